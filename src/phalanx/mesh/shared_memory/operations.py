"""What a rank has posted, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.mesh.shared_memory.peers import Peer
from phalanx.mesh.shared_memory.transfers import Transfer


class CollectivesDifferError(RuntimeError):
    """Ranks of a group called different collectives. Another start may do better: over gloo they
    would have waited for each other."""


@dataclass(frozen=True)
class Blocker:
    """What keeps an operation: a word of `peer`, its address, and what was last read of it."""

    peer: Peer
    address: int
    value: int

    def read_word(self) -> int:
        arena = self.peer.arena
        return arena.words[(self.address - arena.address) // 4]

    def has_changed(self) -> bool:
        return self.read_word() != self.value


def do_nothing() -> None:
    """The end of an operation whose tensors need no more than its transfers."""


@dataclass(eq=False)
class Operation:
    """A collective, send or receive, by the name that people know.

    `finish` is called when everything has been moved (it copies what did not lie in one piece).
    """

    name: str
    finish: Callable[[], None] = do_nothing
    is_done: bool = False
    blocker: Blocker | None = None
    asked_s: float = 0.0
    """When (monotonic) it was last asked whether those it waits for are there."""
    _callbacks: list[Callable[[], object]] = field(default_factory=list)

    def end(self) -> None:
        """Everything has been moved: let the tensors go."""
        self.finish()
        self.finish = do_nothing
        self.is_done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def call_when_done(self, callback: Callable[[], object]) -> None:
        """Call `callback` when everything has been moved; at once if it has been."""
        self._callbacks.append(callback)
        if self.is_done and callback in self._callbacks:
            self._callbacks.remove(callback)
            callback()


@dataclass(eq=False)
class Collective(Operation):
    """Transfers, one after another; `num_done` of them have ended."""

    transfers: Sequence[Transfer] = ()
    num_done: int = 0

    def end(self) -> None:
        super().end()
        self.transfers = ()
