"""Ranks that only lost another one keep their process and what they hold: training goes on at the
same step, and ends with the bits of a run that nothing happened to.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from commands import (
    TINY,
    Done,
    events,
    loss_curve,
    run,
    run_all,
    survivors,
    weights,
    write_text,
)
from holds import UNWATCHED, make_fault
from phalanx.core.errors import ExitCode
from phalanx.observe.events import (
    LayoutChanged,
    MemoryMeasured,
    RankFailed,
    RanksStarted,
    RunStarted,
    SamplesRead,
    StepFinished,
    StoreLost,
)
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE

STEPS, SAVED_EACH = 20, 10
# Its import ends a rank while it starts, in these attempts.
LEMON = """
import os
import signal
from phalanx.nn.objective import causal_cross_entropy

if os.environ["RANK"] == "{rank}" and int(os.environ["PHALANX_ATTEMPT"]) in [{attempts}]:
    os.kill(os.getpid(), signal.SIGKILL)
loss = causal_cross_entropy(64)
"""
LAYOUTS = {
    "ddp": ("parallel.ranks=2", "parallel.dp_replicate=2"),
    "ddp4": ("parallel.ranks=4", "parallel.dp_replicate=4"),
    "hsdp": ("parallel.ranks=4", "parallel.dp_replicate=2", "parallel.dp_shard=2"),
    "tp": ("parallel.ranks=4", "parallel.dp_replicate=2", "parallel.tp=2"),
    "zero1": ("parallel.ranks=2", "parallel.dp_shard=2", "parallel.zero_stage=1"),
    "zero3": ("parallel.ranks=2", "parallel.dp_shard=2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("live")
    write_text(folder / "text")
    return folder


def arguments(layout: str, name: str, *more: str) -> list[str]:
    return [
        "train",
        *TINY,
        "data.source=text",
        f"train.steps={STEPS}",
        f"checkpoint.every_steps={SAVED_EACH}",
        "checkpoint.asynchronous=false",
        "optim.lr=0.01",
        "observe.samples=true",
        f"run.dir={name}",
        *LAYOUTS[layout],
        *more,
    ]


def inject(*faults: str) -> str:
    return "resilience.inject=[" + ", ".join(f'"{fault}"' for fault in faults) + "]"


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    """A run of two ranks under ddp that nothing happens to."""
    done = run(*arguments("ddp", "straight"), cwd=folder)
    assert done.code == 0, done.err
    return folder / "straight"


def run_beside_undisturbed(folder: Path, layout: str, command: list[str]) -> Done:
    """How `command` ended. The reference, a run of `layout` to which nothing happens and which is
    called so, is done beside it if no test has had it before."""
    has_reference = (folder / layout).exists()
    commands = [command] if has_reference else [command, arguments(layout, layout)]
    done, *references = run_all(commands, folder)
    assert [reference.code for reference in references] in ([], [0]), references[0].err
    return done


def require_same_as_straight(straight: Path, run_dir: Path, done: Done) -> None:
    assert done.code == 0, done.err
    assert loss_curve(run_dir) == loss_curve(straight)
    assert weights(run_dir) == weights(straight)
    assert not survivors(run_dir)


@pytest.mark.long
def test_a_rank_that_is_frozen_beside_a_killed_one_costs_no_step(folder: Path) -> None:
    """Two of four replicas wait in a collective for the one that is frozen."""
    faults = inject("freeze:rank=1,step=5,phase=backward", "kill:rank=3,step=5,phase=collective")
    command = arguments("ddp4", "frozen and killed", faults)
    done = run_beside_undisturbed(folder, "ddp4", command)
    run_dir = folder / "frozen and killed"
    require_same_as_straight(folder / "ddp4", run_dir, done)
    assert [start.event.kept for start in events(run_dir, RanksStarted)] == [[], [0, 2]]
    assert "rank 1 is stopped while others leave after a failure: killed" in done.out
    assert "starting ranks 1 and 3 again beside ranks 0 and 2 (restart 1 of 3)" in done.out


def test_no_step_is_lost_in_any_phase(folder: Path, straight: Path) -> None:
    """Rank and phase of each kill differ; the rank that lives stays the same process throughout
    what is not its own death."""
    faults = (
        "kill:rank=1,step=3,phase=data",
        "kill:rank=0,step=6,phase=forward",
        "kill:rank=1,step=9,phase=backward",
        "kill:rank=0,step=12,phase=optimizer",
        "kill:rank=1,step=15,phase=optimizer",
        "kill:rank=0,step=18,phase=record",
    )
    done = run(
        *arguments("ddp", "each phase", inject(*faults), "resilience.max_restarts=10"),
        cwd=folder,
    )
    run_dir = folder / "each phase"
    require_same_as_straight(straight, run_dir, done)
    killed = [e.event.failed_rank for e in events(run_dir, RankFailed)]
    assert killed == [1, 0, 1, 0, 1, 0]
    starts = [e.event for e in events(run_dir, RanksStarted)]
    for before, after, rank in zip(starts[:-1], starts[1:], killed, strict=True):
        assert after.kept == [1 - rank]
        assert after.pids[1 - rank] == before.pids[1 - rank]
        assert after.pids[rank] != before.pids[rank]
    continued = [e.event for e in events(run_dir, RunStarted)][1:]
    assert [e.restored_from for e in continued] == [
        f"the memory of rank {1 - rank}" for rank in killed
    ]
    # Every step once on the record of every rank, with its samples: none was done again.
    for kind in (StepFinished, SamplesRead):
        recorded = Counter((e.rank, e.event.step) for e in events(run_dir, kind))
        assert recorded == {(rank, step): 1 for rank in range(2) for step in range(1, STEPS + 1)}
    assert len(re.findall(r"starting it again beside rank \d \(restart", done.out)) == len(faults)


# Ends rank 1 when all ranks have done step 7, where it calls METHOD.
LATE_LEMON = """
import os
import signal
from {module} import {name}
from phalanx.nn.objective import causal_cross_entropy

loss, call = causal_cross_entropy(64), {name}.{method}

def call_or_end(self, *given):
    step = self._state.step if hasattr(self, "_state") else given[0]
    if (os.environ["RANK"], os.environ["PHALANX_ATTEMPT"], step) == ("1", "0", 7):
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, *given)

{name}.{method} = call_or_end
"""


@pytest.fixture(scope="module")
def straight_with_lemon(folder: Path) -> Path:
    """As `straight`, with the loss of a lemon."""
    (folder / "whole_lemon.py").write_text(LEMON.format(rank=1, attempts=""))
    done = run(*arguments("ddp", "whole lemon", "model.objective=whole_lemon:loss"), cwd=folder)
    assert done.code == 0, done.err
    return folder / "whole lemon"


@pytest.mark.parametrize(
    ("module", "name", "method"),
    [
        ("phalanx.train.step_recorder", "StepRecorder", "_emit_step"),
        ("phalanx.data.loader", "TrainBatches", "record"),
    ],
    ids=["before the step's record", "before that of its samples"],
)
def test_killed_between_the_end_of_a_step_and_its_record(
    folder: Path, straight_with_lemon: Path, module: str, name: str, method: str
) -> None:
    """The step is done, and the new process records what is missing of it. Reference: the same
    undisturbed."""
    lemon, run_name = f"late_{method}", f"killed in {method}"
    (folder / f"{lemon}.py").write_text(LATE_LEMON.format(module=module, name=name, method=method))
    done = run(*arguments("ddp", run_name, f"model.objective={lemon}:loss"), cwd=folder)
    run_dir = folder / run_name
    require_same_as_straight(straight_with_lemon, run_dir, done)
    assert [e.event.step for e in events(run_dir, RunStarted)] == [0, 7]
    recorded = Counter((e.rank, e.event.step) for e in events(run_dir, StepFinished))
    assert recorded == {(rank, step): 1 for rank in range(2) for step in range(1, STEPS + 1)}

    def list_samples(of_run: Path) -> dict[tuple[int, int], tuple[list[int], str]]:
        read = events(of_run, SamplesRead)
        found = {(e.rank, e.event.step): (e.event.ranges, e.event.xxh3) for e in read}
        assert len(found) == len(read) == 2 * STEPS
        return found

    assert list_samples(run_dir) == list_samples(straight_with_lemon)


STOPPING = """
from phalanx.resilience.run_processes import find_store

def stop_store():
    find_store().suspend()
"""


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        ("zero3", "kill_store"),
        pytest.param("ddp", "kill_store", marks=pytest.mark.long),
        # One that is stopped would be waited for: the supervisor kills it.
        pytest.param("zero3", "stopping:stop_store", marks=pytest.mark.long),
    ],
)
def test_ranks_that_lose_their_store_train_on(folder: Path, layout: str, how: str) -> None:
    """A save beside training opens a group: there they need a store, and start again with what all
    of them hold, so that no step is done twice. Reference: the same layout undisturbed."""
    (folder / "stopping.py").write_text(STOPPING)
    fault, beside = f"{how}:rank=0,step=3,phase=forward", "checkpoint.asynchronous=true"
    run_dir = folder / f"{layout} without its store ({how[:4]})"
    command = arguments(layout, run_dir.name, beside, inject(fault))
    done = run_beside_undisturbed(folder, layout, command)
    require_same_as_straight(folder / layout, run_dir, done)
    (lost,) = events(run_dir, StoreLost)
    assert lost.event.ranks_go_on
    assert 3 <= lost.event.step <= SAVED_EACH
    (failed,) = events(run_dir, RankFailed)
    assert (failed.event.failed_rank, failed.event.step >= lost.event.step) == (-1, True)
    assert [e.event.kept for e in events(run_dir, RanksStarted)] == [[], [0, 1]]
    recorded = Counter((e.rank, e.event.step) for e in events(run_dir, StepFinished))
    assert recorded == {(rank, step): 1 for rank in range(2) for step in range(1, STEPS + 1)}


def test_a_store_that_nobody_comes_to_need_is_not_missed(folder: Path, straight: Path) -> None:
    done = run(
        *arguments("ddp", "not missed", inject("kill_store:rank=1,step=3,phase=data")), cwd=folder
    )
    require_same_as_straight(straight, folder / "not missed", done)
    assert [e.event.ranks_go_on for e in events(folder / "not missed", StoreLost)] == [True]
    assert not events(folder / "not missed", RankFailed)


@pytest.mark.parametrize(
    "layout", ["hsdp", *(pytest.param(name, marks=pytest.mark.long) for name in ("ddp4", "tp"))]
)
def test_shards_come_from_the_replica_that_holds_them(folder: Path, layout: str) -> None:
    """Reference: the same layout undisturbed."""
    fault = "kill:rank=2,step=14,phase=backward"
    run_dir = folder / f"{layout} killed"
    done = run_beside_undisturbed(folder, layout, arguments(layout, run_dir.name, inject(fault)))
    require_same_as_straight(folder / layout, run_dir, done)
    started = [e.event for e in events(run_dir, RunStarted)][1]
    assert started.step == 13
    assert started.restored_from == "the memory of ranks 0, 1 and 3"


@pytest.mark.parametrize("layout", ["zero3", pytest.param("zero1", marks=pytest.mark.long)])
def test_without_a_replica_the_checkpoint_has_the_state(folder: Path, layout: str) -> None:
    """The processes are kept all the same; what the dead rank alone held is on the disk."""
    fault = "kill:rank=1,step=14,phase=forward"
    run_dir = folder / f"{layout} killed"
    done = run_beside_undisturbed(folder, layout, arguments(layout, run_dir.name, inject(fault)))
    require_same_as_straight(folder / layout, run_dir, done)
    assert [e.event.kept for e in events(run_dir, RanksStarted)] == [[], [0]]
    started = [e.event for e in events(run_dir, RunStarted)][1]
    assert (started.step, started.restored_from.startswith("step-10")) == (10, True)


CLEARING = """
import os
import shutil
import signal

def clear_checkpoints_and_die(site):
    shutil.rmtree(site.run_dir / "checkpoints")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(folder: Path) -> None:
    """Somebody cleared up, or unmounted what they lie on: nothing is left of what one of two shards
    held, and all steps would be done again without a word."""
    (folder / "clearing.py").write_text(CLEARING)
    fault = inject("clearing:clear_checkpoints_and_die:rank=1,step=14,phase=forward")
    done = run(*arguments("zero3", "cleared", fault), cwd=folder)
    assert done.code == ExitCode.CHECKPOINT, done.out + done.err
    words = "the run's checkpoints are gone (that of step 10 was there, and now there is none)"
    assert words in done.err
    assert max(e.event.step for e in events(folder / "cleared", StepFinished)) <= 14
    assert len(events(folder / "cleared", RunStarted)) == 1


@pytest.mark.long
def test_before_the_first_checkpoint_nothing_is_lost(folder: Path, straight: Path) -> None:
    """Without a checkpoint the weights would be drawn again: they come from memory."""
    fault = "kill:rank=0,step=5,phase=backward"
    done = run(*arguments("ddp", "early", inject(fault)), cwd=folder)
    require_same_as_straight(straight, folder / "early", done)
    assert [e.event.step for e in events(folder / "early", RunStarted)] == [0, 4]


def test_what_a_kept_rank_holds_counts_as_memory_of_training(folder: Path) -> None:
    """Rank 0 keeps its process over two kills: its peak is that of training, and not what came on
    top of what it held. Reference: the same undisturbed."""
    large = ("model.dim=128", "model.num_layers=4", "train.steps=12")
    faults = inject("kill:rank=1,step=5,phase=backward", "kill:rank=1,step=9,phase=forward")
    first, second = run_all(
        [arguments("ddp", "measured", *large), arguments("ddp", "measured kept", *large, faults)],
        folder,
    )
    assert (first.code, second.code) == (0, 0), first.err + second.err

    def read_peak(name: str) -> int:
        return max(
            e.event.measured_bytes["peak"]
            for e in events(folder / name, MemoryMeasured)
            if e.rank == 0
        )

    assert read_peak("measured kept") >= 0.9 * read_peak("measured")


def test_killed_during_the_recovery(folder: Path, straight_with_lemon: Path) -> None:
    """The rank that was started again is killed before it trains: what the first survivor holds is
    still there. Reference: the same undisturbed."""
    (folder / "lemon.py").write_text(LEMON.format(rank=1, attempts="1"))
    fault, objective = "kill:rank=1,step=14,phase=backward", "model.objective=lemon:loss"
    done = run(*arguments("ddp", "twice", inject(fault), objective), cwd=folder)
    run_dir = folder / "twice"
    require_same_as_straight(straight_with_lemon, run_dir, done)
    assert [e.event.kept for e in events(run_dir, RanksStarted)] == [[], [0], [0]]
    assert [e.event.step for e in events(run_dir, RunStarted)][-1] == 13


FLAKY = """
import os
from phalanx.nn.objective import causal_cross_entropy

if (os.environ["RANK"], os.environ["PHALANX_ATTEMPT"]) in [("1", "1"), {more}]:
    raise ImportError("a file server that hands out half a file")
loss = causal_cross_entropy(64)
"""


def test_a_rank_that_fails_to_start_again_once_is_tried_once_more(
    folder: Path, straight_with_lemon: Path
) -> None:
    """Its process raises where it did not before; in two attempts one after the other it is
    gone."""
    (folder / "flaky.py").write_text(FLAKY.format(more=""))
    (folder / "gone.py").write_text(FLAKY.format(more='("1", "2")'))
    fault = inject("kill:rank=1,step=14,phase=backward")
    once, gone = run_all(
        [
            arguments("ddp", "flaky", fault, "model.objective=flaky:loss"),
            arguments("ddp", "gone", fault, "model.objective=gone:loss"),
        ],
        folder,
    )
    require_same_as_straight(straight_with_lemon, folder / "flaky", once)
    assert [e.event.kept for e in events(folder / "flaky", RanksStarted)][1] == [0]
    assert len(events(folder / "flaky", RanksStarted)) == 3
    assert gone.code == ExitCode.INTERNAL, gone.out + gone.err
    assert "ImportError: a file server" in gone.err
    assert len(events(folder / "gone", RanksStarted)) == 3


ASKED = """
import os
import signal
from phalanx.observe.events import RanksStarted
from phalanx.observe.tail import read_recorded_events
from phalanx.resilience.run_processes import find_supervisor

def ask_rank_0_and_die(site):
    (started,) = read_recorded_events(site.run_dir, RanksStarted, rank=-1)
    os.kill(started.event.pids[0], signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)

def ask_supervisor_and_die(site):
    find_supervisor(site.run_dir).send_signal(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_was_asked_to_stop_and_lost_another_one_stops_when_they_meet_again(
    folder: Path,
) -> None:
    (folder / "asking.py").write_text(ASKED)
    fault = inject("asking:ask_rank_0_and_die:rank=1,step=5,phase=forward")
    done = run(*arguments("ddp", "asked", fault), cwd=folder)
    assert done.code == ExitCode.PREEMPTED, done.out + done.err
    assert done.err == "stopped by a signal to a rank; the checkpoint of step 4 stands\n"


def test_a_stop_that_comes_while_a_rank_is_lost_loses_no_step(folder: Path, straight: Path) -> None:
    """A node dies, and the scheduler ends the job: before a recovery has begun."""
    (folder / "asking.py").write_text(ASKED)
    fault = inject("asking:ask_supervisor_and_die:rank=1,step=15,phase=backward")
    # Also of a machine that is busy the grace is long enough.
    done = run(*arguments("ddp", "stopped", fault, "resilience.grace_s=250"), cwd=folder)
    assert done.code == ExitCode.PREEMPTED, done.out + done.err
    assert done.err == "stopped by SIGTERM; the checkpoint of step 14 stands\n"
    words = "; starting it again beside rank 0 to save before the stop (restart 1 of 3)"
    assert words in done.out.replace("\n", " ")
    done = run("train", "--resume", "stopped", cwd=folder)
    require_same_as_straight(straight, folder / "stopped", done)


EDITED = """
import os
import signal
from pathlib import Path
from phalanx.nn.objective import causal_cross_entropy

loss = causal_cross_entropy(64)

def be_edited_and_die():
    Path(__file__).write_text(Path(__file__).read_text() + "loss = causal_cross_entropy(32)")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_would_compute_with_other_code_is_refused(folder: Path) -> None:
    """The user's module is edited while the run trains: the rank that is started again imports what
    it is now, beside one that has what it was."""
    (folder / "edited.py").write_text(EDITED)
    fault = inject("edited:be_edited_and_die:rank=1,step=5,phase=forward")
    done = run(*arguments("ddp", "edited", "model.objective=edited:loss", fault), cwd=folder)
    assert done.code == ExitCode.RESOURCES, done.out + done.err
    assert "module edited of rank 1 is not that of rank 0" in done.err.splitlines()[0]
    assert max(e.event.step for e in events(folder / "edited", StepFinished)) == 4
    assert not survivors(folder / "edited")


def test_fewer_ranks_and_all_of_them_again(folder: Path) -> None:
    """Rank 1 cannot be started two times: three ranks go on with the same batches, and at the next
    checkpoint all four do. Reference: four ranks to which nothing happens."""
    (folder / "lemon.py").write_text(LEMON.format(rank=1, attempts="1, 2"))
    # A small rate: other roundings are not to grow in a few steps.
    four = (
        "parallel.ranks=4",
        "parallel.dp_replicate=4",
        "train.global_batch_size=12",
        "optim.lr=1e-4",
    )
    first, second = run_all(
        [
            arguments("ddp", "all four", *four, "train.steps=30"),
            arguments(
                "ddp",
                "fewer",
                *four,
                "train.steps=30",
                "resilience.min_ranks=2",
                "model.objective=lemon:loss",
                # The three do not finish before phalanx has heard of the checkpoint of step 20.
                UNWATCHED,
                inject(
                    "kill:rank=1,step=14,phase=forward",
                    make_fault(folder, "until_stop", 28, attempt=3),
                ),
            ),
        ],
        folder,
    )
    assert first.code == second.code == 0, first.err + second.err
    assert second.out.count("-> 3 ranks (") == 1
    assert "; going on with 3 ranks (restart 3 of 3)" in second.out
    assert "the ranks save and leave, and phalanx starts all of them that the job" in second.out
    assert len(re.findall(r"stopping after step \d+: more ranks are started", second.out)) == 1
    assert "sigterm" not in second.out
    run_dir = folder / "fewer"
    changes = [e.event for e in events(run_dir, LayoutChanged)]
    assert [(e.num_ranks_before, e.num_ranks) for e in changes] == [(4, 3), (3, 4)]
    starts = [e.event for e in events(run_dir, RunStarted)]
    small = next(e for e in starts if e.world_size == 3)
    # Nothing is lost on the way down, nor on the way up, which is a save.
    assert (small.step, small.restored_from) == (13, "the memory of ranks 0-2")
    assert starts[-1].world_size == 4
    assert starts[-1].restored_from == f"step-{starts[-1].step}"
    # The same samples, added up in another order while there were three.
    expected, found = loss_curve_of_ranks(folder / "all four"), loss_curve_of_ranks(run_dir)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected != found
    proof = run("data", "ledger", "fewer", cwd=folder)
    assert "360 samples in 30 steps" in proof.out
    assert "each exactly once" in proof.out


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_of_two_sharded_replicas_one_goes_on_with_what_the_others_hold(
    folder: Path, rank: int
) -> None:
    """Whichever rank does not come back: the shards of a whole replica are held by those that are
    left, and no step is lost. Reference: the same undisturbed."""
    whole, fewer = "hsdp whole", f"hsdp without {rank}"
    own = ("train.global_batch_size=8", "optim.lr=1e-4", "resilience.min_ranks=2")
    (folder / f"lemon_{rank}.py").write_text(LEMON.format(rank=rank, attempts="1, 2"))
    objective = f"model.objective=lemon_{rank}:loss"
    fault = inject(f"kill:rank={rank},step=14,phase=forward")
    # No checkpoint after the failure: all ranks would be tried again there.
    saves = "checkpoint.every_steps=12"
    commands = [arguments("hsdp", fewer, *own, saves, objective, fault)]
    if not (folder / whole).exists():
        commands.append(arguments("hsdp", whole, *own, saves))
    for done in run_all(commands, folder):
        assert done.code == 0, done.err
    run_dir = folder / fewer
    (change,) = [e.event for e in events(run_dir, LayoutChanged)]
    assert (change.num_ranks_before, change.num_ranks) == (4, 2)
    last = [e.event for e in events(run_dir, RunStarted)][-1]
    assert (last.step, last.restored_from) == (13, "the memory of ranks 0 and 1")
    expected, found = loss_curve_of_ranks(folder / whole), loss_curve_of_ranks(run_dir)
    assert found == pytest.approx(expected, rel=TOLERANCE_OF_DTYPE["float32"])
    assert found.keys() == set(range(1, STEPS + 1))


@pytest.mark.long
@pytest.mark.parametrize("step", [14, 5], ids=["after a checkpoint", "before the first one"])
def test_a_newcomer_that_is_left_alone_does_not_lead(
    folder: Path, straight: Path, step: int
) -> None:
    """The rank that holds the state is killed while the one beside it, which holds nothing and is
    new, starts: the next attempt has the checkpoint's state, or draws all weights anew."""
    faults = inject(
        f"kill:rank=0,step={step},phase=backward", "kill:rank=1,step=0,phase=startup,attempt=1"
    )
    name = f"alone from {step}"
    done = run(*arguments("ddp", name, faults), cwd=folder)
    run_dir = folder / name
    require_same_as_straight(straight, run_dir, done)
    assert [e.event.failed_rank for e in events(run_dir, RankFailed)] == [0, 1]
    kept = [e.event.kept for e in events(run_dir, RanksStarted)]
    assert kept == [[], [1], []]
    begun = step // SAVED_EACH * SAVED_EACH
    assert [e.event.step for e in events(run_dir, RunStarted)] == [0, begun]


def loss_curve_of_ranks(run_dir: Path) -> dict[int, float]:
    """The last loss of each step on record: steps that were done again at another layout differ in
    their last bits."""
    return {e.event.step: e.event.loss for e in events(run_dir, StepFinished)}


def test_a_rank_that_does_not_start_ends_a_run_that_cannot_do_with_fewer(folder: Path) -> None:
    """Without min_ranks, and with a layout that has no smaller one, which is said at the start and
    at the end."""
    (folder / "lemon.py").write_text(LEMON.format(rank=1, attempts="1, 2, 3, 4"))
    more = (inject("kill:rank=1,step=14,phase=forward"), "model.objective=lemon:loss")
    tp = ("parallel.dp_replicate=1", "parallel.tp=2", "resilience.min_ranks=1")
    lost, uncut = run_all(
        [arguments("ddp", "lost", *more), arguments("ddp", "uncut", *more, *tp)], folder
    )
    assert lost.code == uncut.code == 10
    assert "deterministic failure before the first step" in lost.err
    assert "the run needs all ranks" not in lost.err
    why = "tp=2 has no smaller layout, for only data parallelism shrinks"
    assert f"ranks   the run ends if one does not come back: {why}" in uncut.out
    assert f"rank 1 does not start, and the run needs all ranks: {why}" in uncut.err


def test_all_ranks_start_anew_if_none_is_to_be_kept(folder: Path, straight: Path) -> None:
    fault = "kill:rank=1,step=14,phase=backward"
    done = run(*arguments("ddp", "anew", inject(fault), "resilience.keep_ranks=false"), cwd=folder)
    run_dir = folder / "anew"
    require_same_as_straight(straight, run_dir, done)
    assert [e.event.kept for e in events(run_dir, RanksStarted)] == [[], []]
    assert [e.event.step for e in events(run_dir, RunStarted)] == [0, 10]


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "zero3"])
def test_fifty_restarts_one_after_the_other(folder: Path, layout: str) -> None:
    """A kill every other step, of a drawn rank in a drawn phase. Reference: the same undisturbed."""
    draw = random.Random(11)
    num_ranks = int(LAYOUTS[layout][0].partition("=")[2])
    phases = ("data", "prepare", "forward", "backward", "collective", "optimizer", "record")
    faults = []
    for step in range(2, 102, 2):
        faults.append(
            f"kill:rank={draw.randrange(num_ranks)},step={step},phase={draw.choice(phases)}"
        )
    more = ("train.steps=104", "checkpoint.every_steps=1", "checkpoint.keep_last=2")
    first, second = run_all(
        [
            arguments(layout, f"{layout} quiet", *more),
            arguments(
                layout, f"{layout} fifty", *more, inject(*faults), "resilience.max_restarts=60"
            ),
        ],
        folder,
    )
    assert first.code == 0, first.err
    run_dir = folder / f"{layout} fifty"
    require_same_as_straight(folder / f"{layout} quiet", run_dir, second)
    assert len(events(run_dir, RankFailed)) == len(faults)
