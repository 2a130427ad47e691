"""Explains a norm of gradients that is wrong while the gradients are right, by whose squares are in
it. Torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from phalanx.verify.compare import ZERO_DOTS, TraceComparison
from phalanx.verify.diagnosis_of_experts import EXPERTS
from phalanx.verify.diagnosis_of_stages import StageDiagnosis
from phalanx.verify.factors import FactorExplainer
from phalanx.verify.trace_facts import name_gradients_set

EQUAL_SQUARES_TOLERANCE = 1e-6  # of the square of a norm
SHARES_OF_OTHERS = "as if other ranks held the same ones, too, and each counted its share of them"
MAX_RANKS_OF_SUBSETS = 8  # of which all subsets are tried


class NormDiagnosis:
    """Finds the gradients that are missing in a norm, or that count more than once."""

    def __init__(
        self, compared: TraceComparison, factors: FactorExplainer, stages: StageDiagnosis | None
    ) -> None:
        self._compared, self._factors, self._stages = compared, factors, stages

    def explain(self, norm: float, step: int) -> str:
        """The cause of a finite norm that is not the reference's."""
        reference = self._compared.trace.steps[step].grad_norm
        if self._stages is not None and (cause := self._stages.explain_wrong_grad_norm(norm, step)):
            return cause
        excess = norm**2 - reference**2
        cause = (
            self._explain_norm_of_one_rank(norm, step)
            or self._explain_by_one_miscounted_tensor(excess, step)
            or self._explain_replicas_counted_repeatedly(norm / reference)
            or self._explain_by_miscounted_replicas(excess, step)
            or self._explain_by_miscounted_tensor_group(excess, step)
        )
        if cause:
            return cause
        if self._factors.explain(norm / reference, step):
            return self._factors.describe("it", norm / reference, step)
        return (
            self._explain_by_ranks_that_count(norm, step)
            or self._explain_by_weighted_tensor_group(excess, step)
            or self._describe_norm_factor(norm / reference, step)
        )

    def _describe_norm_factor(self, factor: float, step: int) -> str:
        mistake = "some of them are left out of the norm"
        if factor > 1:
            mistake = "some of them count more than once in the norm"
        return f"{self._factors.describe('it', factor, step)}, and gradients agree: {mistake}"

    def _explain_norm_of_one_rank(self, norm: float, step: int) -> str:
        observations = self._compared.observations
        for rank, observation in enumerate(observations):
            square = sum(
                dots[1] for dots in observation["tensors"][name_gradients_set(step)].values()
            )
            if len(observations) > 1 and _is_nearly_equal(norm**2, square):
                return (
                    f"it is the norm of what rank {rank} holds: the shards of the others are"
                    " missing"
                )
        return ""

    def _explain_by_one_miscounted_tensor(self, excess: float, step: int) -> str:
        for name, size in self._compared.trace.sizes[name_gradients_set(step)].items():
            # The squares of the two norms differ by that of this one tensor.
            if size and abs(abs(excess) / size**2 - 1) < 1e-4:
                return f"the gradient of {name} is {_describe_wrong_count(excess)}"
        return ""

    def _explain_replicas_counted_repeatedly(self, factor: float) -> str:
        copies = round(factor**2)
        if 1 < copies <= len(self._compared.observations) and _is_nearly_equal(factor**2, copies):
            return (
                f"its square is {copies} x the reference's: replicas of the same gradient each"
                " count"
            )
        return ""

    def _explain_by_miscounted_replicas(self, excess: float, step: int) -> str:
        """The cause of a norm whose square is off by `excess`, where that is what replicas have."""
        kind = name_gradients_set(step)
        order = self._compared.trace.order
        copies_of = {name: self._compared.count_tensor_copies(kind, name) for name in order}
        fewest = min(copies_of.values(), default=1)
        alike = [name for name, copies in copies_of.items() if copies > fewest]
        sizes = self._compared.trace.sizes[kind]
        repeated = sum((copies_of[name] / fewest - 1) * sizes[name] ** 2 for name in alike)
        once = sum(sizes[name] ** 2 for name in alike)
        for square, words in ((repeated, "each count"), (-once, "are left out")):
            if alike and _is_nearly_equal(excess, square):
                return (
                    f"replicas {words}: gradients that several ranks hold alike, such as that of"
                    f" {alike[0]}"
                )
        return ""

    def _explain_by_miscounted_tensor_group(self, excess: float, step: int) -> str:
        """The cause of a norm that lacks, or has twice, gradients that belong together."""
        sizes = self._compared.trace.sizes[name_gradients_set(step)]
        for words, names in self._list_tensor_groups():
            square = sum(sizes[name] ** 2 for name in names)
            if square and _is_nearly_equal(abs(excess), square):
                return f"gradients of {words} are {_describe_wrong_count(excess)}"
        return ""

    def _explain_by_weighted_tensor_group(self, excess: float, step: int) -> str:
        """The cause of a norm in which experts, or the tensors of a place, are multiplied with a
        number of ranks, or divided by it."""
        sizes = self._compared.trace.sizes[name_gradients_set(step)]
        for words, names in self._list_tensor_groups(has_neighbours=False):
            square = sum(sizes[name] ** 2 for name in names)
            for axis, degree in self._factors.list_degrees():
                for power in (1, 2):
                    for number, verb in (
                        (degree**power, "multiplied"),
                        (degree**-power, "divided"),
                    ):
                        if square and _is_nearly_equal(excess, (number - 1) * square):
                            return (
                                f"the squares of gradients of {words} count {number:.4g} x:"
                                f" {verb} by the number of ranks of {axis} ({degree})"
                                + (" twice" if power == 2 else "")
                                + self._explain_shares(step, names, number)
                            )
        return ""

    def _explain_shares(self, step: int, names: Sequence[str], number: float) -> str:
        """Words for squares that count `number` times, where there are so many other ranks that do
        not hold these gradients; else ""."""
        kind = name_gradients_set(step)
        copies = max(self._compared.count_tensor_copies(kind, name) for name in names)
        # Of what these ranks hold already no more can hold the same.
        if not number < 1 or copies > number * len(self._compared.observations) * (1 + 1e-6):
            return ""
        return f", {SHARES_OF_OTHERS}"

    def _list_tensor_groups(
        self, *, has_neighbours: bool = True
    ) -> Iterator[tuple[str, Sequence[str]]]:
        """(in words, names) of tensors that belong together: experts, those of one place in all
        blocks, and with `has_neighbours` those that follow each other."""
        order = self._compared.trace.order
        experts = [name for name in order if EXPERTS in name]
        yield "experts", experts
        alike: dict[str, list[str]] = {}
        for name in order:
            segments = name.split(".")
            for start in range(max(0, len(segments) - 3), len(segments)):
                alike.setdefault(".".join(segments[start:]), []).append(name)
        for suffix, names in alike.items():
            yield f"all {suffix}", names
        if not has_neighbours:
            return
        for start, end in itertools.combinations(range(len(order) + 1), 2):
            yield f"{order[start]} to {order[end - 1]}", order[start:end]

    def _explain_by_ranks_that_count(self, norm: float, step: int) -> str:
        """The cause of a norm in which only what some ranks hold counts, each of what several hold
        alike by its share."""
        kind, observations = name_gradients_set(step), self._compared.observations
        if len(observations) > MAX_RANKS_OF_SUBSETS:
            return ""
        squares: list[float] = []
        for observation in observations:
            shares = [
                observation["tensors"][kind].get(name, ZERO_DOTS)[-1]
                / self._compared.count_tensor_copies(kind, name)
                for name in self._compared.trace.order
            ]
            squares.append(sum(shares))
        for count in range(1, len(observations)):
            for ranks in itertools.combinations(range(len(observations)), count):
                if _is_nearly_equal(norm**2, sum(squares[rank] for rank in ranks)):
                    noun = "ranks" if count > 1 else "rank"
                    return (
                        f"only what {noun} {', '.join(map(str, ranks))} holds counts in it:"
                        " gradients of the others are missing"
                    ) + self._explain_even_share(norm, step)
        return ""

    def _explain_even_share(self, norm: float, step: int) -> str:
        """Words for a norm that all gradients would make, too, if each counted an even share; "" if
        they would not."""
        share = (norm / self._compared.trace.steps[step].grad_norm) ** 2
        number = round(1 / share)
        if not 1 < number <= len(self._compared.observations):
            return ""
        if not _is_nearly_equal(share * number, 1.0):
            return ""
        words = self._explain_shares(step, self._compared.trace.order, share)
        return words and f"; or those of all count {share:.4g} x{words}"


def _describe_wrong_count(excess: float) -> str:
    if excess > 0:
        return "counted twice"
    return "left out"


def _is_nearly_equal(a: float, b: float) -> bool:
    return math.isfinite(a) and abs(a - b) <= EQUAL_SQUARES_TOLERANCE * max(abs(a), abs(b))
