"""`phalanx plan --from RUN`: what a run measured, scaled by how the parts of a step grow; and the
layouts that `--autotune` runs."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.profiles import make_profile

from phalanx.core.errors import ExitCode, LayoutError, PhalanxError, UsageError
from phalanx.job.load import check_job, load_job
from phalanx.job.schema import Job
from phalanx.observe.bus import Bus
from phalanx.observe.events import MemoryMeasured, StepFinished
from phalanx.plan.calibrated.one_core import load_one_core_profile
from phalanx.plan.calibrated.step import (
    estimate_processor_seconds,
    estimate_step_from_profile,
)
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.stored_plan import (
    StoredPlanError,
    parse_stored_plan,
    read_stored_plan_or_none,
)
from phalanx.run import autotune
from phalanx.run.plan_from import GROUPS, extrapolate_plan_from_run, load_job_file_or_job_of_run

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = Cluster("cpu", 2, 2**36)
SMALL = (
    "model.dim=128",
    "model.num_layers=2",
    "model.num_heads=2",
    "data.seq_len=128",
    "train.global_batch_size=8",
    "parallel.ranks=2",
    "cluster.device=cpu",
)


def plan_of(*overrides: str) -> Plan:
    return make_plan(load_job(None, [*SMALL, *overrides]), cluster=CPU, vocab_size=257)


def write_run(
    run_dir: Path,
    *,
    slower: float,
    unattributed_s: float = 0.0,
    steps: int = 8,
    cpu_s: float = 0.0,
    attempt: int = 0,
) -> Plan:
    """A run whose ranks took `slower` times what one core's figures say, and `cpu_s` processor
    seconds a step."""
    plan = plan_of()
    terms = estimate_step_from_profile(plan, load_one_core_profile(CPU.num_devices)).terms
    seconds = {
        group: slower * sum(terms[name] for name in names) for group, names in GROUPS.items()
    }
    phases = {
        "forward": 0.4 * seconds["computing"],
        "backward": 0.6 * seconds["computing"],
        "collective": seconds["messages"],
        "optimizer": seconds["optimizer"],
    }
    run_dir.mkdir(parents=True, exist_ok=attempt > 0)
    (run_dir / "job.json").write_text(json.dumps(load_job(None, SMALL).to_json()))
    (run_dir / "plan.json").write_text(json.dumps(plan.to_json()))
    for rank in range(2):
        bus = Bus(rank=rank, attempt=attempt, run_dir=run_dir)
        for step in range(1, steps + 1):
            # The first step is slow, as first steps are.
            step_s = (sum(phases.values()) + unattributed_s) * (10 if step == 1 else 1)
            bus.emit(
                StepFinished(
                    step,
                    2.0,
                    512,
                    512 * step,
                    1e-3,
                    1.0,
                    step_s,
                    1.0,
                    phases,
                    unattributed_s,
                    0,
                    cpu_s=cpu_s,
                )
            )
        bus.close()
    return plan


@pytest.fixture(autouse=True)
def _no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("phalanx.run.plan_from.detect_cluster", lambda device: CPU)
    monkeypatch.setattr("phalanx.plan.described_cluster.list_visible_gpus", lambda: ())


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_the_run_itself_is_predicted_as_it_was_measured(tmp_path: Path, slower: float) -> None:
    plan = write_run(tmp_path / "run", slower=slower, unattributed_s=0.01)
    result = extrapolate_plan_from_run(tmp_path / "run", plan)
    assert result.run.num_steps == 6
    assert result.scales == {group: pytest.approx(slower) for group in GROUPS}
    assert result.step.total_s == pytest.approx(result.run.step_s)
    assert result.step.low_s < result.run.step_s < result.step.high_s
    assert result.waiting_s == 0


def test_a_larger_job_grows_as_its_parts_do_and_its_interval_widens(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=2.0)
    near = extrapolate_plan_from_run(tmp_path / "run", plan)
    far_plan = plan_of("model.num_layers=16", "model.dim=512", "model.num_heads=8")
    far = extrapolate_plan_from_run(tmp_path / "run", far_plan)
    grown = estimate_step_from_profile(far_plan, load_one_core_profile(CPU.num_devices)).total_s
    assert far.step.total_s == pytest.approx(2.0 * grown, rel=0.01)
    assert far.step.high_s / far.step.total_s > near.step.high_s / near.step.total_s


def test_steps_of_another_attempt_are_steps_of_their_own(tmp_path: Path) -> None:
    """Those that a restart repeats are not mixed with those before, nor are its first ones taken."""
    plan = write_run(tmp_path / "run", slower=1.0, steps=20)
    once = extrapolate_plan_from_run(tmp_path / "run", plan)
    write_run(tmp_path / "run", slower=4.0, steps=7, attempt=1)
    result = extrapolate_plan_from_run(tmp_path / "run", plan)
    assert result.run.num_steps == (20 - 2) + (7 - 2)
    assert result.run.step_s == pytest.approx(once.run.step_s)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is no JSON"), ("[]", "holds no plan"), ("{}", "the plan has no job_digest")],
)
def test_a_run_whose_plan_is_damaged_is_refused_in_words(
    tmp_path: Path, text: str, problem: str
) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    (tmp_path / "run" / "plan.json").write_text(text)
    with pytest.raises(StoredPlanError, match=problem):
        extrapolate_plan_from_run(tmp_path / "run", plan)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("schema", "phalanx.plan-search/1", "is a phalanx.plan-search/1, and no plan of a run"),
        ("num_microbatches", None, "the plan has no num_microbatches"),
        ("shape", None, "the plan has no shape"),
        ("micro_batch_size", "4", "micro_batch_size is '4'"),
        ("seq_len", -128, "seq_len is -128"),
        ("capacity_bytes", 2.5, "capacity_bytes is 2.5"),
        ("precision", 16, "precision is 16"),
        ("compile", "no", 'compile is "no", and no truth value'),
        ("peak_lr", float("nan"), "peak_lr is nan"),
        ("peak_lr", 10**400, "peak_lr is 1000"),
        ("shape.rope_theta", 10**400, "shape.rope_theta is 1000"),
        ("layout.tp", 2, "world_size is 2, and the layout has 4 ranks"),
        ("layout.dp_replicate", 0, "dp_replicate is 0"),
        ("layout.rows", 2, "the plan cannot be used"),
        ("micro_batch_size", 1, "global_batch_size is 8, and 1 microbatches of 1"),
        ("shape.dim", -128, "shape.dim is -128, and less than 0"),
        ("shape.dim", None, "the plan cannot be used"),
        ("shape.rope_theta", float("inf"), "shape.rope_theta is inf"),
        ("parallel.tp", 0, "the plan cannot be used"),
        ("alternatives.0.predicted_bytes.parameters", -1, "less than 0"),
        ("alternatives.0.predicted_bytes.parameters", "few", "no whole number"),
        ("alternatives.0.total_bytes", 7, "is 7, and its predicted_bytes add up to"),
        ("alternatives.0.layout", None, "the plan has no layout"),
        ("alternatives", [], "0 of its alternatives are chosen"),
        ("alternatives", [3], "an alternative has no predicted_bytes"),
        ("alternatives", {}, "alternatives is {}"),
    ],
)
def test_a_run_whose_plan_was_edited_is_refused_with_the_key(
    tmp_path: Path, key: str, value: Any, problem: str
) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    edit_json(tmp_path / "run" / "plan.json", key, value)
    with pytest.raises(StoredPlanError, match=re.escape(problem)) as caught:
        extrapolate_plan_from_run(tmp_path / "run", plan)
    assert caught.value.exit_code == ExitCode.JOB
    assert "\n" not in str(caught.value)


def edit_json(path: Path, key: str, value: Any) -> None:
    """Puts `value` where the dotted `key` leads to; None takes the key away."""
    body = json.loads(path.read_text())
    *way, last = key.split(".")
    part = body
    for name in way:
        part = part[int(name)] if isinstance(part, list) else part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    path.write_text(json.dumps(body))


def test_a_plan_of_another_batch_than_the_job_is_refused(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    edit_json(tmp_path / "run" / "plan.json", "global_batch_size", 16)
    edit_json(tmp_path / "run" / "plan.json", "micro_batch_size", 8)
    with pytest.raises(StoredPlanError, match="is 16, and the run's job says 8"):
        extrapolate_plan_from_run(tmp_path / "run", plan)


def test_a_plan_of_another_run_is_refused(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    other = plan_of("model.dim=64").to_json()
    (tmp_path / "run" / "plan.json").write_text(json.dumps(other))
    with pytest.raises(StoredPlanError, match=r"shape\.dim is 64, and the run's job says 128"):
        extrapolate_plan_from_run(tmp_path / "run", plan)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"step_s":', '"step_s":-', "has step_s -"),
        ('"step_s":', '"step_s":NaN,"old":', "has step_s nan"),
        ('"forward":', '"forward":-', "has phases_s.forward -"),
        ('"cpu_s":0.0', '"cpu_s":-1.0', "has cpu_s -1.0"),
    ],
)
def test_a_run_with_durations_that_no_clock_says_is_refused(
    tmp_path: Path, before: str, after: str, problem: str
) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    for path in (tmp_path / "run" / "events").iterdir():
        path.write_text(path.read_text().replace(before, after))
    with pytest.raises(StoredPlanError, match=f"step 1 of rank 0 {re.escape(problem)}"):
        extrapolate_plan_from_run(tmp_path / "run", plan)


def test_steps_that_rank_0_has_lost_are_not_taken_from_the_others(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    (path,) = (tmp_path / "run" / "events").glob("rank-0000-*")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:40])
    with pytest.raises(UsageError, match="has 3 steps on record, and 5 are needed"):
        extrapolate_plan_from_run(tmp_path / "run", plan)


def test_a_run_without_its_events_is_not_to_be_trained_longer(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    for path in (tmp_path / "run" / "events").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="has 0 steps on record") as caught:
        extrapolate_plan_from_run(tmp_path / "run", plan)
    assert caught.value.fix == "give a run that has trained"


@pytest.mark.parametrize(
    ("key", "value"),
    [("layout", {"dp_replicate": -1}), ("shape", {}), ("alternatives", [1])],
)
def test_whoever_can_do_without_a_plan_gets_none_of_a_damaged_one(
    tmp_path: Path, key: str, value: object
) -> None:
    path = tmp_path / "plan.json"
    body = plan_of().to_json()
    path.write_text(json.dumps(body))
    assert read_stored_plan_or_none(path) == plan_of()
    path.write_text(json.dumps(body | {key: value}))
    assert read_stored_plan_or_none(path) is None
    path.write_text("[" * 100_000)
    assert read_stored_plan_or_none(path) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [("kv_rank", None), ("dim", -1), ("rope_theta", math.nan), ("positions", "x"), ("kind", 3)],
)
def test_a_plan_whose_shape_has_another_value_than_any_model_is_none(
    key: str, value: object
) -> None:
    body = plan_of().to_json()
    body["shape"][key] = value
    with pytest.raises(StoredPlanError, match=key):
        parse_stored_plan(body)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_lost_files_is_refused(tmp_path: Path, rank: int) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    for path in (tmp_path / "run" / "events").glob(f"rank-{rank:04d}-*"):
        path.unlink()
    with pytest.raises(StoredPlanError, match=f"rank {rank} has no step on record"):
        extrapolate_plan_from_run(tmp_path / "run", plan)
    (tmp_path / "run" / "plan.json").unlink()
    with pytest.raises(StoredPlanError, match=r"the run has no plan\.json"):
        load_job_file_or_job_of_run(tmp_path / "run", None, [])


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.zero_stage=3", "train.micro_batch_size=2"],
        ["parallel.pp=2", "train.micro_batch_size=1"],
        ["parallel.tp=2", "train.recompute=full"],
        ["model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=64"],
        ["model.preset=vit-l16"],
    ],
)
def test_every_plan_is_read_as_it_was_written(overrides: list[str]) -> None:
    plan = plan_of(*overrides)
    assert parse_stored_plan(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    "path", sorted([*GOLDEN.glob("plans-*/*.json"), *GOLDEN.glob("*/run/plan.json")]), ids=str
)
def test_plans_of_earlier_releases_are_read(path: Path) -> None:
    parse_stored_plan(json.loads(path.read_text()))


def test_waiting_for_other_ranks_is_not_taken_for_messages(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    for path in (tmp_path / "run" / "events").iterdir():
        lines = []
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if "phases_s" in event:
                event["phases_s"]["collective"] += 1.0
                event["step_s"] += 1.0
            lines.append(json.dumps(event, separators=(",", ":")))
        path.write_text("\n".join(lines) + "\n")
    result = extrapolate_plan_from_run(tmp_path / "run", plan)
    assert result.scales["messages"] == pytest.approx(3.0)
    assert 0.9 < result.waiting_s < 1.0
    assert result.step.total_s == pytest.approx(result.run.step_s)


def test_products_of_a_small_run_take_what_one_core_needs(tmp_path: Path) -> None:
    """They were divided by hundreds of threads that no rank has, so that only what a kernel takes
    whatever its size was left of a step."""
    plan = plan_of("train.global_batch_size=64")
    step = estimate_step_from_profile(plan, load_one_core_profile(CPU.num_devices))
    work = plan.model_shape.work(plan.seq_len)
    assert work is not None
    flops = 3 * work.matmul_flops * 32
    assert 2e10 < flops / step.terms["ideal"] < 5e11
    assert step.terms["ideal"] > step.terms["launch"]


def test_a_larger_batch_takes_longer_in_proportion(tmp_path: Path) -> None:
    write_run(tmp_path / "run", slower=1.0)
    steps = []
    for batch in (64, 512):
        plan = plan_of(f"train.global_batch_size={batch}")
        steps.append(extrapolate_plan_from_run(tmp_path / "run", plan).step.total_s)
    assert 6 < steps[1] / steps[0] <= 8


def test_a_run_that_is_slower_than_its_estimate_leaves_open_how_it_grows(tmp_path: Path) -> None:
    near = write_run(tmp_path / "run", slower=3.0)
    assert not extrapolate_plan_from_run(tmp_path / "run", near)._describe_disagreement()
    far = plan_of("train.global_batch_size=128")
    result = extrapolate_plan_from_run(tmp_path / "run", far)
    by_kernel, by_token = result.explained_s
    assert by_kernel < result.step.total_s <= by_token
    assert result.step.low_s <= by_kernel
    assert result.step.high_s >= by_token
    assert any("outside of what was measured" in line for line in result.lines())


def test_cores_that_others_had_are_no_reason_to_doubt_the_estimate(tmp_path: Path) -> None:
    profile = load_one_core_profile(CPU.num_devices)
    cpu_s = estimate_processor_seconds(plan_of(), profile)
    write_run(tmp_path / "run", slower=3.0, cpu_s=cpu_s)
    far = plan_of("train.global_batch_size=128")
    result = extrapolate_plan_from_run(tmp_path / "run", far)
    by_kernel, by_token = result.explained_s
    assert by_token == pytest.approx(by_kernel, rel=0.02)
    assert not any("outside of what was measured" in line for line in result.lines())


def test_memory_is_scaled_by_the_measured_over_the_predicted_peak(tmp_path: Path) -> None:
    plan = write_run(tmp_path / "run", slower=1.0)
    mib = 2**20
    predicted = {"parameters": 100 * mib, "activations": 100 * mib, "peak": 200 * mib}
    bus = Bus(rank=0, run_dir=tmp_path / "run")
    bus.emit(MemoryMeasured(predicted, {"parameters": 100 * mib, "peak": 180 * mib}, 0))
    bus.close()
    result = extrapolate_plan_from_run(tmp_path / "run", plan)
    assert result.run.memory_ratio == pytest.approx(0.9)


def test_an_axis_that_the_run_had_not_makes_the_interval_wider(tmp_path: Path) -> None:
    write_run(tmp_path / "run", slower=1.0)
    job = load_job_file_or_job_of_run(tmp_path / "run", None, ["parallel.tp=2"])
    tensor_parallel = make_plan(job, cluster=CPU, vocab_size=257)
    assert extrapolate_plan_from_run(tmp_path / "run", tensor_parallel).step.terms["tp"] > 0


def test_what_is_no_run_and_what_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run is there"):
        load_job_file_or_job_of_run(tmp_path / "nothing", None, [])
    plan = write_run(tmp_path / "run", slower=1.0, steps=4)
    gpus = ["cluster.device=auto", "cluster.gpu=h100-sxm"]
    with pytest.raises(UsageError, match=r"--from is for this machine: .* planned for h100-sxm"):
        load_job_file_or_job_of_run(tmp_path / "run", None, gpus)
    with pytest.raises(UsageError, match="4 steps on record, and 5 are needed"):
        extrapolate_plan_from_run(tmp_path / "run", plan)


# Autotune


def list_names(*overrides: str) -> list[tuple[str, dict[str, Any]]]:
    job = load_job(None, [*SMALL, *overrides])
    return [(layout.name, layout.keys) for layout in autotune.rank_layouts_by_predicted_time(job)]


def test_every_family_comes_once_before_any_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, _ in list_names()]
    families = list(dict.fromkeys(names))
    assert set(families) == {"ddp", "zero1", "zero2", "zero3", "tp", "pp"}
    assert names[: len(families)] == families


def test_the_fastest_is_first_where_there_is_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "phalanx.run.plan_time.find_profile_of_cluster", lambda cluster: make_profile()
    )
    layouts = autotune.rank_layouts_by_predicted_time(load_job(None, SMALL))
    first_six = [layout.predicted_s or 0.0 for layout in layouts[:6]]
    assert first_six == sorted(first_six)
    assert all(first_six)


def test_what_is_not_predicted_comes_after_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile may lack an operation that some layouts need."""
    predict = autotune.predict_step_time_of_plan
    monkeypatch.setattr(
        "phalanx.run.plan_time.find_profile_of_cluster", lambda cluster: make_profile()
    )
    monkeypatch.setattr(
        autotune,
        "predict_step_time_of_plan",
        lambda plan: replace(predict(plan), step=None) if plan.layout.tp > 1 else predict(plan),
    )
    layouts = autotune.rank_layouts_by_predicted_time(load_job(None, SMALL))
    families = list(dict.fromkeys(layout.name for layout in layouts))
    assert families[-1] == "tp"


def test_what_the_job_fixes_stays() -> None:
    assert {name for name, _ in list_names("parallel.tp=2")} == {"tp"}
    assert len(list_names("parallel.tp=2")) > 1
    assert list_names("parallel.tp=2", "train.micro_batch_size=4") == [
        ("tp", {"tp": 2, "micro_batch_size": 4})
    ]


def test_layouts_are_those_of_the_search() -> None:
    """Experts over ranks, sequences over ranks and combinations were no families of the fixed list
    that was tried before."""
    experts = ["model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_dim=64"]
    long = ["data.seq_len=8192", "parallel.ranks=4", "cluster.memory_gib=64"]
    names = {name for name, _ in list_names(*experts, *long)}
    assert {"ep", "cp", "tp"} <= {axis for name in names for axis in name.split(" + ")}
    assert any(name.count(" + ") >= 2 for name in names)


def test_a_job_without_a_legal_layout_is_refused_with_the_reason() -> None:
    with pytest.raises(LayoutError):
        autotune.rank_layouts_by_predicted_time(
            load_job(None, [*SMALL, "model.num_heads=1", "parallel.tp=2"])
        )


def test_a_layout_is_run_as_a_short_copy_of_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With its keys where they belong, and nothing that is of the job's whole run."""
    trained: list[Job] = []

    def train(job: Job, **_: object) -> None:
        trained.append(check_job(job))
        raise PhalanxError("ran")

    monkeypatch.setattr(autotune, "train_job", train)
    long = ["optim.warmup_steps=10", "observe.trace_steps=[100]", "eval.every_steps=20"]
    saving = ["checkpoint.every=auto", "checkpoint.mtbf_hours=9", "resilience.min_ranks=2"]
    job = load_job(None, [*SMALL, *long, *saving, 'resilience.inject=["kill:rank=0,step=4"]'])
    keys = {"dp_replicate": 2, "micro_batch_size": 4, "recompute": "full"}
    layout = autotune.TunedLayout("dp", keys, plan_of(), None)
    tuned, _ = autotune._run_layout_for_some_steps(job, layout, tmp_path)
    assert tuned.why_not == "ran"
    (short,) = trained
    assert (short.parallel.dp_replicate, short.train.micro_batch_size) == (2, 4)
    assert (short.train.recompute, short.train.steps) == ("full", autotune.STEPS)
    assert short.run.dir == str(tmp_path)
    assert not short.resilience.inject
    assert not short.checkpoint.has_interval
