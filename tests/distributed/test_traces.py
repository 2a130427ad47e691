"""Traces of real runs, read back with Perfetto's own classes and held beside the events of the same
steps: of ranks that reduce gradients, and of a pipeline that is asked while it runs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commands import DEADLINE_S, TINY, events, run, start, wait_until, watching, write_text
from perfetto_reader import ReadTrace, Slice
from phalanx.core.phases import PHASES
from phalanx.core.step_ranges import StepRange
from phalanx.mesh.clock_exchange import MeasuredOffset, exchange_clock_offsets
from phalanx.mesh.mesh import open_mesh
from phalanx.observe.events import StepFinished
from phalanx.observe.trace_part import list_trace_parts, read_trace_part
from phalanx.plan.layout import Layout
from phalanx.report.trace.merge import find_parts_of_steps, merge_trace_parts
from phalanx.train import step_tracer
from phalanx.train.step_tracer import StepTracer
from phalanx.train.trainer import Trainer
from ranks import run_ranks
from trained import Case, train_case

JOB = (*TINY, "data.source=text", "parallel.ranks=2", "checkpoint.at_end=false")
# Events round the seconds of a phase to microseconds.
ROUNDING_S = 1e-6


def require_same_seconds(
    trace: ReadTrace, run_dir: Path, steps: StepRange, *, clock_error_s: float = 0.0
) -> None:
    """The own times of the spans of each phase, rank and step are the seconds of its event; but for
    `record`: what recording a step takes is in its trace, and in the seconds of the next one."""
    own_s: dict[tuple[int, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for rank in (0, 1):
        for each in trace.slices(rank, "phases"):
            if each.name in PHASES:
                own_s[rank, each.args["step"]][each.name] += each.self_ns / 1e9
    num_compared = 0
    for envelope in events(run_dir, StepFinished):
        event = envelope.event
        assert isinstance(event, StepFinished)
        if steps.first <= event.step <= steps.last:
            found = own_s[envelope.rank, event.step]
            tolerance_s = ROUNDING_S + clock_error_s
            assert found.pop("record") > 0
            phases_s = {name: s for name, s in event.phases_s.items() if name != "record"}
            assert found == pytest.approx(phases_s, abs=tolerance_s, rel=1e-6)
            assert {"forward", "backward", "optimizer"} <= found.keys()
            num_compared += 1
    assert num_compared == 2 * steps.num_steps


def list_collectives(trace: ReadTrace, rank: int) -> list[Slice]:
    return [each for each in trace.slices(rank, "collectives") if "sequence" in each.args]


def test_a_trace_of_chosen_steps_agrees_with_their_events(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    done = run(
        "train", *JOB, "train.steps=8", "train.micro_batch_size=2", "run.dir=run",
        'observe.trace_steps=[3, "5:6"]', "observe.profile_steps=[6]", "checkpoint.every_steps=5",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    done = run("trace", "run", "--steps", "5:6", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert facts["missing_ranks"] == facts["unfinished_ranks"] == facts["unaligned_ranks"] == []
    assert (facts["num_clocks"], facts["clock_error_s"], facts["num_dropped"]) == (1, 0, 0)
    trace = ReadTrace((tmp_path / facts["file"]).read_bytes())
    require_same_seconds(trace, run_dir, StepRange(5, 6))

    # Both ranks are in a collective of all of them at once: none has its result before the last
    # has posted it.
    ranks: list[dict[Any, Slice]] = []
    for rank in (0, 1):
        found = {}
        for each in list_collectives(trace, rank):
            if each.name == "all_reduce":
                found[each.args["group"], each.args["sequence"]] = each
        ranks.append(found)
    assert ranks[0].keys() == ranks[1].keys()
    assert {group for group, _ in ranks[0]} >= {"world"}
    assert len(ranks[0]) >= 4, "gradients and facts of two steps"
    for key, one in ranks[0].items():
        other = ranks[1][key]
        assert one.args["bytes"] == other.args["bytes"] > 0
        assert max(one.start_ns, other.start_ns) < min(one.end_ns, other.end_ns)
        assert {one.args["end"], other.args["end"]} <= {"completed", "waited"}
    for rank in (0, 1):
        steps = {each.name: each for each in trace.slices(rank, "phases") if each.parent is None}
        assert list(steps) == ["step 5", "step 6"]
        assert [each.name for each in trace.slices(rank, "microbatches")] == [
            "microbatch 0", "microbatch 1", "microbatch 0", "microbatch 1",
        ]  # fmt: skip
        (memory,) = trace.of_rank(rank, "resident memory")
        assert min(value for _, value in memory.values) > 2**20
        # The save of step 5 goes on beside step 6, in a thread with collectives of its own. How far
        # it comes there is a matter of the disk.
        saves = list(trace.slices(rank, "phases beside training"))
        assert {each.name for each in saves} & {"ckpt_stage", "ckpt_write"}
        assert {each.args["step"] for each in saves} == {5}
        operators = list(trace.slices(rank, "operators"))
        assert {"aten::mm", "aten::embedding"} <= {each.name for each in operators}
        forward = [each for each in trace.slices(rank, "phases") if each.name == "forward"]
        embeddings = [each for each in operators if each.name == "aten::embedding"]
        # By the profiler's clock, on that of the phases: an operator of each microbatch's forward.
        assert len(embeddings) == 2
        for each, phase in zip(embeddings, forward[2:], strict=True):
            assert phase.args["step"] == 6
            assert phase.start_ns <= each.start_ns <= each.end_ns <= phase.end_ns
    done = run("trace", "run", cwd=tmp_path)
    assert (done.code, "choose with --steps: 3, 5:6" in done.problem) == (2, True)


def test_a_pipeline_is_traced_while_it_runs(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    num_microbatches = 4
    job = (
        *JOB, "model.num_layers=2", "model.tie_embeddings=false", "parallel.pp=2", "parallel.schedule=1f1b",
        "train.micro_batch_size=2", "train.steps=1000000", "run.dir=run",
    )  # fmt: skip
    run_dir = tmp_path / "run"
    with watching(start("train", *job, "observe.log_every=1", cwd=tmp_path)) as watched:
        watched.wait_for("step")
        done = run("trace", "run", "--next", "2", "--json", cwd=tmp_path)
        assert done.code == 0, done.err
        facts = json.loads(done.out)
        late = run("trace", "run", "--steps", "1:1", cwd=tmp_path)
        never = run("trace", "run", "--steps", "1000001", cwd=tmp_path)
        # A request that nobody waits for any more is taken back.
        waiting = start("trace", "run", "--steps", "999999", "--timeout", "4", cwd=tmp_path)
        out, err = waiting.communicate(timeout=DEADLINE_S)
        assert (waiting.returncode, out) == (6, "")
        # Not done, or on a busy machine not even answered: 4 s are few there.
        assert "in time" in err
        waiting = start("trace", "run", "--steps", "999998", cwd=tmp_path)
        asked, answer = (run_dir / "traces" / f"{name}.json" for name in ("request", "answer"))
        # The run takes it away at its next look, and answers: one of the two stays to be seen.
        wait_until(lambda: asked.exists() or "999998" in answer.read_text())
        os.killpg(waiting.pid, signal.SIGINT)
        waiting.communicate(timeout=DEADLINE_S)
        assert waiting.returncode == 130
        os.killpg(watched.process.pid, signal.SIGINT)
        assert watched.finish().code == 130
    assert (late.code, "step 1 is over" in late.problem) == (2, True)
    assert (never.code, "the run ends with step 1000000" in never.problem) == (2, True)
    assert not (run_dir / "traces" / "request.json").exists()

    steps = StepRange(facts["first_step"], facts["last_step"])
    assert steps.num_steps == 2
    trace = ReadTrace((tmp_path / facts["file"]).read_bytes())
    require_same_seconds(trace, run_dir, steps)
    for step in (steps.first, steps.last):
        actions = {}
        for rank in (0, 1):
            for each in trace.slices(rank, "pipeline actions"):
                if each.args["step"] == step:
                    assert each.name[0] == str(rank)
                    actions[each.name] = each
        assert len(actions) == 4 * num_microbatches
        for microbatch in range(num_microbatches):
            # On one clock what a stage computes from comes before.
            assert actions[f"0F{microbatch}"].end_ns <= actions[f"1F{microbatch}"].start_ns
            assert actions[f"1B{microbatch}"].end_ns <= actions[f"0B{microbatch}"].start_ns
    # Each microbatch sends a hidden state down and a gradient up.
    assert facts["num_arrows"] == 2 * 2 * num_microbatches
    starts: dict[int, Slice] = {}
    ends: dict[int, Slice] = {}
    for rank in (0, 1):
        for each in trace.slices(rank, "collectives"):
            starts |= dict.fromkeys(each.flows, each)
            ends |= dict.fromkeys(each.flow_ends, each)
    assert starts.keys() == ends.keys()
    for flow, begin in starts.items():
        assert begin.name == "send"
        assert begin.start_ns <= ends[flow].start_ns
        receive = ends[flow]
        while receive.parent is not None:
            receive = receive.parent
        assert receive.args["bytes"] == begin.args["bytes"]
        assert receive.track.process != begin.track.process
    done = run("trace", "run", cwd=tmp_path)
    assert done.code == 0, "of a run that has ended the only steps that were traced"


def measure_offsets(rank: int, shifts_ns: list[int], clocks: list[str]) -> MeasuredOffset | None:
    with open_mesh(Layout(dp_replicate=3), device="cpu") as mesh:
        return exchange_clock_offsets(
            mesh, clocks, lambda: time.perf_counter_ns() + shifts_ns[rank]
        )


def test_offsets_of_clocks_are_right_to_the_error_that_is_told() -> None:
    hour_ns = 3_600_000_000_000
    shifts_ns = [0, hour_ns, hour_ns]
    first, *others = run_ranks(3, measure_offsets, shifts_ns, ["a", "b", "b"])
    assert first is None
    assert others[0] == others[1], "ranks of one machine have one clock"
    assert abs(others[0].offset_ns + hour_ns) <= others[0].error_ns < 10**9
    assert run_ranks(3, measure_offsets, shifts_ns, ["a", "a", "a"]) == [None] * 3


class StepError(Exception):
    pass


def train_traced(rank: int, folder: Path, fails_at: int) -> None:
    """Train with a trace of steps 2 to 4, as ranks of two machines; rank 0 fails at a step."""
    # As where it is read: one machine has one clock.
    step_tracer.build_monotonic_clock_id = lambda: f"machine {rank}"  # type: ignore[attr-defined]

    def change(trainer: Trainer) -> None:
        recorder = trainer._recorder
        trainer._tracer = StepTracer(
            trainer.job,
            trainer.state.model,
            trainer.bus,
            folder,
            partial(recorder.exclude_from_next_step, "trace"),
        )
        record = recorder.record_last_step

        def record_or_fail() -> None:
            if trainer.state.step == fails_at:
                raise StepError
            record()

        recorder.record_last_step = record_or_fail  # type: ignore[method-assign]

    case = Case(2, {"dp_replicate": 2}, job={"observe": {"trace_steps": ("2:4",)}})
    if fails_at:
        with pytest.raises(StepError):
            train_case(rank, case, folder, change=change)
    else:
        train_case(rank, case, folder, change=change)


def test_ranks_of_two_machines_are_on_one_clock_with_its_error(tmp_path: Path) -> None:
    run_ranks(2, train_traced, tmp_path, 0)
    steps = StepRange(2, 4)
    data = bytearray()
    facts = merge_trace_parts(find_parts_of_steps(tmp_path, steps), steps, data.extend)
    assert (facts.num_clocks, facts.unaligned_ranks, facts.unfinished_ranks) == (2, (), ())
    assert facts.clock_error_s > 0
    offsets = read_trace_part(list_trace_parts(tmp_path)[1].path).of_kind("clock")
    assert len(offsets) == 2, "before the first step, and after the last"
    for offset in offsets:
        assert abs(offset.offset_ns) <= offset.error_ns, "it is one clock after all"
    # What the clocks seem to drift by is the error of both exchanges.
    trace = ReadTrace(bytes(data))
    require_same_seconds(trace, tmp_path, steps, clock_error_s=2 * facts.clock_error_s)


def test_a_run_that_fails_in_a_traced_step_leaves_the_steps_before(tmp_path: Path) -> None:
    run_ranks(2, train_traced, tmp_path, 3)
    steps = StepRange(2, 4)
    data = bytearray()
    facts = merge_trace_parts(find_parts_of_steps(tmp_path, steps), steps, data.extend)
    assert facts.unfinished_ranks == (0, 1)
    trace = ReadTrace(bytes(data))
    for rank in (0, 1):
        found = {each.args["step"] for each in trace.slices(rank, "phases")}
        assert found == {2, 3}, "what was recorded of the step that failed is there, too"
