"""Guards decide about a step at one point, from facts that are the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from phalanx.core.errors import NumericsError
from phalanx.core.roll_back import NONFINITE_WEIGHTS, RollBack, RollBackRequest
from phalanx.observe.loss_spikes import SPIKES_TO_ROLL_BACK, LossSpikeDetector
from phalanx.parallel.step_stats import StepStats
from phalanx.train.finite_weights import describe_broken_weights


@dataclass
class SkippedStepsGuard:
    """Gives up (exit 8) after more than `limit` steps in a row that could not be applied.

    Those are steps whose loss or gradients were not finite, and steps without a single target: a
    run of either ends with the weights that it began with.
    """

    limit: int
    in_a_row: int = 0
    without_targets: int = 0

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        if facts.should_apply:
            self.in_a_row = self.without_targets = 0
            return None
        # Usual in fp16, and the loss scale gives up by itself.
        if facts.reason_to_skip == "overflow":
            return None
        self.in_a_row += 1
        self.without_targets += facts.num_targets == 0
        # On all ranks in the same step: the facts are those of the step's reduction.
        if self.in_a_row > self.limit:
            raise self._too_many_skipped_error(step)
        return None

    def _too_many_skipped_error(self, step: int) -> NumericsError:
        look_at_data = (
            "look at what masks them: targets of -100, documents or prompts longer than"
            " train.seq_len"
        )
        # The fix differs: without targets the data is at fault, not the optimizer.
        if self.without_targets == self.in_a_row:
            return NumericsError(
                f"no targets in {_format_steps_in_a_row(self.in_a_row)}, up to step {step}",
                fix=look_at_data,
            )
        if self.without_targets == 0:
            return NumericsError(
                f"{_format_steps_in_a_row(self.in_a_row)} had non-finite gradients,"
                f" up to step {step}",
                fix=(
                    "lower optim.lr, lengthen optim.warmup_steps, or continue from an older"
                    " checkpoint"
                ),
            )
        return NumericsError(
            f"{_format_steps_in_a_row(self.in_a_row)} could not be applied, up to step {step}",
            why=(
                f"{self.without_targets} had no targets, {self.in_a_row - self.without_targets}"
                " non-finite gradients"
            ),
            fix=look_at_data + "; lower optim.lr",
        )


class NonFiniteWeightsGuard:
    """Goes back where trained weights are not finite: no step would ever be applied to them.

    They are looked at after a step that could not be applied. Those of after the last one that
    could may be broken, too: the run goes back to a checkpoint of before it. `reads_on`: behind the
    batch of the step that is being decided, whose end is `next_sample`; else the same batches are
    read again. Where it may not go back it gives up (exit 8).

    `find_broken` gives the names of such weights by rank, and is called on all ranks.
    """

    def __init__(
        self,
        find_broken: Callable[[], Mapping[int, Sequence[str]]],
        next_sample: Callable[[], int],
        *,
        may_roll_back: bool,
        reads_on: bool,
    ) -> None:
        self._find_broken, self._next_sample = find_broken, next_sample
        self._may_roll_back, self._reads_on = may_roll_back, reads_on
        self._finite_step: int | None = None

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        if self._finite_step is None:
            # The checkpoint that the attempt began with may hold them.
            self._finite_step = step - 1
        if facts.should_apply:
            self._finite_step = step
            return None
        if facts.num_targets == 0:
            return None
        broken = self._find_broken()
        if broken:
            self._leave(step, broken)
        return None

    def _leave(self, step: int, broken: Mapping[int, Sequence[str]]) -> NoReturn:
        finite_step = self._finite_step or 0
        rank = min(broken)
        what = describe_broken_weights(broken[rank])
        if finite_step >= 1 and self._may_roll_back:
            raise RollBackRequest(
                RollBack(
                    kind=NONFINITE_WEIGHTS,
                    step=step,
                    not_after_step=finite_step - 1,
                    why=f"{what}: no step would be applied any more",
                    skip_to_sample=self._next_sample() if self._reads_on else -1,
                    rank=rank if len(broken) == 1 else -1,
                )
            )
        fix = (
            f"continue from a checkpoint not after step {finite_step - 1}: remove the later ones,"
            " and run again with --resume and a lower optim.lr"
        )
        if finite_step < 1:
            fix = "look at the weights that the run begins with"
        where = f" on rank {rank}" if len(broken) == 1 else ""
        raise NumericsError(
            f"step {step}: {what}{where}: no step would be applied any more", fix=fix
        )


class LossSpikeGuard:
    """Decides about steps whose loss is a spike (`observe.loss_spikes`), alike on all ranks.

    Their update is left out. With `may_roll_back` the run goes back after SPIKES_TO_ROLL_BACK of
    them in a row, and reads on behind their batches; without, their level counts as ordinary then.
    `next_sample` is the first sample behind the batch of the step that is being decided.
    """

    def __init__(self, next_sample: Callable[[], int], *, may_roll_back: bool) -> None:
        self._next_sample, self._may_roll_back = next_sample, may_roll_back
        self._detector = LossSpikeDetector()
        self._num_in_a_row = 0

    def reason_to_skip(self, step: int, facts: StepStats) -> str | None:
        if not facts.should_apply:
            return None
        median = self._detector.judge_loss(facts.loss)
        if median is None:
            self._detector.add_loss(facts.loss)
            self._num_in_a_row = 0
            return None
        self._num_in_a_row += 1
        if self._num_in_a_row < SPIKES_TO_ROLL_BACK:
            return "loss_spike"
        if self._may_roll_back:
            first = step - self._num_in_a_row + 1
            raise RollBackRequest(
                RollBack(
                    kind="loss_spike",
                    step=step,
                    not_after_step=first - 1,
                    why=(
                        f"the loss is {facts.loss:.4g} since step {first}, where {median:.4g} was"
                        " ordinary"
                    ),
                    skip_to_sample=self._next_sample(),
                )
            )
        self._detector.forget()
        self._detector.add_loss(facts.loss)
        self._num_in_a_row = 0
        return None


def _format_steps_in_a_row(number: int) -> str:
    if number == 1:
        return "1 step"
    return f"{number} steps in a row"
