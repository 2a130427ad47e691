"""The attempts of a training run: the payload of each, and what is changed after a failure.

Torch-free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from phalanx.checkpoint.ownership.fence import RunOwnershipClaim, RunOwnershipWatch
from phalanx.core.errors import CheckpointError
from phalanx.core.roll_back import RollBack
from phalanx.launch.slow_ranks import SlowRankWatch
from phalanx.observe.events import CheckpointSaved, Event
from phalanx.run.elastic_layout import ElasticLayout
from phalanx.run.prepare import PreparedRun
from phalanx.run.rank_run import RankPayload
from phalanx.run.roll_back_history import RollBackHistory
from phalanx.run.usable_checkpoints import UsableCheckpoints


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
        self._checkpoints = UsableCheckpoints(run.run_dir, run.store)
        # Those that were there when this command began, and that it has saved since.
        self._saved_steps: set[int] = set()
        with contextlib.suppress(OSError, CheckpointError):
            self._saved_steps = {folder.step for folder in run.store.folders()}

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
            self._find_newest_saved_step(),
        )

    def _find_newest_saved_step(self) -> int:
        """The step of the newest checkpoint that ranks must find; 0: none, as where the run goes
        back to before some of them, which are removed."""
        if self._roll_backs.current.find_limit() is not None:
            return 0
        return max(self._saved_steps, default=0)

    def note_event(self, event: Event) -> None:
        """Take note of an event of rank 0: a checkpoint that was saved (any layout can go on from
        it, and nothing goes back behind it), or one that ranks could not use."""
        self._checkpoints.note_event(event)
        if isinstance(event, CheckpointSaved):
            self._saved_steps.add(event.step)
            self._elastic.note_checkpoint()
            self._roll_backs.note_checkpoint()

    def find_newest_step(self) -> int:
        return self._checkpoints.find_newest_step()

    def describe_samples(self, step: int) -> str:
        """The global numbers of the samples of `step`, in words; empty where the checkpoint that it
        was counted from cannot be read."""
        done_steps, samples_seen = self._checkpoints.find_data_cursor_before(step)
        if samples_seen < 0:
            return ""
        batch = self._run.plan.global_batch_size
        next_sample = self._roll_backs.current.find_next_sample(done_steps, samples_seen)
        first = next_sample + (step - 1 - done_steps) * batch
        if batch == 1:
            return f"sample {first}"
        return f"samples {first} to {first + batch - 1}"

    def describe_what_stands(self) -> str:
        return self._checkpoints.describe_newest()

    def go_back(self, roll_back: RollBack) -> int:
        epoch = 0 if self._fence.token is None else self._fence.token.number
        self._roll_backs.add(roll_back, epoch)
        return epoch

    def lessen_memory(self) -> str:
        return self._elastic.lessen_memory()

    def list_memory_advice(self) -> Sequence[str]:
        return self._elastic.list_memory_advice()

    def shrink(self) -> int | None:
        return self._elastic.shrink()

    def explain_no_shrink(self) -> str:
        return self._elastic.explain_no_shrink()

    def choose_survivors(self, ranks: Sequence[int]) -> Sequence[int]:
        return self._elastic.choose_survivors(ranks)

    def should_grow(self) -> bool:
        return self._elastic.should_grow()

    def grow(self) -> int:
        return self._elastic.grow()

    def describe_last_change(self) -> str:
        return self._elastic.describe_last_change()
