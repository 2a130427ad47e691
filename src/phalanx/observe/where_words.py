"""Says where ranks are, in sentences for people and as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.black_box_reader import BoxGroup, LastPosition, RecordedCollective
from phalanx.core.units import format_bytes, format_seconds
from phalanx.observe.rank_waits import MIN_WAIT_S, RankState, RankWait, WaitVerdict, find_group

# Below this share of a core, in a process that wants to run, it is starved.
_THROTTLED_SHARE = 0.1
STOPPED_BY_SIGNAL = "stopped by a signal (such as SIGSTOP or SIGTSTP)"
"""Of a process in the kernel's state T, which is the same for all signals that stop one: only its
parent could be told the number."""
_VERBS = {
    "running": "is running, in code that did not get there,",
    "sleeping": "waits for something else",
    "waiting for a device": "waits for a disk or a network file system",
    "stopped": f"is {STOPPED_BY_SIGNAL}",
    "traced": "is stopped by a debugger",
    "gone": "is gone (its process has ended)",
    "unknown": "did not come (its process cannot be seen from here)",
}


def describe_waits(
    verdict: WaitVerdict, states: Mapping[int, RankState], now_s: float | None = None
) -> list[str]:
    """One sentence for each culprit, or one for all; `now_s`: monotonic seconds, None where the
    ranks are not of this machine, or are gone."""
    if verdict.kind == "none":
        return [_describe_no_wait(states, now_s)]
    if verdict.kind == "inside":
        unseen = _list_unseen_peers(verdict, states)
        if unseen:
            return [
                f"{_describe_waiters(verdict.waits, now_s)}; nothing is seen of"
                f" {format_rank_list(unseen)} from here"
            ]
        return [
            f"all ranks have posted what they wait in: {_describe_waiters(verdict.waits, now_s)}"
        ]
    if verdict.kind == "circle":
        ranks = format_rank_list(verdict.culprits)
        return [f"{ranks} wait for each other: {_describe_waiters(verdict.waits, now_s)}"]
    sentences = []
    for rank in verdict.culprits:
        if verdict.kind == "differs":
            sentences.append(_describe_difference(rank, verdict, states))
        else:
            sentences.append(_describe_culprit(rank, verdict, states, now_s))
    return sentences


def describe_rank(state: RankState, wait: RankWait | None, now_s: float | None) -> str:
    """The activity and place of a rank, without its number: equal for ranks that do the same."""
    position = state.position
    words = [describe_process(state)]
    if position is None:
        return f"{words[0]}, has no black box"
    words.append(_describe_step(position))
    if wait is not None:
        words.append(f"in {describe_collective(wait.collective, wait.group)}")
        if wait.absent:
            words.append(f"waiting for {format_rank_list(wait.absent)}")
    elif position.collective:
        words.append(position.collective)
    words.append(f"at {_describe_line(position)}")
    if position.num_torn:
        words.append(f"{position.num_torn} torn entries")
    return ", ".join(words)


def describe_process(state: RankState) -> str:
    """The state of a rank's process, and its CPU where that says something."""
    process = state.process
    text = process.state
    if process.throttled_share is not None and process.throttled_share > _THROTTLED_SHARE:
        text += f" (its cgroup was throttled {process.throttled_share:.0%} of the time)"
    elif process.state == "running" and process.cpu_share is not None:
        text += f" ({process.cpu_share:.2g} cores)"
    return text


def describe_collective(collective: RecordedCollective, group: BoxGroup | None) -> str:
    """The collective in words: "all_reduce #118 of dp (float32 [4096, 1024], 16.0 MiB)"."""
    label = "an unknown group"
    if group is not None:
        label = group.label
    name = f"{collective.op} #{collective.sequence}"
    if collective.is_p2p and collective.peer >= 0:
        direction = "to" if collective.op == "send" else "from"
        name += f" {direction} rank {collective.peer}"
    sizes = ", ".join(map(str, collective.shape))
    if collective.num_dims > len(collective.shape):
        sizes += ", ..."
    tensor = f"{collective.dtype} [{sizes}]"
    if collective.num_tensors > 1:
        tensor += f" and {collective.num_tensors - 1} more"
    return f"{name} of {label} ({tensor}, {format_bytes(collective.num_bytes)})"


def format_rank_list(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 0 and 3", "ranks 0-2 and 5"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], None]:
        if rank is not None and rank == previous + 1:
            previous = rank
            continue
        parts += _format_range(start, previous)
        if rank is not None:
            start = previous = rank
    if len(parts) == 1:
        return f"ranks {parts[0]}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}"


def _format_range(first: int, last: int) -> list[str]:
    if last - first < 2:
        return [str(rank) for rank in range(first, last + 1)]
    return [f"{first}-{last}"]


def _describe_culprit(
    rank: int, verdict: WaitVerdict, states: Mapping[int, RankState], now_s: float | None
) -> str:
    state = states.get(rank)
    if state is None or state.position is None:
        text = f"rank {rank} left no position"
    else:
        text = f"rank {rank} {_VERBS[state.process.state]} in {_describe_step(state.position)}"
    waits = [wait for wait in verdict.waits if rank in wait.absent]
    waits_of_rank = [wait for wait in verdict.waits if wait.rank == rank]
    if waits:
        text += f", before {describe_collective(waits[0].collective, waits[0].group)}"
    elif waits_of_rank:
        text += f", in {describe_collective(waits_of_rank[0].collective, waits_of_rank[0].group)}"
        waits = [wait for wait in verdict.waits if _is_same_call(wait, waits_of_rank[0])]
    if state is not None and state.position is not None:
        text += f", last seen at {_describe_line(state.position)}"
    waiters = sorted(wait.rank for wait in waits if wait.rank != rank)
    if waiters:
        verb = "wait" if len(waiters) > 1 else "waits"
        text += f"; {format_rank_list(waiters)} {verb} in it{_describe_duration(waits, now_s)}"
    return text


def _describe_difference(rank: int, verdict: WaitVerdict, states: Mapping[int, RankState]) -> str:
    wait = next(wait for wait in verdict.waits if rank in wait.differing)
    awaited_call = describe_collective(wait.collective, wait.group)
    position = states[rank].position
    text = f"rank {rank} posted something else than {awaited_call}"
    if position is None or wait.group is None:
        return text
    for each in position.collectives:
        group = find_group(position, each)
        is_same_group = group is not None and group.key == wait.group.key
        if is_same_group and not each.is_p2p and each.sequence == wait.collective.sequence:
            text = f"rank {rank} posted {describe_collective(each, group)}"
            text += f" at {_format_site(each.file, each.line)}, where rank {wait.rank} posted"
            text += f" {awaited_call} at {_format_site(wait.collective.file, wait.collective.line)}"
    return text


def _describe_waiters(waits: Sequence[RankWait], now_s: float | None) -> str:
    by_text: dict[str, list[RankWait]] = {}
    for wait in waits:
        text = describe_collective(wait.collective, wait.group)
        by_text.setdefault(text, []).append(wait)
    parts = []
    for text, same in by_text.items():
        ranks = format_rank_list([wait.rank for wait in same])
        parts.append(f"{ranks} in {text}{_describe_duration(same, now_s)}")
    return "; ".join(parts)


def _list_unseen_peers(verdict: WaitVerdict, states: Mapping[int, RankState]) -> list[int]:
    """The ranks of which no state was read, and whose send or receive is waited for: nobody knows
    whether they have come."""
    peers = {wait.collective.peer for wait in verdict.waits if wait.collective.is_p2p}
    return sorted(peer for peer in peers if peer >= 0 and peer not in states)


def _describe_no_wait(states: Mapping[int, RankState], now_s: float | None) -> str:
    if states and all(state.process.state == "gone" for state in states.values()):
        return "the processes of all ranks have ended; no rank is known to have waited for another"
    if now_s is not None:
        return f"no rank has waited for another one for {MIN_WAIT_S:g} s"
    return "no rank is known to wait for another"


def _describe_duration(waits: Sequence[RankWait], now_s: float | None) -> str:
    if now_s is None or not waits:
        return ""
    began_s = min(wait.began_s for wait in waits)
    waited_s = max(0.0, now_s - began_s)
    return f" for {waited_s:.1f} s" if waited_s < 59.95 else f" for {format_seconds(waited_s)}"


def _is_same_call(one: RankWait, other: RankWait) -> bool:
    if one.group is None or other.group is None or one.group.key != other.group.key:
        return False
    return one.collective.sequence == other.collective.sequence


def _describe_step(position: LastPosition) -> str:
    text = f"step {position.step}, {position.phase}"
    if position.step < 1:
        text = f"{position.phase}, before the first step"
    if position.microbatch >= 0:
        text += f", microbatch {position.microbatch}"
    return text


def find_newest_call_site(position: LastPosition) -> tuple[str, int]:
    """The newest line that a rank wrote: that of its phase, or of a collective after it."""
    file, line, written_s = position.file, position.line, position.monotonic_s
    for each in position.collectives:
        if each.is_foreground and each.posted_s >= written_s and each.file:
            file, line, written_s = each.file, each.line, each.posted_s
    return file, line


def _describe_line(position: LastPosition) -> str:
    return _format_site(*find_newest_call_site(position))


def _format_site(file: str, line: int) -> str:
    if not file:
        return "an unknown line"
    return f"{os.path.basename(file)}:{line}"


def build_where_json(
    verdict: WaitVerdict, states: Mapping[int, RankState], now_s: float | None
) -> dict[str, Any]:
    """WaitVerdict and ranks as JSON; the schema is described in docs/where.md."""
    waits = {wait.rank: wait for wait in verdict.waits}
    ranks = []
    for rank, state in sorted(states.items()):
        ranks.append(_build_rank_json(state, waits.get(rank), now_s))
    return {
        "verdict": verdict.kind,
        "culprits": list(verdict.culprits),
        "sentences": describe_waits(verdict, states, now_s),
        "ranks": ranks,
    }


def _build_rank_json(
    state: RankState, wait: RankWait | None, now_s: float | None
) -> dict[str, Any]:
    process, position = state.process, state.position
    facts: dict[str, Any] = {
        "rank": state.rank,
        "process": process.state,
        "cpu_share": process.cpu_share,
        "throttled_share": process.throttled_share,
    }
    if position is None:
        return facts | {"step": None}
    file, line = find_newest_call_site(position)
    facts |= {
        "step": position.step,
        "microbatch": position.microbatch,
        "phase": position.phase,
        "waits_for_name": position.collective,
        "file": file,
        "line": line,
        "num_writes": position.num_writes,
        "num_torn": position.num_torn,
        "since_progress_s": None if now_s is None else now_s - position.last_progress_s,
        "wait": None,
    }
    if position.header is not None:
        header = position.header
        facts |= {"pid": header.pid, "host": header.host, "incarnation": header.incarnation}
    if wait is not None:
        facts["wait"] = {
            "number": wait.collective.number,
            "absent": list(wait.absent),
            "differing": list(wait.differing),
        }
    collectives = []
    for each in position.collectives:
        collectives.append(_build_collective_json(each, find_group(position, each)))
    return facts | {"collectives": collectives}


def _build_collective_json(each: RecordedCollective, group: BoxGroup | None) -> dict[str, Any]:
    label = ranks = ""
    if group is not None:
        label, ranks = group.label, group.ranks
    return {
        "number": each.number,
        "op": each.op,
        "group": label,
        "group_ranks": ranks,
        "sequence": each.sequence,
        "dtype": each.dtype,
        "shape": list(each.shape),
        "num_tensors": each.num_tensors,
        "num_bytes": each.num_bytes,
        "state": each.state,
        "posted_monotonic_s": each.posted_s,
        "wait_began_monotonic_s": each.wait_began_s or None,
        "ended_monotonic_s": each.ended_s or None,
        "step": each.step,
        "microbatch": each.microbatch,
        "phase": each.phase,
        "peer": each.peer,
        "tag": each.tag,
        "is_foreground": each.is_foreground,
        "file": each.file,
        "line": each.line,
    }
