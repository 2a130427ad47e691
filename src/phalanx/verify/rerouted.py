"""Whether a layout routes as one process does; if not, whether near-ties are all the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from phalanx.parallel.model import Batch
from phalanx.verify.flips import Misrouted, Reroute, wrong_ones
from phalanx.verify.layout_run import Ran
from phalanx.verify.references import References
from phalanx.verify.routes import Choices, are_alike, disagreement, read_routes
from phalanx.verify.trace_facts import Trace

RANKS_DISAGREE = "ranks that have the same token route it differently, or none does: copies of the router are not alike"
NOT_REPEATED = "the layout chooses other experts each time that it runs"


@dataclass(frozen=True)
class Rerouted:
    """`trace`: what the layout is to be judged by. `flips`: the near-ties that it turns, if these are all.
    `misrouted`: the first token that is sent elsewhere without one."""

    trace: Trace
    flips: tuple[Reroute, ...] = ()
    misrouted: Misrouted | None = None

    def confirmed_by(self, again: Ran) -> Rerouted:
        """After a second run, beside `trace`."""
        other = _first_other(again.choices, read_routes(self.trace.directory))
        if other is None:
            return self
        reroute = _unknown(*other)
        return replace(self, flips=(), misrouted=Misrouted(reroute, _ranks_with(again, reroute), NOT_REPEATED))


def compare_routes(
    ran: Ran, references: References, trace: Trace, steps: list[list[Batch]], tolerance: float
) -> Rerouted:
    """`steps`: those of the layout, of all ranks. Collective."""
    if are_alike(ran.choices, read_routes(trace.directory)):
        return Rerouted(trace)
    odd = disagreement(ran.choices)
    if odd is not None:
        reroute = _unknown(*odd)
        return Rerouted(trace, (), Misrouted(reroute, _ranks_with(ran, reroute), RANKS_DISAGREE))
    replayed, reroutes = references.replay(trace, steps, ran.choices)
    wrong = _in_order(wrong_ones(reroutes, tolerance), trace)
    if isinstance(replayed, str):
        cause = f"one process that routes alike has no reference: {replayed}"
        other = _first_other(ran.choices, read_routes(trace.directory))
        assert other is not None
        return Rerouted(trace, (), Misrouted(_unknown(*other), (0,), cause))
    if wrong:
        return Rerouted(trace, (), Misrouted(wrong[0], _ranks_with(ran, wrong[0])))
    return Rerouted(replayed, tuple(_in_order(reroutes, trace)))


def _in_order(reroutes: Sequence[Reroute], trace: Trace) -> list[Reroute]:
    """Step by step, in each as a forward meets the routers."""
    phases = list(dict.fromkeys(found.phase for found in reroutes))
    place = {name.removesuffix(".weight"): number for number, name in enumerate(trace.order)}
    return sorted(reroutes, key=lambda r: (phases.index(r.phase), place.get(r.router, 0), r.row, r.token))


def _first_other(choices: Choices, wanted: Choices) -> tuple[str, int, int] | None:
    for key, choice in choices.items():
        odd = (choice != wanted[key]).any(-1).nonzero()
        if len(odd):
            row, token = odd[0].tolist()
            return key, row, token
    return None


def _unknown(key: str, row: int, token: int) -> Reroute:
    phase, _, router = key.partition("/")
    return Reroute(router, phase, row, token, -1, -1, math.inf)


def _ranks_with(ran: Ran, reroute: Reroute) -> tuple[int, ...]:
    """Those that route the token. Collective."""
    mine = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    mine[dist.get_rank()] = ran.watch.has(f"{reroute.phase}/{reroute.router}", reroute.row, reroute.token)
    dist.all_reduce(mine)
    return tuple(mine.nonzero().flatten().tolist())
