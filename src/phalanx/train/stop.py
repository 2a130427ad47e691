"""Requests to stop a run: signals to any rank, on which all ranks agree."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from phalanx.core.stop_signals import (
    LEAVE_FOR_MORE_RANKS_SIGNAL,
    MORE_RANKS_REASON,
    SIGNALS_TAKEN_AS_SIGTERM,
    is_signal_left_to_phalanx,
    release_stop_signals,
)
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.transfer import create_fp64_on_device


@dataclass
class StopSignalFlags:
    """Signals that this rank has got. Ranks agree on them in the reduction of each step.

    `sigterm`: SIGTERM, or a signal that is taken as it. `is_for_more_ranks`: `sigterm` stands for
    the supervisor's wish to start more ranks.
    """

    sigterm: bool = False
    sigint: bool = False
    is_for_more_ranks: bool = False

    def __post_init__(self) -> None:
        # Each only sets a flag: a handler may run between any two instructions of Python.
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = {
            LEAVE_FOR_MORE_RANKS_SIGNAL: self._leave_for_more_ranks,
            signal.SIGTERM: self._note_sigterm,
            signal.SIGINT: self._note_sigint,
            **dict.fromkeys(SIGNALS_TAKEN_AS_SIGTERM, self._note_sigterm),
        }

    def request_stop_on_signals(self) -> None:
        """From now on SIGTERM, SIGINT and signals that are taken as SIGTERM, unless other code has
        them, ask for a stop at a step boundary.

        Outside the main thread, where Python allows no handlers, this rank stops only as others ask
        for it. A request that came before, in an attempt that is over, stands; but for the wish for
        more ranks, which was that of its supervisor then.
        """
        if self.is_for_more_ranks:
            self.sigterm = self.is_for_more_ranks = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._handlers.items():
            if number in SIGNALS_TAKEN_AS_SIGTERM and not self._may_take(number):
                continue
            signal.signal(number, handler)
        release_stop_signals()

    def take_signals_back(self) -> list[str]:
        """Ask for a stop again on SIGTERM and SIGINT, where other code has taken them since
        `request_stop_on_signals`, as a library may when it is imported; the names of those."""
        if threading.current_thread() is not threading.main_thread():
            return []
        taken = []
        for number in (signal.SIGTERM, signal.SIGINT):
            handler = self._handlers[number]
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                taken.append(number.name)
        return taken

    def _may_take(self, number: int) -> bool:
        # Once it was taken, a handler in C that came since would be lost: Python still names ours.
        is_taken = signal.getsignal(number) == self._handlers[number]
        return not is_taken and is_signal_left_to_phalanx(number)

    def name_reason(self, agreed: str) -> str:
        """The reason of a stop on whose kind all ranks `agreed` ("sigterm" or "sigint")."""
        if agreed == "sigterm" and self.is_for_more_ranks:
            return MORE_RANKS_REASON
        return agreed

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        # Whoever sends it wants the run to end, whatever the supervisor wanted before.
        self.sigterm, self.is_for_more_ranks = True, False

    def _note_sigint(self, number: int, frame: FrameType | None) -> None:
        self.sigint = True

    def _leave_for_more_ranks(self, number: int, frame: FrameType | None) -> None:
        self.is_for_more_ranks = not self.sigterm
        self.sigterm = True


def choose_stop_reason(sigterm: float, sigint: float) -> str | None:
    """The reason of a stop, given how many ranks got SIGTERM and how many SIGINT: "sigterm",
    "sigint", or None for none. SIGTERM comes first."""
    if sigterm:
        return "sigterm"
    return "sigint" if sigint else None


def agree_on_stop(
    stop: StopSignalFlags, mesh: Mesh, numbers: Sequence[float] = ()
) -> tuple[str | None, list[float]]:
    """Where no reduction of a step tells it: "sigterm" or "sigint" if a rank was asked to stop,
    else None; and the sums of `numbers` over ranks, as many on each.

    Collective; all ranks return the same.
    """
    own = create_fp64_on_device((stop.sigterm, stop.sigint, *numbers), mesh.device)
    sigterm, sigint, *sums = mesh.all_reduce_sum(own).tolist()
    return choose_stop_reason(sigterm, sigint), sums


class StopRequestedError(Exception):
    """All ranks agreed, inside an evaluation, to stop. Never leaves the trainer."""
