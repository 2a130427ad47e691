"""Blames the rank that called another collective than the others."""

from __future__ import annotations

import os
from dataclasses import replace

from phalanx.launch.blamed_rank import BlamedRank, read_black_boxes
from phalanx.launch.hang_kinds import ABSENT_COLLECTIVE, find_unusual_callers
from phalanx.launch.rank_failure import RankFailure
from phalanx.observe.rank_waits import RankState, find_group
from phalanx.observe.where_words import describe_collective, find_newest_call_site


def blame_rank_in_other_collective(
    failure: RankFailure, first: BlamedRank, consequence: str
) -> RankFailure:
    """`failure` as that of the rank which called another collective than the others, if the black
    boxes single one out: any of them may be the first to end."""
    failure = replace(failure, hang_kind=ABSENT_COLLECTIVE)
    positions = read_black_boxes(first.end, first.run_dir)
    states = {rank: RankState(rank, position) for rank, position in positions.items()}
    odd = find_unusual_callers(states, sorted(states))
    if len(odd) != 1:
        return failure
    (rank,) = odd
    position = positions[rank]
    # A save beside training calls collectives of its own.
    call = [each for each in position.collectives if each.is_foreground][-1]
    name = describe_collective(call, find_group(position, call))
    file, line = find_newest_call_site(position)
    text = f"rank {rank} called {name} at {os.path.basename(file)}:{line},"
    text += f" where others called another collective, and {consequence}"
    return replace(
        failure, rank=rank, summary=text, detail=text, report=f"{text}\n{failure.report}"
    )
