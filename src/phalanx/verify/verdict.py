"""From what every rank saw to a verdict: equal, or which tensor differs first, where, by how much, why. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.plan.pipeline.planned import Pipeline
from phalanx.verify.causes import ROWS_MIXED, Causes
from phalanx.verify.compare import NO_DOTS, Comparison
from phalanx.verify.flips import EVALUATION, UPDATE_TOLERANCE, Misrouted, optimizer_step, train_step
from phalanx.verify.row import Difference
from phalanx.verify.trace_facts import BUFFERS, FINAL, INITIAL, UPDATED, Trace, gradients_of

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@dataclass(frozen=True)
class Verdict:
    errors: Mapping[str, float]
    first: Difference | None
    eased: tuple[str, ...] = ()
    """Gradients that are off by more than the tolerance, but not by more than rounding costs in one process."""


class Judge:
    """Compares what all ranks of a layout saw with the trace.

    `data_parallel_size`: shares of the batch's tokens. `tp`: ranks that work on the same one. `cp`: ranks that share
    its sequences. `ep`: ranks that have different experts. `pipeline`: how the model is cut. `misrouted`: the first
    token that goes to another expert than in one process, and not because of a near-tie.
    """

    def __init__(
        self,
        trace: Trace,
        seen: Sequence[Mapping[str, Any]],
        *,
        tolerance: float,
        data_parallel_size: int,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pipeline: Pipeline | None = None,
        misrouted: Misrouted | None = None,
    ):
        self._trace, self._seen, self._tolerance = trace, seen, tolerance
        self._compared = Comparison(trace, seen)
        self._causes = Causes(self._compared, dp=data_parallel_size, tp=tp, cp=cp, ep=ep, pipeline=pipeline)
        self._misrouted = misrouted
        self._schedule = "" if pipeline is None else pipeline.schedule_name

    def verdict(self) -> Verdict:
        first = next(self._differences(), None)
        if first is not None:
            first = replace(first, schedule=self._schedule, stages=self._compared.stages.get(first.name, ()))
        errors = {
            "loss": self._compared.worst_scalar("losses", "loss"),
            "norm": self._compared.worst_scalar("norms", "grad_norm"),
        }
        steps = range(len(self._trace.steps))
        errors["initial"] = self._compared.worst(INITIAL)
        errors["gradient"] = max((self._compared.worst(gradients_of(step)) for step in steps), default=0.0)
        for name, kind in (("weight", FINAL), ("buffer", BUFFERS), ("update", UPDATED)):
            if kind in self._trace.sizes:
                errors[name] = self._compared.worst(kind)
        if self._trace.evaluation is not None:
            errors["evaluation"] = max(self._compared.evaluation_errors())
        return Verdict(errors, first, self._eased())

    def _differences(self) -> Iterator[Difference]:
        """In the order in which things go wrong: names, initial weights, then step by step, then weights."""
        yield from self._strange_names()
        yield from self._tensors("initial weight", INITIAL, 0)
        for step in range(len(self._trace.steps)):
            yield from self._counts(step)
            yield from self._masks(step)
            yield from self._routing(train_step(step))
            yield from self._scalar("loss", "losses", "loss", step)
            yield from self._tensors("gradient", gradients_of(step), step)
            yield from self._scalar("gradient norm", "norms", "grad_norm", step)
        for what, kind in (("weight", FINAL), ("buffer", BUFFERS), ("update", UPDATED)):
            if kind == UPDATED:
                for step in range(len(self._trace.steps)):
                    yield from self._routing(optimizer_step(step))
            if kind in self._trace.sizes:
                yield from self._tensors(what, kind, len(self._trace.steps) - 1)
            if kind == BUFFERS:
                yield from self._routing(EVALUATION)
                yield from self._evaluation()

    def _eased(self) -> tuple[str, ...]:
        found = {}
        for kind in map(gradients_of, range(len(self._trace.steps))):
            for name in self._compared.judged(kind):
                allowed = self._trace.tolerance(kind, name, self._tolerance)
                if self._tolerance < self._compared.error(kind, name) <= allowed:
                    found[name] = None
        return tuple(found)

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
                    ROWS_MIXED
                    if self._trace.mixed_by == "objective"
                    else (
                        f"{found} targets were counted, not {wanted}: masked ones count, a microbatch is left out, "
                        "or ranks see other shares of the batch than they should"
                    )
                )
                yield Difference("number of targets", "", step, abs(found - wanted) / wanted, rank, (rank,), "", cause)
                return

    def _masks(self, step: int) -> Iterator[Difference]:
        """Dropout layers in the order in which a forward meets them."""
        wrong = [{name: off for at, name, off in seen.get("wrong_masks", ()) if at == step} for seen in self._seen]
        for name in dict.fromkeys(name for seen in wrong for name in seen):
            ranks = tuple(rank for rank, seen in enumerate(wrong) if name in seen)
            worst = max(ranks, key=lambda rank: wrong[rank][name])
            cause = "its masks depend on the layout: they are not those of (seed, step, row, name, call)"
            if 0 not in ranks and len(ranks) == len(wrong) - 1:
                cause = "its masks depend on the layout: rank 0's rows are right, and those of the others are not"
            yield Difference("dropout", name, step, wrong[worst][name], worst, ranks, "its mask", cause)

    def _routing(self, phase: str) -> Iterator[Difference]:
        found = self._misrouted
        if found is None or found.reroute.phase != phase:
            return
        reroute, ranks = found.reroute, found.ranks or (0,)
        number = phase.rpartition("-")[2]
        step = int(number) if number.isdecimal() else len(self._trace.steps) - 1
        cause = found.cause or self._causes.of_routing(reroute)
        yield Difference("routing", reroute.router, step, reroute.margin, ranks[0], ranks, found.where, cause)

    def _scalar(self, what: str, key: str, attribute: str, step: int) -> Iterator[Difference]:
        errors = [self._compared.scalar_error(seen[key][step], attribute, step) for seen in self._seen]
        worst = max(range(len(errors)), key=lambda rank: errors[rank])
        if errors[worst] > self._tolerance:
            ranks = tuple(rank for rank, error in enumerate(errors) if error > self._tolerance)
            found = self._seen[worst][key][step]
            cause = self._causes.of_loss(found, step) if what == "loss" else self._causes.of_norm(found, step)
            yield Difference(what, "", step, errors[worst], worst, ranks, "", cause)

    def _evaluation(self) -> Iterator[Difference]:
        errors = self._compared.evaluation_errors()
        worst = max(range(len(errors)), key=lambda rank: errors[rank])
        if errors[worst] > self._tolerance:
            ranks = tuple(rank for rank, error in enumerate(errors) if error > self._tolerance)
            cause = "weights and buffers agree, so a forward without gradients does something else than one with them"
            step = len(self._trace.steps) - 1
            yield Difference("evaluation loss", "", step, errors[worst], worst, ranks, "", cause)

    # Tensors

    def _tensors(self, what: str, kind: str, step: int) -> Iterator[Difference]:
        usual = UPDATE_TOLERANCE if kind == UPDATED else self._tolerance
        allowed = {name: self._trace.tolerance(kind, name, usual) for name in self._compared.judged(kind)}
        off = [name for name, tolerance in allowed.items() if self._compared.error(kind, name) > tolerance]
        for name in off:
            tolerance = allowed[name]
            shares = [seen["tensors"][kind].get(name, NO_DOTS)[0] for seen in self._seen]
            limit = (tolerance * self._trace.scale(kind, name)) ** 2 / len(shares)
            ranks = tuple(rank for rank, share in enumerate(shares) if not share <= limit)
            worst = max(range(len(shares)), key=lambda rank: shares[rank] if shares[rank] == shares[rank] else math.inf)
            held = self._seen[worst]["held"].get(name, "nothing")
            cause = self._causes.of_tensor(what, kind, name, off, ranks, step)
            yield Difference(what, name, step, self._compared.error(kind, name), worst, ranks or (worst,), held, cause)
