"""Compares what all ranks observed of the trainer with the second loop: equal, or what differs
first, in which step, and the likely cause. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.verify.diagnosis import CHANGED_BUFFER_CAUSE
from phalanx.verify.row import Difference
from phalanx.verify.trainer_cases import (
    BACKGROUND_EVERY,
    CLIPPING,
    JUDGED_PARTS,
    LINKED_CHECKPOINT,
    LINKED_FILES,
    LINKED_STEP,
    NUM_STEPS,
    POSTPONED_SAVE,
    POSTPONED_STEP,
    RECORDED_GRADIENT_NORMS,
    RECORDED_UPDATE_NORMS,
    REPEATED_STEPS,
    SAME_LAYOUT,
    SAVE_EVERY,
    STOP_STEP,
    UNMASKED_STEP,
)
from phalanx.verify.trainer_errors import (
    ErrorRecord,
    make_number_difference,
    make_tensor_difference,
    relative_error,
)
from phalanx.verify.trainer_facts import (
    AttemptObservation,
    SecondLoopRecord,
    SecondLoopStep,
    StateObservation,
)
from phalanx.verify.trainer_records import ReadCheckpointComparator, RecordComparator
from phalanx.verify.trainer_states import StateComparator
from phalanx.verify.trainer_steps import StepComparator

TOLERANCE, NARROW_TOLERANCE = 1e-8, 1e-4


class RunComparator:
    """Compares the attempts of all ranks with the second loop.

    `by_rank`: of each rank its attempts. `record` is of the layout of the first three attempts,
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
        self._by_rank, self._records = by_rank, (record, record, record, other)
        self._compress = compress
        narrows = record.narrows or other.narrows
        self._errors = ErrorRecord(NARROW_TOLERANCE if narrows else TOLERANCE)
        self._states = StateComparator(self._errors, batch_size=batch_size, compress=compress)
        self._steps = StepComparator(self._errors, is_scaled=is_scaled, compress=compress)
        self._recorded = RecordComparator(
            self._errors, batch_size=batch_size, is_scaled=is_scaled, compress=compress
        )
        self._checkpoints = ReadCheckpointComparator(self._errors)

    @property
    def _why_not_repeated(self) -> str:
        """Why the layout repeats no step; empty if it does."""
        return self._by_rank[0][0].why_not_repeated

    @property
    def _has_linked_files(self) -> bool:
        return any(attempt.num_linked_bytes for attempt in self._by_rank[0])

    @property
    def _was_held_too_long(self) -> bool:
        return any(attempt.was_held_too_long for attempt in self._by_rank[0])

    @property
    def _has_norms_of_updates(self) -> bool:
        return any(norms.updates for attempt in self._by_rank[0] for norms in attempt.norms)

    @property
    def tolerance(self) -> float:
        """The relative error that is allowed."""
        return self._errors.tolerance

    def find_first_difference(self) -> Difference | None:
        """The first difference; None if the trainer equals the second loop."""
        return next(self._iterate_differences(), None)

    def errors(self) -> dict[str, float]:
        """The largest relative error of each kind, up to the first difference."""
        return dict(self._errors.worst)

    def notes(self) -> tuple[str, ...]:
        """Lines that a reader must know of the tolerance."""
        if not self._records[0].narrows:
            return ()
        return (
            "the module computes in fewer digits than float64 on its way, and is judged by those",
        )

    def list_judged_parts(self) -> tuple[str, ...]:
        """List what was compared."""
        left_out = set()
        if self._compress != "none" or self._records[0].max_norm is None:
            left_out.add(CLIPPING)
        if self._compress != "none":
            left_out.add(RECORDED_GRADIENT_NORMS)
        if not self._has_norms_of_updates:
            left_out.add(RECORDED_UPDATE_NORMS)
        if self._why_not_repeated:
            left_out.add(REPEATED_STEPS)
        parts = tuple(part for part in JUDGED_PARTS if part not in left_out)
        if not self._was_held_too_long:
            parts = (*parts, POSTPONED_SAVE)
        if self._has_linked_files:
            parts = (*parts, LINKED_FILES)
        if self._compress == "none":
            return parts
        return (*parts, f"what {self._compress} keeps of gradients, in the runs that are resumed")

    def list_untested_parts(self) -> tuple[str, ...]:
        """List what this run had nothing of."""
        record = self._records[0]
        lines = []
        if not self._has_linked_files:
            why = "none was linked"
            if not record.get_step_record(LINKED_STEP).skipped:
                why = "no step is skipped, in which nothing changes"
            lines.append(f"{LINKED_FILES}: {why}")
        if self._was_held_too_long:
            lines.append(f"{POSTPONED_SAVE}: the other was written before, as this machine is slow")
        if not self._has_norms_of_updates:
            lines.append(f"{RECORDED_UPDATE_NORMS}: for want of memory in the plan")
        if self._why_not_repeated:
            lines.append(f"{REPEATED_STEPS}: {self._why_not_repeated}")
        if self._compress != "none":
            lines.append(f"gradients, their norm and {CLIPPING}: ddp-{self._compress} has them")
            return tuple(lines)
        if record.unused:
            lines.append(f"parameters without a gradient: {', '.join(record.unused)}")
        if not any(step.skipped == "no_targets" for step in record.steps):
            lines.append("a step without targets: the data has none")
        return (*lines, *_list_untested_clipping(record))

    def _iterate_differences(self) -> Iterator[Difference]:
        for index, of_ranks in enumerate(zip(*self._by_rank, strict=True)):
            name = of_ranks[0].name
            for difference in self._compare_attempt(of_ranks, self._records[index]):
                # The run before it was equal to its end.
                if name and "resumed" not in difference.cause:
                    difference = replace(
                        difference, cause=f"{difference.cause}, in the run that is {name}"
                    )
                yield difference
        # Last: what runs restore of the same checkpoints says more of what is wrong with them.
        for attempt, record in zip(self._by_rank[0], self._records, strict=False):
            yield from self._checkpoints.compare(attempt, record)

    def _compare_attempt(
        self, ranks: Sequence[AttemptObservation], record: SecondLoopRecord
    ) -> Iterator[Difference]:
        attempt = ranks[0]
        yield from self._compare_saved_steps(attempt)
        steps = {rank: {s.step: s for s in of_rank.steps} for rank, of_rank in enumerate(ranks)}
        states = {rank: of_rank.states for rank, of_rank in enumerate(ranks)}
        for index, observed in enumerate(attempt.states):
            of_ranks = [states[rank][index] for rank in range(len(ranks))]
            began = attempt.name if index == 0 else ""
            # Before the evaluation: it reads the weights.
            yield from self._states.compare(of_ranks, record, began, ranks)
            if observed.step:
                yield from self._compare_evaluation(attempt, record.get_step_record(observed.step))
            following = observed.step + 1
            if all(following in of_rank for of_rank in steps.values()):
                step_ranks = [of_rank[following] for of_rank in steps.values()]
                differences = self._steps.compare(step_ranks, record, attempt, ranks)
                if following == 1 and len(attempt.states) > index + 1:
                    after = [of_rank[index + 1] for of_rank in states.values()]
                    differences = self._name_changed_buffer(differences, after, record)
                yield from differences
        yield from self._compare_attempt_end(attempt)
        yield from _find_saved_infinite_weights(ranks)
        # Of the linked checkpoint's observation there is no attempt of its own.
        if attempt.name != LINKED_CHECKPOINT:
            yield from self._recorded.compare(ranks, record)

    def _name_changed_buffer(
        self,
        differences: Iterator[Difference],
        after: Sequence[StateObservation],
        record: SecondLoopRecord,
    ) -> Iterator[Difference]:
        """The differences of a run's first step, of which the weights are right: losses and
        gradients that differ come from a buffer that its forward has changed, if one differs
        `after` it."""
        for difference in differences:
            name = ""
            if difference.what in ("loss", "gradient norm", "gradient"):
                name = self._states.find_changed_buffer(after, record)
            if name:
                difference = replace(difference, cause=CHANGED_BUFFER_CAUSE.format(name=name))
            yield difference

    def _compare_saved_steps(self, attempt: AttemptObservation) -> Iterator[Difference]:
        due = _list_saved_steps(attempt.name)
        if attempt.name and attempt.checkpoints != due:
            yield make_number_difference(
                "checkpoints",
                attempt.first_step - 1,
                float(len(attempt.checkpoints) - len(due)) or math.nan,
                f"the run saved steps {list(attempt.checkpoints)}, not {list(due)}",
            )

    def _compare_attempt_end(self, attempt: AttemptObservation) -> Iterator[Difference]:
        if attempt.error:
            yield make_number_difference(
                "run",
                _find_last_step_of_attempt(attempt),
                math.nan,
                self._explain_attempt_error(attempt),
            )
        expected, last = "finished", NUM_STEPS
        # The first run is stopped on the way.
        if not attempt.name:
            expected, last = "sigterm", STOP_STEP
        if attempt.name == LINKED_CHECKPOINT:
            expected, last = "restored", LINKED_STEP
        actual_last = _find_last_step_of_attempt(attempt)
        yield from _compare_saves_elsewhere(attempt)
        if attempt.end != expected or actual_last != last:
            cause = (
                f"the run ended with {attempt.end or 'nothing'} after step {actual_last},"
                f" not with {expected} after step {last}"
            )
            yield make_number_difference("end of the run", last, math.nan, cause)

    def _explain_attempt_error(self, attempt: AttemptObservation) -> str:
        if attempt.name:
            return f"{attempt.name}, the run cannot be restored: {attempt.error}"
        return attempt.error

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
            yield make_number_difference("evaluation loss", step, math.nan, cause)
        if actual is None or expected is None:
            return
        num_more = attempt.evaluated_targets[str(step)] - reference.evaluated_targets
        if num_more:
            cause = (
                "the evaluation counts other targets than its sources have, or some more than once"
            )
            yield make_number_difference("evaluation's targets", step, float(num_more), cause)
        error = relative_error(actual, expected)
        self._errors.note("evaluation", error)
        if not error <= self._errors.tolerance:
            cause = (
                "the evaluation does not give the loss per target of its sources, by their weights,"
                " in evaluation mode"
            )
            yield make_number_difference("evaluation loss", step, error, cause)
        yield from self._compare_evaluated_sources(attempt, reference)

    def _compare_evaluated_sources(
        self, attempt: AttemptObservation, reference: SecondLoopStep
    ) -> Iterator[Difference]:
        """The losses of the sources by themselves."""
        step, expected = reference.step, reference.evaluated_sources
        # One by itself has the loss of all, which is told once.
        if len(expected) < 2:
            expected = {}
        losses = attempt.evaluated_sources[str(step)]
        for name in sorted(expected.keys() | losses.keys()):
            error = math.nan
            if name in expected and name in losses:
                error = relative_error(losses[name], expected[name])
                self._errors.note("evaluation", error)
            if not error <= self._errors.tolerance:
                cause = (
                    f"of the source {name} the evaluation tells another loss than its batches have,"
                    " or one of no targets"
                )
                yield make_number_difference("evaluation loss of a source", step, error, cause)


def _compare_saves_elsewhere(attempt: AttemptObservation) -> Iterator[Difference]:
    """What the run that is resumed elsewhere has saved, if it came to its end."""
    if attempt.name in ("", SAME_LAYOUT, LINKED_CHECKPOINT) or attempt.end != "finished":
        return
    due = [NUM_STEPS, POSTPONED_STEP, BACKGROUND_EVERY]
    if attempt.was_held_too_long:
        due = [NUM_STEPS, *(step for step in attempt.saved if step != NUM_STEPS)]
    if list(attempt.saved) != due:
        cause = f"the run has saved steps {list(attempt.saved)}, not {due}"
        if NUM_STEPS not in attempt.saved:
            cause += ": it saves nothing at its end"
        elif POSTPONED_STEP not in attempt.saved:
            cause += (
                f": the save of step {2 * BACKGROUND_EVERY}, due while another was in flight, is"
                " never done"
            )
        yield make_number_difference("checkpoints", NUM_STEPS, math.nan, cause)


def _find_saved_infinite_weights(ranks: Sequence[AttemptObservation]) -> Iterator[Difference]:
    for rank, attempt in enumerate(ranks):
        if attempt.saved_infinite_weight:
            cause = (
                "a state with a weight that is not finite is saved: its checkpoint takes the place"
                " of one from which training goes on"
            )
            yield make_tensor_difference(
                "weight", attempt.saved_infinite_weight, NUM_STEPS, math.inf, rank, "", cause
            )


def _list_saved_steps(name: str) -> tuple[int, ...]:
    """The steps that have been saved when the attempt `name` is resumed, the newest first: by the
    first attempt some, by the second all of its own."""
    regular = [step for step in range(1, STOP_STEP) if step % SAVE_EVERY == 0]
    steps_of_second_attempt: list[int] = []
    if name != SAME_LAYOUT:
        steps_of_second_attempt = list(range(STOP_STEP + 1, NUM_STEPS + 1))
    return (*reversed(steps_of_second_attempt), STOP_STEP, *reversed(regular))


def _list_untested_clipping(record: SecondLoopRecord) -> list[str]:
    if record.max_norm is None:
        return [f"{CLIPPING}: optim.clip_norm is none"]
    lines = []
    num_clipped = sum(step.is_clipped for step in record.steps)
    if num_clipped == 0:
        lines.append("active clipping")
    elif not record.get_step_record(UNMASKED_STEP).is_clipped:
        lines.append("active clipping of a step without masked targets")
    if num_clipped == sum(not step.skipped for step in record.steps):
        lines.append("steps below the clipping norm")
    return lines


def _find_last_step_of_attempt(attempt: AttemptObservation) -> int:
    if not attempt.states:
        return 0
    return attempt.states[-1].step
