"""What a ``with`` block sets for the code that runs inside it, in generators, asyncio tasks and threads too; and
functions that compilers take as constants."""

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
    def __init__(self, value: Value) -> None:
        self.value, self.ended = value, False


class Setting(Generic[Value]):
    """The value of the last block that is open in the running context, or a default.

    Blocks of generators end in any order and in any context. So a context holds all its blocks, and each block knows
    whether it has ended. To restore the earlier value at the end of a block could bring back one that has ended.
    """

    def __init__(self, name: str, default: Value) -> None:
        self.default = default
        self.open = ""  # the values of all open blocks, of any context, in the order in which they began
        self._all: list[_Block[Value]] = []
        self._lock = Lock()
        self._blocks: ContextVar[tuple[_Block[Value], ...]] = ContextVar(name, default=())

    def get(self) -> Value:
        """Return the value. In compiled code it is a constant; opening other blocks in the process recompiles."""
        return self._get() if self.open else self.default

    @constant_in_graphs
    def _get(self) -> Value:
        for block in reversed(self._blocks.get()):
            if not block.ended:
                return block.value
        return self.default

    @contextmanager
    def block(self, value: Value) -> Iterator[None]:
        """Set the value inside a ``with`` block."""
        block = _Block(value)
        self._blocks.set((*self._open(), block))
        self._count(self._all.append, block)
        try:
            yield
        finally:
            block.ended = True
            self._blocks.set(tuple(self._open()))
            self._count(self._all.remove, block)

    def _count(self, change: Callable[[_Block[Value]], None], block: _Block[Value]) -> None:
        with self._lock:
            change(block)
            self.open = ", ".join(repr(one.value) for one in self._all)

    def _open(self) -> Iterator[_Block[Value]]:
        return (block for block in self._blocks.get() if not block.ended)
