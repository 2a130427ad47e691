"""Events of the supervisor: ranks that start, fail, hang or are slow, and what it does about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class RanksStarted(Event):
    """From the supervisor: the processes of one attempt. `kept`: ranks whose process is that of the
    attempt before, as they only had lost another one."""

    pids: list[int]
    start_s: float
    kept: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RankFailed(Event):
    """From the supervisor: the rank that failed first (-1: the server or the store of the ranks, or
    nobody knows which, or `is_of_all_ranks`: each of several ranks raised the same error).

    `cause`: "exception" | "signal" | "exit" (it left before its work was done) | "hang" (the others
    waited in vain) | "out of memory" | "lost_connection" (ranks lost each other, and nothing else
    is known to have failed). `hang_kind`: as in HangFound, also where gloo noticed another
    collective first and aborted a rank; "left_early" for a rank that ended before its work was done
    without an error; empty otherwise, and in files of earlier releases. `is_oom_kill`: the signal
    was that of the kernel's out-of-memory killer, by the count of the rank's cgroup or machine,
    which `detail` names.
    """

    failed_rank: int
    step: int
    phase: str
    cause: str
    detail: str
    detected_s: float
    hang_kind: str = ""
    is_oom_kill: bool = False
    is_of_all_ranks: bool = False


@dataclass(frozen=True)
class HangFound(Event):
    """From the supervisor: no rank made progress for `detected_s`, longer than `limit_s`, because
    of the ranks `culprits`, which are killed now.

    Work that leaves signs (a save, a load, a compiler) is progress; the seconds count from the last
    of them.

    `hang_kind`: "gone" (its process has ended, and the server of the ranks has not told so) |
    "frozen" (stopped) | "gil_held" (C code holds Python's lock) | "spinning" |
    "waiting_elsewhere" (sleeps in what is no collective) | "absent_collective" (in another one than
    the others) | "left_early" | "endless_step" (goes on writing phases or collectives in a step
    that lasts `detected_s` and does not end) | "link_cut" (what is sent to it, or by it, does not
    arrive). `step` and `phase` are those of the first culprit;
    `collective` is what the others wait in; `report` has the stacks of all ranks, the odd ones
    first.
    """

    hang_kind: str
    culprits: list[int]
    step: int
    phase: str
    collective: str
    report: str
    detected_s: float
    limit_s: float


@dataclass(frozen=True)
class StoreLost(Event):
    """From the supervisor: the process of the ranks' rendezvous store ended (`detail`: how).

    `ranks_go_on`: they train, which needs no store, their processes are kept, and their progress is
    watched. Where one comes to need it (a save, an evaluation, a new group) they leave with what
    they hold in memory, and meet again at a new store: `rank_failed` says when. Otherwise the
    attempt ends at once. `step` is that of the rank that has come furthest, 0 before training.
    """

    step: int
    detail: str
    ranks_go_on: bool


@dataclass(frozen=True)
class RankSlow(Event):
    """From the supervisor: a rank takes `factor` times as long for its own work as ranks with the
    same work, at least since `first_step`; seconds for which it had no processor are left out. It
    is slow, not hung, and nothing is restarted.

    `excess_s` a step is what it takes longer, most in `phase`; the others waited `waited_s` for it
    so far, in sum. `cpu_share` are the cores it used in the seconds of its own work,
    `peers_cpu_share` those of the others (0: nobody counted): with fewer it is starved, throttled
    or waits for something; with as many it computes more, or slower. `why`: the kernel says that it
    is kept from running, and how; then `cpu_share` are the shares (0 to 1) of the time they wanted
    to run, and `excess_s`, `phase` and `waited_s` are not known.
    """

    slow_rank: int
    step: int
    first_step: int
    factor: float
    excess_s: float
    phase: str
    waited_s: float
    cpu_share: float
    peers_cpu_share: float
    why: str = ""


@dataclass(frozen=True)
class RankSlowEnded(Event):
    """From the supervisor: a rank that was slow since `first_step` is as fast as the others again,
    or its attempt is over (`with_attempt`); they waited `waited_s` for it in sum (0: not known).
    `why` as in RankSlow."""

    slow_rank: int
    step: int
    first_step: int
    waited_s: float
    why: str = ""
    with_attempt: bool = False


@dataclass(frozen=True)
class RestartScheduled(Event):
    """From the supervisor: the ranks start again from the newest checkpoint, of step `from_step`.

    `held_step`: the newest step whose state a rank still holds in memory, -1 for none; whether all
    of it is held, the ranks find out when they have met (`run_started` says). `restart`: how many
    count against `budget` now, this one included. `pause_s`: seconds before it, in an outage.
    """

    restart: int
    budget: int
    from_step: int
    held_step: int = -1
    pause_s: float = 0.0


@dataclass(frozen=True)
class RolledBack(Event):
    """From the supervisor: in `step` all ranks agreed to go back to the newest checkpoint that is
    not after `not_after_step`.

    `cause`: "loss_spike" | "corruption" | "nonfinite_weights"; `failed_rank` holds what is
    corrupted, -1 where that is not known. `skip_to_sample`: the next sample that is read then, -1:
    as the checkpoint says. `epoch`: that of the attempt that ended, as manifests of its
    checkpoints have it; 0: not known.
    """

    step: int
    cause: str
    why: str
    not_after_step: int
    skip_to_sample: int
    failed_rank: int
    epoch: int = 0


@dataclass(frozen=True)
class LayoutChanged(Event):
    """From the supervisor: the next attempt has another number of ranks. `step` is that of the
    newest state it may go on from, `text` says both layouts, `why` the reason."""

    step: int
    num_ranks_before: int
    num_ranks: int
    text: str
    why: str


@dataclass(frozen=True)
class ReliabilityMeasured(Event):
    """From the supervisor, after each hour of a command (`hour` counts from 0) and at its end, if
    it lasted an hour or a rank failed.

    `goodput`: the share of these `hour_s` seconds in steps that stand and were applied, as far as
    is known by then; `participation`: over the steps that stand, the mean share of all ranks that
    took part (NaN: no step).
    `num_failures` and `mean_between_failures_s` (NaN: none) are of the command so far;
    `save_stall_s` is the median of what a save stopped training for, and `best_save_every_s` what
    Young and Daly want for it and for that rate of failures (NaN: not known).
    """

    hour: int
    hour_s: float
    goodput: float
    participation: float
    num_failures: int
    mean_between_failures_s: float
    save_stall_s: float
    best_save_every_s: float
