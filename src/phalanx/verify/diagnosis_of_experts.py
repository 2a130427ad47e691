"""Explains differences around experts, by which tensors differ and how. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx.plan.layout import AXES
from phalanx.verify.compare import TraceComparison
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.routing_differences import RoutingChange
from phalanx.verify.trace_facts import name_buffers_set

ROUTER, BIAS, EXPERTS = ".router.weight", ".router.bias", ".moe.experts."
WRONG_BIAS_UPDATE_CAUSE = (
    "its bias was moved by other counts than those of the whole batch: the loads of some ranks are"
    " missing, counted twice, or a rank does not move it"
)


class ExpertDiagnosis:
    """Explains a difference that lies with routers or experts; "" where it does not."""

    def __init__(self, compared: TraceComparison, layout: JudgedLayout) -> None:
        self._compared, self._layout = compared, layout
        self._ep, self._tp, self._cp = layout.ep, layout.tp, layout.cp
        self._gathers_weights = layout.gathers_weights
        self._routers = [name for name in compared.trace.order if name.endswith(ROUTER)]

    def explain_misrouted_token(self, reroute: RoutingChange, wrong_output: str) -> str:
        """The cause of a token that goes elsewhere while all before it agrees, and that is no
        near-tie. `wrong_output`: the first output that differs in that step, "" if none is
        known."""
        weight, bias = f"{reroute.router}.weight", f"{reroute.router}.bias"
        if reroute.phase != "step-0":
            trace, kind = self._compared.trace, name_buffers_set(self._compared.trace.num_steps - 1)
            if bias in trace.sizes.get(kind, {}) and self._compared.error(kind, bias) > 1e-3:
                return f"it is no near-tie, and gradients agree: {WRONG_BIAS_UPDATE_CAUSE}"
            return (
                "it is no near-tie, and all before it agrees: the router has other weights, or a"
                " stale bias"
            )
        index = self._routers.index(weight) if weight in self._routers else 0
        if index == 0:
            words = (
                "it is no near-tie, and no router comes before it: it sees the hidden states of"
                " other tokens, or sums"
            )
            if self._tp > 1:
                return f"{words} of a part of them"
            return f"{words} them otherwise"
        before = self._routers[index - 1].removesuffix(ROUTER)
        words = f"it is no near-tie, and the router of {before} chooses as it should, so"
        if cause := self._explain_exchanged_experts():
            return f"{words} hidden states go wrong between them: {cause}"
        capacity = ", or capacity is counted per rank" if self._cp > 1 else ""
        where = "hidden states go wrong between them"
        if wrong_output:
            where += f", first in {wrong_output}"
            if wrong_output != before:
                return f"{words} {where}, and not in the experts of {before}"
        gathered = ""
        if self._gathers_weights and self._are_stacks_cut(before):
            gathered = " (what is gathered of a stack is put together in another order, say)"
        return (
            f"{words} {where}: rows of experts meet other matrices than those of the experts that"
            f" were chosen for them{gathered}, or come back to other tokens, or with other weights"
            f" of their choices{capacity}"
        )

    def _explain_exchanged_experts(self) -> str:
        """The cause of experts that other ranks of ep hold than those to which rows are sent; "" if
        each rank holds its own. The first ranks of ep hold the first experts, and ranks count up in
        the order of theirs."""
        for name in self._compared.trace.order:
            if EXPERTS not in name or self._ep == 1:
                continue
            firsts: dict[int, int] = {}
            for rank, observation in enumerate(self._compared.observations):
                for offset, _, _ in observation["boxes"].get(name, ()):
                    share = offset[0] * self._ep // self._count_experts(name)
                    firsts.setdefault(share, rank)
            if list(firsts) != sorted(firsts):
                rank = next(iter(firsts.values()))
                first = next(iter(firsts)) * self._count_experts(name) // self._ep
                return (
                    f"ranks of ep hold experts of other ranks than those to which rows are sent"
                    f" (rank {rank} those from {first} on), so that rows are multiplied by other"
                    " experts than were chosen for them"
                )
        return ""

    def _are_stacks_cut(self, block: str) -> bool:
        """True if ranks hold less of a stack of experts of `block` than ep and tp leave them."""
        prefix = f"{block}{EXPERTS.removeprefix('.moe')}"
        for name in self._compared.trace.order:
            boxes = [
                observation["boxes"].get(name, ()) for observation in self._compared.observations
            ]
            if not name.startswith(prefix) or not any(boxes):
                continue
            stack_size = math.prod(
                max(offset[dim] + size[dim] for of_rank in boxes for offset, size, _ in of_rank)
                for dim in range(len(next(filter(None, boxes))[0][1]))
            )
            smallest_part_size = min(
                sum(math.prod(size) for _, size, _ in of_rank) for of_rank in boxes
            )
            if smallest_part_size * self._ep * self._tp < stack_size:
                return True
        return False

    def _count_experts(self, name: str) -> int:
        """How many experts the stack `name` has."""
        return max(
            offset[0] + size[0]
            for observation in self._compared.observations
            for offset, size, _ in observation["boxes"].get(name, ())
        )

    def explain_wrong_router_bias(self, name: str) -> str:
        if name.endswith(BIAS):
            return f"gradients and weights agree, so {WRONG_BIAS_UPDATE_CAUSE}"
        return ""

    def explain_reordered_load(self, load: Sequence[int], expected: Sequence[int]) -> str:
        """The cause of a load that has the right counts (of each expert, then of what was dropped)
        in other places; "" of all others."""
        if sorted(load) != sorted(expected):
            return ""
        counts, shifted = list(expected), "each expert has the count of the one {}"
        where = "lie in another order: they are read or written in other places"
        for words, places in (("before it", 1), ("behind it", -1)):
            if list(load) == [*counts[-places:], *counts[:-places]]:
                where = f"are shifted by one: {shifted.format(words)}"
        return (
            "all counts of one process are there, what was dropped for want of room among them, and"
            f" {where}"
        )

    def explain_load_of_axis(
        self, loads: Sequence[Sequence[int] | None], expected: Sequence[int]
    ) -> str:
        """The cause of loads in which ranks differ along one axis, and along no other; "" of all
        others."""
        for axis in AXES:
            counts_of: dict[int, tuple[int, ...]] = {}
            along = set()
            for ranks in self._layout.group_ranks_along_axis(axis):
                counts = {rank: tuple(load[:-1]) for rank in ranks if (load := loads[rank])}
                # Ranks of other stages have other routers.
                if counts:
                    counts_of |= counts
                    along.add(tuple(counts.values()))
            if len(along) == 1 and len(set(counts_of.values())) > 1:
                return _explain_counts_of_axis(axis, counts_of, along.pop(), tuple(expected[:-1]))
        return ""

    def explain_wrong_gradients(self, kind: str, off: Sequence[str], ranks: Sequence[int]) -> str:
        """`off`: all that differ, after a loss that agrees."""
        if not self._routers:
            return ""
        if all(EXPERTS in name for name in off):
            return self._explain_gradients_of_ep_experts(kind, off, ranks)
        return self._explain_balance_loss_gradient(off)

    def _explain_gradients_of_ep_experts(
        self, kind: str, off: Sequence[str], ranks: Sequence[int]
    ) -> str:
        if self._ep == 1:
            return ""
        factors = [self._compared.find_multiple_of_reference(kind, off, rank) for rank in ranks]
        # Nothing is divided or averaged that is not there.
        if all(factor == 0 for factor in factors):
            return ""
        if all(factor is not None and abs(factor / self._ep - 1) < 1e-3 for factor in factors):
            return (
                f"gradients of experts are {self._ep} x the reference: the mean over the ranks that"
                f" hold the same experts was not divided by ep {self._ep}"
            )
        if all(factor is not None and abs(factor * self._ep - 1) < 1e-3 for factor in factors):
            return (
                f"gradients of experts are {1 / self._ep:.4g} x the reference: they were divided by"
                f" ep {self._ep} once too often"
            )
        return (
            "only gradients of experts differ: they are reduced over ranks that hold other experts,"
            " or not over all that hold the same"
        )

    def _explain_balance_loss_gradient(self, off: Sequence[str]) -> str:
        """The balance loss enters where a router's scores are made: that router and all before
        it have its gradient."""
        last = max((self._compared.trace.order.index(name) for name in off), default=0)
        behind = set(self._compared.trace.order[last + 1 :])
        if not off or not self._compared.trace.order[last].endswith(ROUTER) or behind & set(off):
            return ""
        # Told apart by whether parts add up (see `_explain_gradient_by_rank_parts`).
        if all(name.endswith(ROUTER) for name in off) and self._tp > 1:
            return ""
        over = []
        if self._tp > 1:
            over.append("counted by each rank of tp")
        if self._cp > 1:
            over.append(_LOCAL_TOKENS_CAUSE)
        return (
            f"the loss agrees, and what comes behind {self._compared.trace.order[last]} does: the"
            f" balance loss of routers is {', or '.join(over) or 'weighed otherwise'}"
        )


_LOCAL_TOKENS_CAUSE = "made of a rank's own tokens instead of whole sequences"


def _explain_counts_of_axis(
    axis: str,
    counts_of: Mapping[int, Sequence[int]],
    along: Sequence[Sequence[int]],
    expected: Sequence[int],
) -> str:
    """The cause of counts by rank that differ along an axis alone, where they are `along`."""
    all_of_them = [rank for rank, counts in counts_of.items() if counts == expected]
    none_of_them = [rank for rank, counts in counts_of.items() if not any(counts)]
    if tuple(map(sum, zip(*along, strict=True))) != expected:
        does = (
            "have other counts each: they are not added up over these ranks, or not alike on each"
        )
    elif all_of_them:
        does = (
            f"do not have the same, for all are on rank {_join(all_of_them)} and none on rank"
            f" {_join(none_of_them)}: they are not added up over these ranks, or do not reach each"
            " of them"
        )
    else:
        does = (
            "have only those of one rank each, which add up to all: they are not added up over"
            " these ranks"
        )
    return (
        f"the ranks of {axis} {does}, so that biases of routers are moved by other counts than the"
        " whole batch's"
    )


def _join(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def find_router_of_wrong_balance(names: Collection[str], off: Collection[str]) -> str:
    """Of a model whose gradients `names` are, and of which `off` differ: the last router, if its
    gradient differs and that of what its experts compute does not; else "". What enters there is a
    loss of its scores."""
    routers = [name for name in names if name.endswith(ROUTER)]
    last = max(routers, key=_list_numbers, default="")
    if not last or last not in off:
        return ""
    prefix = f"{last.removesuffix(ROUTER)}{EXPERTS.removeprefix('.moe')}"
    experts = [name for name in names if name.startswith(prefix)]
    if not experts or any(name in off for name in experts):
        return ""
    return last.removesuffix(".weight")


def _list_numbers(name: str) -> list[int]:
    """The numbers in a name: in the order of a forward, of blocks in lists."""
    return [int(part) for part in name.split(".") if part.isdecimal()]
