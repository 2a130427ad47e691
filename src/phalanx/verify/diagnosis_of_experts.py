"""Explains differences around experts, by which tensors differ and how. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import TraceComparison
from phalanx.verify.routing_differences import RoutingChange
from phalanx.verify.trace_facts import name_buffers_set

ROUTER, BIAS, EXPERTS = ".router.weight", ".router.bias", ".moe.experts."
WRONG_BIAS_UPDATE_CAUSE = (
    "its bias was moved by other counts than those of the whole batch: the loads of some ranks are"
    " missing, counted twice, or a rank does not move it"
)


class ExpertDiagnosis:
    """Explains a difference that lies with routers or experts; "" where it does not.

    `ep`: ranks that have different experts; `tp` and `cp` as everywhere.
    """

    def __init__(self, compared: TraceComparison, *, ep: int, tp: int, cp: int) -> None:
        self._compared, self._ep, self._tp, self._cp = compared, ep, tp, cp
        self._routers = [name for name in compared.trace.order if name.endswith(ROUTER)]

    def explain_misrouted_token(self, reroute: RoutingChange) -> str:
        """The cause of a token that goes elsewhere while all before it agrees, and that is no
        near-tie."""
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
        capacity = ", or capacity is counted per rank" if self._cp > 1 else ""
        return (
            f"it is no near-tie, and the router of {before} chooses as it should, so hidden states"
            " go wrong between them: rows of experts come back to other tokens, or with other"
            f" weights{capacity}"
        )

    def explain_wrong_router_bias(self, name: str) -> str:
        if name.endswith(BIAS):
            return f"gradients and weights agree, so {WRONG_BIAS_UPDATE_CAUSE}"
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
