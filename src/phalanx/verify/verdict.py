"""From what every rank saw to a verdict: equal, or which tensor differs first, where, by how much, perhaps why.

Torch-free. The error of a tensor is |a - r| / max(|r|, 1e-3 |g| / sqrt(num_tensors)), over all its blocks on all ranks;
replicas count each time, so that the error is never too small.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.verify.row import Difference
from phalanx.verify.trace_facts import BUFFERS, FINAL, INITIAL, UPDATED, Trace, gradients_of

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
UPDATE_TOLERANCE = 1e-8  # Adam divides the rounding of a gradient that is truly zero by its eps
NOT_FINITE = "it is not a finite number"


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, size) in the whole tensor."""


@dataclass(frozen=True)
class Verdict:
    errors: Mapping[str, float]
    first: Difference | None


class Judge:
    """Compares what all ranks of a layout saw with the trace. `data_parallel_size`: shares of the batch."""

    def __init__(self, trace: Trace, seen: Sequence[Mapping[str, Any]], *, tolerance: float, data_parallel_size: int):
        self._trace, self._seen, self._tolerance = trace, seen, tolerance
        self._dp = data_parallel_size

    def verdict(self) -> Verdict:
        differences = list(self._differences())
        errors = {"loss": self._worst_scalar("losses", "loss"), "norm": self._worst_scalar("norms", "grad_norm")}
        steps = range(len(self._trace.steps))
        errors["initial"] = self._worst(INITIAL)
        errors["gradient"] = max((self._worst(gradients_of(step)) for step in steps), default=0.0)
        errors["weight"] = self._worst(FINAL)
        for name, kind in (("buffer", BUFFERS), ("update", UPDATED)):
            if kind in self._trace.sizes:
                errors[name] = self._worst(kind)
        return Verdict(errors, differences[0] if differences else None)

    def _differences(self) -> Iterator[Difference]:
        """In the order in which things go wrong: names, initial weights, then step by step, then weights."""
        yield from self._strange_names()
        yield from self._tensors("initial weight", INITIAL, 0)
        for step in range(len(self._trace.steps)):
            yield from self._counts(step)
            yield from self._scalar("loss", "losses", "loss", step)
            yield from self._tensors("gradient", gradients_of(step), step)
            yield from self._scalar("gradient norm", "norms", "grad_norm", step)
        yield from self._tensors("weight", FINAL, len(self._trace.steps) - 1)
        for what, kind in (("buffer", BUFFERS), ("update", UPDATED)):
            if kind in self._trace.sizes:
                yield from self._tensors(what, kind, len(self._trace.steps) - 1)

    # Names and numbers

    def _strange_names(self) -> Iterator[Difference]:
        for key, words in (("unknown", "no tensor of the module"), ("absent", "on no rank")):
            every = [set(seen[key]) for seen in self._seen]
            names = sorted(set.union(*every) if key == "unknown" else set.intersection(*every))
            for name in names:
                ranks = tuple(rank for rank, some in enumerate(every) if name in some)
                cause = "a tied weight became two" if key == "unknown" else "a stage or a rule lost it"
                yield Difference(f"{words}:", name, 0, math.inf, ranks[0], ranks, "its name", cause)

    def _counts(self, step: int) -> Iterator[Difference]:
        wanted = self._trace.steps[step].num_targets
        for rank, seen in enumerate(self._seen):
            if seen["num_targets"][step] != wanted:
                found = seen["num_targets"][step]
                cause = (
                    f"{found} targets were counted, not {wanted}: masked ones count, a microbatch is left out, "
                    "or ranks see other shares of the batch than they should"
                )
                yield Difference("number of targets", "", step, abs(found - wanted) / wanted, rank, (rank,), "", cause)
                return

    def _scalar(self, what: str, key: str, attribute: str, step: int) -> Iterator[Difference]:
        errors = [self._scalar_error(seen[key][step], attribute, step) for seen in self._seen]
        worst = max(range(len(errors)), key=lambda rank: errors[rank])
        if errors[worst] > self._tolerance:
            ranks = tuple(rank for rank, error in enumerate(errors) if error > self._tolerance)
            found = self._seen[worst][key][step]
            cause = self._cause_of_loss(found, step) if what == "loss" else self._cause_of_norm(found, step)
            yield Difference(what, "", step, errors[worst], worst, ranks, "", cause)

    def _scalar_error(self, found: float, attribute: str, step: int) -> float:
        wanted = getattr(self._trace.steps[step], attribute)
        error = abs(found - wanted) / max(abs(wanted), 1e-30)
        return error if error == error else math.inf

    def _worst_scalar(self, key: str, attribute: str) -> float:
        return max(
            self._scalar_error(found, attribute, step) for seen in self._seen for step, found in enumerate(seen[key])
        )

    def _cause_of_loss(self, found: float, step: int) -> str:
        means = [mean for seen in self._seen for mean in seen["local_means"][step]]
        present = [mean for mean in means if mean == mean]
        wanted = self._trace.steps[step].loss
        if found - found != 0:
            return NOT_FINITE
        if present and _near(found, sum(present) / len(present)):
            return "a mean of means: microbatches count alike, however many targets they have"
        by_rank = [_mean([m for m in seen["local_means"][step] if m == m]) for seen in self._seen]
        for rank, mean in enumerate(by_rank):
            if len(by_rank) > 1 and _near(found, mean):
                return f"it is the loss of rank {rank} alone: it was not reduced"
        if self._trace.mixes_rows and step == 0:
            return "what the module makes of a row depends on the other rows, and a rank has only its own"
        if step > 0:
            return "all before it agrees, so it saw other weights: a stale copy, or a forward that changes its own"
        return _multiple("it", found / wanted if wanted else math.inf, self._dp)

    def _cause_of_norm(self, found: float, step: int) -> str:
        if found - found != 0:
            return NOT_FINITE
        squares = [sum(d[1] for d in seen["tensors"][gradients_of(step)].values()) for seen in self._seen]
        for rank, square in enumerate(squares):
            if len(squares) > 1 and _near(found, square**0.5):
                return f"it is the norm of what rank {rank} holds: the shards of the others are missing"
        wanted = self._trace.steps[step].grad_norm
        excess = (found**2 - wanted**2) / wanted**2
        for name, size in self._trace.sizes[gradients_of(step)].items():
            if size and abs(abs(excess) * (wanted / size) ** 2 - 1) < 1e-4:
                return f"the gradient of {name} is {'counted twice' if excess > 0 else 'left out'}"
        copies = round((found / wanted) ** 2)
        if 1 < copies <= len(self._seen) and _near((found / wanted) ** 2, copies):
            return f"its square is {copies} x the reference's: replicas of the same gradient each count"
        return _multiple("it", found / wanted, len(self._seen))

    # Tensors

    def _error(self, kind: str, name: str) -> float:
        square = sum(seen["tensors"][kind].get(name, (0, 0, 0, 0))[0] for seen in self._seen)
        error = square**0.5 / self._trace.scale(kind, name) if square == square else math.inf
        return max(error, self._gap(kind, name))

    def _gap(self, kind: str, name: str) -> float:
        """0 if the blocks of all ranks make the tensor a whole number of times, else how far they are from it."""
        if not covers_evenly([_boxes(seen, name) for seen in self._seen]):
            return 1.0
        kind = FINAL if kind == UPDATED else kind  # whose sizes are those of the movement
        size = self._trace.sizes[kind][name] ** 2
        held = sum(seen["tensors"][kind].get(name, (0, 0, 0, 0))[3] for seen in self._seen)
        if size == 0:
            return 0.0
        copies = held / size
        gap = abs(copies - max(1, round(copies)))
        return gap if gap > 1e-6 else 0.0

    def _worst(self, kind: str) -> float:
        return max((self._error(kind, name) for name in self._judged(kind)), default=0.0)

    def _judged(self, kind: str) -> list[str]:
        """The tensors of a set, in forward order.

        Not the update of one whose gradient is rounding: Adam divides that by its own size, and moves it at random.
        """
        names = [name for name in self._trace.order if name in self._trace.sizes[kind]] or list(self._trace.sizes[kind])
        return [n for n in names if kind != UPDATED or not self._trace.never_moved_by_more_than_rounding(n)]

    def _tensors(self, what: str, kind: str, step: int) -> Iterator[Difference]:
        tolerance = UPDATE_TOLERANCE if kind == UPDATED else self._tolerance
        off = [name for name in self._judged(kind) if self._error(kind, name) > tolerance]
        for name in off:
            shares = [seen["tensors"][kind].get(name, (0.0,) * 4)[0] for seen in self._seen]
            limit = (tolerance * self._trace.scale(kind, name)) ** 2 / len(shares)
            ranks = tuple(rank for rank, share in enumerate(shares) if not share <= limit)
            worst = max(range(len(shares)), key=lambda rank: shares[rank] if shares[rank] == shares[rank] else math.inf)
            held = self._seen[worst]["held"].get(name, "nothing")
            cause = self._cause_of_tensors(what, kind, name, off, ranks, step)
            yield Difference(what, name, step, self._error(kind, name), worst, ranks or (worst,), held, cause)

    def _cause_of_tensors(
        self, what: str, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int
    ) -> str:
        if self._gap(kind, name):
            return (
                "the ranks' parts do not make the tensor: borders of shards are off, or another dimension is cut than "
                "the one that is gathered"
            )
        if any(self._square(kind, off[0], rank) - self._square(kind, off[0], rank) != 0 for rank in ranks):
            return NOT_FINITE
        if what == "initial weight":
            return "initial weights depend on the layout"
        if what == "buffer":
            return "gradients and weights agree, so a rank moves it by its own share of the batch, or not at all"
        if what == "update" and self._trace.has_no_gradient(name):
            return "in one process it has no gradient and stays; here it is updated (decay, say): freeze it"
        if what == "update":
            return "plain descent agrees, so the job's optimizer sees or keeps something else than in one process"
        if what == "weight":
            return (
                "gradients agree, so the update was not the same: a stale copy, or an optimizer that saw something else"
            )
        if what == "gradient" and not self._trace.sizes[kind][name]:
            return "in one process it has no gradient: it is frozen, or has no part in the loss"
        rounding = self._cause_of_rounding(kind, name)
        if rounding:
            return rounding
        num_tensors = len(self._trace.order)
        factors = [self._factor(kind, off, rank) for rank in range(len(self._seen))]
        scaled = [factor for factor in factors if factor is not None]
        if len(scaled) == len(factors) and len(off) == num_tensors:
            if max(scaled) - min(scaled) <= 1e-4 * max(map(abs, scaled)):
                return self._cause_of_clipping(step, scaled[0]) or _multiple("every gradient", scaled[0], self._dp)
            listed = ", ".join(f"{factor:.4g} x on rank {rank}" for rank, factor in enumerate(scaled[:4]))
            return f"each rank scaled its gradients by a factor of its own ({listed}): clipped by local norms"
        if len(ranks) < len(self._seen):
            return f"only rank {', '.join(map(str, ranks))} differs: its part was not reduced, or is stale"
        factor = self._factor(kind, [name], ranks[0])
        if factor is not None and abs(factor - 1) > 1e-3:
            return _multiple(f"the gradient of {name}", factor, self._dp)
        if len(off) < num_tensors:
            return f"{len(off)} of {num_tensors} tensors differ: the backward goes wrong where it meets {off[-1]}"
        if step > 0:
            return "the step before agrees, and so do its weights and the loss: is something of it left in gradients?"
        return "every gradient differs, and not by a factor: the forward, or the loss, is not the same"

    def _cause_of_clipping(self, step: int, factor: float) -> str:
        """A factor that first appears where clipping does, and is that of clipping."""
        reference = self._trace.steps[step]
        if reference.max_norm is None:
            return ""
        clipped = reference.max_norm / reference.grad_norm
        for found, words in ((clipped, "clipped twice"), (1 / clipped, "not clipped")):
            if abs(factor / found - 1) < 1e-3:
                return f"every gradient is {factor:.4g} x the reference: {words}"
        return ""

    def _cause_of_rounding(self, kind: str, name: str) -> str:
        """In float64 an error of the size of a narrower type's rounding tells that type."""
        if self._trace.dtype != "float64" or self._trace.narrows:
            return ""
        error = self._error(kind, name)
        for low, high, narrow in ((1e-9, 1e-6, "float32"), (3e-4, 1e-2, "bfloat16")):
            if low < error < high:
                return f"the error is of the size of {narrow}'s rounding: computed, or reduced, in {narrow}"
        return ""

    def _square(self, kind: str, name: str, rank: int) -> float:
        return float(self._seen[rank]["tensors"][kind].get(name, (0.0,) * 4)[0])

    def _factor(self, kind: str, names: Sequence[str], rank: int) -> float | None:
        """What a rank's part is a multiple of the reference by, if it is one."""
        dots = [self._seen[rank]["tensors"][kind].get(name, (0.0,) * 4) for name in names]
        aa, ar, rr = (sum(d[i] for d in dots) for i in (1, 2, 3))
        if not rr or not aa or aa != aa:
            return None
        factor = ar / rr
        residual = max(0.0, aa - factor * ar)
        return factor if residual <= 1e-6 * aa else None


def covers_evenly(boxes_of_ranks: Sequence[Sequence[Box]]) -> bool:
    """True if the blocks of all ranks make one whole, each as often as the others: none overlaps another in part."""
    count = Counter(box for boxes in boxes_of_ranks for box in boxes)
    if len(set(count.values())) > 1:
        return False
    blocks = list(count)
    return not any(_overlap(a, b) for a, b in itertools.combinations(blocks, 2))


def _overlap(a: Box, b: Box) -> bool:
    spans = zip(*a, *b, strict=True)
    return all(start_a < start_b + size_b and start_b < start_a + size_a for start_a, size_a, start_b, size_b in spans)


def _boxes(seen: Mapping[str, Any], name: str) -> list[Box]:
    return [(tuple(offset), tuple(size)) for offset, size in seen["boxes"].get(name, ())]


def _multiple(what: str, factor: float, dp: int) -> str:
    ways = (
        (dp, "summed over the data-parallel ranks instead of averaged"),
        (1 / dp, "divided by the number of data-parallel ranks, or of microbatches, once too often"),
    )
    for number, words in ways:
        if dp > 1 and abs(factor / number - 1) < 1e-3:
            return f"{what} is {factor:.4g} x the reference: {words}"
    return f"{what} is {factor:.6g} x the reference"


def _near(a: float, b: float) -> bool:
    return b == b and abs(a - b) <= 1e-6 * max(abs(a), abs(b))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
