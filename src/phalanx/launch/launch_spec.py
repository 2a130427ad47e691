"""The ranks to launch, and who plans their attempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.core.roll_back import RollBack
from phalanx.core.typed_json import JsonConvertible
from phalanx.launch.hang_limits import HangSettings


class AttemptPlanner(Protocol):
    """Plans the attempts of a run: what the ranks of the next one are given, and what is changed
    after one that failed.

    A change holds for the payload that is built after it.
    """

    @property
    def is_elastic(self) -> bool:
        """True where a run may go on with fewer ranks than it began with."""
        ...

    def build_payload(self) -> JsonConvertible:
        """The payload of the next attempt, right before its ranks start."""
        ...

    def find_newest_step(self) -> int:
        """The step of the newest checkpoint, from which a restart continues; 0 without one."""
        ...

    def describe_samples(self, step: int) -> str:
        """The samples of the batch of `step`, in words; empty where that is not known."""
        ...

    def describe_what_stands(self) -> str:
        """The newest checkpoint that can be read, or why none is named, in words."""
        ...

    def go_back(self, roll_back: RollBack) -> int:
        """Have the next attempt begin at a checkpoint that all ranks agreed to go back to. Returns
        the epoch of the attempt that ended, 0 where attempts have none."""
        ...

    def lessen_memory(self) -> str:
        """After a rank was out of memory: have the next attempt need less, and say how; empty where
        the run is to end."""
        ...

    def list_memory_advice(self) -> Sequence[str]:
        """Lines on what would need less memory, for the person whose run ends by that."""
        ...

    def shrink(self) -> int | None:
        """Go on with fewer ranks; the number of them, None where that is not possible."""
        ...

    def explain_no_shrink(self) -> str:
        """Why `shrink` did nothing, in words; empty where it was not asked for."""
        ...

    def choose_survivors(self, ranks: Sequence[int]) -> Sequence[int]:
        """Those of `ranks`, of the layout before `shrink`, that are to go on, in their order: as
        many as there are ranks now, if so many are left."""
        ...

    def should_grow(self) -> bool:
        """True if it is time to try all ranks again."""
        ...

    def grow(self) -> int:
        """Go on with all ranks again; the number of them."""
        ...

    def describe_last_change(self) -> str:
        """Both numbers of ranks of the last change, in words."""
        ...


def describe_checkpoint_that_stands(step: int) -> str:
    """ "the checkpoint of step 40 stands"; that there is none for step 0."""
    if step < 1:
        return "no checkpoint is there"
    return f"the checkpoint of step {step} stands"


@dataclass(frozen=True)
class RepeatedAttempts:
    """Attempts that are all laid out alike, of work that changes nothing after a failure."""

    payload_builder: Callable[[], JsonConvertible]
    newest_step: int = 0
    is_elastic: bool = False

    def build_payload(self) -> JsonConvertible:
        return self.payload_builder()

    def find_newest_step(self) -> int:
        return self.newest_step

    def describe_samples(self, step: int) -> str:
        return ""

    def describe_what_stands(self) -> str:
        return describe_checkpoint_that_stands(self.newest_step)

    def go_back(self, roll_back: RollBack) -> int:
        """Change nothing: the ranks find the checkpoint themselves."""
        return 0

    def lessen_memory(self) -> str:
        return ""

    def list_memory_advice(self) -> Sequence[str]:
        return ()

    def shrink(self) -> int | None:
        return None

    def explain_no_shrink(self) -> str:
        return ""

    def choose_survivors(self, ranks: Sequence[int]) -> Sequence[int]:
        return ranks

    def should_grow(self) -> bool:
        return False

    def grow(self) -> int:
        raise AssertionError("ranks that never become fewer cannot become more")

    def describe_last_change(self) -> str:
        return ""


@dataclass(frozen=True)
class LaunchSpec:
    """The entry to run, in how many ranks, and with which limits.

    `entry` is "package.module:function", called in each rank as `function(payload, link) -> exit
    code` with the JSON of a payload and a RankLink; `preload` names the modules that are imported
    once, before the first fork. `max_restarts` holds per `restart_window_s` without progress
    (`restarts`); `grace_s` is how long the ranks may take to save after SIGTERM or Ctrl-C.
    """

    entry: str
    attempts: AttemptPlanner
    num_ranks: int
    run_dir: Path
    preload: tuple[str, ...]
    stepless: str = ""
    """The work of ranks without steps, say "evaluating": they are started once, not again.

    Empty for ranks that train.
    """
    max_restarts: int = 3
    restart_window_s: float = 3600.0
    outage_s: float = 0.0
    """Seconds for which an outage is waited for, with pauses between restarts."""
    grace_s: float = 25.0
    keeps_ranks: bool = False
    """The entry can take part in several attempts: ranks that only lost another one keep their
    process when it is started again."""
    hangs: HangSettings | None = None
    """How ranks without progress are found; None: they are not looked for."""
