"""Compares what all ranks observed of the trainer with the second loop: equal, or what differs
first, in which step, and the likely cause. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from phalanx.verify.row import Difference
from phalanx.verify.trainer_cases import (
    CLIPPING,
    EVALUATED_STEPS,
    JUDGED_PARTS,
    NUM_STEPS,
    SAME_LAYOUT,
    SAVE_EVERY,
    STOP_STEP,
)
from phalanx.verify.trainer_facts import (
    BUFFER,
    COMPRESSION,
    COPY,
    GRADIENT,
    STATE,
    WEIGHT,
    AttemptObservation,
    Dots,
    SecondLoopRecord,
    SecondLoopStep,
    StateObservation,
    StepObservation,
)

TOLERANCE, NARROW_TOLERANCE = 1e-8, 1e-4
EQUAL_RATIO_TOLERANCE = 1e-3  # ratios that are alike
_ACCEPTED_SKIP_REASONS = {
    "": ("",),
    "no_targets": ("no_targets",),
    "not_finite": ("nonfinite_gradients", "overflow"),
}


class RunComparator:
    """Compares the attempts of all ranks with the second loop.

    `by_rank`: of each rank its attempts. `record` is of the layout of the first two attempts,
    `other` of the one that the last is resumed in. `is_scaled`: the loss was multiplied by a scale.
    `compress`: how gradients were compressed, which makes them others than the second loop's.
    """

    def __init__(
        self,
        by_rank: Sequence[Sequence[AttemptObservation]],
        record: SecondLoopRecord,
        other: SecondLoopRecord,
        *,
        batch_size: int,
        is_scaled: bool,
        compress: str = "none",
    ) -> None:
        self._by_rank, self._records = by_rank, (record, record, other)
        self._batch_size, self._is_scaled = batch_size, is_scaled
        self._compress = compress
        self.tolerance = TOLERANCE
        if record.narrows or other.narrows:
            self.tolerance = NARROW_TOLERANCE
        self._worst: dict[str, float] = {}

    def find_first_difference(self) -> Difference | None:
        """The first difference; None if the trainer equals the second loop."""
        return next(self._iterate_differences(), None)

    def errors(self) -> dict[str, float]:
        """The largest relative error of each kind, up to the first difference."""
        return dict(self._worst)

    def notes(self) -> tuple[str, ...]:
        """Lines that a reader must know of the tolerance."""
        if not self._records[0].narrows:
            return ()
        return (
            "the module computes in fewer digits than float64 on its way, and is judged by those",
        )

    def list_judged_parts(self) -> tuple[str, ...]:
        """List what was compared."""
        if self._compress == "none":
            return JUDGED_PARTS
        parts = tuple(part for part in JUDGED_PARTS if part != CLIPPING)
        return (*parts, f"what {self._compress} keeps of gradients, in the runs that are resumed")

    def list_untested_parts(self) -> tuple[str, ...]:
        """List what this run had nothing of."""
        record = self._records[0]
        lines = []
        if self._compress != "none":
            lines.append(f"gradients, their norm and {CLIPPING}: ddp-{self._compress} has them")
            return tuple(lines)
        if record.unused:
            lines.append(f"parameters without a gradient: {', '.join(record.unused)}")
        if not any(step.skipped == "no_targets" for step in record.steps):
            lines.append("a step without targets: the data has none")
        num_clipped = sum(step.is_clipped for step in record.steps)
        if num_clipped == 0:
            lines.append("active clipping")
        if num_clipped == sum(not step.skipped for step in record.steps):
            lines.append("steps below the clipping norm")
        return tuple(lines)

    def _iterate_differences(self) -> Iterator[Difference]:
        for index, of_ranks in enumerate(zip(*self._by_rank, strict=True)):
            yield from self._compare_attempt(of_ranks, self._records[index])

    def _compare_attempt(
        self, ranks: Sequence[AttemptObservation], record: SecondLoopRecord
    ) -> Iterator[Difference]:
        attempt = ranks[0]
        yield from self._compare_saved_steps(attempt)
        steps = {rank: {s.step: s for s in of_rank.steps} for rank, of_rank in enumerate(ranks)}
        states = {rank: of_rank.states for rank, of_rank in enumerate(ranks)}
        for index, observed in enumerate(attempt.states):
            of_ranks = [states[rank][index] for rank in range(len(ranks))]
            if observed.step:
                yield from self._compare_evaluation(attempt, record.get_step_record(observed.step))
            began = attempt.name if index == 0 else ""
            yield from self._compare_state(of_ranks, record, began, ranks)
            following = observed.step + 1
            if all(following in of_rank for of_rank in steps.values()):
                step_ranks = [of_rank[following] for of_rank in steps.values()]
                yield from self._compare_step(step_ranks, record, attempt, ranks)
        yield from self._compare_attempt_end(attempt)

    def _compare_saved_steps(self, attempt: AttemptObservation) -> Iterator[Difference]:
        due = _list_saved_steps()
        if attempt.name and attempt.checkpoints != due:
            yield self._make_number_difference(
                "checkpoints",
                attempt.first_step - 1,
                float(len(attempt.checkpoints) - len(due)) or math.nan,
                f"the run saved steps {list(attempt.checkpoints)}, not {list(due)}",
            )

    def _compare_attempt_end(self, attempt: AttemptObservation) -> Iterator[Difference]:
        if attempt.error:
            yield self._make_number_difference(
                "run",
                _find_last_step_of_attempt(attempt),
                math.nan,
                self._explain_attempt_error(attempt),
            )
        expected, last = "finished", NUM_STEPS
        # The first run is stopped on the way.
        if not attempt.name:
            expected, last = "sigterm", STOP_STEP
        actual_last = _find_last_step_of_attempt(attempt)
        if attempt.end != expected or actual_last != last:
            cause = (
                f"the run ended with {attempt.end or 'nothing'} after step {actual_last},"
                f" not with {expected} after step {last}"
            )
            yield self._make_number_difference("end of the run", last, math.nan, cause)

    def _explain_attempt_error(self, attempt: AttemptObservation) -> str:
        if attempt.name:
            return f"{attempt.name}, the run cannot be restored: {attempt.error}"
        return attempt.error

    # Between two steps

    def _compare_state(
        self,
        ranks: Sequence[StateObservation],
        record: SecondLoopRecord,
        restored: str,
        attempts: Sequence[AttemptObservation],
    ) -> Iterator[Difference]:
        """All that differs between two steps. `restored`: how the run was resumed just before, in
        words."""
        step = ranks[0].step
        yield from self._compare_counters(ranks, record, restored)
        is_evaluated = step in EVALUATED_STEPS and not restored
        yield from find_changed_modes(ranks)
        for rank, observed in enumerate(ranks):
            for name in observed.left:
                cause = "the step before is left in gradients: they were not cleared"
                if step and record.get_step_record(step).skipped:
                    cause = "a skipped step is left in gradients: they were not cleared"
                yield self._make_tensor_difference(
                    "gradient", name, step, observed.left[name], rank, "", cause
                )
        for kind in _list_tensor_kinds(ranks):
            yield from self._compare_tensors(kind, ranks, record, restored, attempts, is_evaluated)
        for rank, observed in enumerate(ranks):
            for key, off in observed.numbers.items():
                if off == 0:
                    continue
                slot, _, name = key.partition("/")
                cause = self._explain_wrong_state(f"{STATE}/{slot}", step, record, restored)
                kind_of_tensor = f"optimizer state {slot} of"
                yield self._make_tensor_difference(
                    kind_of_tensor, name, step, abs(off), rank, "", cause
                )
        yield from self._compare_compression_states(ranks, restored)

    def _compare_compression_states(
        self, ranks: Sequence[StateObservation], restored: str
    ) -> Iterator[Difference]:
        """What compression keeps between steps, beside an earlier attempt's after the same step."""
        for rank, observed in enumerate(ranks):
            for key, error in observed.compression.items():
                self._note_worst_error(COMPRESSION, error)
                if error <= self.tolerance:
                    continue
                _, slot, name = key.split("/", 2)
                subject = f"what {self._compress} keeps between steps ({slot}) is"
                cause = f"{subject} not what it was in the run before the stop"
                if restored:
                    cause = _describe_restore_cause(subject, restored)
                yield self._make_tensor_difference(
                    f"compression state {slot} of", name, observed.step, error, rank, "", cause
                )

    def _compare_counters(
        self, ranks: Sequence[StateObservation], record: SecondLoopRecord, restored: str
    ) -> Iterator[Difference]:
        step = ranks[0].step
        tokens = record.get_step_record(step).tokens_seen if step else 0
        for rank, observed in enumerate(ranks):
            pairs = (
                ("step", observed.counted_step, step),
                ("tokens seen", observed.tokens_seen, tokens),
                ("samples seen", observed.samples_seen, step * self._batch_size),
            )
            for kind_of_tensor, actual, expected in pairs:
                if actual == expected:
                    continue
                cause = f"{kind_of_tensor}: {actual} after step {step}, not {expected}"
                if restored:
                    cause += f": not restored from the checkpoint ({restored})"
                yield self._make_number_difference(
                    kind_of_tensor, step, abs(actual - expected), cause, rank
                )
            following = step + 1
            if observed.asked_step not in (0, following):
                cause = (
                    f"step {following} asks for the data of step {observed.asked_step}: it trains"
                    " on another batch"
                )
                if restored:
                    cause += f", where the run is {restored}"
                error = float(abs(observed.asked_step - following))
                yield self._make_number_difference("data", following, error, cause, rank)

    def _compare_tensors(
        self,
        kind: str,
        ranks: Sequence[StateObservation],
        record: SecondLoopRecord,
        restored: str,
        attempts: Sequence[AttemptObservation],
        is_evaluated: bool,
    ) -> Iterator[Difference]:
        step = ranks[0].step
        reference = record.steps[step - 1] if step else None
        label = {WEIGHT: "weight", COPY: "weight of the optimizer", BUFFER: "buffer"}.get(kind)
        if step == 0:
            label = f"initial {label}"
        sums = [observed.tensors.get(kind, {}) for observed in ranks]
        skipped_names = record.unused if kind != BUFFER else ()
        size_kind = WEIGHT if kind == COPY else kind
        off = self._find_wrong_tensors(sums, reference, size_kind, skipped_names)
        for name, (error, rank) in off.items():
            if kind == BUFFER and is_evaluated:
                cause = "a buffer is another one than before: an evaluation leaves its buffers"
            elif kind in (WEIGHT, COPY, BUFFER):
                cause = self._explain_wrong_weight(name, sums, step, record, restored, is_evaluated)
            else:
                cause = self._explain_wrong_state(kind, step, record, restored)
            kind_of_tensor = label or f"optimizer state {kind.partition('/')[2]} of"
            held_blocks = attempts[rank].held.get(name, "")
            yield self._make_tensor_difference(
                kind_of_tensor, name, step, error, rank, held_blocks, cause
            )

    def _find_wrong_tensors(
        self,
        sums: Sequence[Mapping[str, Dots]],
        reference: SecondLoopStep | None,
        kind: str,
        skipped_names: Sequence[str],
    ) -> dict[str, tuple[float, int]]:
        """Name -> (relative error, the rank that has most of it) of tensors that are off."""
        off: dict[str, tuple[float, int]] = {}
        names = dict.fromkeys(name for of_rank in sums for name in of_rank)
        for name in names:
            if name in skipped_names:
                continue
            # Before the first step nothing has a size: any error counts.
            scale = 1.0
            if reference is not None:
                scale = reference.scale(kind, name)
            errors = [math.sqrt(of_rank[name][0]) if name in of_rank else 0.0 for of_rank in sums]
            # NaN is the worst of all.
            worst = max(range(len(errors)), key=lambda rank: _replace_nan_by_infinity(errors[rank]))
            error = errors[worst] / scale
            self._note_worst_error(kind.partition("/")[0], error)
            if not error <= self.tolerance:
                off[name] = error, worst
        return off

    def _explain_wrong_weight(
        self,
        name: str,
        sums: Sequence[Mapping[str, Dots]],
        step: int,
        record: SecondLoopRecord,
        restored: str,
        is_evaluated: bool,
    ) -> str:
        if restored:
            return _describe_restore_cause("what was saved is", restored)
        if not step:
            return "the trainer begins with other weights"
        if record.get_step_record(step).skipped:
            return "a skipped step is applied, or changed weights all the same"
        moved = sum(of_rank[name][1] for of_rank in sums if name in of_rank)
        expected = sum(of_rank[name][3] for of_rank in sums if name in of_rank)
        if moved == 0 and expected:
            return "the optimizer's update did not move it: not updated, a stale copy"
        ratio = math.sqrt(moved / expected) if expected else math.inf
        if abs(ratio - 2) < 0.2:
            return f"it moved {ratio:.3g} times as far: the optimizer's update is made twice"
        if is_evaluated:
            return "the update, or the evaluation behind it, changed it otherwise"
        return (
            "gradients and rate are right, and the update is not the optimizer's by its"
            " definition: decay of the wrong parameters, eps, betas or counts"
        )

    def _explain_wrong_state(
        self, kind: str, step: int, record: SecondLoopRecord, restored: str
    ) -> str:
        slot = kind.partition("/")[2]
        words = {
            "exp_avg": "first moments",
            "exp_avg_sq": "second moments",
            "step": "counts of updates",
            "momentum_buffer": "momentum",
        }.get(slot, slot)
        if restored:
            return _describe_restore_cause(f"{words} of the optimizer are", restored)
        if step and record.get_step_record(step).skipped:
            return f"{words} of the optimizer went on in a skipped step"
        return f"{words} are not what the optimizer's definition makes of the same gradients"

    # Within a step

    def _compare_step(
        self,
        ranks: Sequence[StepObservation],
        record: SecondLoopRecord,
        attempt: AttemptObservation,
        attempts: Sequence[AttemptObservation],
    ) -> Iterator[Difference]:
        reference = record.get_step_record(ranks[0].step)
        for rank, observed in enumerate(ranks):
            yield from self._compare_step_facts(observed, reference, record, rank, attempt)
        for rank, observed in enumerate(ranks):
            yield from self._compare_updates(observed, reference, rank)
        sums = [observed.gradients for observed in ranks]
        off = self._find_wrong_tensors(sums, reference, GRADIENT, record.unused)
        for name, (error, rank) in off.items():
            held_blocks = attempts[rank].held.get(name, "")
            cause = self._explain_wrong_gradients(sums, reference)
            yield self._make_tensor_difference(
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
            yield self._make_number_difference("number of targets", step, abs(off), cause, rank)
        if reference.skipped != "no_targets":
            error = _relative_error(observed.loss, reference.loss)
            self._note_worst_error("loss", error)
            if not error <= self.tolerance:
                yield self._make_number_difference(
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
                error = _relative_error(observed.loss_scale, scale)
                yield self._make_number_difference("loss scale", step, error, cause, rank)
        if not reference.skipped and self._compress == "none":
            error = _relative_error(observed.grad_norm, reference.grad_norm)
            self._note_worst_error("norm", error)
            if not error <= self.tolerance:
                cause = "gradients before clipping are others, of equal weights and data"
                yield self._make_number_difference("gradient norm", step, error, cause, rank)
        if observed.reason not in _ACCEPTED_SKIP_REASONS[reference.skipped]:
            cause = (
                f"the step is taken for {observed.reason or 'a good one'}, and must be skipped:"
                f" {reference.skipped}"
            )
            if not reference.skipped:
                cause = f"a good step is skipped: {observed.reason}"
            yield self._make_number_difference("skipped step", step, 1.0, cause, rank)

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
        return cause

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
            yield self._make_number_difference(
                "update", step, abs(observed.num_updates - expected), cause, rank
            )
        for rate in observed.rates:
            error = _relative_error(rate, reference.rate)
            self._note_worst_error("rate", error)
            if not error <= 1e-12:
                cause = (
                    f"the learning rate of a group is {rate:.4g}, by the schedule it is"
                    f" {reference.rate:.4g}"
                )
                yield self._make_number_difference("learning rate", step, error, cause, rank)

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
                f"all gradients are {ratio:.3g} times as large as they should be, {clipped} by the"
                " norm: clipping"
            )
        return "the norm before clipping is right, and the gradients that are applied are others"

    # Evaluations

    def _compare_evaluation(
        self, attempt: AttemptObservation, reference: SecondLoopStep
    ) -> Iterator[Difference]:
        step = reference.step
        # What a run has on record is not evaluated again.
        if step < attempt.first_step:
            return
        actual, expected = attempt.evaluations.get(str(step)), reference.evaluation
        if (actual is None) != (expected is None):
            cause = "an evaluation that is due is not done"
            if expected is None:
                cause = "an evaluation is done that is not due"
            yield self._make_number_difference("evaluation loss", step, math.nan, cause)
        if actual is None or expected is None:
            return
        error = _relative_error(actual, expected)
        self._note_worst_error("evaluation", error)
        if not error <= self.tolerance:
            cause = (
                "the evaluation does not give the loss per target of its sources, by their weights,"
                " in evaluation mode"
            )
            yield self._make_number_difference("evaluation loss", step, error, cause)

    def _note_worst_error(self, kind: str, error: float) -> None:
        self._worst[kind] = max(self._worst.get(kind, 0.0), _replace_nan_by_infinity(error))

    def _make_number_difference(
        self, kind_of_number: str, step: int, error: float, cause: str, rank: int = 0
    ) -> Difference:
        return self._make_tensor_difference(kind_of_number, "", step, error, rank, "", cause)

    def _make_tensor_difference(
        self,
        kind_of_tensor: str,
        name: str,
        step: int,
        error: float,
        rank: int,
        held_blocks: str,
        cause: str,
    ) -> Difference:
        # Steps of differences are counted from 0.
        return Difference(
            kind_of_tensor, name, max(0, step - 1), error, rank, (rank,), held_blocks, cause
        )


def find_changed_modes(ranks: Sequence[StateObservation]) -> Iterator[Difference]:
    """The difference of modules whose mode, training or evaluation, is another than before: named
    by the first module and its ranks; its error is how many there are."""
    changed = [rank for rank, observed in enumerate(ranks) if observed.modes]
    if not changed:
        return
    first = ranks[changed[0]]
    name, num_modules = first.modes[0] or "(the model)", len(first.modes)
    cause = (
        f"{num_modules} modules are in another mode than before, {name} the first: an evaluation"
        " leaves its mode, or sets that of modules which have one of their own"
    )
    yield Difference(
        "mode",
        name,
        max(0, first.step - 1),
        float(num_modules),
        changed[0],
        tuple(changed),
        f"{num_modules} modules",
        cause,
    )


def _describe_restore_cause(subject: str, restored: str) -> str:
    """The cause of a state that is another one after a restore."""
    cause = f"{subject} not restored from the checkpoint: {restored}"
    if restored == SAME_LAYOUT:
        return cause
    return (
        f"{cause} from what a thread wrote, which must be a copy that later updates do not change"
    )


def _list_saved_steps() -> tuple[int, ...]:
    """The steps that the first attempt saves, the newest first."""
    regular = [step for step in range(1, STOP_STEP) if step % SAVE_EVERY == 0]
    return (STOP_STEP, *reversed(regular))


def _find_last_step_of_attempt(attempt: AttemptObservation) -> int:
    if not attempt.states:
        return 0
    return attempt.states[-1].step


def _list_tensor_kinds(ranks: Sequence[StateObservation]) -> list[str]:
    """Kinds of tensors: states of the optimizer first, of which weights are made."""
    kinds = dict.fromkeys(kind for observed in ranks for kind in observed.tensors)
    return sorted(kinds, key=lambda kind: (not kind.startswith(STATE), kind))


def _relative_error(actual: float, expected: float) -> float:
    if actual == expected:
        return 0.0
    return abs(actual - expected) / max(abs(expected), 1e-300)


def _replace_nan_by_infinity(value: float) -> float:
    if math.isnan(value):
        return math.inf
    return value
