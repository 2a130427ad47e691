"""Tells the kinds of hangs apart, and finds the rank that keeps the others waiting: from the black
boxes and what the kernel said of the processes since the run made progress last.

Pure: whoever looks at the ranks is elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.core.black_box_reader import LastPosition, RecordedCollective
from phalanx.launch.hang_limits import LONG_LIMIT_S, HangLimit
from phalanx.launch.rank_activity import QuietTime
from phalanx.observe.rank_waits import RankState, find_group, find_waits, judge_ranks

GONE = "gone"
FROZEN = "frozen"
GIL_HELD = "gil_held"
SPINNING = "spinning"
WAITING_ELSEWHERE = "waiting_elsewhere"
ABSENT_COLLECTIVE = "absent_collective"
LEFT_EARLY = "left_early"
ENDLESS_STEP = "endless_step"
LINK_CUT = "link_cut"
HANG_KINDS = (
    GONE,
    FROZEN,
    GIL_HELD,
    SPINNING,
    WAITING_ELSEWHERE,
    ABSENT_COLLECTIVE,
    LEFT_EARLY,
    ENDLESS_STEP,
    LINK_CUT,
)

# Without a pulse for this share of the limit (and at least so long) Python's lock is held. The
# pulse comes twice a second.
_SILENT_PULSE_SHARE = 0.6
_MIN_SILENT_PULSE_S = 0.9
# Of a rank that was not seen at work yet: on a machine that others use it gets less than a core.
_CPU_SHARE_UNKNOWN = 0.5
# A server that has a processor tells of a rank's end within milliseconds.
MIN_UNTOLD_S = 2.0
_WAITING_PHASES = ("collective", "pipeline")


@dataclass(frozen=True)
class HangEvidence:
    """The facts about a run without progress for `silent_s`, longer than its limit allows.

    `usual_cpu_share`: cores that the training thread of each rank used while the run went on.
    `finished`: ranks that said that their work is done. `left`: those of them whose processes have
    ended as they should. `untold_s`: of ranks that have ended without a word of the server, for how
    long it could have told. `now_s`: monotonic seconds.
    """

    states: Mapping[int, RankState]
    quiet: Mapping[int, QuietTime]
    usual_cpu_share: Mapping[int, float]
    finished: frozenset[int]
    silent_s: float
    limit: HangLimit
    now_s: float
    left: frozenset[int] = frozenset()
    untold_s: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Culprits:
    """The ranks that keep the others waiting. An empty `kind` without ranks: no hang, or none that
    could be told; `why` says which."""

    kind: str
    ranks: tuple[int, ...]
    why: str = ""


def find_culprits(evidence: HangEvidence) -> Culprits:
    """The culprits, those that are surest first: what has ended, what is stopped, what holds
    Python's lock, what computes, what sleeps elsewhere, and what is in another collective than the
    others."""
    if evidence.left:
        remaining = {rank: q for rank, q in evidence.quiet.items() if rank not in evidence.left}
        evidence = replace(evidence, quiet=remaining)
    surest = _judge_ended_ranks(evidence) or _judge_stopped_ranks(evidence)
    if surest:
        return surest
    if evidence.finished:
        return _judge_end_of_work(evidence)
    return (
        _judge_holders_of_lock(evidence)
        or _judge_running_ranks(evidence)
        or _judge_waits_for_others(evidence)
        or _judge_sleeping_ranks(evidence)
    )


def _judge_ended_ranks(evidence: HangEvidence) -> Culprits | None:
    """The ranks whose processes have ended, of which the process that started them should have told
    at once and has not; none yet where it may still do so, and None where no rank has ended."""
    ended = [rank for rank, quiet in evidence.quiet.items() if quiet.has_ended]
    gone = [rank for rank in ended if evidence.untold_s.get(rank, 0.0) >= MIN_UNTOLD_S]
    if ended and not gone:
        return Culprits("", (), "a rank has ended, and the server had no time yet to tell so")
    return _name_if_any(GONE, gone)


def _judge_stopped_ranks(evidence: HangEvidence) -> Culprits | None:
    """The culprits where the kernel has stopped a rank; None where it has not."""
    stopped = [rank for rank, quiet in evidence.quiet.items() if quiet.is_stopped]
    if stopped:
        return Culprits(FROZEN, tuple(sorted(stopped)))
    if any(quiet.num_stopped for quiet in evidence.quiet.values()):
        return Culprits("", (), "a rank is stopped and continued in turns")
    return None


def _judge_holders_of_lock(evidence: HangEvidence) -> Culprits | None:
    """The ranks that hold Python's lock; None where there are none."""
    holders = [rank for rank in evidence.quiet if _is_pulse_silent(evidence, rank)]
    holders = [rank for rank in holders if not _is_short_of_processor(evidence, rank)]
    if holders:
        return Culprits(GIL_HELD, tuple(sorted(holders)))
    return None


def _judge_running_ranks(evidence: HangEvidence) -> Culprits | None:
    """The culprits among ranks that compute, which may be none yet; None where all sleep."""
    running = [rank for rank in evidence.quiet if _computes(evidence, rank)]
    spinning = [rank for rank in running if not _is_short_of_processor(evidence, rank)]
    if spinning and evidence.silent_s >= evidence.limit.computes_s:
        return Culprits(SPINNING, tuple(sorted(spinning)))
    if spinning:
        return Culprits("", (), f"a rank computes, which it may: {evidence.limit.why}")
    if running:
        return Culprits("", (), "a rank gets too little of a processor: it is slow")
    return None


def _judge_waits_for_others(evidence: HangEvidence) -> Culprits | None:
    """No hang yet where a rank waits for a disk or for a process of its own; None without such
    a rank."""
    for rank, quiet in evidence.quiet.items():
        if quiet.is_in_disk and evidence.silent_s < evidence.limit.disk_s:
            return Culprits("", (), f"rank {rank} waits for a disk or a file server")
        if quiet.is_helper_running and evidence.silent_s < evidence.limit.children_s:
            return Culprits("", (), f"rank {rank} waits for a process of its own that runs")
    return None


def _judge_end_of_work(evidence: HangEvidence) -> Culprits:
    """The culprits among ranks of which some have said that their work is done.

    The last save of some, and then each token of the text that all sample, may take longer than a
    step: only what lasts for longer than other long work may counts.
    """
    limit = evidence.limit
    quiet_s = max(limit.quiet_s, LONG_LIMIT_S)
    if evidence.silent_s < quiet_s:
        return Culprits("", (), "ranks end their work")
    computes_s = max(limit.computes_s, LONG_LIMIT_S)
    evidence = replace(evidence, limit=replace(limit, quiet_s=quiet_s, computes_s=computes_s))
    awaited = {rank for wait in find_waits(evidence.states) for rank in wait.absent}
    left_early = awaited & evidence.finished
    if len(evidence.finished) < len(evidence.states):
        if left_early:
            return Culprits(LEFT_EARLY, tuple(sorted(left_early)))
        at_work = {r: q for r, q in evidence.quiet.items() if r not in evidence.finished}
        evidence = replace(evidence, quiet=at_work)
        return (
            _judge_holders_of_lock(evidence)
            or _judge_running_ranks(evidence)
            or _judge_waits_for_others(evidence)
            or _judge_sleeping_ranks(evidence)
        )
    # One that sleeps may wait for its sinks, and then no other rank waits for it.
    asleep = {rank for rank in evidence.quiet if not _computes(evidence, rank)}
    return (
        _judge_holders_of_lock(evidence)
        or _judge_running_ranks(evidence)
        or _judge_waits_for_others(evidence)
        or _name_if_any(WAITING_ELSEWHERE, awaited & asleep)
        or Culprits("", (), "ranks end their work")
    )


def _name_if_any(kind: str, ranks: Iterable[int]) -> Culprits | None:
    named = tuple(sorted(ranks))
    return Culprits(kind, named) if named else None


def _is_pulse_silent(evidence: HangEvidence, rank: int) -> bool:
    position = evidence.states[rank].position
    if position is None or position.header is None or not position.header.pulse_s:
        return False
    silent_s = evidence.now_s - position.header.pulse_s
    return silent_s >= max(_MIN_SILENT_PULSE_S, _SILENT_PULSE_SHARE * evidence.limit.quiet_s)


def _computes(evidence: HangEvidence, rank: int) -> bool:
    """True for a rank that runs, unless it waits for its GPU in a collective: CUDA asks in a loop
    whether the stream is done, and takes a processor for it."""
    position = evidence.states[rank].position
    waits_for_gpu = (
        position is not None
        and position.header is not None
        and position.header.device.startswith("cuda")
        and _is_in_waiting_phase(position)
    )
    return evidence.quiet[rank].is_running and not waits_for_gpu


def _is_short_of_processor(evidence: HangEvidence, rank: int) -> bool:
    """True for a rank that wants to run, and has not had yet as much of a processor as it would
    have had within the limit."""
    quiet = evidence.quiet[rank]
    if not quiet.is_running:
        return False
    share = evidence.usual_cpu_share.get(rank, _CPU_SHARE_UNKNOWN)
    return quiet.cpu_s < evidence.limit.quiet_s * share


def _judge_sleeping_ranks(evidence: HangEvidence) -> Culprits:
    """The culprits among ranks that all sleep, in collectives or elsewhere."""
    waiting = {wait.rank for wait in find_waits(evidence.states)}
    elsewhere = [rank for rank in evidence.states if rank not in waiting]
    # The phase of a wait that the box does not see, such as that of DDP in C++.
    named = [rank for rank in elsewhere if not _is_in_waiting_phase(evidence.states[rank].position)]
    if elsewhere:
        return Culprits(WAITING_ELSEWHERE, tuple(sorted(named or elsewhere)))
    verdict = judge_ranks(evidence.states)
    if verdict.kind in ("differs", "circle", "absent"):
        odd = find_unusual_callers(evidence.states, verdict.culprits)
        return Culprits(ABSENT_COLLECTIVE, odd or verdict.culprits)
    return Culprits("", (), "all ranks have posted what they wait in")


def _is_in_waiting_phase(position: LastPosition | None) -> bool:
    return position is not None and position.phase in _WAITING_PHASES and bool(position.collective)


def find_unusual_callers(
    states: Mapping[int, RankState], suspects: Sequence[int]
) -> tuple[int, ...]:
    """The ranks of `suspects` whose newest collective does not follow, in any earlier step that
    the box remembers, the collective before it; where all are so, as in the step after a save,
    those whose newest collective is in no earlier step. Empty where all or none of them are so."""
    # A suspect that was never seen has no calls.
    positions = {rank: states[rank].position for rank in suspects if rank in states}
    for is_unusual in (_is_newest_call_unusual, _is_newest_call_new):
        unusual = [
            rank
            for rank, position in sorted(positions.items())
            if position is not None and is_unusual(position)
        ]
        if len(unusual) < len(positions):
            return tuple(unusual)
    return ()


def _is_newest_call_unusual(position: LastPosition) -> bool:
    pairs = list(itertools.pairwise(_list_call_keys(position)))
    return len(pairs) > 1 and pairs[-1] not in pairs[:-1]


def _is_newest_call_new(position: LastPosition) -> bool:
    keys = _list_call_keys(position)
    return len(keys) > 1 and keys[-1] not in keys[:-1]


def _list_call_keys(position: LastPosition) -> list[tuple[object, ...]]:
    return [_make_call_key(position, each) for each in position.collectives if each.is_foreground]


def _make_call_key(position: LastPosition, call: RecordedCollective) -> tuple[object, ...]:
    group = find_group(position, call)
    label = "" if group is None else group.label
    return call.op, label, call.dtype, call.shape, call.file, call.line
