"""The attempts of a training run: the payload of each, and what is changed after a failure.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.ownership.fence import RunOwnershipClaim, RunOwnershipWatch
from phalanx.checkpoint.stores import Store
from phalanx.core.errors import CheckpointError
from phalanx.core.roll_back import RollBack
from phalanx.launch.launch_spec import describe_checkpoint_that_stands
from phalanx.launch.slow_ranks import SlowRankWatch
from phalanx.observe.events import CheckpointSaved, CheckpointUnusable, Event
from phalanx.observe.tail import read_recorded_events
from phalanx.run.elastic_layout import ElasticLayout
from phalanx.run.prepare import PreparedRun
from phalanx.run.rank_run import RankPayload
from phalanx.run.roll_back_history import RollBackHistory


class TrainingAttempts:
    """Plans the attempts of `run`: an AttemptPlanner.

    `first_attempt` is the number of the first one of this command, `began_s` (monotonic) when the
    run was asked for.
    """

    def __init__(
        self,
        run: PreparedRun,
        first_attempt: int,
        began_s: float,
        fence: RunOwnershipWatch,
        slow_ranks: SlowRankWatch,
    ) -> None:
        self._run, self._first_attempt, self._began_s = run, first_attempt, began_s
        self._fence, self._slow_ranks = fence, slow_ranks
        self._elastic = ElasticLayout(run)
        self._roll_backs = RollBackHistory(run.run_dir)
        # Kept up by events: to read all of them anew at each restart took 3.6 s after 50,000 steps.
        self._unusable_steps = _read_unusable_steps(run.run_dir)

    @property
    def is_elastic(self) -> bool:
        return self._run.job.resilience.min_ranks is not None

    def build_payload(self) -> RankPayload:
        # A token for each attempt: what ranks of an earlier one, not dead yet, still write is
        # refused.
        self._fence.token = self._run.lock.acquire_token_for_attempt()
        claim = RunOwnershipClaim(self._fence.token.number, self._run.lock.holder)
        layout = self._elastic.plan.layout
        self._slow_ranks.change_ranks(layout.world_size, layout.pp)
        return RankPayload(
            self._elastic.job,
            self._elastic.plan,
            self._run.run_dir.resolve(),
            self._first_attempt,
            self._began_s,
            claim,
            self._roll_backs.current,
        )

    def note_event(self, event: Event) -> None:
        """Take note of an event of rank 0: a checkpoint that was saved (any layout can go on from
        it, and nothing goes back behind it), or one that ranks could not use."""
        match event:
            case CheckpointSaved():
                self._elastic.note_checkpoint()
                self._roll_backs.note_checkpoint()
                # Saved again since: it is a new one.
                self._unusable_steps.discard(event.step)
            case CheckpointUnusable():
                self._unusable_steps.add(event.step)

    def find_newest_step(self) -> int:
        """The step of the newest checkpoint that ranks could use, or that was written again since;
        0 without one."""
        try:
            steps = {folder.step for folder in self._run.store.folders()}
        except (OSError, CheckpointError):
            return 0
        return max(steps - self._unusable_steps, default=0)

    def describe_what_stands(self) -> str:
        return describe_newest_checkpoint(self._run.store, self._unusable_steps)

    def go_back(self, roll_back: RollBack) -> None:
        self._roll_backs.add(roll_back)

    def lessen_memory(self) -> str:
        return self._elastic.lessen_memory()

    def list_memory_advice(self) -> Sequence[str]:
        return self._elastic.list_memory_advice()

    def shrink(self) -> int | None:
        return self._elastic.shrink()

    def should_grow(self) -> bool:
        return self._elastic.should_grow()

    def grow(self) -> int:
        return self._elastic.grow()

    def describe_last_change(self) -> str:
        return self._elastic.describe_last_change()


def describe_newest_checkpoint(store: Store, unusable_steps: Container[int]) -> str:
    """The newest checkpoint of `store` whose manifest can be read, in words, except those that
    ranks could not use; or that none is there, can be used, or can be seen."""
    try:
        folders = store.folders()
    except (OSError, CheckpointError):
        return "checkpoints cannot be seen now"
    for folder in reversed(folders):
        if folder.step not in unusable_steps:
            with suppress(OSError, CheckpointError):
                return describe_checkpoint_that_stands(read_manifest(folder).step)
    if folders:
        return "no checkpoint can be used"
    return describe_checkpoint_that_stands(0)


def _read_unusable_steps(run_dir: Path) -> set[int]:
    """The steps of checkpoints that ranks of an earlier command found unusable, and that were not
    saved again since."""
    unusable: set[int] = set()
    for envelope in read_recorded_events(run_dir, CheckpointSaved, CheckpointUnusable):
        match envelope.event:
            case CheckpointUnusable(step=step):
                unusable.add(step)
            case CheckpointSaved(step=step):
                unusable.discard(step)
    return unusable
