"""What a rank keeps between two attempts: the state that it held when it lost another rank, or when
its dataset met an outage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from phalanx.core.errors import DataSourceError
from phalanx.launch.reports import is_caused_by_lost_peer
from phalanx.observe.bus import Bus
from phalanx.observe.event_file import EventFile
from phalanx.train.held_state import HeldState, hold_state
from phalanx.train.memory import MemoryBefore
from phalanx.train.stop import StopSignalFlags
from phalanx.train.trainer import Trainer


class Survivor:
    """Holds the state of a rank over the end of its process groups, until it trains again.

    `memory_before` is what the process had before it first trained; `last_bus` may have
    events that the disk had not taken by the end of an attempt. `stop` has the requests to stop
    that came in any attempt, and between two of them.

    Only of a rank whose training was ended by the loss of another one, or by a file server or a
    network that was away when its dataset read: every other error is its own, and what it holds may
    be the reason.
    """

    def __init__(self) -> None:
        self.held: HeldState | None = None
        self.memory_before: MemoryBefore | None = None
        self.last_bus: Bus | None = None
        self.stop = StopSignalFlags()
        self._may_be_kept = False

    @contextlib.contextmanager
    def holding_state_of(self, trainer: Trainer) -> Iterator[None]:
        """Keep the state if the body, which trains, ends by something outside of this process."""
        self.held, self._may_be_kept = None, False
        try:
            yield
        except Exception as error:
            if _is_from_outside(error):
                self._may_be_kept = True
                # What cannot be held comes from the checkpoint.
                with contextlib.suppress(Exception):
                    self.held = hold_state(trainer.state, trainer.last_finished)
            raise

    def may_go_on(self, error: BaseException) -> bool:
        """True if `error`, with which an attempt ended, came from outside of this process, and this
        attempt or the one before ended so while it trained."""
        return self._may_be_kept and isinstance(error, Exception) and _is_from_outside(error)

    def take_unwritten_events(self) -> EventFile | None:
        """The event file of the last attempt with what the disk had not taken; None without one."""
        return None if self.last_bus is None else self.last_bus.take_unwritten()

    @property
    def held_step(self) -> int:
        """The step whose state this rank holds; -1: none."""
        return -1 if self.held is None else self.held.step


def _is_from_outside(error: Exception) -> bool:
    """True for the loss of another rank, and for an outage of what the dataset reads."""
    return is_caused_by_lost_peer(error) or bool(
        isinstance(error, DataSourceError) and error.outage
    )
