"""`find_straggler`: one rank of those with the same work that the others wait for."""

from __future__ import annotations

from statistics import mean, median

from phalanx.report.bottleneck.cause import MIN_EXPLAINED_SHARE, MIN_SHARE, Cause
from phalanx.report.bottleneck.few_steps import describe_few_steps, sum_beyond_few_steps
from phalanx.report.bottleneck.study import StepStudy
from phalanx.report.bottleneck.what_if import calculate_excess
from phalanx.report.formats import format_milliseconds, format_percent

# What a rank does by itself, in which it can be slower than the others.
_OWN_GROUPS = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "evaluate",
    "other",
    "unaccounted",
)
_WORDS_OF_GROUP = {
    "unaccounted": "between its phases",
    "other": "around its forwards and backwards",
    "data": "in its loader",
}
# Of what the others have: below this a rank sleeps, waits, or has no turn.
_MIN_PROCESSOR_RATIO = 0.7
# Above this it computes as they do, if longer.
_MIN_BUSY_RATIO = 0.9


def find_straggler(study: StepStudy, group: tuple[int, ...]) -> None:
    """A rank that has clearly more to do by itself than the others, and explains what they
    wait; in the steps without the causes that were found before."""
    if len(group) < 2 or any(cause.rank in group for cause in study.causes):
        return
    rank, explained = _find_latest_rank(study, group)
    peers = tuple(other for other in group if other != rank)
    excess = calculate_excess(study.table, rank, peers, study.remaining_seconds)
    excess = [max(each, 0.0) for each in excess]
    share = sum(excess) / study.total_s
    if share < MIN_SHARE or explained < MIN_EXPLAINED_SHARE:
        return
    if sum_beyond_few_steps(study.table, excess) < MIN_SHARE * study.total_s:
        return
    phase, phase_s = _find_slow_phase(study, rank, peers)
    if phase == "data" and _wait_peers_for_data(study, peers):
        return
    speedup = study.take_out({rank: excess})
    where = _WORDS_OF_GROUP.get(phase, f"in {phase}")
    waits = median(mean(row.waiting_s for row in study.table.rows[other]) for other in peers)
    own_waits = mean(row.waiting_s for row in study.table.rows[rank])
    evidence = [
        f"rank {rank} takes {format_milliseconds(phase_s)} of a step longer {where} than the"
        f" others, and explains {format_percent(explained, 1)} of what ranks are apart",
        f"the others wait {format_milliseconds(waits)} of a step in collectives, rank {rank}"
        f" {format_milliseconds(own_waits)}",
        *describe_few_steps(study.table, excess),
    ]
    action = _advise_on_straggler(study, rank, peers, phase, evidence)
    is_upper_bound = _gives_way_to_others(study, rank, peers)
    if is_upper_bound:
        evidence.append(
            f"ranks share processors here: while rank {rank} stands still the others run faster"
            " than beside it, so the gain may be smaller"
        )
    study.causes.append(
        Cause(
            "straggler",
            share,
            speedup,
            f"rank {rank} {where}",
            tuple(evidence),
            action,
            rank=rank,
            phase=phase,
            is_upper_bound=is_upper_bound,
        )
    )


def _wait_peers_for_data(study: StepStudy, peers: tuple[int, ...]) -> bool:
    """True where the others wait for their own batches, too. The rank whose loader began last then
    seems to be the slowest, and the others' loaders go on while they wait for it."""
    shares = []
    for other in peers:
        waited_s = sum(row.seconds.get("data", 0.0) for row in study.table.rows[other])
        shares.append(waited_s / study.total_s)
    return median(shares) >= MIN_SHARE


def _gives_way_to_others(study: StepStudy, rank: int, peers: tuple[int, ...]) -> bool:
    """True where ranks compute on CPUs and this one leaves its processor to others for a part of
    its own time."""
    share, peer_share = study.processor_share(rank), median(map(study.processor_share, peers))
    return study.outline.device == "cpu" and 0 < share < _MIN_BUSY_RATIO * peer_share


def _find_latest_rank(study: StepStudy, group: tuple[int, ...]) -> tuple[int, float]:
    """The rank that is beyond the median of the others most, and the share (0 to 1) of all
    such seconds that it is by itself the latest."""
    latest_s = dict.fromkeys(group, 0.0)
    for index in range(study.table.num_steps):
        self_seconds = {rank: study.remaining_seconds(rank, index) for rank in group}
        rank = max(self_seconds, key=self_seconds.__getitem__)
        rest = [seconds for other, seconds in self_seconds.items() if other != rank]
        latest_s[rank] += self_seconds[rank] - median(rest)
    rank = max(latest_s, key=latest_s.__getitem__)
    return rank, latest_s[rank] / max(sum(latest_s.values()), 1e-12)


def _find_slow_phase(study: StepStudy, rank: int, peers: tuple[int, ...]) -> tuple[str, float]:
    """The time group in which a rank is slower by most, and by how many seconds of a step."""
    excess = {}
    for group in _OWN_GROUPS:
        if group in study.groups_taken_out:
            continue

        def seconds(of_rank: int, index: int, group: str = group) -> float:
            return study.table.rows[of_rank][index].seconds.get(group, 0.0)

        excess[group] = mean(calculate_excess(study.table, rank, peers, seconds))
    phase = max(excess, key=excess.__getitem__)
    return phase, excess[phase]


def _advise_on_straggler(
    study: StepStudy, rank: int, peers: tuple[int, ...], phase: str, evidence: list[str]
) -> str:
    if phase == "data":
        return (
            f"look at what rank {rank} reads and where from (its disk, its workers: data.workers)"
        )
    share, peer_share = study.processor_share(rank), median(map(study.processor_share, peers))
    if share > 0 and peer_share > 0:
        evidence.append(
            f"rank {rank} had a processor for {format_percent(share, 1)} of its own time, the"
            f" others for {format_percent(peer_share, 1)}"
        )
        if share < _MIN_PROCESSOR_RATIO * peer_share:
            return (
                f"rank {rank} waits for something or has no turn on its cores: look for other"
                " processes there, and for what its code waits for"
            )
    return (
        f"rank {rank} computes more or slower: compare its batches (lengths, experts), its"
        " clock speed and temperature; move it to another device to tell which"
    )
