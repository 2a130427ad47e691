"""The verdict that a run hangs: its culprits, and what is told of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.core.black_box_reader import LastPosition
from phalanx.core.units import format_seconds
from phalanx.launch.endless_steps import EndlessStep
from phalanx.launch.hang_kinds import (
    ABSENT_COLLECTIVE,
    ENDLESS_STEP,
    FROZEN,
    GIL_HELD,
    GONE,
    LEFT_EARLY,
    LINK_CUT,
    SPINNING,
    Culprits,
    HangEvidence,
)
from phalanx.launch.hang_limits import HangLimit
from phalanx.launch.stack_groups import find_telling_line, format_stack_groups, group_stacks
from phalanx.observe.rank_waits import RankState, WaitVerdict, find_waits, judge_ranks
from phalanx.observe.where_words import describe_collective, describe_waits


@dataclass(frozen=True)
class HangVerdict:
    """The ranks that kept a run from going on. `kind` is one of `hang_kinds.HANG_KINDS`.

    `sentences` has one for each culprit; `collective` is what the others waited in, empty where
    they did not; `report` are lines for a person, with the stacks of all ranks in groups. The run
    had made no progress for `detected_s` when this was decided, and for `limit` it might.
    """

    kind: str
    culprits: tuple[int, ...]
    sentences: tuple[str, ...]
    collective: str
    report: tuple[str, ...]
    detected_s: float
    limit: HangLimit
    positions: Mapping[int, LastPosition] = field(default_factory=dict)


def build_verdict_on_hang(
    culprits: Culprits,
    evidence: HangEvidence,
    stacks: Mapping[int, Sequence[str]],
    detected_s: float,
) -> HangVerdict:
    """The verdict on the `culprits` of a run that hangs. `stacks`: those of the ranks that
    answered; `detected_s`: since the last progress, also while nobody looked."""
    states, limit = evidence.states, evidence.limit
    sentences = []
    for sentence, rank in zip(
        _describe_places(culprits, states, evidence.now_s), culprits.ranks, strict=False
    ):
        reason = _describe_reason(culprits.kind, rank, evidence)
        sentences.append(sentence + reason + _describe_telling_line(stacks.get(rank, ())))
    silence = f"no rank made progress for {detected_s:.1f} s"
    silence += f" (limit {format_seconds(limit.quiet_s)}: {limit.why})"
    present = [rank for rank in states if rank not in evidence.left]
    groups = group_stacks({rank: stacks.get(rank, ()) for rank in present}, first=culprits.ranks)
    return HangVerdict(
        kind=culprits.kind,
        culprits=culprits.ranks,
        sentences=tuple(sentences),
        collective=_describe_awaited(culprits, states),
        report=(*sentences, silence, *format_stack_groups(groups)),
        detected_s=detected_s,
        limit=limit,
        positions=_list_positions(states),
    )


def build_verdict_on_step(
    endless: EndlessStep,
    states: Mapping[int, RankState],
    stacks: Mapping[int, Sequence[str]],
) -> HangVerdict:
    """The verdict on ranks that go on and do not end their step."""
    positions = _list_positions(states)
    usual = f", where {endless.most_writes} are the most of a step" if endless.most_writes else ""
    sentences = []
    for rank in endless.ranks:
        position = positions[rank]
        sentences.append(
            f"rank {rank} goes on in step {endless.step} and does not end it: in"
            f" {endless.elapsed_s:.1f} s it wrote {endless.num_writes} phases and collectives"
            f"{usual}; last seen in {position.phase} at"
            f" {os.path.basename(position.file)}:{position.line}"
            f"{_describe_telling_line(stacks.get(rank, ()))}"
        )
    groups = group_stacks({rank: stacks.get(rank, ()) for rank in states}, first=endless.ranks)
    limit = HangLimit(
        endless.limit_s,
        "of one step",
        computes_s=endless.limit_s,
        children_s=endless.limit_s,
        disk_s=endless.limit_s,
        counts_work=False,
    )
    return HangVerdict(
        kind=ENDLESS_STEP,
        culprits=endless.ranks,
        sentences=tuple(sentences),
        collective="",
        report=(*sentences, *format_stack_groups(groups)),
        detected_s=endless.elapsed_s,
        limit=limit,
        positions=positions,
    )


def _describe_reason(kind: str, rank: int, evidence: HangEvidence) -> str:
    """The end of a sentence on a culprit: what its process did meanwhile."""
    cpu_s = evidence.quiet[rank].cpu_s
    position = evidence.states[rank].position
    if kind == GIL_HELD and position is not None and position.header is not None:
        silent_s = evidence.now_s - position.header.pulse_s
        return (
            f"; C code holds Python's lock: no thread of it has run for {silent_s:.1f} s,"
            f" and it used {cpu_s:.1f} s of a processor"
        )
    if kind == SPINNING:
        return f"; it used {cpu_s:.1f} s of a processor since then and did not get on"
    if kind == LINK_CUT:
        return "; what is sent over its connections is repeated and does not arrive"
    if kind == GONE:
        return "; the process that started the ranks has not told so: it is stopped, or waits"
    if kind == LEFT_EARLY:
        return "; it says that its work is done"
    return ""


def _describe_telling_line(stack: Sequence[str]) -> str:
    """The end of a sentence on a rank that has answered: what it is in now, where its box has the
    last line that it wrote something at."""
    line = find_telling_line(stack)
    return f"; the rank is in {line}" if line else ""


def _describe_places(
    culprits: Culprits, states: Mapping[int, RankState], now_s: float
) -> list[str]:
    """A sentence for each culprit: its process, step, phase and line, and who waits for it."""
    if culprits.kind == LINK_CUT:
        return [_describe_cut_off_rank(rank, states[rank].position) for rank in culprits.ranks]
    waits = find_waits(states)
    if culprits.kind == ABSENT_COLLECTIVE:
        verdict = judge_ranks(states)
        if verdict.kind == "differs":
            differing = {rank for wait in waits for rank in wait.differing}
            if set(culprits.ranks) <= differing:
                return describe_waits(WaitVerdict("differs", culprits.ranks, waits), states, now_s)
    kind = "stopped" if culprits.kind == FROZEN else "absent"
    return describe_waits(WaitVerdict(kind, culprits.ranks, waits), states, now_s)


def _describe_cut_off_rank(rank: int, position: LastPosition | None) -> str:
    if position is None:
        return f"rank {rank} is cut off"
    place = f"{os.path.basename(position.file)}:{position.line}"
    return f"rank {rank} is cut off in step {position.step}, {position.phase}, at {place}"


def _describe_awaited(culprits: Culprits, states: Mapping[int, RankState]) -> str:
    for wait in find_waits(states):
        if set(culprits.ranks) & {*wait.absent, *wait.differing}:
            return describe_collective(wait.collective, wait.group)
    return ""


def _list_positions(states: Mapping[int, RankState]) -> dict[int, LastPosition]:
    return {rank: state.position for rank, state in states.items() if state.position is not None}
