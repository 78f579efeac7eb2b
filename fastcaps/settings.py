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


class _Block(Generic[Value]):
    """A ``with`` block. It may end in another context than the one that opened it, and before those inside it."""

    def __init__(self, value: Value, outer: _Block[Value] | None) -> None:
        self.value, self.outer, self.ended = value, outer, False


class Setting(Generic[Value]):
    """The value of the innermost block that is open in the running context, or a default."""

    def __init__(self, name: str, default: Value) -> None:
        self.default = default
        self.open: tuple[Value, ...] = ()  # the values of all open blocks, of any thread
        self._innermost: ContextVar[_Block[Value] | None] = ContextVar(name, default=None)
        self._lock = Lock()

    def get(self) -> Value:
        """Return the value. In compiled code it is a constant; opening other blocks in the process recompiles."""
        return self._get() if self.open else self.default

    @constant_in_graphs
    def _get(self) -> Value:
        block = self._innermost.get()
        while block is not None and block.ended:
            block = block.outer
        return self.default if block is None else block.value

    @contextmanager
    def block(self, value: Value) -> Iterator[None]:
        """Set the value inside a ``with`` block."""
        made = _Block(value, self._innermost.get())
        self._innermost.set(made)
        with self._lock:
            self.open = (*self.open, value)
        try:
            yield
        finally:
            made.ended = True
            with self._lock:
                k = self.open.index(value)
                self.open = self.open[:k] + self.open[k + 1 :]
            if self._innermost.get() is made:
                self._innermost.set(made.outer)
