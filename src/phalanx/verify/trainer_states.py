"""Compares the trainer between two steps with the second loop: counters, modes, weights, buffers,
and what the optimizer and compression keep. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

from phalanx.verify.diagnosis import (
    CHANGED_BUFFER_CAUSE,
    EQUAL_BUFFERS_CAUSE,
    MISSING_STATE_CAUSE,
)
from phalanx.verify.row import Difference
from phalanx.verify.trainer_cases import EVALUATED_STEPS, LINKED_CHECKPOINT, SAME_LAYOUT
from phalanx.verify.trainer_errors import (
    ErrorRecord,
    make_number_difference,
    make_tensor_difference,
)
from phalanx.verify.trainer_facts import (
    BEFORE,
    BUFFER,
    COMPRESSION,
    COPY,
    STATE,
    UPDATE,
    WEIGHT,
    AttemptObservation,
    Dots,
    SecondLoopRecord,
    SecondLoopStep,
    StateObservation,
)

RUNNING_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""The buffers of a BatchNorm, which ranks move by statistics of the whole batch."""

# Of the squares of two sizes.
EQUAL_SIZE_TOLERANCE = 1e-6


class StateComparator:
    """Compares what all ranks have between two steps. `compress`: how gradients are compressed."""

    def __init__(self, errors: ErrorRecord, *, batch_size: int, compress: str) -> None:
        self._errors, self._batch_size, self._compress = errors, batch_size, compress

    def compare(
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
                yield make_tensor_difference(
                    "gradient", name, step, observed.left[name], rank, "", cause
                )
        for rank, observed in enumerate(ranks):
            for name, number in observed.left_loads.items():
                cause = (
                    f"{number:g} choices of experts are counted before the next step has begun: an"
                    " evaluation, or a step that was skipped, is left in the loads that move biases"
                )
                yield make_tensor_difference("load of experts", name, step, number, rank, "", cause)
        yield from _find_missing_buffers(ranks, record)
        for kind in _list_tensor_kinds(ranks):
            yield from self._compare_tensors(kind, ranks, record, restored, attempts, is_evaluated)
        for rank, observed in enumerate(ranks):
            for key, off in observed.numbers.items():
                if off == 0:
                    continue
                slot, _, name = key.partition("/")
                described = restored and _describe_restore(restored, (), ())
                cause = self._explain_wrong_state(f"{STATE}/{slot}", step, record, described)
                kind_of_tensor = f"optimizer state {slot} of"
                yield make_tensor_difference(kind_of_tensor, name, step, abs(off), rank, "", cause)
        yield from self._compare_compression_states(ranks, restored)

    def _compare_compression_states(
        self, ranks: Sequence[StateObservation], restored: str
    ) -> Iterator[Difference]:
        """What compression keeps between steps, beside an earlier attempt's after the same step."""
        for rank, observed in enumerate(ranks):
            for key, error in observed.compression.items():
                self._errors.note(COMPRESSION, error)
                if error <= self._errors.tolerance:
                    continue
                _, slot, name = key.split("/", 2)
                subject = f"what {self._compress} keeps between steps ({slot}) is"
                cause = f"{subject} not what it was in the run before the stop"
                if restored:
                    cause = _describe_restore_cause(subject, _describe_restore(restored, (), ()))
                yield make_tensor_difference(
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
                yield make_number_difference(
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
                yield make_number_difference("data", following, error, cause, rank)

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
        off = self._errors.find_wrong_tensors(sums, reference, size_kind, skipped_names)
        sizes = {} if reference is None else reference.sizes.get(size_kind, {})
        changed = [name for name in dict.fromkeys(chain(*sums)) if sizes.get(name)]
        if restored:
            restored = _describe_restore(restored, changed, off)
        measured = {norms.step for norms in attempts[0].norms if norms.updates}
        for name, (error, rank) in off.items():
            if kind == BUFFER and not restored and step:
                cause = _explain_wrong_buffer(
                    name, sums, is_evaluated, is_skipped=bool(record.get_step_record(step).skipped)
                )
            elif kind in (WEIGHT, COPY, BUFFER):
                cause = self._explain_wrong_weight(name, sums, step, record, restored, is_evaluated)
                if kind != BUFFER and not restored and _are_all_zero(name, sums, reference):
                    cause = _explain_zeros(is_measured=step in measured)
            else:
                cause = self._explain_wrong_state(kind, step, record, restored)
            kind_of_tensor = label or f"optimizer state {kind.partition('/')[2]} of"
            held_blocks = attempts[rank].held.get(name, "")
            yield make_tensor_difference(
                kind_of_tensor, name, step, error, rank, held_blocks, cause
            )

    def find_changed_buffer(
        self, ranks: Sequence[StateObservation], record: SecondLoopRecord
    ) -> str:
        """A buffer that the step before `ranks` has left with other values; "" where there is
        none."""
        reference = record.get_step_record(ranks[0].step)
        sums = [observed.tensors.get(BUFFER, {}) for observed in ranks]
        # A record of its own: what a row says of its errors ends at the first difference.
        errors = ErrorRecord(self._errors.tolerance)
        return next(iter(errors.find_wrong_tensors(sums, reference, BUFFER, ())), "")

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


def _are_all_zero(
    name: str, sums: Sequence[Mapping[str, Dots]], reference: SecondLoopStep | None
) -> bool:
    """True if a trained weight has moved as far as it was from zero, and not as it should."""
    if reference is None or reference.skipped:
        return False
    before = reference.sizes.get(BEFORE, {}).get(name, 0.0)
    update = reference.sizes.get(UPDATE, {}).get(name, 0.0)
    moved = sum(of_rank[name][1] for of_rank in sums if name in of_rank)
    expected = sum(of_rank[name][3] for of_rank in sums if name in of_rank)
    if not before or not update or not expected:
        return False
    # As many copies of each part in both.
    return abs(moved / expected * (update / before) ** 2 - 1) < EQUAL_SIZE_TOLERANCE


def _explain_zeros(*, is_measured: bool) -> str:
    cause = (
        "all of it is zero after the update, of right gradients and rates: it is cleared or written"
        " over besides the optimizer"
    )
    if is_measured:
        cause += (
            "; the step measures norms of updates, for which the weights before it are held: they"
            " must be a copy"
        )
    return cause


def _explain_wrong_buffer(
    name: str, sums: Sequence[Mapping[str, Dots]], is_evaluated: bool, *, is_skipped: bool
) -> str:
    if is_evaluated:
        return "a buffer is another one than before: an evaluation leaves its buffers"
    if is_skipped:
        return "a skipped step leaves what its forward made of a buffer"
    values = {of_rank[name] for of_rank in sums if name in of_rank}
    # Other buffers of all ranks follow one rank's rows, alike and wrong.
    if name.rpartition(".")[2] in RUNNING_STATISTICS and len(values) == 1:
        return EQUAL_BUFFERS_CAUSE
    return CHANGED_BUFFER_CAUSE.format(name=name)


def _find_missing_buffers(
    ranks: Sequence[StateObservation], record: SecondLoopRecord
) -> Iterator[Difference]:
    """A difference for each buffer that checkpoints keep, of which no rank has a part."""
    step = ranks[0].step
    if not step:
        return
    for name in record.get_step_record(step).sizes.get(BUFFER, {}):
        if not any(name in observed.tensors.get(BUFFER, {}) for observed in ranks):
            yield make_tensor_difference("buffer", name, step, 1.0, 0, "", MISSING_STATE_CAUSE)


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
    """The cause of a state that is another one after a restore, described as `restored`."""
    return f"{subject} not restored from the checkpoint: {restored}"


def _describe_restore(restored: str, changed: Sequence[str], off: Collection[str]) -> str:
    """How a run was resumed, and what that and the tensors that are `off`, of all that training has
    `changed`, say of a state that is another one then."""
    if restored == SAME_LAYOUT:
        return restored
    if restored == LINKED_CHECKPOINT:
        return f"{restored}: a file was linked though a block in it had changed"
    num_right = sum(name not in off for name in changed)
    if num_right:
        return (
            f"{restored}: {len(off)} tensors of the kind differ and {num_right} do not, so it is"
            " not that later updates have changed what a thread wrote: pieces of them were not"
            " written, or are written or read in other places, as where the two layouts cut them"
            " otherwise"
        )
    return (
        f"{restored} from what a thread wrote, which must be a copy that later updates do not"
        " change"
    )


def _list_tensor_kinds(ranks: Sequence[StateObservation]) -> list[str]:
    """Kinds of tensors: states of the optimizer first, of which weights are made."""
    kinds = dict.fromkeys(kind for observed in ranks for kind in observed.tensors)
    return sorted(kinds, key=lambda kind: (not kind.startswith(STATE), kind))
