"""Compares what the trainer has put on record, and the checkpoints that it has left, with the
second loop. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from phalanx.verify.row import Difference
from phalanx.verify.trainer_cases import NORMS_EVERY, NUM_STEPS, POSTPONED_STEP, SAME_LAYOUT
from phalanx.verify.trainer_errors import (
    ErrorRecord,
    make_number_difference,
    make_tensor_difference,
    relative_error,
)
from phalanx.verify.trainer_facts import (
    BEFORE,
    BUFFER,
    GRADIENT,
    STATE,
    UPDATE,
    WEIGHT,
    AttemptObservation,
    ReadCheckpoint,
    RecordedNorms,
    RecordedStep,
    SecondLoopRecord,
    SecondLoopStep,
)
from phalanx.verify.trainer_steps import ACCEPTED_SKIP_REASONS

# Norms by block are recorded in six digits.
NORM_TOLERANCE = 1e-5
# Of a block whose gradients are nothing but rounding: relative to that of the whole model.
SMALLEST_SHARE_OF_NORM = 1e-6
RATE_TOLERANCE = 1e-12


class RecordComparator:
    """Compares the records of all ranks, as `StepComparator` does what the trainer handed to its
    guards and its optimizer."""

    def __init__(
        self, errors: ErrorRecord, *, batch_size: int, is_scaled: bool, compress: str
    ) -> None:
        self._errors, self._batch_size = errors, batch_size
        self._is_scaled, self._compress = is_scaled, compress

    def compare(
        self, ranks: Sequence[AttemptObservation], record: SecondLoopRecord
    ) -> Iterator[Difference]:
        """All that differs on record of an attempt."""
        for rank, attempt in enumerate(ranks):
            done = [observed.step for observed in attempt.steps]
            recorded = [step.step for step in attempt.recorded]
            if recorded != done:
                cause = f"steps {recorded} are on record, not {done}"
                yield make_number_difference("record", attempt.first_step, math.nan, cause, rank)
                continue
            for step in attempt.recorded:
                yield from self._compare_step(step, record.get_step_record(step.step), rank)
        yield from self._compare_skips(ranks[0], record)
        yield from self._compare_norms(ranks[0], record)

    def _compare_step(
        self, recorded: RecordedStep, reference: SecondLoopStep, rank: int
    ) -> Iterator[Difference]:
        tolerance = self._errors.tolerance
        pairs = [
            ("number of targets", recorded.num_targets, reference.num_targets, 0.0),
            ("tokens seen", recorded.tokens_seen, reference.tokens_seen, 0.0),
            ("learning rate", recorded.learning_rate, reference.rate, RATE_TOLERANCE),
            (
                "targets a second",
                recorded.tokens_per_s * recorded.step_s,
                recorded.num_targets,
                tolerance,
            ),
        ]
        if reference.skipped != "no_targets":
            pairs.append(("loss", recorded.loss, reference.loss, tolerance))
            scale = reference.loss_scale if self._is_scaled else 0.0
            pairs.append(("loss scale", recorded.loss_scale, scale, 0.0))
            if self._compress == "none":
                pairs.append(("gradient norm", recorded.grad_norm, reference.grad_norm, tolerance))
        for name, actual, expected, allowed in pairs:
            if math.isnan(actual) and not math.isfinite(expected):
                continue
            error = relative_error(actual, expected)
            if not error <= allowed:
                cause = (
                    f"on record the {name} of the step is {actual:.6g}, and was {expected:.6g}:"
                    " consoles, pages and metrics show what is on record"
                )
                yield make_number_difference(f"recorded {name}", recorded.step, error, cause, rank)

    def _compare_skips(
        self, attempt: AttemptObservation, record: SecondLoopRecord
    ) -> Iterator[Difference]:
        recorded = {skip.step: skip for skip in attempt.skips}
        for observed in attempt.steps:
            step = observed.step
            expected, skip = record.get_step_record(step).skipped, recorded.get(step)
            reason = "" if skip is None else skip.reason
            samples = ((step - 1) * self._batch_size, self._batch_size)
            if reason not in ACCEPTED_SKIP_REASONS[expected]:
                cause = (
                    f"on record the step is {reason or 'a good one'}, and was"
                    f" {expected or 'a good one'}"
                )
            elif skip is not None and (skip.first_sample, skip.num_samples) != samples:
                cause = (
                    f"on record the skipped step has {skip.num_samples} samples from"
                    f" {skip.first_sample} on, and had {samples[1]} from {samples[0]} on"
                )
            else:
                continue
            yield make_number_difference("recorded skip", step, math.nan, cause)

    # Norms by block

    def _compare_norms(
        self, attempt: AttemptObservation, record: SecondLoopRecord
    ) -> Iterator[Difference]:
        done = [observed.step for observed in attempt.steps]
        due = [step for step in done if (step - 1) % NORMS_EVERY == 0]
        measured = [norms.step for norms in attempt.norms]
        if measured != due:
            cause = f"norms by block of steps {measured} are on record, not of {due}"
            yield make_number_difference("record", attempt.first_step, math.nan, cause)
            return
        for norms in attempt.norms:
            yield from self._compare_norms_of_step(norms, record)

    def _compare_norms_of_step(
        self, norms: RecordedNorms, record: SecondLoopRecord
    ) -> Iterator[Difference]:
        reference = record.get_step_record(norms.step)
        if reference.skipped:
            # The second loop keeps no gradients of such a step.
            if norms.updates or norms.weights:
                cause = "on record a step that was skipped has an update"
                yield make_number_difference("recorded update", norms.step, math.nan, cause)
            return
        unclipped = 1.0
        if reference.is_clipped:
            assert record.max_norm is not None
            unclipped = reference.grad_norm / record.max_norm
        kinds = [(UPDATE, "update", norms.updates, 1.0), (BEFORE, "weights", norms.weights, 1.0)]
        if not norms.updates and not norms.weights:
            kinds = []
        # Compressed ones are others by design.
        if self._compress == "none":
            kinds.append((GRADIENT, "gradients", norms.gradients, unclipped))
        # By its weights: of a parameter without a gradient, too.
        trained = reference.sizes[BEFORE]
        for kind, words, recorded, factor in kinds:
            expected = _sum_sizes_by_block(trained, reference.sizes.get(kind, {}), recorded)
            unused_blocks = {_find_block(name, recorded) for name in record.unused}
            total = math.sqrt(sum(size**2 for size in expected.values())) * factor
            for block, size in expected.items():
                actual = recorded.get(block, math.nan)
                smallest = max(size * factor, SMALLEST_SHARE_OF_NORM * total, 1e-300)
                error = abs(actual - size * factor) / smallest
                if error <= max(NORM_TOLERANCE, self._errors.tolerance) or block in unused_blocks:
                    continue
                cause = (
                    f"on record the norm of the {words} of {block or 'no block'} is {actual:.6g},"
                    f" and was {size * factor:.6g}"
                )
                yield make_number_difference(f"recorded {words}", norms.step, error, cause)


def _sum_sizes_by_block(
    trained: Mapping[str, float], sizes: Mapping[str, float], blocks: Mapping[str, float]
) -> dict[str, float]:
    """Block -> norm of all its tensors; "" -> that of tensors that are in none of `blocks`."""
    squares = dict.fromkeys(blocks, 0.0)
    for name in trained:
        block = _find_block(name, blocks)
        squares[block] = squares.get(block, 0.0) + sizes.get(name, 0.0) ** 2
    return {block: math.sqrt(square) for block, square in squares.items()}


def _find_block(name: str, blocks: Mapping[str, float]) -> str:
    """The innermost of `blocks` that a parameter is in; "" if it is in none."""
    holders = [block for block in blocks if name == block or name.startswith(f"{block}.")]
    return max(holders, key=len, default="")


class ReadCheckpointComparator:
    """Compares what rank 0 has read of the newest checkpoint of a run."""

    def __init__(self, errors: ErrorRecord) -> None:
        self._errors = errors

    def compare(
        self, attempt: AttemptObservation, record: SecondLoopRecord
    ) -> Iterator[Difference]:
        """All that differs in the checkpoint that is the newest when the attempt ends."""
        expected, subject = NUM_STEPS, "an export of the run reads"
        if attempt.name != SAME_LAYOUT:
            expected = POSTPONED_STEP
            subject = "the second checkpoint that is saved in the background has"
        for read in attempt.read:
            if read.error:
                cause = f"the run's newest checkpoint cannot be read whole: {read.error}"
                yield make_number_difference("checkpoint", expected, math.nan, cause)
            elif read.step != expected:
                cause = (
                    f"the checkpoint of step {read.step} is taken for the run's newest,"
                    f" and it has one of step {expected}"
                )
                yield make_number_difference("checkpoint", expected, math.nan, cause)
            else:
                yield from self._compare_tensors(read, record, attempt, subject)

    def _compare_tensors(
        self,
        read: ReadCheckpoint,
        record: SecondLoopRecord,
        attempt: AttemptObservation,
        subject: str,
    ) -> Iterator[Difference]:
        reference = record.get_step_record(read.step)
        for name in read.missing:
            cause = f"{subject} nothing of it"
            yield make_tensor_difference("read weight", name, read.step, 1.0, 0, "", cause)
        for kind, sums in read.tensors.items():
            skipped_names = record.unused if kind != BUFFER else ()
            off = self._errors.find_wrong_tensors([sums], reference, kind, skipped_names)
            label = {WEIGHT: "read weight", BUFFER: "read buffer"}.get(kind)
            if label is None:
                label = f"read optimizer state {kind.removeprefix(STATE + '/')} of"
            for name, (error, _) in off.items():
                cause = (
                    f"{subject} other values than the run had after step {read.step}: of another"
                    " step, or pieces in other places of the tensor"
                )
                if name in read.unequal:
                    cause = (
                        f"{subject} another one matrix by matrix, as exports read those of experts,"
                        " than as a whole: its pieces are put together wrongly"
                    )
                yield make_tensor_difference(label, name, read.step, error, 0, "", cause)
