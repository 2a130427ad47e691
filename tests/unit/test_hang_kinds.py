"""The judgement on ranks without progress, on evidence made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import phalanx
from phalanx.core.black_box_reader import BoxGroup, BoxHeader, LastPosition, RecordedCollective
from phalanx.launch import other_collective
from phalanx.launch.attempt_end import AttemptEnd
from phalanx.launch.blamed_rank import BlamedRank
from phalanx.launch.endless_steps import EndlessStep, EndlessStepWatch
from phalanx.launch.hang_kinds import (
    ABSENT_COLLECTIVE,
    FROZEN,
    GIL_HELD,
    GONE,
    LEFT_EARLY,
    MIN_UNTOLD_S,
    SPINNING,
    WAITING_ELSEWHERE,
    HangEvidence,
    find_culprits,
)
from phalanx.launch.hang_limits import (
    COMPILERS_LIMIT_S,
    LONG_LIMIT_S,
    MIN_STEP_LIMIT_S,
    NUM_WARM_UP_STEPS,
    PATIENT_LIMIT_S,
    HangLimit,
    HangSettings,
    StepDurations,
    choose_limit,
)
from phalanx.launch.log_excerpts import read_main_thread_stack
from phalanx.launch.rank import STACK_FIRST_LINE
from phalanx.launch.rank_activity import ProcessSample, QuietTime
from phalanx.launch.stack_groups import (
    MAX_SHOWN_GROUPS,
    find_odd_ranks,
    find_telling_line,
    format_stack_groups,
    group_stacks,
)
from phalanx.observe.process_status import ProcessStatus
from phalanx.observe.rank_waits import RankState

ADAPTIVE = HangSettings()
NOW_S = 100.0
LIMIT_S = 4.0
STEP_LIMIT = HangLimit(LIMIT_S, "", LIMIT_S, LONG_LIMIT_S, LONG_LIMIT_S, False)
STEPS_WORDS = "steps of this run take up to %.2g s; resilience.hang_s sets another"
WORLD = BoxGroup("key", "world", 2, "0-1", 0)


def call(
    sequence: int, *, shape: int = 4, state: str = "finished", line: int = 1
) -> RecordedCollective:
    return RecordedCollective(
        *(sequence, sequence, "all_reduce", 0, "float32", (shape,), 1, 1, 4 * shape, state),
        *(NOW_S - 10, 0.0, 0.0, 5, 0, "backward", -1, -1, True, "model.py", line),
    )


def position(
    phase: str = "backward",
    *calls: RecordedCollective,
    pulse_s: float = NOW_S,
    steps: int = 9,
    is_compiling: bool = False,
    device: str = "cpu",
) -> LastPosition:
    header = BoxHeader(
        *(1, 1, 0, 2, 0, device, "host", "boot", 0.0, 0.0, pulse_s, steps),
        is_compiling=is_compiling,
    )
    num_posted = max((each.sequence for each in calls), default=0)
    group = BoxGroup(WORLD.key, WORLD.label, 2, WORLD.ranks, num_posted)
    return LastPosition(5, NOW_S - 11, phase, header=header, groups=(group,), collectives=calls)


def quiet(letters: str, cpu_s: Sequence[float] = (0.0,), *, helper: bool = False) -> QuietTime:
    """A sample for each letter; processor seconds go on to the last value given."""
    found = QuietTime()
    found.begin(ProcessSample("R", 0.0, 0.0))
    for index, letter in enumerate(letters):
        seconds = cpu_s[min(index, len(cpu_s) - 1)]
        found.add(ProcessSample(letter, seconds, seconds, helper))
    return found


WAITS = position("backward", call(1), call(2, state="waiting"))
BEHIND = position("backward", call(1))


def judge(
    first: tuple[LastPosition, QuietTime],
    second: tuple[LastPosition, QuietTime],
    *,
    silent_s: float = LIMIT_S + 0.2,
    finished: frozenset[int] = frozenset(),
    limit: HangLimit = STEP_LIMIT,
    left: frozenset[int] = frozenset(),
    untold_s: float = MIN_UNTOLD_S,
) -> tuple[str, tuple[int, ...]]:
    states, quiets = {}, {}
    for rank, (place, looks) in enumerate((first, second)):
        status = ProcessStatus("running" if looks.is_running else "sleeping")
        states[rank] = RankState(rank, place, status)
        quiets[rank] = looks
    shares = {0: 1.0, 1: 1.0}
    untold = {rank: untold_s for rank, looks in quiets.items() if looks.has_ended}
    evidence = HangEvidence(states, quiets, shares, finished, silent_s, limit, NOW_S, left, untold)
    culprits = find_culprits(evidence)
    return culprits.kind, culprits.ranks


ASLEEP = quiet("SSSSSSSS")


def test_a_rank_that_has_ended_explains_all_others() -> None:
    ended = quiet("SSZZZZZZ")
    silent = position("collective", call(1), call(2, state="waiting"), pulse_s=NOW_S - 12)
    assert judge((silent, ASLEEP), (BEHIND, ended)) == (GONE, (1,))
    # One that was started anew since then is another process.
    assert judge((WAITS, ASLEEP), (BEHIND, quiet("ZZSSSSSS"))) == (WAITING_ELSEWHERE, (1,))


def test_a_rank_that_has_ended_is_not_gone_before_the_server_could_tell() -> None:
    """At the end of a healthy run on a busy machine the server, which reaps, has no processor."""
    ended = quiet("SSZZZZZZ")
    done = frozenset({0, 1})
    for finished in (frozenset[int](), done):
        for first in ((WAITS, ASLEEP), (BEHIND, quiet("TTTTTTTT")), (BEHIND, ended)):
            early = judge(first, (BEHIND, ended), finished=finished, untold_s=MIN_UNTOLD_S / 2)
            assert early == ("", ())
    assert judge((BEHIND, ended), (BEHIND, ended), finished=done) == (GONE, (0, 1))


def test_a_stopped_process_is_frozen() -> None:
    assert judge((WAITS, ASLEEP), (BEHIND, quiet("TTTTTTTT"))) == (FROZEN, (1,))
    # The first look may come before the stop.
    assert judge((WAITS, ASLEEP), (BEHIND, quiet("RTTTTTTT"))) == (FROZEN, (1,))
    # Also where the others wait for one that holds the lock, or sleeps elsewhere.
    assert judge((BEHIND, quiet("TTTTTTTT")), (BEHIND, ASLEEP)) == (FROZEN, (0,))


@pytest.mark.parametrize(
    "looks",
    [
        quiet("TRTRTTRT", (0.1, 0.2, 0.3)),
        # Seen stopped at every look, and yet it got on in between.
        quiet("TTTTTTTT", (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
    ],
)
def test_a_process_stopped_and_continued_in_turns_is_slow(looks: QuietTime) -> None:
    assert judge((WAITS, ASLEEP), (BEHIND, looks)) == ("", ())


def test_without_a_pulse_the_lock_is_held() -> None:
    silent = position("backward", call(1), pulse_s=NOW_S - LIMIT_S)
    assert judge((WAITS, ASLEEP), (silent, quiet("SSSSSSSS"))) == (GIL_HELD, (1,))
    assert judge((WAITS, ASLEEP), (silent, quiet("RRRRRRRR", (1.0, 4.1)))) == (GIL_HELD, (1,))
    # Starved, so that its pulse is late.
    assert judge((WAITS, ASLEEP), (silent, quiet("RRRRRRRR", (0.1, 0.3)))) == ("", ())


def test_a_running_rank_spins_once_it_had_its_processor_time() -> None:
    assert judge((WAITS, ASLEEP), (BEHIND, quiet("RRRRRRRR", (1.0, 4.1)))) == (SPINNING, (1,))
    for seconds in (60.0, 600.0):
        looks = quiet("RRRRRRRR", (0.1, 0.4))
        assert judge((WAITS, ASLEEP), (BEHIND, looks), silent_s=seconds) == ("", ())


def test_a_rank_that_waits_for_its_gpu_takes_a_processor_and_does_not_spin() -> None:
    on_gpu = position("collective", call(1, state="queued"), call(2, state="queued"))
    header = on_gpu.header
    assert header is not None
    waits = on_gpu._replace(collective="step", header=replace(header, device="cuda:0"))
    waits_for_gpu = (waits, quiet("R" * 20, [LIMIT_S]))
    behind = position("data", call(1, state="queued"), device="cuda:1")
    assert judge(waits_for_gpu, (behind, quiet("S" * 20))) == (WAITING_ELSEWHERE, (1,))
    # Worker processes of the other rank's loader are at work: it is slow.
    loads = (behind, quiet("S" * 20, helper=True))
    assert judge(waits_for_gpu, loads) == ("", ())
    assert judge(waits_for_gpu, (behind, quiet("R" * 20, [LIMIT_S]))) == (SPINNING, (1,))
    # In no phase of waiting, or on a CPU, it computes.
    computes = waits._replace(phase="forward", collective="")
    assert judge((computes, waits_for_gpu[1]), loads) == (SPINNING, (0,))
    on_cpu = on_gpu._replace(collective="step")
    assert judge((on_cpu, waits_for_gpu[1]), loads) == (SPINNING, (0,))


def test_a_rank_that_sleeps_elsewhere() -> None:
    assert judge((WAITS, ASLEEP), (BEHIND, ASLEEP)) == (WAITING_ELSEWHERE, (1,))
    # A disk that does not answer, or a loader's worker that is at work, gets longer.
    for looks in (quiet("DDDDDDDD"), quiet("SSSSSSSS", helper=True)):
        assert judge((WAITS, ASLEEP), (BEHIND, looks)) == ("", ())
        late = judge((WAITS, ASLEEP), (BEHIND, looks), silent_s=LONG_LIMIT_S + 1)
        assert late == (WAITING_ELSEWHERE, (1,))


def test_of_two_different_collectives_the_one_that_never_came_there_before() -> None:
    """A step is two calls, at lines 1 and 2; rank 1 leaves out line 1 and is at 2 alone."""
    usual = [call(1, line=1), call(2, shape=8, line=2), call(3, line=1), call(4, shape=8, line=2)]
    straight = position("backward", *usual, call(5, line=1, state="waiting"))
    skipped = position("backward", *usual, call(5, shape=8, line=2, state="waiting"))
    assert judge((straight, ASLEEP), (skipped, ASLEEP)) == (ABSENT_COLLECTIVE, (1,))
    assert judge((skipped, ASLEEP), (straight, ASLEEP)) == (ABSENT_COLLECTIVE, (0,))


def test_of_two_different_collectives_after_a_save_the_one_that_was_never_called() -> None:
    """Nothing follows the save in an earlier step: all calls after it are unusual."""
    before = [call(1, line=1), call(2, line=1), call(3, shape=8, line=9)]
    straight = position("backward", *before, call(4, line=1, state="waiting"))
    extra = position("forward", *before, call(4, shape=3, line=5, state="waiting"))
    assert judge((straight, ASLEEP), (extra, ASLEEP)) == (ABSENT_COLLECTIVE, (1,))
    assert judge((extra, ASLEEP), (straight, ASLEEP)) == (ABSENT_COLLECTIVE, (0,))
    other = position("forward", *before, call(4, shape=5, line=6, state="waiting"))
    assert judge((extra, ASLEEP), (other, ASLEEP)) == (ABSENT_COLLECTIVE, (0, 1))


def test_the_call_that_is_named_is_none_of_a_save_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [call(1, line=1), call(2, line=1)]
    of_save = replace(call(1, shape=24, line=9), is_foreground=False)
    straight = position("backward", *before, call(3, line=1, state="waiting"))
    extra = position("forward", *before, call(3, shape=3, line=5, state="waiting"), of_save)
    monkeypatch.setattr(
        other_collective, "read_black_boxes", lambda end, run_dir: {0: straight, 1: extra}
    )
    first = BlamedRank(0, AttemptEnd(0), tmp_path, straight)
    failure = first.build_restartable_failure("exception", "", "", [], "")
    blamed = other_collective.blame_rank_in_other_collective(failure, first, "rank 0 noticed")
    assert blamed.rank == 1
    assert blamed.summary.startswith(
        "rank 1 called all_reduce #3 of world (float32 [3], 12 B) at model.py:5, where others"
    )


def test_all_in_the_same_collective_is_no_rank_s_fault() -> None:
    assert judge((WAITS, ASLEEP), (WAITS, ASLEEP)) == ("", ())


def test_a_rank_whose_work_is_done_and_that_others_wait_for() -> None:
    done = frozenset({1})
    assert judge((WAITS, ASLEEP), (BEHIND, ASLEEP), finished=done) == ("", ())
    late = judge((WAITS, ASLEEP), (BEHIND, ASLEEP), finished=done, silent_s=LONG_LIMIT_S + 1)
    assert late == (LEFT_EARLY, (1,))


def test_a_rank_that_hangs_while_others_have_done_their_work() -> None:
    done = frozenset({0})
    late_s = LONG_LIMIT_S + 1
    stopped = quiet("TTTTTTTT")
    assert judge((WAITS, ASLEEP), (BEHIND, stopped), finished=done) == (FROZEN, (1,))
    ended = judge((WAITS, ASLEEP), (BEHIND, quiet("SSZZZZZZ")), finished=done)
    assert ended == (GONE, (1,))
    # A last save or evaluation may hold the lock, compute or sleep for longer than a step may.
    silent = position("backward", call(1), pulse_s=NOW_S - 50.0)
    busy = quiet("RRRRRRRR", (1.0, 90.0))
    for looks, kind in (
        ((silent, ASLEEP), GIL_HELD),
        ((BEHIND, busy), SPINNING),
        ((BEHIND, ASLEEP), WAITING_ELSEWHERE),
    ):
        assert judge((WAITS, ASLEEP), looks, finished=done) == ("", ())
        assert judge((WAITS, ASLEEP), looks, finished=done, silent_s=late_s) == (kind, (1,))


def test_a_rank_that_hangs_after_the_work_of_all_is_done() -> None:
    done = frozenset({0, 1})
    late_s = LONG_LIMIT_S + 1
    assert judge((WAITS, ASLEEP), (BEHIND, quiet("TTTTTTTT")), finished=done) == (FROZEN, (1,))
    silent = position("backward", call(1), pulse_s=NOW_S - 50.0)
    busy = quiet("RRRRRRRR", (1.0, 90.0))
    for looks, kind in (
        ((silent, ASLEEP), GIL_HELD),
        ((BEHIND, busy), SPINNING),
        ((BEHIND, ASLEEP), WAITING_ELSEWHERE),
    ):
        assert judge((WAITS, ASLEEP), looks, finished=done) == ("", ())
        assert judge((WAITS, ASLEEP), looks, finished=done, silent_s=late_s) == (kind, (1,))
    # One that is kept from its processor.
    starved = (BEHIND, quiet("RRRRRRRR", (0.1, 0.4)))
    assert judge((WAITS, ASLEEP), starved, finished=done, silent_s=late_s) == ("", ())
    # Sinks are slow, for which nobody waits.
    closing = position("backward", call(1), pulse_s=0.0)
    found = judge((closing, ASLEEP), (closing, ASLEEP), finished=done, silent_s=late_s)
    assert found == ("", ())
    # One that left as it should is no process that ended behind anybody's back.
    gone = quiet("SSZZZZZZ")
    found = judge((closing, ASLEEP), (BEHIND, gone), finished=done, left=frozenset({1}))
    assert found == ("", ())


def test_the_limit_follows_the_steps_and_what_is_done() -> None:
    def limit(
        place: LastPosition, settings: HangSettings = ADAPTIVE, p99_s: float = 0.1
    ) -> tuple[float, ...]:
        """Seconds: quiet, computing, with children that compute, with a disk."""
        found = choose_limit(settings, {0: place, 1: BEHIND}, 2, p99_s)
        assert found.counts_work == (found.why not in ("resilience.hang_s", STEPS_WORDS % p99_s))
        return found.quiet_s, found.computes_s, found.children_s, found.disk_s

    minute, minutes = LONG_LIMIT_S, PATIENT_LIMIT_S
    assert limit(BEHIND) == (MIN_STEP_LIMIT_S, MIN_STEP_LIMIT_S, minute, minute)
    assert limit(BEHIND, p99_s=2.0)[:2] == (16.0, 16.0)
    assert limit(BEHIND, HangSettings(1.5))[:2] == (1.5, 1.5)
    early = position("backward", steps=NUM_WARM_UP_STEPS)
    assert limit(early) == limit(early, HangSettings(1.5)) == (minute,) * 4
    assert limit(position("evaluate")) == (minute,) * 4
    for phase in ("startup", "ckpt_load"):
        assert limit(position(phase)) == (minute, minute, minutes, minutes)
    for phase in ("ckpt_write", "before_commit"):
        assert limit(position(phase)) == (minute, minute, minute, minutes)
    assert limit(position("startup"), HangSettings(900.0)) == (900.0,) * 4
    # Whatever the phase is, and as long as it lasts.
    compiling = position("forward", is_compiling=True)
    assert limit(compiling) == (minute, minutes, COMPILERS_LIMIT_S, minute)
    assert choose_limit(HangSettings(), {0: BEHIND}, 2, 0.1).quiet_s == minute


def test_a_compiler_may_compute_for_longer_and_may_not_sleep() -> None:
    limit = HangLimit(60.0, "code is compiled", 600.0, 3600.0, 60.0, True)
    computes = quiet("RRRRRRRR", (30.0, 90.0))
    for silent_s, verdict in ((61.0, ("", ())), (601.0, (SPINNING, (1,)))):
        looks = (WAITS, ASLEEP), (BEHIND, computes)
        assert judge(*looks, silent_s=silent_s, limit=limit) == verdict
    # Its children compute.
    for silent_s, verdict in ((601.0, ("", ())), (3601.0, (WAITING_ELSEWHERE, (1,)))):
        looks = (WAITS, ASLEEP), (BEHIND, quiet("SSSSSSSS", helper=True))
        assert judge(*looks, silent_s=silent_s, limit=limit) == verdict
    asleep = judge((WAITS, ASLEEP), (BEHIND, ASLEEP), silent_s=61.0, limit=limit)
    assert asleep == (WAITING_ELSEWHERE, (1,))
    holds = position("backward", call(1), pulse_s=NOW_S - 50.0)
    assert judge((WAITS, ASLEEP), (holds, ASLEEP), silent_s=61.0, limit=limit) == (GIL_HELD, (1,))


class StepsOfTwoRanks:
    """Two ranks whose positions are looked at once a second."""

    def __init__(self) -> None:
        self.watch, self.now_s, self.writes = EndlessStepWatch(), 0.0, [0, 0]
        for step in range(1, 10):
            assert self.go_on(step, 1, (40, 40)) is None

    def go_on(
        self, step: int, seconds: int, per_second: tuple[int, int], phase: str = "forward"
    ) -> EndlessStep | None:
        """Stay in `step`, with so many writes of each rank a second."""
        for _ in range(seconds):
            self.now_s += 1.0
            places = {}
            for rank, number in enumerate(per_second):
                self.writes[rank] += number
                place = position(phase)._replace(step=step, num_writes=self.writes[rank])
                places[rank] = place
            found = self.watch.look(places, now_s=self.now_s, p99_s=1.0, long_s=60.0)
            if found is not None:
                return found
        return None


def test_a_step_that_goes_on_for_ever_is_found_by_what_it_writes() -> None:
    found = StepsOfTwoRanks().go_on(10, 100, (0, 40))
    assert found is not None
    assert (found.ranks, found.step, found.elapsed_s, found.most_writes) == ((1,), 10, 60.0, 40)
    # One that is starved takes long for what a step writes, and one that waits writes nothing.
    assert StepsOfTwoRanks().go_on(10, 1000, (0, 0)) is None
    # All together may be at other work, but not without end.
    together = StepsOfTwoRanks()
    assert together.go_on(10, 600, (40, 40)) is None
    found = together.go_on(10, 10, (40, 40))
    assert found is not None
    assert found.ranks == (0, 1)
    # A long evaluation of one rank.
    assert StepsOfTwoRanks().go_on(10, 1000, (0, 40), phase="evaluate") is None


def test_the_99th_percentile_of_steps() -> None:
    durations = StepDurations()
    assert durations.compute_long_step_s() == 0.0
    now_s = 0.0
    for step in range(300):
        now_s += 2.0 if step == 250 else 0.25
        durations.observe(step, now_s)
    assert durations.compute_long_step_s() == 0.25
    # Something between the steps, and an attempt that begins at an earlier one, are no steps.
    durations.forget_step()
    durations.observe(290, now_s + 1000.0)
    durations.observe(200, now_s + 2000.0)
    assert durations.compute_long_step_s() == 0.25
    few = StepDurations()
    for step, at_s in enumerate((0.0, 1.0, 2.0, 5.0)):
        few.observe(step, at_s)
    assert few.compute_long_step_s() == 3.0


def test_the_first_steps_of_a_restart_make_no_step_a_long_one() -> None:
    """A hang soon after a restart was told after eight times what its first step took."""
    durations = StepDurations()
    # Of a run that begins they are all that is known.
    for step in range(3):
        durations.observe(step, 2.0 * step, warms_up=True)
    assert durations.compute_long_step_s() == 2.0
    now_s = 4.0
    for step in range(3, 303):
        now_s += 0.25
        durations.observe(step, now_s)
    assert durations.compute_long_step_s() == 0.25
    for _ in range(10):
        durations.begin_attempt()
        # The first look, and one after a slow first step, which has seen five steps begin.
        durations.observe(250, now_s, warms_up=True)
        durations.observe(254, now_s + 11.0)
        now_s += 11.0
        assert durations.compute_long_step_s() == 2.75
        for step in range(255, 259):
            now_s += 0.25
            durations.observe(step, now_s)
        assert durations.compute_long_step_s() == 0.25


@pytest.mark.parametrize("num_before", [100, 1000])
def test_a_restart_whose_steps_take_longer_is_given_their_time(num_before: int) -> None:
    """On fewer ranks, or with a cold cache: they would be taken for hung."""
    durations = StepDurations()
    for step in range(num_before):
        durations.observe(step, 0.1 * step)
    durations.begin_attempt()
    now_s = 1000.0
    for step in range(40, 60):
        durations.observe(step, now_s, warms_up=step < 43)
        now_s += 6.0
        if step > 41:
            assert durations.compute_long_step_s() == pytest.approx(6.0)


def test_short_steps_are_those_of_now() -> None:
    durations = StepDurations()
    # The first take longer, and before enough are known nothing is ruled out.
    for step, at_s in enumerate((0.0, 0.5, 1.0, 1.5)):
        durations.observe(step, at_s)
        assert durations.may_be_shorter_than(0.05)
    for step in range(4, 20):
        durations.observe(step, 0.5 * step)
    assert not durations.may_be_shorter_than(0.05)
    for poll in range(1, 9):
        durations.observe(19 + 25 * poll, 9.5 + 0.5 * poll)
    assert durations.may_be_shorter_than(0.05)


def test_stacks_are_grouped_the_odd_one_out_first() -> None:
    here, there = ["Stack:", '  File "a.py", line 1 in f'], ["Stack:", '  File "b.py", line 2 in g']
    stacks = {0: here, 1: here, 2: there, 3: here, 4: []}
    assert [group.ranks for group in group_stacks(stacks)] == [(2,), (4,), (0, 1, 3)]
    assert [group.ranks for group in group_stacks(stacks, first=(0,))] == [(0, 1, 3), (2,), (4,)]
    assert find_odd_ranks(stacks) == (2, 4)
    assert find_odd_ranks({0: here, 1: there}) == ()
    assert format_stack_groups(group_stacks(stacks)) == [
        "rank 2:",
        '  File "b.py", line 2 in g',
        "rank 4: did not answer",
        "ranks 0, 1 and 3:",
        '  File "a.py", line 1 in f',
    ]
    # What called it is not compared: a rank that was kept and one that was forked anew do the same.
    deep = {rank: ["Stack:", *[here[1]] * 10, *([there[1]] * (rank == 2))] for rank in range(3)}
    assert find_odd_ranks(deep) == ()
    assert [group.ranks for group in group_stacks(deep)] == [(2,), (0, 1)]
    many = {rank: [f'File "a.py", line {rank} in f'] for rank in range(12)}
    lines = format_stack_groups(group_stacks(many))
    assert len(lines) == 2 * MAX_SHOWN_GROUPS + 1
    assert lines[-1] == "ranks 8-11: other stacks, not shown"


def test_the_line_of_a_stack_that_tells_most() -> None:
    ours = f'  File "{Path(phalanx.__file__).parent}/nn/loss.py", line 3 in loss'
    torchs = '  File "/venv/lib/python3.12/site-packages/torch/nn/linear.py", line 9 in forward'
    users = ['  File "/home/me/model.py", line 12 in forward', '  File "/me/a.py", line 1 in f']
    assert find_telling_line(["Stack:", torchs, ours, *users]) == "forward at model.py:12"
    assert find_telling_line(["Stack:", torchs, ours]) == "forward at linear.py:9"
    assert find_telling_line([]) == ""


def test_a_stack_ends_where_the_rank_was_started(tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    frames = [f'  File "/x/phalanx/{each}", line 7 in f' for each in ("train/trainer.py",) * 30]
    startup = [
        f'  File "/x/phalanx/{each}", line 7 in f' for each in ("run/rank.py", "launch/rank.py")
    ]
    lines = [STACK_FIRST_LINE, *frames, *startup, '  File "<frozen runpy>", line 1 in <module>']
    log.write_text("\n".join(["before", *lines, "after", ""]))
    assert read_main_thread_stack(log) == [STACK_FIRST_LINE, *frames]
    # In start-up that is where it is.
    log.write_text("\n".join([STACK_FIRST_LINE, *startup, ""]))
    assert read_main_thread_stack(log) == [STACK_FIRST_LINE, startup[0]]
