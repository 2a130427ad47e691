"""What the literature says of named schedules on uniform stages without sends; `simulate` finds the
same.

A tool to choose schedules with before one is simulated, and the reference that the simulation is
tested against.
"""

from __future__ import annotations

from fractions import Fraction

from phalanx.plan.pipeline.simulate import Seconds, StageCosts


def closed_form_idle_s(
    name: str, num_ranks: int, num_microbatches: int, costs: StageCosts
) -> Seconds | None:
    """Seconds of a step in which a rank waits; `costs` are those of one stage.

    None where there is no closed form.
    """
    forward, inputs, weights = costs.forward_s, costs.backward_input_s, costs.backward_weight_s
    hops = num_ranks - 1
    in_rounds = num_microbatches % num_ranks == 0
    # (p - 1)(F + B): GPipe 1811.06965, PipeDream-Flush 2006.09503, Narayanan et al. 2104.04473.
    # Interleaved schedules have v smaller stages per rank, and so 1/v of the bubble, as long as
    # microbatches divide into rounds of p.
    if name in ("gpipe", "1f1b") or (name == "interleaved" and in_rounds):
        return hops * (forward + inputs + weights)
    # (p - 1)(F + B - 2W) with B the whole backward (ZB-H1 of 2401.10241), or the longest of F and I
    # if that is more.
    if name == "interleaved-zero-bubble" and in_rounds:
        return hops * max(forward, inputs, forward + inputs - weights)
    # Only where F, I and W take equally long: then a rank of zb-v never waits between its first and
    # its last action, and (p - 1)F is the offset between ranks.
    # Fewer microbatches do not fill the V.
    fill = {"zb-v": 2 * num_ranks - 1, "dualpipe-v": 2 * num_ranks}.get(name)
    if fill is not None and num_microbatches >= fill and forward == inputs == weights:
        return hops * forward
    return None


def closed_form_bubble(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, costs: StageCosts
) -> Seconds | None:
    """The part of all ranks' time that is idle, (p - 1)/(v·m + p - 1) for gpipe, 1f1b and
    interleaved."""
    idle = closed_form_idle_s(name, num_ranks, num_microbatches, costs)
    if idle is None:
        return None
    of_microbatch = costs.forward_s + costs.backward_input_s + costs.backward_weight_s
    step = num_microbatches * stages_per_rank * of_microbatch + idle
    if not step:
        return Fraction(0)
    return idle / step


def closed_form_peak_in_flight(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, rank: int
) -> int | None:
    """Microbatches of one stage that `rank` holds at most, over all its stages; None where there
    is no closed form."""
    all_of_them = num_microbatches * stages_per_rank
    to_end = num_ranks - 1 - rank
    in_rounds = num_microbatches % num_ranks == 0
    # No backward begins before the last forward.
    if name == "gpipe":
        return all_of_them
    if name == "1f1b":
        # One for each stage from this one to the end.
        return min(all_of_them, to_end + 1)
    if name == "interleaved" and in_rounds:
        # The warm-up, and the forward before the first backward.
        return min(all_of_them, (stages_per_rank - 1) * num_ranks + 2 * to_end + 1)
    if name == "interleaved-zero-bubble" and in_rounds:
        # A shorter warm-up on late ranks, whose W lag behind by as much: equal on all ranks.
        return stages_per_rank * num_ranks
    if name == "zb-v" and num_microbatches >= 2 * num_ranks - 1:
        return min(all_of_them, 2 * num_ranks)
    if name == "dualpipe-v" and num_microbatches >= 2 * num_ranks:
        return min(all_of_them, 2 * num_ranks + 1)
    return None
