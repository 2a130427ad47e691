"""Compares what every rank saw with the trace: equal, or which tensor differs first, where and why.

Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.verify.compare import TraceComparison, replace_nan_by_infinity
from phalanx.verify.diagnosis import MIXED_ROWS_CAUSE, DifferenceDiagnosis
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.number_types import EPSILON_OF_DTYPE, FP8, parameter_dtype_of_row
from phalanx.verify.one_process_faults import iterate_one_process_faults
from phalanx.verify.routing_differences import EVALUATION_KIND, MisroutedToken, train_phase_of_step
from phalanx.verify.row import EVALUATED_TARGETS, OVERFLOW, Difference
from phalanx.verify.trace_facts import (
    INITIAL_KIND,
    SUM_OVER_MICROBATCHES,
    TOLERANCE_OF_DTYPE,
    Trace,
    name_buffers_set,
    name_gradients_set,
    name_weights_set,
)

# A gradient that was added up wrongly is off by more, whatever it is rounded to.
SMALL_ERROR = 0.1
# Of a learning rate: a quotient and a product of the same numbers.
RATE_TOLERANCE = 1e-9


@dataclass(frozen=True)
class LayoutVerdict:
    """Errors by kind; `first` is None if the layout equals the reference."""

    errors: Mapping[str, float]
    first: Difference | None
    relaxed: tuple[str, ...] = ()
    """Gradients that are off by more than the tolerance, but not by more than rounding costs in
    one process."""


class LayoutComparator:
    """Compares the observations of all ranks of a layout with the trace.

    `misrouted`: the first token that goes to another expert than in one process, and not because of
    a near-tie.
    """

    def __init__(
        self,
        trace: Trace,
        observations: Sequence[Mapping[str, Any]],
        layout: JudgedLayout,
        *,
        tolerance: float,
        misrouted: MisroutedToken | None = None,
    ):
        self._trace, self._observations, self._tolerance = trace, observations, tolerance
        self._compared = TraceComparison(trace, observations, tolerance)
        self._diagnosis = DifferenceDiagnosis(self._compared, layout)
        self._misrouted = misrouted
        self._keeps_error = layout.keeps_error
        self._schedule = "" if layout.pipeline is None else layout.pipeline.schedule_name

    def compare(self) -> LayoutVerdict:
        """The errors of each kind, and the first difference with its likely cause."""
        # The generator stops there: what only follows from the first difference is not explained.
        first = next(self._iterate_differences(), None)
        if first is not None:
            first = replace(
                first, schedule=self._schedule, stages=self._compared.stages.get(first.name, ())
            )
        errors = {
            "loss": self._compared.largest_relative_scalar_error("losses", "loss"),
            "norm": self._compared.largest_relative_scalar_error("norms", "grad_norm"),
        }
        steps = range(len(self._trace.steps))
        errors["initial"] = self._compared.worst(INITIAL_KIND)
        errors["gradient"] = max(self._compared.worst(name_gradients_set(step)) for step in steps)
        errors["weight"] = self._compared.largest_relative_weight_error()
        errors["update"] = max(self._compared.worst(name_weights_set(step)) for step in steps)
        if self._trace.has_buffers:
            errors["buffer"] = max(self._compared.worst(name_buffers_set(step)) for step in steps)
        if self._trace.evaluation is not None:
            errors["evaluation"] = max(self._compared.relative_evaluation_errors())
        return LayoutVerdict(errors, first, self._list_relaxed_gradients())

    def _iterate_differences(self) -> Iterator[Difference]:
        """All differences, in the order in which things go wrong: names, initial weights, and of
        each step what leads to its gradients, its update and its buffers."""
        yield from self._compare_names()
        yield from self._compare_tensors("initial weight", INITIAL_KIND, 0)
        yield from iterate_one_process_faults(self._trace, self._observations)
        yield from self._compare_rotary_tables()
        yield from self._compare_rates()
        last = self._trace.num_steps - 1
        for step in range(self._trace.num_steps):
            yield from self._compare_target_counts(step)
            yield from self._compare_dropout_masks(step)
            yield from self._compare_routing(train_phase_of_step(step))
            yield from self._compare_scalar("loss", "losses", "loss", step)
            yield from self._compare_reduction_types(step)
            yield from self._compare_tensors("gradient", name_gradients_set(step), step)
            yield from self._compare_sent_gradients(step)
            yield from self._compare_scalar("gradient norm", "norms", "grad_norm", step)
            yield from self._compare_replicas("gradient", name_gradients_set(step), step)
            yield from self._compare_loads(step)
            yield from self._compare_tensors("update", name_weights_set(step), step)
            if self._trace.has_buffers:
                yield from self._compare_tensors("buffer", name_buffers_set(step), step)
        yield from self._compare_replicas("weight", name_weights_set(last), last)
        if self._trace.has_buffers:
            yield from self._compare_replicas("buffer", name_buffers_set(last), last)
        yield from self._compare_routing(EVALUATION_KIND)
        yield from self._compare_evaluation()
        yield from self._compare_overflow()

    def _list_relaxed_gradients(self) -> tuple[str, ...]:
        relaxed: dict[str, None] = {}
        # All of them are judged so, and the row says by how much.
        if self._trace.rounding_dtype:
            return ()
        for kind in map(name_gradients_set, range(len(self._trace.steps))):
            for name in self._compared.list_tensors_in_forward_order(kind):
                allowed = self._trace.tolerance(kind, name, self._tolerance)
                if self._tolerance < self._compared.error(kind, name) <= allowed:
                    relaxed[name] = None
        return tuple(relaxed)

    # Names and numbers

    def _compare_names(self) -> Iterator[Difference]:
        for key, words in (("unknown", "no tensor of the module"), ("absent", "on no rank")):
            names_of_ranks = [set(observation[key]) for observation in self._observations]
            # Unknown on any rank; absent where all lack it, for a rank has only its stage's.
            names = sorted(
                set.union(*names_of_ranks)
                if key == "unknown"
                else set.intersection(*names_of_ranks)
            )
            for name in names:
                ranks = tuple(
                    rank for rank, rank_names in enumerate(names_of_ranks) if name in rank_names
                )
                if key == "unknown":
                    cause = "a tied weight became two"
                else:
                    cause = "a stage or a rule lost it"
                yield Difference(f"{words}:", name, 0, math.inf, ranks[0], ranks, "its name", cause)

    def _compare_target_counts(self, step: int) -> Iterator[Difference]:
        num_expected = self._trace.steps[step].num_targets
        for rank, observation in enumerate(self._observations):
            num_targets = observation["num_targets"][step]
            if num_targets != num_expected:
                cause = (
                    f"{num_targets} targets were counted, not {num_expected}: masked ones count, a"
                    " microbatch is left out, or ranks see other shares of the batch than they"
                    " should"
                )
                if self._trace.mixed_by == "objective":
                    cause = MIXED_ROWS_CAUSE
                error = abs(num_targets - num_expected) / num_expected
                yield Difference("number of targets", "", step, error, rank, (rank,), "", cause)
                return

    def _compare_reduction_types(self, step: int) -> Iterator[Difference]:
        """The first kind of reduction of gradients in a narrow type that begins in a step."""
        reduction_of_rank: dict[int, tuple[str, str, int]] = {}
        for rank, observation in enumerate(self._observations):
            for first_step, words, dtype, num_ranks in observation.get("narrow_reductions", ()):
                if first_step == step:
                    reduction_of_rank.setdefault(rank, (words, dtype, num_ranks))
        if not reduction_of_rank:
            return
        rank = min(reduction_of_rank)
        words, dtype, num_ranks = reduction_of_rank[rank]
        if words == SUM_OVER_MICROBATCHES:
            cause = f"{words} of a step adds gradients up in {dtype}, and not in float32"
        else:
            cause = (
                f"{words} of {num_ranks} ranks adds gradients up in {dtype}, and not in float32:"
                " each sum is rounded to as few digits, however many ranks there are"
            )
        error = EPSILON_OF_DTYPE.get(dtype, EPSILON_OF_DTYPE[FP8]) / 2
        yield Difference(
            "gradient reduction", "", step, error, rank, tuple(reduction_of_rank), "", cause
        )

    def _compare_rotary_tables(self) -> Iterator[Difference]:
        """The first block that rotates by a table in a narrow type."""
        ranks = [
            rank
            for rank, observation in enumerate(self._observations)
            if observation.get("narrow_tables", {})
        ]
        if not ranks:
            return
        name, dtype = next(iter(self._observations[ranks[0]]["narrow_tables"].items()))
        cause = (
            f"the cosines and sines that {name} rotates by are cast to {dtype}, and one process has"
            " them in float32: positions far from a sequence's begin run into each other"
        )
        error = EPSILON_OF_DTYPE.get(dtype, EPSILON_OF_DTYPE[FP8]) / 2
        yield Difference("rotary table of", name, 0, error, ranks[0], tuple(ranks), "whole", cause)

    def _compare_rates(self) -> Iterator[Difference]:
        """The parameters to which a step of the trainer gives another rate than the user's own
        optimizer has for them: its groups have their multiples of the job's rate, or, where no two
        differ in that, the job's."""
        rates_of_ranks = [observation.get("rates", {}) for observation in self._observations]
        built = {rates[0] for of_rank in rates_of_ranks for rates in of_rank.values()}
        differ = bool(built) and max(built) - min(built) > RATE_TOLERANCE * max(built)
        wrong: dict[str, dict[int, tuple[float, float]]] = {}
        for rank, of_rank in enumerate(rates_of_ranks):
            for name, (ratio, actual) in of_rank.items():
                due = ratio if differ else 1.0
                if not abs(actual - due) <= RATE_TOLERANCE * max(abs(due), abs(actual)):
                    wrong.setdefault(name, {})[rank] = actual, due
        for name, by_rank in wrong.items():
            rank, (actual, due) = next(iter(by_rank.items()))
            cause = (
                f"a step of the trainer gives {name} {actual:.4g} x the job's learning rate, and"
                f" its group was built with {due:.4g} x: the group's part of the rate is lost"
            )
            error = abs(actual - due) / max(abs(due), abs(actual))
            part = self._observations[rank]["held"].get(name, "nothing")
            yield Difference("learning rate of", name, 0, error, rank, tuple(by_rank), part, cause)

    def _compare_dropout_masks(self, step: int) -> Iterator[Difference]:
        """The dropout layers with wrong masks, in the order in which a forward meets them."""
        wrong: list[dict[str, float]] = []
        names: dict[str, None] = {}
        for observation in self._observations:
            layers = {}
            for at, name, off in observation.get("wrong_masks", ()):
                if at == step:
                    layers[name] = off
            wrong.append(layers)
            names |= dict.fromkeys(layers)
        for name in names:
            ranks = tuple(rank for rank, layers in enumerate(wrong) if name in layers)
            worst = max(ranks, key=lambda rank: wrong[rank][name])
            cause = (
                "its masks depend on the layout: they are not those of (seed, step, row, name,"
                " call)"
            )
            if 0 not in ranks and len(ranks) == len(wrong) - 1:
                cause = (
                    "its masks depend on the layout: rank 0's rows are right, and those of the"
                    " others are not"
                )
            yield Difference(
                "dropout", name, step, wrong[worst][name], worst, ranks, "its mask", cause
            )

    def _compare_routing(self, phase: str) -> Iterator[Difference]:
        misrouted = self._misrouted
        if misrouted is None or misrouted.reroute.phase != phase:
            return
        reroute, ranks = misrouted.reroute, misrouted.ranks or (0,)
        number = phase.rpartition("-")[2]
        step = int(number) if number.isdecimal() else len(self._trace.steps) - 1
        cause = misrouted.cause or self._diagnosis.explain_misrouted_token(reroute)
        yield Difference(
            "routing", reroute.router, step, reroute.margin, ranks[0], ranks, misrouted.where, cause
        )

    def _compare_scalar(
        self, kind: str, key: str, attribute: str, step: int
    ) -> Iterator[Difference]:
        errors = [
            self._compared.relative_scalar_error(observation[key][step], attribute, step)
            for observation in self._observations
        ]
        worst = max(range(len(errors)), key=lambda rank: errors[rank])
        tolerance = self._trace.scalar_tolerance(attribute, self._tolerance)
        if errors[worst] > tolerance:
            ranks = tuple(rank for rank, error in enumerate(errors) if error > tolerance)
            value = self._observations[worst][key][step]
            if kind == "loss":
                cause = self._diagnosis.explain_wrong_loss(value, step)
            else:
                cause = self._diagnosis.explain_wrong_grad_norm(value, step)
            difference = Difference(kind, "", step, errors[worst], worst, ranks, "", cause)
            if kind == "loss":
                difference = self._add_first_wrong_output(difference)
            yield difference

    def _add_first_wrong_output(self, difference: Difference) -> Difference:
        """The difference of a loss with the first output that differs in its step, and on which
        ranks; as it is where none does."""
        firsts = {
            rank: first
            for rank, observation in enumerate(self._observations)
            for first in observation.get("outputs", ())
            if first[0] == difference.step
        }
        if not firsts:
            return difference
        first_position = min(first[1] for first in firsts.values())
        ranks = tuple(rank for rank, first in firsts.items() if first[1] == first_position)
        worst = max(ranks, key=lambda rank: replace_nan_by_infinity(firsts[rank][3]))
        name, error = firsts[worst][2:4]
        row, token = min(tuple(firsts[rank][4:]) for rank in ranks)
        origin = (
            f"the first output that differs is that of {name}, on rank"
            f" {', '.join(map(str, ranks))}, by {error:.1e}: first in row {row}, token {token}"
        )
        return replace(difference, rank=worst, ranks=ranks, origin=origin)

    def _compare_evaluation(self) -> Iterator[Difference]:
        errors = self._compared.relative_evaluation_errors()
        worst = max(range(len(errors)), key=lambda rank: errors[rank])
        tolerance = self._trace.scalar_tolerance("evaluation", self._tolerance)
        if errors[worst] > tolerance:
            ranks = tuple(rank for rank, error in enumerate(errors) if error > tolerance)
            cause = self._diagnosis.explain_wrong_evaluation(worst)
            step = len(self._trace.steps) - 1
            yield Difference("evaluation loss", "", step, errors[worst], worst, ranks, "", cause)
        yield from self._compare_evaluated_targets()

    def _compare_evaluated_targets(self) -> Iterator[Difference]:
        if self._trace.evaluation is None:
            return
        expected, step = self._trace.num_evaluated, len(self._trace.steps) - 1
        errors = [
            abs(observation["num_evaluated"] - expected) / expected
            for observation in self._observations
        ]
        worst = max(range(len(errors)), key=lambda rank: errors[rank])
        if errors[worst]:
            ranks = tuple(rank for rank, error in enumerate(errors) if error)
            cause = self._diagnosis.explain_wrong_evaluated_targets(worst)
            yield Difference(EVALUATED_TARGETS, "", step, errors[worst], worst, ranks, "", cause)

    def _compare_overflow(self) -> Iterator[Difference]:
        """What a gradient that is not finite leaves in compression, or does not tell the step."""
        step = len(self._trace.steps) - 1
        faults: dict[tuple[str, str], dict[int, float]] = {}
        for rank, observation in enumerate(self._observations):
            for name, error, words in observation.get("overflow_faults", ()):
                faults.setdefault((name, words), {})[rank] = error
        for (name, words), error_of_rank in faults.items():
            worst = max(error_of_rank, key=lambda rank: error_of_rank[rank])
            ranks, error = tuple(error_of_rank), error_of_rank[worst]
            part = "whole" if name else ""
            yield Difference(OVERFLOW, name, step, error, worst, ranks, part, words)

    def _compare_sent_gradients(self, step: int) -> Iterator[Difference]:
        """Differences between what compression sends in a step and what its definition sends."""
        faults: dict[str, dict[int, tuple[float, str]]] = {}
        for rank, observation in enumerate(self._observations):
            for number, name, error, words in observation.get("sent_faults", ()):
                if number == step:
                    faults.setdefault(name, {})[rank] = (error, words)
        for name, faults_of_rank in faults.items():
            worst = max(faults_of_rank, key=lambda rank: faults_of_rank[rank][0])
            error, words = faults_of_rank[worst]
            yield Difference(
                "compressed gradient",
                name,
                step,
                error,
                worst,
                tuple(faults_of_rank),
                "whole",
                words,
            )

    def _compare_loads(self, step: int) -> Iterator[Difference]:
        """The loads of experts, as routers count it for their biases and for the run's page."""
        if not self._trace.loads:
            return
        for router, expected in self._trace.loads[step].items():
            ranks, worst = [], 0
            for rank, observation in enumerate(self._observations):
                load = observation["loads"][step].get(router)
                if load is None:
                    continue
                off = sum(abs(a - b) for a, b in zip(load, expected, strict=True))
                if off:
                    ranks.append(rank)
                    worst = max(worst, off)
            if ranks:
                error = worst / max(1, sum(expected[:-1]))
                loads = [
                    observation["loads"][step].get(router) for observation in self._observations
                ]
                cause = self._diagnosis.explain_wrong_expert_load(loads, ranks[0], expected)
                yield Difference(
                    "load of experts", router, step, error, ranks[0], tuple(ranks), "", cause
                )

    # Tensors

    def _compare_replicas(self, label: str, kind: str, step: int) -> Iterator[Difference]:
        """The first tensor of a set that ranks hold alike, and not with the same bits."""
        unequal = self._compared.find_unequal_replicas(kind)
        if unequal is None:
            return
        name, ranks = unequal
        cause = (
            "ranks hold the same part with other bits, by less than the tolerance: replicas drift"
            " apart, for they reduce or update it each in its own way"
        )
        part = self._observations[ranks[0]]["held"].get(name, "nothing")
        error = self._compared.error(kind, name)
        yield Difference(f"replica of {label}", name, step, error, ranks[0], ranks, part, cause)

    def _compare_tensors(self, label: str, kind: str, step: int) -> Iterator[Difference]:
        usual = self._tolerance
        # The gradients that led to it are the reference's own, to the bit.
        if label == "update":
            usual = TOLERANCE_OF_DTYPE[parameter_dtype_of_row(self._trace.dtype)]
        tolerance_of: dict[str, float] = {}
        for name in self._compared.list_tensors_in_forward_order(kind):
            tolerance = self._trace.tolerance(kind, name, usual)
            if self._compared.error(kind, name) > tolerance:
                tolerance_of[name] = tolerance
        off = list(tolerance_of)
        # A backward that goes wrong spoils all before the place where it does: what is nearest to
        # the loss says where that is.
        ordered = reversed(off) if label == "gradient" else iter(off)
        for name in ordered:
            tolerance = tolerance_of[name]
            shares = self._compared.list_squared_errors_by_rank(kind, name)
            # The square of the error is a sum over ranks: each may have its share of the bound.
            limit = (tolerance * self._trace.scale(kind, name)) ** 2 / len(shares)
            # Not `share > limit`: NaN is above any limit.
            ranks = tuple(rank for rank, share in enumerate(shares) if not share <= limit)
            sizes = list(map(replace_nan_by_infinity, shares))
            worst = sizes.index(max(sizes))
            part = self._observations[worst]["held"].get(name, "nothing")
            cause = self._diagnosis.explain_wrong_tensor(label, kind, name, off, ranks, step)
            error = self._compared.error(kind, name)
            # What a definition says of a rounded gradient is nearer than what its size says.
            if label == "gradient" and not self._keeps_error and error < SMALL_ERROR:
                cause = self._compared.find_sent_fault(name, step) or cause
            yield Difference(label, name, step, error, worst, ranks or (worst,), part, cause)
