"""Compares how a layout routes tokens with one process, and finds near-ties that explain a
difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from phalanx.parallel.executor import Batch
from phalanx.verify.layout_run import LayoutResult
from phalanx.verify.references import ReferenceTraces
from phalanx.verify.routes import (
    ChosenExperts,
    all_reduce_on_group_device,
    find_disputed_token,
    have_same_choices,
    read_expert_choices,
)
from phalanx.verify.routing_differences import MisroutedToken, RoutingChange, find_misrouted_tokens
from phalanx.verify.trace_facts import Trace

RANKS_DISAGREE_CAUSE = (
    "ranks that have the same token route it differently, or none does: copies of the router are"
    " not alike"
)
NOT_REPEATED_CAUSE = "the layout chooses other experts each time that it runs"


@dataclass(frozen=True)
class ReroutedReference:
    """`trace`: what the layout is to be judged by.

    `flips`: the near-ties that it turns, if these are all. `misrouted`: the first token that is
    sent elsewhere without one.
    """

    trace: Trace
    flips: tuple[RoutingChange, ...] = ()
    misrouted: MisroutedToken | None = None

    def confirm_by_second_run(self, second_run: LayoutResult) -> ReroutedReference:
        """The same after a second run, which is misrouted if it chooses other experts than
        `trace`."""
        difference = _find_first_different_choice(
            second_run.choices, read_expert_choices(self.trace.directory)
        )
        if difference is None:
            return self
        reroute = _make_unknown_reroute(*difference)
        return replace(
            self,
            flips=(),
            misrouted=MisroutedToken(
                reroute, _find_ranks_routing_token(second_run, reroute), NOT_REPEATED_CAUSE
            ),
        )


def compare_routing_with_reference(
    layout_result: LayoutResult,
    references: ReferenceTraces,
    trace: Trace,
    steps: list[list[Batch]],
    tolerance: float,
) -> ReroutedReference:
    """`steps`: those of the layout, of all ranks. Collective."""
    # The choices are those of all ranks, so all take the same branch, and meet in collectives.
    if have_same_choices(layout_result.choices, read_expert_choices(trace.directory)):
        return ReroutedReference(trace)
    token_place = find_disputed_token(layout_result.choices)
    if token_place is not None:
        reroute = _make_unknown_reroute(*token_place)
        return ReroutedReference(
            trace,
            (),
            MisroutedToken(
                reroute, _find_ranks_routing_token(layout_result, reroute), RANKS_DISAGREE_CAUSE
            ),
        )
    replayed, reroutes = references.replay_trace_with_choices(trace, steps, layout_result.choices)
    wrong = _sort_reroutes_by_forward(find_misrouted_tokens(reroutes, tolerance), trace)
    if isinstance(replayed, str):
        cause = f"one process that routes alike has no reference: {replayed}"
        difference = _find_first_different_choice(
            layout_result.choices, read_expert_choices(trace.directory)
        )
        assert difference is not None
        return ReroutedReference(
            trace, (), MisroutedToken(_make_unknown_reroute(*difference), (0,), cause)
        )
    if wrong:
        return ReroutedReference(
            trace, (), MisroutedToken(wrong[0], _find_ranks_routing_token(layout_result, wrong[0]))
        )
    return ReroutedReference(replayed, tuple(_sort_reroutes_by_forward(reroutes, trace)))


def _sort_reroutes_by_forward(
    reroutes: Sequence[RoutingChange], trace: Trace
) -> list[RoutingChange]:
    """The reroutes step by step, and in each step as a forward meets the routers."""
    phases = list(dict.fromkeys(reroute.phase for reroute in reroutes))
    order = {name.removesuffix(".weight"): number for number, name in enumerate(trace.order)}
    return sorted(
        reroutes, key=lambda r: (phases.index(r.phase), order.get(r.router, 0), r.row, r.token)
    )


def _find_first_different_choice(
    choices: ChosenExperts, reference: ChosenExperts
) -> tuple[str, int, int] | None:
    for key, choice in choices.items():
        token_place = (choice != reference[key]).any(-1).nonzero()
        if len(token_place):
            row, token = token_place[0].tolist()
            return key, row, token
    return None


def _make_unknown_reroute(key: str, row: int, token: int) -> RoutingChange:
    phase, _, router = key.partition("/")
    return RoutingChange(router, phase, row, token, -1, -1, math.inf)


def _find_ranks_routing_token(
    layout_result: LayoutResult, reroute: RoutingChange
) -> tuple[int, ...]:
    """The ranks that route the token. Collective."""
    if not dist.is_initialized():
        return (0,)
    routes_token = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    key = f"{reroute.phase}/{reroute.router}"
    routes_token[dist.get_rank()] = layout_result.watch.has_chosen_for(
        key, reroute.row, reroute.token
    )
    routes_token = all_reduce_on_group_device(routes_token, dist.ReduceOp.SUM)
    return tuple(routes_token.nonzero().flatten().tolist())
