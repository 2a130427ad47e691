"""What one rank of a training run is given.

Torch-free: the process that prepares a run makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.checkpoint.ownership.fence import RunOwnershipClaim
from phalanx.core.roll_back import NONFINITE_WEIGHTS, RollBack, UnequalSteps
from phalanx.core.typed_json import JsonRecord
from phalanx.job.schema import Job
from phalanx.launch.rank_link import RankLink, SilentRankLink
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class RollBacks:
    """The roll-backs of this run so far. `pending`: since the last one no checkpoint is known to
    have been saved; events of one may be lost. `ended_epoch`: the number of the fencing token of
    the attempt that the last one ended, 0 where that is not known."""

    done: tuple[RollBack, ...] = ()
    pending: bool = False
    ended_epoch: int = 0

    def find_limit(self) -> int | None:
        """The newest step whose checkpoint may be used, unless it was saved since; None: any
        may."""
        if self.pending and self.done:
            return self.done[-1].not_after_step
        return None

    def find_unequal_steps(self, num_ranks: int) -> UnequalSteps | None:
        """The steps that `num_ranks` ranks compare when they do them again: those that the last
        roll-back is for; None where there is nothing to compare."""
        if not self.done:
            return None
        unequal = self.done[-1].unequal
        if unequal is None or len(unequal.digests) != num_ranks:
            return None
        return unequal

    def find_next_sample(self, step: int, samples_seen: int) -> int:
        """The next sample to read after `step`, of whose state `samples_seen` is the cursor."""
        for roll_back in self.done:
            if step <= roll_back.not_after_step:
                samples_seen = max(samples_seen, roll_back.skip_to_sample)
        return samples_seen

    def explain_cursor(self, step: int, samples_seen: int, batch_size: int) -> bool:
        """True if `samples_seen` may be the cursor of a run that has read `batch_size` samples in
        each of its steps up to `step`, also where it has read on after one of these roll backs."""
        if samples_seen == step * batch_size:
            return True
        for index, roll_back in enumerate(self.done):
            num_steps, rest = divmod(samples_seen - roll_back.skip_to_sample, batch_size)
            has_read_on = roll_back.skip_to_sample >= 0 and rest == 0 and num_steps >= 0
            # It went back to a checkpoint of before.
            if not (has_read_on and 0 <= step - num_steps <= roll_back.not_after_step):
                continue
            # Another batch since would not explain how far the step that decided it had read.
            before = replace(self, done=self.done[:index])
            if before.explain_cursor(roll_back.step, roll_back.skip_to_sample, batch_size):
                return True
        return False

    @property
    def is_before_lost_weights(self) -> bool:
        """True where the run went back as weights were not finite, and has saved nothing since."""
        return self.pending and bool(self.done) and self.done[-1].kind == NONFINITE_WEIGHTS


@dataclass(frozen=True)
class RankPayload(JsonRecord):
    """Payload that the supervisor sends each rank of an attempt.

    `started_s` is when the person pressed return, of the monotonic clock that all processes of this
    machine share.
    """

    job: Job
    plan: Plan
    run_dir: Path
    first_attempt: int
    started_s: float
    claim: RunOwnershipClaim
    roll_backs: RollBacks = field(default_factory=RollBacks)
    newest_saved_step: int = 0
    """That of the newest checkpoint that this command has found or saved; 0: none."""


@dataclass(frozen=True)
class RankRunInputs:
    """Everything that one rank needs to train. `started_s` (monotonic) is when the run was
    asked for. `is_restart`: this command's ranks were started before."""

    job: Job
    plan: Plan
    run_dir: Path
    rank: int
    attempt: int
    started_s: float
    claim: RunOwnershipClaim = field(default_factory=RunOwnershipClaim)
    link: RankLink = field(default_factory=SilentRankLink)
    is_restart: bool = False
    roll_backs: RollBacks | None = None
    """None: nobody would go back at this rank's wish."""
    newest_saved_step: int = 0
    """As in RankPayload."""


def keeps_ranks(job: Job, plan: Plan) -> bool:
    """True where a process may take part in another attempt after it lost another rank.

    On GPUs the queue may hold work of a group that is gone, and compiled code its name.
    """
    return job.resilience.keep_ranks and plan.device == "cpu" and not plan.compile
