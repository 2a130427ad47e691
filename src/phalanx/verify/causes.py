"""From the way in which numbers are off to the mistake that looks like it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.plan.pipeline.planned import Pipeline
from phalanx.verify.causes_of_experts import ExpertCauses
from phalanx.verify.causes_of_stages import OTHER_MICROBATCH, StageCauses
from phalanx.verify.compare import NO_DOTS, Comparison
from phalanx.verify.flips import Reroute
from phalanx.verify.trace_facts import BUFFERS, gradients_of

NOT_FINITE = "it is not a finite number"
CUT_WRONG = (
    "a sharding rule cuts elsewhere than between heads or features that belong together, a sum over the ranks of tp is "
    "missing, or a bias is added on every one of them"
)
SEQUENCES_CUT_WRONG = (
    "a rank of cp attends otherwise than the whole sequence does: a mask of documents or of a window is dropped, "
    "positions begin again on each rank, or blocks of keys are merged without their weights"
)
KEYS_LOST = (
    "the loss agrees, and gradients of keys or values do not: what other ranks' tokens owe to this rank's keys and "
    "values does not come back to it"
)


ROWS_MIXED = (
    "the objective lets the rows of a batch see each other, and a rank has only its own: the loss of a batch is not "
    "that of its parts, and changes with the number of ranks and of microbatches"
)


BUFFER_MOVED = (
    "the forward changes the buffer {name} by what it makes of its rows, and a rank sees only its own: it follows rank "
    "0's, one microbatch after the other (docs/own-code.md, other buffers); keep it out of forward"
)
BUFFER_OFF = 1e-8  # relative; far above float64's rounding


class Causes:
    """What a difference looks like, in words. `dp`: shares of the batch's tokens; `tp`: ranks that work on the same
    one; `cp`: ranks that share its sequences; `ep`: ranks that have different experts."""

    def __init__(
        self, compared: Comparison, *, dp: int, tp: int, cp: int = 1, ep: int = 1, pipeline: Pipeline | None = None
    ) -> None:
        self._compared, self._trace, self._seen = compared, compared.trace, compared.seen
        self._dp, self._tp, self._cp = dp, tp, cp
        self._experts = ExpertCauses(compared, ep=ep, tp=tp, cp=cp)
        self._stages = None if pipeline is None else StageCauses(compared, pipeline)

    def of_loss(self, found: float, step: int) -> str:
        means = [mean for seen in self._seen for mean in seen["local_means"][step]]
        present = [mean for mean in means if mean == mean]
        wanted = self._trace.steps[step].loss
        if found - found != 0:
            return NOT_FINITE
        if moved := self.moved_buffer():
            return BUFFER_MOVED.format(name=moved)
        if self._trace.mixed_by == "objective" and step == 0:
            return ROWS_MIXED
        if present and _near(found, sum(present) / len(present)):
            return "a mean of means: microbatches count alike, however many targets they have"
        by_rank = [_mean([m for m in seen["local_means"][step] if m == m]) for seen in self._seen]
        for rank, mean in enumerate(by_rank):
            if self._dp > 1 and _near(found, mean):
                return f"it is the loss of rank {rank} alone: it was not reduced"
        if self._trace.mixes_rows and step == 0:
            return "what the module makes of a row depends on the other rows, and a rank has only its own"
        if self._trace.dropped and step == 0:
            return f"dropout inside {self._trace.dropped[0]} may not drop what it does in one process"
        if step > 0:
            bias = "; or a bias, zero at first, is added on every rank of tp" if self._tp > 1 else ""
            return (
                f"all before it agrees, so it saw other weights: a stale copy, or a forward that changes its own{bias}"
            )
        words = [OTHER_MICROBATCH] if self._stages else []
        words += [CUT_WRONG] if self._tp > 1 else []
        words += [SEQUENCES_CUT_WRONG] if self._cp > 1 else []
        return "; or ".join(words) or _multiple("it", found / wanted if wanted else math.inf, self._dp)

    def moved_buffer(self) -> str:
        """The first buffer that a forward changes and that became something else than in one process; else nothing.

        Of one that no checkpoint keeps it is not known what became of it.
        """
        kept = self._trace.sizes.get(BUFFERS, {})
        off = [name for name in self._trace.moved if name in kept and self._compared.error(BUFFERS, name) > BUFFER_OFF]
        return next(iter([*off, *(name for name in self._trace.moved if name not in kept)]), "")

    def of_routing(self, found: Reroute) -> str:
        words = [self._experts.of_routing(found)]
        if found.phase == "step-0":
            words += [OTHER_MICROBATCH] if self._stages else []
            words += [CUT_WRONG] if self._tp > 1 else []
            words += [SEQUENCES_CUT_WRONG] if self._cp > 1 else []
        return "; or ".join(words)

    def of_norm(self, found: float, step: int) -> str:
        if found - found != 0:
            return NOT_FINITE
        in_stages = self._stages.of_norm(found, step) if self._stages else ""
        if in_stages:
            return in_stages
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

    def of_tensor(self, what: str, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int) -> str:
        if self._compared.gap(kind, name):
            return (
                "the ranks' parts do not make the tensor: borders of shards are off, or another dimension is cut than "
                "the one that is gathered"
            )
        squares = [self._compared.square(kind, off[0], rank) for rank in ranks]
        if any(square - square != 0 for square in squares):
            return NOT_FINITE
        if what == "initial weight":
            return "initial weights depend on the layout"
        if what == "buffer":
            if name in self._trace.moved:
                return BUFFER_MOVED.format(name=name)
            usual = "gradients and weights agree, so a rank moves it by its own share of the batch, or not at all"
            return self._experts.of_buffer(name) or usual
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
        if moved := self.moved_buffer():
            return BUFFER_MOVED.format(name=moved)
        return self._of_rounding(kind, name) or self._of_gradient(kind, name, off, ranks, step)

    def _of_gradient(self, kind: str, name: str, off: Sequence[str], ranks: Sequence[int], step: int) -> str:
        """How the backward, or what follows it, went wrong after a loss that agrees."""
        num_tensors = len(self._trace.order)
        factors = [self._compared.factor(kind, off, rank) for rank in range(len(self._seen))]
        scaled = [factor for factor in factors if factor is not None]
        if len(scaled) == len(factors) and len(off) == num_tensors:
            if max(scaled) - min(scaled) <= 1e-4 * max(map(abs, scaled)):
                return self._of_clipping(step, scaled[0]) or _multiple("every gradient", scaled[0], self._dp)
            listed = ", ".join(f"{factor:.4g} x on rank {rank}" for rank, factor in enumerate(scaled[:4]))
            return f"each rank scaled its gradients by a factor of its own ({listed}): clipped by local norms"
        in_stages = self._stages.of_gradient(kind, name, off) if self._stages else ""
        found = in_stages or self._experts.of_gradient(kind, off, ranks)
        if found:
            return found
        if len(ranks) < len(self._compared.holders(name)):
            return f"only rank {', '.join(map(str, ranks))} differs: its part was not reduced, or is stale"
        factor = self._compared.factor(kind, [name], ranks[0])
        if factor is not None and abs(factor - 1) > 1e-3:
            return self._of_copies(name, factor) or _multiple(f"the gradient of {name}", factor, self._dp)
        if self._is_sum_of_parts(kind, name):
            return (
                f"each rank of tp has its own part of the gradient of {name}, and nobody added them up: "
                'a rule "partial" is missing, or parts that ranks hold alike are not summed'
            )
        if self._dp > 1 and self._is_mean_right(kind, name):
            return (
                f"each data-parallel rank has a gradient of {name} of its own, and their mean is right: never averaged"
            )
        if self._cp > 1 and step == 0 and any(each.endswith((".k.weight", ".v.weight")) for each in off):
            return KEYS_LOST
        if len(off) < num_tensors:
            return f"{len(off)} of {num_tensors} tensors differ: the backward goes wrong where it meets {off[-1]}"
        if step > 0:
            return "the step before agrees, and so do its weights and the loss: is something of it left in gradients?"
        if self._tp > 1:
            return (
                "every gradient differs, and the loss agrees: the backward lacks a sum over the ranks of tp where the "
                "head or the last region is entered"
            )
        return "every gradient differs, and not by a factor: the forward, or the loss, is not the same"

    def _of_copies(self, name: str, factor: float) -> str:
        """Of a tensor that all ranks of tp hold, and see alike."""
        if self._tp > 1 and abs(factor / self._tp - 1) < 1e-3:
            return (
                f"the gradient of {name} is {factor:.4g} x the reference: summed over the ranks of tp, which have all "
                'of it (a rule "replicate" is missing)'
            )
        return ""

    def _is_sum_of_parts(self, kind: str, name: str) -> bool:
        """True if what the ranks of tp have makes the reference once it is added up."""
        dots = [seen["tensors"][kind].get(name, NO_DOTS) for seen in self._seen]
        along, size = sum(d[2] for d in dots), sum(d[3] for d in dots)
        copies = [c for c in range(2, self._tp + 1) if self._tp % c == 0]
        return any(abs(along * c / size - 1) < 1e-6 for c in copies) if size else False

    def _is_mean_right(self, kind: str, name: str) -> bool:
        """True if what the ranks have, each something else, makes the reference on average."""
        dots = [seen["tensors"][kind].get(name, NO_DOTS) for seen in self._seen]
        along, size = sum(d[2] for d in dots), sum(d[3] for d in dots)
        return size > 0 and abs(along / size - 1) < 1e-9

    def _of_clipping(self, step: int, factor: float) -> str:
        """A factor that first appears where clipping does, and is that of clipping."""
        reference = self._trace.steps[step]
        if reference.max_norm is None:
            return ""
        clipped = reference.max_norm / reference.grad_norm
        for found, words in ((clipped, "clipped twice"), (1 / clipped, "not clipped")):
            if abs(factor / found - 1) < 1e-3:
                return f"every gradient is {factor:.4g} x the reference: {words}"
        return ""

    def _of_rounding(self, kind: str, name: str) -> str:
        """In float64 an error of the size of a narrower type's rounding tells that type."""
        if self._trace.dtype != "float64" or self._trace.narrows:
            return ""
        error = self._compared.error(kind, name)
        for low, high, narrow in ((1e-9, 1e-6, "float32"), (3e-4, 1e-2, "bfloat16")):
            if low < error < high:
                return f"the error is of the size of {narrow}'s rounding: computed, or reduced, in {narrow}"
        return ""


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
