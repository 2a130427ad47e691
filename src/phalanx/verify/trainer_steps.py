"""Compares a step of the trainer with the second loop: its data, loss, gradients, and how it is
applied. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from phalanx.verify.diagnosis_of_experts import find_router_of_wrong_balance
from phalanx.verify.factors import format_factor
from phalanx.verify.row import Difference
from phalanx.verify.trainer_cases import OVERFLOW_STEP, REPEATED_STEP
from phalanx.verify.trainer_errors import (
    ErrorRecord,
    make_number_difference,
    make_tensor_difference,
    relative_error,
)
from phalanx.verify.trainer_facts import (
    GRADIENT,
    REFUSAL,
    AttemptObservation,
    Dots,
    SecondLoopRecord,
    SecondLoopStep,
    StepObservation,
)

EQUAL_RATIO_TOLERANCE = 1e-3  # ratios that are alike
ACCEPTED_SKIP_REASONS = {
    "": ("",),
    "no_targets": ("no_targets",),
    "not_finite": ("nonfinite_gradients", "overflow"),
    "refused": (REFUSAL,),
}


class StepComparator:
    """Compares what all ranks observed of a step. `is_scaled`: the loss is multiplied by a scale;
    `compress`: how gradients are compressed."""

    def __init__(self, errors: ErrorRecord, *, is_scaled: bool, compress: str) -> None:
        self._errors, self._is_scaled, self._compress = errors, is_scaled, compress

    def compare(
        self,
        ranks: Sequence[StepObservation],
        record: SecondLoopRecord,
        attempt: AttemptObservation,
        attempts: Sequence[AttemptObservation],
    ) -> Iterator[Difference]:
        reference = record.get_step_record(ranks[0].step)
        sums = [observed.gradients for observed in ranks]
        for rank, observed in enumerate(ranks):
            yield from self._compare_step_facts(observed, reference, record, rank, attempt)
            yield from self._compare_norm(observed, sums, record, rank, attempt)
            yield from _compare_skip(observed, reference, rank)
        for rank, observed in enumerate(ranks):
            yield from self._compare_updates(observed, reference, rank)
        off = self._errors.find_wrong_tensors(sums, reference, GRADIENT, record.unused)
        for name, (error, rank) in off.items():
            held_blocks = attempts[rank].held.get(name, "")
            cause = self._explain_wrong_gradients(sums, reference)
            cause += _describe_repetition(reference.step, attempt)
            yield make_tensor_difference(
                "gradient", name, reference.step, error, rank, held_blocks, cause
            )

    def _compare_step_facts(
        self,
        observed: StepObservation,
        reference: SecondLoopStep,
        record: SecondLoopRecord,
        rank: int,
        attempt: AttemptObservation,
    ) -> Iterator[Difference]:
        step = reference.step
        if observed.num_targets != reference.num_targets:
            cause = self._explain_wrong_target_count(observed, record)
            off = float(observed.num_targets - reference.num_targets)
            yield make_number_difference("number of targets", step, abs(off), cause, rank)
        if reference.skipped != "no_targets":
            error = relative_error(observed.loss, reference.loss)
            self._errors.note("loss", error)
            if not error <= self._errors.tolerance:
                yield make_number_difference(
                    "loss", step, error, self._explain_wrong_loss(step, attempt), rank
                )
            scale = reference.loss_scale if self._is_scaled else 0.0
            if observed.loss_scale != scale:
                cause = f"the loss scale is {observed.loss_scale:g}, not {scale:g}"
                # Before the stop it was right in each step, one that overflows among them.
                if attempt.name:
                    cause += (
                        ": it, or its count of good steps, is not restored from the checkpoint"
                        f" ({attempt.name})"
                    )
                error = relative_error(observed.loss_scale, scale)
                yield make_number_difference("loss scale", step, error, cause, rank)

    def _compare_norm(
        self,
        observed: StepObservation,
        sums: Sequence[Mapping[str, Dots]],
        record: SecondLoopRecord,
        rank: int,
        attempt: AttemptObservation,
    ) -> Iterator[Difference]:
        reference = record.get_step_record(observed.step)
        if reference.skipped not in ("", "refused") or self._compress != "none":
            return
        error = relative_error(observed.grad_norm, reference.grad_norm)
        self._errors.note("norm", error)
        if not error <= self._errors.tolerance:
            cause = "gradients before clipping are others, of equal weights and data"
            cause += self._explain_wrong_balance(sums, reference, record)
            cause += _describe_repetition(reference.step, attempt)
            yield make_number_difference("gradient norm", reference.step, error, cause, rank)

    def _explain_wrong_balance(
        self,
        sums: Sequence[Mapping[str, Dots]],
        reference: SecondLoopStep,
        record: SecondLoopRecord,
    ) -> str:
        """What the gradients say of the balance loss of experts, which enters at routers; "" if
        nothing."""
        # A record of its own: what a row says of its errors ends at the first difference.
        errors = ErrorRecord(self._errors.tolerance)
        off = errors.find_wrong_tensors(sums, reference, GRADIENT, record.unused)
        names = {name for of_rank in sums for name in of_rank}
        router = find_router_of_wrong_balance(names, off)
        if not router:
            return ""
        words = (
            f": those of {router} are, and those of its experts are not, so the balance loss of"
            " experts is weighed otherwise"
        )
        step, scale = reference.step, reference.loss_scale
        before = record.get_step_record(step - 1).loss_scale if step > 1 else scale
        if self._is_scaled and scale != before:
            words += (
                f", and the loss scale is {scale:g} from this step on, {before:g} before it: its"
                " gradient does not follow that"
            )
        return words

    def _explain_wrong_target_count(
        self, observed: StepObservation, record: SecondLoopRecord
    ) -> str:
        for other in record.steps:
            if other.num_targets == observed.num_targets:
                return f"the step trains on the data of step {other.step}: the batch is another one"
        return "the data of the step is not that of its samples"

    def _explain_wrong_loss(self, step: int, attempt: AttemptObservation) -> str:
        cause = (
            "weights and number of targets are equal: other data, or dropout masks of another step"
        )
        if attempt.name and step == attempt.first_step:
            cause += f", for it begins anew where the run is {attempt.name}"
        return cause + _describe_repetition(step, attempt)

    def _compare_updates(
        self, observed: StepObservation, reference: SecondLoopStep, rank: int
    ) -> Iterator[Difference]:
        step, expected = reference.step, 0 if reference.skipped else 1
        if observed.num_updates != expected:
            cause = f"the optimizer's update is made {observed.num_updates} times, not once"
            if not observed.num_updates:
                cause = "the step is good, and not updated: weights are stale, did not move"
            if reference.skipped:
                cause = f"a step that must be skipped ({reference.skipped}) is applied"
            yield make_number_difference(
                "update", step, abs(observed.num_updates - expected), cause, rank
            )
        for rate in observed.rates:
            error = relative_error(rate, reference.rate)
            self._errors.note("rate", error)
            if not error <= 1e-12:
                cause = (
                    f"the learning rate of a group is {rate:.4g}, by the schedule it is"
                    f" {reference.rate:.4g}"
                )
                yield make_number_difference("learning rate", step, error, cause, rank)

    def _explain_wrong_gradients(
        self, sums: Sequence[Mapping[str, Dots]], reference: SecondLoopStep
    ) -> str:
        actual, crossed, expected = 0.0, 0.0, 0.0
        for of_rank in sums:
            for _, own_squares, mixed, reference_squares in of_rank.values():
                actual, crossed, expected = (
                    actual + own_squares,
                    crossed + mixed,
                    expected + reference_squares,
                )
        ratio = math.sqrt(actual / expected) if expected else math.inf
        is_parallel = (
            abs(crossed - math.sqrt(actual * expected)) <= EQUAL_RATIO_TOLERANCE * expected
        )
        if is_parallel and abs(ratio - 1) > EQUAL_RATIO_TOLERANCE:
            clipped = "clipped" if reference.is_clipped else "left as they are"
            return (
                f"all gradients are {format_factor(ratio)} what they should be, {clipped} by the"
                " norm: clipping"
            )
        return "the norm before clipping is right, and the gradients that are applied are others"


def _compare_skip(
    observed: StepObservation, reference: SecondLoopStep, rank: int
) -> Iterator[Difference]:
    if observed.reason in ACCEPTED_SKIP_REASONS[reference.skipped]:
        return
    cause = (
        f"the step is taken for {observed.reason or 'a good one'}, and must be skipped:"
        f" {reference.skipped}"
    )
    if not reference.skipped:
        cause = f"a good step is skipped: {observed.reason}"
    yield make_number_difference("skipped step", reference.step, 1.0, cause, rank)


def _describe_repetition(step: int, attempt: AttemptObservation) -> str:
    """What a cause says besides of the step that is computed twice; "" of all others."""
    if step not in (OVERFLOW_STEP, REPEATED_STEP) or attempt.why_not_repeated:
        return ""
    return ": the step is repeated, for it was not finite the first time"
