"""What a ``with`` block sets for the code that runs inside it; and functions that compilers take as constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_graphs(function: Function) -> Function:
    """Return a function whose result a compiler takes as a constant, as by ``torch.compiler.assume_constant_result``.

    That decorator sets the same mark, but imports PyTorch's compiler first, which takes two seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Setting(Generic[Value]):
    """The value of the innermost block that is open in the running context, or a default."""

    def __init__(self, name: str, default: Value) -> None:
        self.default = default
        self.open: tuple[Value, ...] = ()  # the values of all open blocks, of any thread
        self._value: ContextVar[Value] = ContextVar(name)
        self._lock = Lock()

    def get(self) -> Value:
        """Return the value. In compiled code it is a constant; opening other blocks in the process recompiles."""
        return self._get() if self.open else self.default

    @constant_in_graphs
    def _get(self) -> Value:
        return self._value.get(self.default)

    @contextmanager
    def block(self, value: Value) -> Iterator[None]:
        """Set the value inside a ``with`` block."""
        before = self.get()
        self._value.set(value)
        with self._lock:
            self.open = (*self.open, value)
        try:
            yield
        finally:
            with self._lock:
                k = self.open.index(value)
                self.open = self.open[:k] + self.open[k + 1 :]
            self._value.set(before)
