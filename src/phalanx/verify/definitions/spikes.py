"""What a run decides about steps whose loss jumps, beside the definition of a spike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from phalanx.core.roll_back import RollBack, RollBackRequest
from phalanx.job.schema import Job
from phalanx.parallel.step_stats import StepStats
from phalanx.resilience.guards import LossSpikeGuard
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.plain.spikes import APPLY, ROLL_BACK, SKIP, WINDOW, decide_on_losses
from phalanx.verify.row import Difference

JUDGED = (
    "which steps are skipped for their loss, or send the run back, of a made-up series of losses"
)
_NEXT_SAMPLE = 77


def find_wrong_decisions(job: Job) -> Iterator[Difference]:
    """The first step of a made-up run that is decided otherwise than by definition."""
    losses = _make_losses()
    for may_roll_back in (False, True):
        expected = decide_on_losses(losses, may_roll_back=may_roll_back)
        decisions, roll_back = _decide_by_guard(losses, may_roll_back=may_roll_back)
        mode = "rollback" if may_roll_back else "skip"
        for index in range(max(len(decisions), len(expected))):
            decided, defined = (
                "nothing" if index >= len(each) else each[index] for each in (decisions, expected)
            )
            if decided != defined:
                cause = (
                    f"with resilience.on_loss_spike={mode} step {index + 1} of a made-up series of"
                    f" losses ends with {decided!r}, and by the definition of a spike with"
                    f" {defined!r}"
                )
                yield make_difference("decision on a loss spike", "", 1.0, cause)
                return
        if roll_back is not None:
            yield from _compare_roll_back(roll_back, len(expected))


def _compare_roll_back(roll_back: RollBack, step: int) -> Iterator[Difference]:
    """Where a run goes back to, which is before the first of three spikes, and reads on."""
    destination = (roll_back.step, roll_back.not_after_step, roll_back.skip_to_sample)
    expected = (step, step - 3, _NEXT_SAMPLE)
    if destination != expected:
        words = "(decided in step, newest checkpoint of step, next sample)"
        cause = (
            f"three spikes in a row send the run to {destination} {words}, and not to {expected}"
        )
        yield make_difference("roll-back", "", 1.0, cause)


def _decide_by_guard(
    losses: Sequence[float], *, may_roll_back: bool
) -> tuple[list[str], RollBack | None]:
    guard = LossSpikeGuard(lambda: _NEXT_SAMPLE, may_roll_back=may_roll_back)
    decisions: list[str] = []
    for index, loss in enumerate(losses):
        try:
            reason = guard.reason_to_skip(index + 1, StepStats(loss, 8, 1.0, finite=True))
        except RollBackRequest as request:
            return [*decisions, ROLL_BACK], request.roll_back
        decisions.append(APPLY if reason is None else SKIP)
    return decisions, None


def _make_losses() -> list[float]:
    """Losses that fall, with jumps of each kind: early ones, single ones, two in a row, small ones,
    one that only a quiet window shows, and a level that stays."""
    noise = [((17 * step) % 23 - 11) / 11 for step in range(WINDOW)]
    falling = [4.0 - 0.01 * step + 0.02 * noise[step] for step in range(40)]
    falling[20] = 9.0
    quiet = [3.5 + 0.02 * each for each in noise]
    loud = [3.5 + 0.5 * each for each in noise]
    return [
        *falling,
        *(6.0, 3.6, 6.0, 7.0, 3.6, 3.75, 3.5),
        *loud,
        *(4.1, 3.5),
        *quiet,
        *(4.1, 3.5),
        *(8.0, 8.1, 8.2),
        *(8.0 + each for each in (0.1, 0.0, 5.0)),
        *(8.0 + 0.02 * each for each in noise[:40]),
        *(12.0, 8.0),
    ]
