"""Finds the usual mistake of an optimizer that makes a wrong update, by its numbers.

The gradients and the weights before an update are those of one process. So what each mistake would
make of them is known, element by element, and is compared with what the layout made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from phalanx.mesh.logical import Box, LogicalShard
from phalanx.verify.factors import FLOAT32_ROUNDING, format_factor
from phalanx.verify.misplaced_elements import (
    MAX_SEARCHED,
    RightWeights,
    describe_misplaced_elements,
    list_places_of_boxes,
)
from phalanx.verify.number_types import parameter_dtype_of_row
from phalanx.verify.plain.training import OptimizerDefinition
from phalanx.verify.trace import AppliedTraceGradients, TraceTensorReader
from phalanx.verify.trace_facts import (
    BEGIN_KIND,
    TOLERANCE_OF_DTYPE,
    Trace,
    name_weights_set,
)
from phalanx.verify.update_replays import (
    UpdatedElements,
    compute_momentum_part,
    compute_update,
    find_eps,
    list_candidate_updates,
)

# A mistake explains an error but for this part of it; no other may come nearer than so many times.
MAX_UNEXPLAINED, LEAST_LEAD = 1e-3, 10.0
# An error has to be so many times what storing weights and updates in their type rounds.
LEAST_ERROR_OVER_ROUNDING = 30.0
# Some mistakes do the same at the first steps: so many are named together.
MAX_MISTAKES = 3
# Of fewer elements a mistake may fit by chance.
MIN_ELEMENTS, MIN_ROUNDED_ELEMENTS = 8, 32
MAX_ELEMENTS = 16_384  # of a tensor: more say nothing more
# Tensors that are looked at on a rank: the first that differs of all ranks is among these.
MAX_TENSORS = 3
NARROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LEFT_OUT = "this update were left out: a stale part"

Prediction = tuple[str, torch.Tensor]
"""(a mistake, to be read after "as if"; what it adds to the right update)."""


class UpdateExaminer:
    """Looks at the first updates that are wrong on a rank. `rule` is the job's optimizer, None for
    a user's own."""

    def __init__(
        self,
        trace: Trace,
        applied: AppliedTraceGradients,
        rule: OptimizerDefinition | None,
        num_ranks: int,
    ) -> None:
        self._trace, self._applied, self._rule = trace, applied, rule
        self._num_ranks, self._looked_at = num_ranks, set[str]()

    def examine(
        self, step: int, shards: Mapping[str, LogicalShard], dots_of: Mapping[str, Sequence[float]]
    ) -> dict[str, str]:
        """Name -> the mistake that makes its wrong update in a step, counted from 0, to be read
        after "as if"; of the tensors whose updates were right before, by `dots_of`."""
        mistakes = {}
        for name in self._trace.order:
            if len(self._looked_at) == MAX_TENSORS:
                break
            if name in self._looked_at or not self._is_wrong(step, name, dots_of.get(name)):
                continue
            self._looked_at.add(name)
            mistake = self._find_mistake(step, name, shards[name])
            if mistake:
                mistakes[name] = mistake
        return mistakes

    def _is_wrong(self, step: int, name: str, dots: Sequence[float] | None) -> bool:
        if dots is None or not 0 < dots[0] < math.inf:
            return False
        kind = name_weights_set(step)
        usual = TOLERANCE_OF_DTYPE[parameter_dtype_of_row(self._trace.dtype)]
        tolerance = self._trace.tolerance(kind, name, usual)
        # The square of the error is a sum over ranks, as in the verdict.
        return dots[0] > (tolerance * self._trace.scale(kind, name)) ** 2 / self._num_ranks

    def _find_mistake(self, step: int, name: str, shard: LogicalShard) -> str:
        actual = torch.cat(
            [shard.tensor[box.slices_in_local_tensor].reshape(-1) for box in shard.boxes]
        ).detach()
        dtype, actual = actual.dtype, actual.double().cpu()
        tensors = _TensorReader(self._trace, self._applied, name, shard.boxes)
        expected = tensors.read_weights(step)
        if actual.shape != expected.shape or not bool(torch.isfinite(actual).all()):
            return ""
        before = tensors.read_weights(step - 1)
        rounding = torch.finfo(dtype).eps * (before.abs() + 16 * (expected - before).abs())
        is_wrong = (actual - expected).abs() > 4 * rounding
        everywhere = torch.arange(len(actual))
        for where, words in ((everywhere, ""), (everywhere[is_wrong], "in some of its elements ")):
            chosen = where[:: max(1, len(where) // MAX_ELEMENTS)]
            if len(chosen) < MIN_ELEMENTS:
                continue
            elements = tensors.read_elements(step, dtype, chosen)
            mistake = find_mistake(
                self._rule, elements, actual[chosen], expected[chosen], dtype=dtype
            )
            if mistake:
                return words + mistake
        return self._describe_places(tensors, step, actual, everywhere[is_wrong], dtype)

    def _describe_places(
        self,
        tensors: _TensorReader,
        step: int,
        actual: torch.Tensor,
        wrong: torch.Tensor,
        dtype: torch.dtype,
    ) -> str:
        shape = tensors.read_whole_shape()
        # Whole tensors are read for it, on each rank.
        if len(wrong) < MIN_ELEMENTS or math.prod(shape) > MAX_SEARCHED:
            return ""
        return describe_misplaced_elements(
            actual[wrong],
            list_places_of_boxes(shape, tensors.boxes)[wrong],
            RightWeights(tensors.read_whole_weights(step - 1), tensors.read_whole_weights(step)),
            rounding=8 * torch.finfo(dtype).eps,
        )


class _TensorReader:
    """The part of a tensor that a rank holds, of the sets of a trace, in one dimension."""

    def __init__(
        self, trace: Trace, applied: AppliedTraceGradients, name: str, boxes: Sequence[Box]
    ) -> None:
        self._trace, self._applied, self._name, self.boxes = trace, applied, name, boxes

    def read_weights(self, step: int) -> torch.Tensor:
        """After the update of a step; before the first one of -1."""
        with self._open_weights(step) as reader:
            return self._read(reader).double()

    def read_whole_weights(self, step: int) -> torch.Tensor:
        """The same of all ranks together, in the tensor's own shape."""
        with self._open_weights(step) as reader:
            return reader.read(self._name)

    def read_whole_shape(self) -> tuple[int, ...]:
        with self._open_weights(-1) as reader:
            return reader.read_shape(self._name)

    def _open_weights(self, step: int) -> TraceTensorReader:
        return TraceTensorReader(self._trace, BEGIN_KIND if step < 0 else name_weights_set(step))

    def read_elements(self, step: int, dtype: torch.dtype, chosen: torch.Tensor) -> UpdatedElements:
        """The elements `chosen` at the update of a step, with gradients as an optimizer gets them
        in `dtype`."""
        gradients, weights = [], []
        for number in range(step + 1):
            with self._applied.open(number) as reader:
                gradient = self._read(reader) * self._applied.clipping_factor(number)
            gradients.append(gradient[chosen].to(dtype).double())
            weights.append(self.read_weights(number - 1)[chosen])
        clipping = self._applied.clipping_factor(step)
        return UpdatedElements(gradients, weights, clipping, self._applied.lr)

    def _read(self, reader: TraceTensorReader) -> torch.Tensor:
        blocks = [reader.block(self._name, box.global_offset, box.size) for box in self.boxes]
        return torch.cat([block.reshape(-1) for block in blocks])


def find_mistake(
    rule: OptimizerDefinition | None,
    elements: UpdatedElements,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    dtype: torch.dtype,
) -> str:
    """The mistake that makes weights `actual` in place of `expected`, to be read after "as if"; ""
    where none does, or several do that are not told apart.

    `dtype`: the type that weights are stored in.
    """
    before, error = elements.weights[-1], actual - expected
    update = expected - before
    epsilon = torch.finfo(dtype).eps
    rounding = epsilon * float(before.norm() + 16 * update.norm())
    if not float(error.norm()) > LEAST_ERROR_OVER_ROUNDING * rounding:
        return ""
    limit = max(MAX_UNEXPLAINED * float(error.norm()), rounding)
    predictions = list(_list_predictions_of_any_rule(elements, update, error))
    decay = None
    if rule is not None:
        decay = _find_decay(rule, elements, update, limit)
    if rule is not None and decay is not None:
        predictions += _list_predictions_of_decay(rule, elements, decay, error, rounding=rounding)
        predictions += _list_predictions_of_rule(rule, elements, decay, update, error)
    distances: dict[str, float] = {}
    for words, prediction in predictions:
        distance = float((error - prediction).norm())
        if distance <= distances.get(words, math.inf):
            distances[words] = distance
    nearest = min(distances.values(), default=math.inf)
    if not nearest <= limit:
        rate_of_decay = 0.0 if rule is None else elements.rate * rule.weight_decay
        return _describe_rounding(actual, expected, before, -rate_of_decay * before, dtype)
    bound = LEAST_LEAD * max(nearest, rounding)
    mistakes = sorted(distances, key=lambda words: distances[words])
    mistakes = [words for words in mistakes if distances[words] <= bound]
    if len(mistakes) > MAX_MISTAKES:
        return ""
    return ", or ".join(mistakes)


def _find_decay(
    rule: OptimizerDefinition, elements: UpdatedElements, update: torch.Tensor, limit: float
) -> float | None:
    """The weight decay by which `rule` makes the right update, its own or none; None where it makes
    another one with either."""
    distances = {
        float((compute_update(rule, elements, decay) - update).norm()): decay
        for decay in (rule.weight_decay, 0.0)
    }
    nearest = min(distances)
    return distances[nearest] if nearest <= limit else None


def _list_predictions_of_any_rule(
    elements: UpdatedElements, update: torch.Tensor, error: torch.Tensor
) -> Iterator[Prediction]:
    yield LEFT_OUT, -update
    factor = 1 + _find_multiple(error, update)
    yield _describe_rate(factor), (factor - 1) * update
    after_it = elements.weights[-1] + update
    share = _find_multiple(error, after_it)
    yield (
        f"the weights after it were {format_factor(1 + share)} the right ones",
        share * after_it,
    )
    for number, weights in enumerate(elements.weights[:-1]):
        after = f"update {number}" if number else "the beginning"
        yield (
            f"it had the weights of {after}: a stale part",
            weights - elements.weights[-1] - update,
        )
    if elements.count > 1:
        yield (
            "the update before were taken back: it began with stale weights",
            elements.weights[-2] - elements.weights[-1],
        )


def _list_predictions_of_rule(
    rule: OptimizerDefinition,
    elements: UpdatedElements,
    decay: float,
    update: torch.Tensor,
    error: torch.Tensor,
) -> Iterator[Prediction]:
    right, weights = compute_update(rule, elements, decay), elements.weights[-1]
    for words, other in list_candidate_updates(rule, elements, decay):
        # Of the difference: what plain formulas round otherwise than the optimizer is in both.
        yield words, other - right
    if rule.kind == "adamw":
        if decay:
            decayed = -elements.rate * decay * weights
            adaptive = right - decayed
            factor = 1 + _find_multiple(error, adaptive)
            words = f"{_describe_rate(factor)}, and for decay the right one"
            yield words, (factor - 1) * adaptive
        eps = find_eps(rule, elements, decay, update + error)
        if eps is not None:
            words = f"eps were {eps:.3g} in place of {rule.eps:g}"
            yield words, _update_with_eps(rule, elements, decay, eps) - right
        return
    if rule.momentum and elements.count > 1:
        part = compute_momentum_part(rule, elements, decay)
        factor = 1 + _find_multiple(error, part)
        words = f"its momentum were {factor * rule.momentum:.4g} in place of {rule.momentum:g}"
        if abs(factor) < MAX_UNEXPLAINED:
            words = "its momentum were lost"
        yield words, (factor - 1) * part
        gradient_part = right - part
        factor = 1 + _find_multiple(error, gradient_part)
        # Those that have a name are candidates by themselves.
        yield f"it took in {format_factor(factor)} its gradient", (factor - 1) * gradient_part


def _update_with_eps(
    rule: OptimizerDefinition, elements: UpdatedElements, decay: float, eps: float
) -> torch.Tensor:
    changed = OptimizerDefinition(rule.kind, rule.weight_decay, rule.betas, eps, rule.momentum)
    return compute_update(changed, elements, decay)


def _list_predictions_of_decay(
    rule: OptimizerDefinition,
    elements: UpdatedElements,
    decay: float,
    error: torch.Tensor,
    *,
    rounding: float,
) -> Iterator[Prediction]:
    """A decay that is another, where an error is a multiple of the weights."""
    weights, rate = elements.weights[-1], elements.rate
    if not bool(weights.any()):
        return
    share = _find_multiple(error, weights)
    # As exactly as it is known.
    usual = decay or rule.weight_decay or 1.0
    slack = rounding / (rate * usual * float(weights.norm()))
    factor = (decay - share / rate) / usual
    if abs(round(factor, 2) - factor) <= slack:
        factor = round(factor, 2)
    if not decay:
        words = f"this tensor decayed (by {factor * usual:.4g}), which has no weight decay"
    elif abs(factor) < MAX_UNEXPLAINED:
        words = "this tensor did not decay (its weight decay is missing)"
    else:
        words = f"its weight decay were {format_factor(factor)} the job's"
        if abs(factor * rate - 1) < MAX_UNEXPLAINED:
            words = "its weight decay were not multiplied by the learning rate"
    yield words, share * weights


def _find_multiple(error: torch.Tensor, direction: torch.Tensor) -> float:
    """The multiple of `direction` that is nearest to `error`."""
    size = float(direction.dot(direction))
    return float(error.dot(direction)) / size if size else 0.0


def _describe_rate(factor: float) -> str:
    if abs(factor) < MAX_UNEXPLAINED:
        return LEFT_OUT
    if abs(factor + 1) < MAX_UNEXPLAINED:
        return "the update had the other sign"
    if 0 < abs(factor - 1) <= FLOAT32_ROUNDING * 1.01:
        return "its learning rate were rounded to float32"
    return f"its learning rate were {format_factor(factor)} the right one"


# Rounding


def _describe_rounding(
    actual: torch.Tensor,
    expected: torch.Tensor,
    before: torch.Tensor,
    decayed: torch.Tensor,
    dtype: torch.dtype,
) -> str:
    """The narrow type that weights or their update are rounded to; "" for none. `decayed`: the
    decay's part of an update."""
    error = (actual - expected).abs()
    if len(error) < MIN_ROUNDED_ELEMENTS:
        return ""
    for narrow in _list_narrower_dtypes(dtype):
        facts = torch.finfo(narrow)
        least = facts.eps * expected.abs() + facts.smallest_normal
        if bool((actual.to(narrow).double() == actual).all()) and bool((error <= least).all()):
            return f"the weights were rounded to {_name(narrow)} after it"
    return _describe_rounded_update(actual - before, expected - before, before, decayed, dtype)


def _describe_rounded_update(
    update: torch.Tensor,
    right_update: torch.Tensor,
    before: torch.Tensor,
    decayed: torch.Tensor,
    dtype: torch.dtype,
) -> str:
    """The narrow type of which `update` has numbers, with its decay or without; "" for none."""
    rounding = torch.finfo(dtype).eps * (before.abs() + update.abs())
    for narrow in _list_narrower_dtypes(dtype):
        for part in (torch.zeros_like(before), decayed):
            shares = []
            for moved in (update - part, right_update - part):
                off = (moved - moved.to(narrow).double()).abs()
                shares.append(float((off <= rounding).double().mean()))
            if shares[0] > 0.99 and shares[1] < 0.5:
                return f"the update were rounded to {_name(narrow)}"
    return ""


def _list_narrower_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    epsilon = torch.finfo(dtype).eps
    return [narrow for narrow in NARROW_DTYPES if torch.finfo(narrow).eps > epsilon]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
