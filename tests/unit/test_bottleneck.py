"""What bounds a run: verdicts over event files that the real writer's envelopes make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.recorded_steps import write_run

from phalanx.job.shapes.vit import VitShape
from phalanx.observe.events import (
    EvalFinished,
    Event,
    OperatorsCounted,
    RunStarted,
    StepFinished,
    wrap_event_in_envelope,
)
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.bottleneck.describe import (
    describe_basis,
    describe_bottleneck,
    describe_utilization,
    list_verdict_lines,
)
from phalanx.report.bottleneck.of_run import judge_run
from phalanx.report.bottleneck.step_table import read_step_table
from phalanx.report.end_of_run import list_end_of_run_lines
from phalanx.report.page import render_page
from phalanx.report.reduce import collect_run_facts
from phalanx.report.self_time import build_self_time_map
from phalanx.report.summary import build_run_json

PLAN = {"layout": {"dp_replicate": 4, "tp": 1}, "device": "cpu", "flops_per_token": 5e6}


def judge(run_dir: Path, plan: dict[str, Any] | None = None) -> BottleneckVerdict:
    verdict = judge_run(run_dir, PLAN if plan is None else plan)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("phase", ["forward", "backward", "data", "optimizer"])
def test_a_late_rank_is_named_with_its_phase_and_the_gain_of_mending_it(
    tmp_path: Path, phase: str
) -> None:
    run = write_run(tmp_path / "run", {2: {phase: 0.060}})
    main = judge(run).main
    assert main is not None
    assert (main.kind, main.rank, main.phase) == ("straggler", 2, phase)
    healthy_s = judge(write_run(tmp_path / "healthy", {})).mean_step_s
    assert main.speedup == pytest.approx(judge(run).mean_step_s / healthy_s, abs=0.03)


def test_a_rank_that_is_late_in_some_steps_is_named(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        {},
        delays_of_step=lambda rank, step: {"forward": 0.2 if rank == 1 and step % 3 == 0 else 0},
    )
    main = judge(run).main
    assert main is not None
    assert (main.kind, main.rank) == ("straggler", 1)


def test_ranks_that_are_late_in_turn_are_no_straggler(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        {},
        delays_of_step=lambda rank, step: {"forward": 0.05 if rank == step % 4 else 0},
    )
    main = judge(run).main
    assert main is not None
    assert (main.kind, main.rank) == ("uneven steps", None)


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        ("data", "data"),
        ("ckpt_write", "checkpoint"),
        ("unaccounted", "host overhead"),
    ],
)
def test_what_all_ranks_spend_is_no_straggler(tmp_path: Path, phase: str, kind: str) -> None:
    run = write_run(tmp_path / "run", {-1: {phase: 0.050}})
    verdict = judge(run)
    assert verdict.main is not None
    assert (verdict.main.kind, verdict.main.rank) == (kind, None)
    assert verdict.main.speedup == pytest.approx(verdict.mean_step_s / 0.106, abs=0.05)


def test_slow_loaders_of_all_ranks_are_no_straggler_though_one_began_later(tmp_path: Path) -> None:
    """The loaders of those that wait for it go on meanwhile: they too are too slow."""
    run = write_run(tmp_path / "run", {0: {"data": 0.10}, -1: {"data": 0.05}})
    verdict = judge(run)
    assert [(cause.kind, cause.rank) for cause in verdict.causes] == [("data", None)]


def test_a_late_rank_is_seen_behind_loaders_that_all_wait_for(tmp_path: Path) -> None:
    """Reading takes 250 ms beside a step of 100: a rank that computes 80 ms longer waits 80 less
    for its batch, and steps are as long as without it."""
    run = write_run(
        tmp_path / "run",
        {0: {"backward": 0.080, "data": 0.070}, 1: {"data": 0.150}, 2: {"data": 0.150}},
        num_ranks=3,
    )
    verdict = judge(run)
    named = [(cause.kind, cause.rank) for cause in verdict.causes]
    assert named == [("data", None), ("straggler", 0)]
    saved_share = sum(1 - 1 / cause.speedup for cause in verdict.causes)
    assert 1 / (1 - saved_share) == pytest.approx(0.254 / 0.104, rel=0.05)


def test_calls_of_small_operators_are_host_overhead(tmp_path: Path) -> None:
    """Eight microbatches of 600 operators of 10 us are 48 ms of a step of 104."""
    # Products at 50 GFLOP/s take 51 ms of it: at most the other half of forward and backward goes.
    counted = OperatorsCounted(3, 600, 8, 10e-6, 5e10)
    main = judge(write_run(tmp_path / "run", {}, more=(counted,))).main
    assert main is not None
    assert (main.kind, main.share) == ("host overhead", pytest.approx(0.048 / 0.1045, abs=0.02))
    # One microbatch has an eighth of it.
    assert main.speedup == pytest.approx(0.1045 / (0.1045 - 0.043), abs=0.06)
    assert "train.micro_batch_size" in main.action
    few = OperatorsCounted(3, 600, 1, 10e-6, 1e11)
    main = judge(write_run(tmp_path / "few", {}, more=(few,))).main
    assert main is not None
    assert main.kind == "compute"


def test_small_operators_are_no_more_than_forward_and_backward(tmp_path: Path) -> None:
    """Counted while another process slowed everything down: 200 ms of calls in 100 of them. What
    they save is not charged to another cause, too."""
    run = write_run(tmp_path / "run", {}, transfer_s=0.100, more=(
        OperatorsCounted(3, 10_000, 4, 5e-6, 1e11),
    ))  # fmt: skip
    verdict = judge(run)
    assert {cause.kind for cause in verdict.causes} == {"host overhead", "communication"}
    (overhead,) = [cause for cause in verdict.causes if cause.kind == "host overhead"]
    assert overhead.share == pytest.approx(0.5, abs=0.02)
    assert overhead.speedup == pytest.approx(1 / (1 - 0.375), abs=0.05)


def test_two_ranks_that_take_turns_are_named(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        {},
        num_ranks=8,
        delays_of_step=lambda rank, step: {
            "backward": 0.05 if rank == (2 if step % 2 else 5) else 0.0
        },
    )
    main = judge(run).main
    assert main is not None
    assert (main.kind, main.subject) == ("uneven steps", "ranks 2, 5, late in turn")


def test_a_late_rank_behind_loaders_is_named_by_what_is_not_loading(tmp_path: Path) -> None:
    """All wait for data, one more than the others, and it is late in its backward besides."""
    run = write_run(tmp_path / "run", {0: {"data": 0.05, "backward": 0.04}, -1: {"data": 0.05}})
    verdict = judge(run)
    (late,) = [cause for cause in verdict.causes if cause.kind == "straggler"]
    assert (late.rank, late.phase) == (0, "backward")


@pytest.mark.parametrize(
    ("plan", "event"),
    [
        (PLAN, EvalFinished(20, 2.0, 10, 1e18)),
        (PLAN, OperatorsCounted(3, 10**300, 10**300, 0.5, 1e11)),
        (PLAN, OperatorsCounted(3, 1, 1, 0.5, -1.0)),
        (PLAN, OperatorsCounted(3, 10**300, 1, 1e-5, 1e11)),
    ],
)
def test_numbers_of_a_damaged_file_raise_nothing(
    tmp_path: Path, plan: dict[str, Any], event: Event
) -> None:
    run = write_run(tmp_path / "run", {}, more=(event,))
    verdict = judge_run(run, plan)
    assert verdict is not None
    assert describe_bottleneck(verdict)


def test_a_pipeline_that_only_waits_has_a_gain_that_is_a_number(tmp_path: Path) -> None:
    plan = {**PLAN, "layout": {"pp": 4}}
    run = write_run(tmp_path / "run", {-1: {"pipeline": 5.0}})
    verdict = judge_run(run, plan)
    assert verdict is not None
    assert all(1 <= cause.speedup <= 100 and cause.share <= 1.01 for cause in verdict.causes)


def test_the_models_flops_are_held_beside_products_as_they_were_measured(tmp_path: Path) -> None:
    """5 MFLOP a token, 2,048 tokens a step of 104 ms on four ranks: 24.6 GFLOP/s of 100."""
    verdict = judge(
        write_run(tmp_path / "run", {}, more=(OperatorsCounted(3, 100, 1, 10e-6, 100e9),))
    )
    assert verdict.model_flops_utilization == pytest.approx(0.246, abs=0.01)
    assert verdict.main is not None
    assert any("% of what large products reach" in text for text in verdict.main.evidence)
    mfu = 100 * verdict.model_flops_utilization
    assert (
        describe_utilization(verdict) == f"MFU {mfu:.1f} % of what large products reach on rank 0"
    )
    assert verdict.to_json()["utilization_of"] == "measured products"
    assert any("memory bandwidth" in text for text in verdict.not_judged)
    unknown = judge(write_run(tmp_path / "unknown", {}))
    assert unknown.to_json()["model_flops_utilization"] is None
    assert unknown.to_json()["utilization_of"] is None
    # A GPU measures none: its data sheet stands in plan.json.
    by_data_sheet = judge_run(tmp_path / "unknown", {**PLAN, "peak_flops_per_s": 200e9})
    assert by_data_sheet is not None
    assert by_data_sheet.model_flops_utilization == pytest.approx(0.123, abs=0.005)
    assert describe_utilization(by_data_sheet).endswith("of the data sheet's peak")
    assert by_data_sheet.to_json()["utilization_of"] == "data sheet"
    assert describe_utilization(unknown) == ""
    recomputed = judge_run(tmp_path / "run", {**PLAN, "hardware_flops_per_token": 6.5e6})
    assert recomputed is not None
    assert recomputed.hardware_flops_utilization == pytest.approx(0.246 * 1.3, abs=0.01)
    assert f"HFU {1.3 * mfu:.1f} % (with what is recomputed)" in describe_utilization(recomputed)


def test_flops_are_those_of_tokens_and_not_of_targets(tmp_path: Path) -> None:
    """An image has one target, and as many tokens as patches: MFU was a seventeenth."""
    shape = VitShape(3, 64, 4, 4, 16, 256, image_size=32, patch_size=8, num_channels=3)
    counted = OperatorsCounted(3, 1, 1, 1e-6, 100e9)
    run = write_run(tmp_path / "run", {}, more=(counted,))
    plan = {**PLAN, "shape": shape.to_json(), "seq_len": 1, "global_batch_size": 2048}
    of_images = judge(run, plan)
    # Each step of this run has 2,048 targets: of a text of 2,048 tokens, or of as many images.
    by_targets = judge(run).model_flops_utilization
    assert by_targets > 0
    assert of_images.model_flops_utilization == pytest.approx(17 * by_targets)
    damaged = judge(run, {**plan, "shape": {**shape.to_json(), "patch_size": 0}})
    assert damaged.model_flops_utilization == by_targets


def test_a_late_rank_that_leaves_its_processor_to_others_has_an_upper_bound(tmp_path: Path) -> None:
    """On CPUs that ranks share, the others are faster while it sleeps."""
    sleeps = judge(write_run(tmp_path / "sleeps", {0: {"backward": 0.1}}, cpu_share_of={0: 0.5}))
    spins = judge(write_run(tmp_path / "spins", {0: {"backward": 0.1}}))
    assert sleeps.main is not None
    assert spins.main is not None
    assert (sleeps.main.is_upper_bound, spins.main.is_upper_bound) == (True, False)


def test_the_axis_whose_transfer_takes_longest_is_named(tmp_path: Path) -> None:
    """Of the rank that comes last: what others have more over an axis is waiting."""
    plan = {**PLAN, "layout": {"dp_replicate": 2, "tp": 2}}
    run = write_run(
        tmp_path / "run",
        {},
        transfer_s=0.050,
        communication=lambda seconds: {
            "tp: all_gather sequence": seconds - 0.015,
            "dp: all_reduce gradients": 0.010,
            "world: all_reduce step facts": 0.005,
        },
    )
    verdict = judge_run(run, plan)
    assert verdict is not None
    assert verdict.main is not None
    assert (verdict.main.kind, verdict.main.axis) == ("communication", "tp")
    assert any("tp: all_gather sequence 35" in text for text in verdict.main.evidence)


def test_transfer_is_communication_and_waiting_is_not(tmp_path: Path) -> None:
    slow_link = judge(write_run(tmp_path / "link", {}, transfer_s=0.050)).main
    assert slow_link is not None
    assert (slow_link.kind, slow_link.axis) == ("communication", "dp")
    late = judge(write_run(tmp_path / "late", {0: {"backward": 0.1}}))
    assert [cause.kind for cause in late.causes] == ["straggler"]


def test_two_causes_are_both_named_and_no_second_counts_twice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {3: {"backward": 0.080}, -1: {"data": 0.040}})
    verdict = judge(run)
    assert [cause.kind for cause in verdict.causes] == ["straggler", "data"]
    product = 1.0
    saved_s = 0.0
    for cause in verdict.causes:
        saved_s += verdict.mean_step_s * (1 - 1 / cause.speedup)
        product *= cause.speedup
    assert verdict.mean_step_s - saved_s == pytest.approx(0.106, abs=0.004)


def test_a_healthy_run_is_bound_by_computation(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path / "run", {}))
    assert [cause.kind for cause in verdict.causes] == ["compute"]
    assert "computation" in describe_bottleneck(verdict)


def test_ranks_without_a_processor_are_told_from_slow_kernels(tmp_path: Path) -> None:
    main = judge(write_run(tmp_path / "run", {}, cpu_share=0.3)).main
    assert main is not None
    assert main.kind == "no processor time"


def test_where_ranks_lack_a_processor_so_may_what_they_wait_for(tmp_path: Path) -> None:
    starved = judge(write_run(tmp_path / "starved", {}, cpu_share=0.3, transfer_s=0.1))
    assert {cause.kind for cause in starved.causes} == {"communication", "no processor time"}
    assert starved.not_judged == (
        "how much of the other causes is waiting for a processor: ranks had one for at most 30.2 %"
        " of the time in which they computed, and for how much of the rest nobody counted",
    )
    # Ranks that sleep until their next batch comes lack none.
    loads = write_run(tmp_path / "loads", {-1: {"data": 0.2}}, cpu_share=0.4)
    assert judge(loads).not_judged == ()


def test_evaluations_between_the_steps_count(tmp_path: Path) -> None:
    evaluations = tuple(EvalFinished(step, 2.0, 100, 1.0) for step in (10, 20, 30))
    main = judge(write_run(tmp_path / "run", {}, more=evaluations)).main
    assert main is not None
    assert main.kind == "evaluation"
    assert main.share == pytest.approx(3 / (3 + 37 * 0.105), abs=0.02)
    assert describe_bottleneck(judge(tmp_path / "run")) == (
        "evaluating, 43.5 % of the time of steps and of what lies between them: without it training"
        " would be at most 1.77 x faster"
    )


def test_ranks_of_a_pipeline_are_compared_within_their_stage(tmp_path: Path) -> None:
    # Stage 1 has more to do by its cut: that is no straggler.
    plan = {**PLAN, "layout": {"pp": 2, "dp_replicate": 2}}
    uneven = write_run(tmp_path / "uneven", {2: {"forward": 0.05}, 3: {"forward": 0.05}})
    assert all(cause.kind != "straggler" for cause in judge(uneven, plan).causes)
    late = write_run(tmp_path / "late", {3: {"forward": 0.05}})
    main = judge(late, plan).main
    assert main is not None
    assert (main.kind, main.rank) == ("straggler", 3)
    assert any(text.startswith("MFU: ") for text in judge(late, plan).not_judged)
    assert not any(text.startswith("MFU: ") for text in judge(late).not_judged)


def test_ranks_whose_files_are_lost_change_neither_stages_nor_rates(tmp_path: Path) -> None:
    """Stage 1 has more to do by its cut; of its ranks only 4 has a file."""
    plan = {**PLAN, "layout": {"pp": 2, "dp_replicate": 4}, "world_size": 8}
    delays = {rank: {"forward": 0.05} for rank in (4, 5, 6, 7)}
    counted = OperatorsCounted(3, 1, 1, 1e-6, 5e10)
    whole = write_run(tmp_path / "whole", delays, num_ranks=8, more=(counted,))
    lost = write_run(tmp_path / "lost", delays, num_ranks=8, more=(counted,))
    for rank in (5, 6, 7):
        (lost / "events" / f"rank-{rank:04}-attempt-00.jsonl").unlink()
    verdict = judge(lost, plan)
    assert [cause.kind for cause in verdict.causes if cause.rank is not None] == []
    assert verdict.model_flops_utilization == judge(whole, plan).model_flops_utilization > 0
    times = build_self_time_map(read_step_table(lost), 2, num_ranks=8)
    assert times is not None
    assert max(map(max, times.rows)) < 0.01


def test_the_layout_is_that_with_which_the_attempt_began(tmp_path: Path) -> None:
    """Of a run that goes on with fewer ranks plan.json is that of all of them."""
    plan = {**PLAN, "layout": {"pp": 2, "dp_replicate": 4}, "world_size": 8}
    began = RunStarted("run", "", 4, 0, 40, "cpu", {"pp": 1, "dp_replicate": 4})
    run = write_run(tmp_path / "run", {3: {"forward": 0.05}}, more=(began,))
    main = judge(run, plan).main
    assert main is not None
    assert (main.kind, main.rank) == ("straggler", 3)
    assert "others" in main.evidence[0]


def test_one_long_step_of_a_rank_is_no_straggler(tmp_path: Path) -> None:
    """Two seconds in one step of 37, a third of all of them: that tells nothing of the rank."""
    once = write_run(
        tmp_path / "once",
        {},
        delays_of_step=lambda rank, step: {"forward": 2.0 if (rank, step) == (1, 17) else 0},
    )
    verdict = judge(once)
    assert [(cause.kind, cause.rank) for cause in verdict.causes] == [("uneven steps", None)]
    lines = list_verdict_lines(verdict)
    assert any("is in step 17 alone" in line for line in lines)
    assert "in step 17 rank 1 was 2,00" in " ".join(lines)
    assert any("--since step:17" in line for line in lines)
    thrice = write_run(
        tmp_path / "thrice",
        {},
        delays_of_step=lambda rank, step: {"forward": 2.0 if rank == 1 and step % 12 == 5 else 0},
    )
    main = judge(thrice).main
    assert main is not None
    assert (main.kind, main.rank) == ("straggler", 1)


def test_what_one_step_has_alone_is_said_of_every_shared_cause(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", {}, delays_of_step=lambda rank, step: {"data": 2.0 if step == 17 else 0}
    )
    main = judge(run).main
    assert main is not None
    assert main.kind == "data"
    assert main.evidence[1].endswith("% of that is in step 17 alone")
    always = judge(write_run(tmp_path / "always", {-1: {"data": 0.05}})).main
    assert always is not None
    assert len(always.evidence) == 1


def test_the_newest_steps_of_ranks_have_no_first_ones(tmp_path: Path) -> None:
    """A first step that compiles is not what a plan's seconds are held beside."""
    run = write_run(
        tmp_path / "run", {}, delays_of_step=lambda rank, step: {"forward": 9.0 if step < 4 else 0}
    )
    facts = collect_run_facts(run)
    assert [rank.rank for rank in facts.newest_ranks] == [rank.rank for rank in facts.ranks]
    assert facts.ranks[0].mean_groups_s["forward"] > 0.5
    assert facts.newest_ranks[0].mean_groups_s["forward"] == pytest.approx(0.1 / 3)
    assert facts.newest_ranks[0].num_steps == 37
    sentence = build_run_json(facts)["bottleneck"]["sentence"]
    assert sentence.startswith("computation, ")


def test_waiting_in_turn_within_a_step_is_no_transfer(tmp_path: Path) -> None:
    """Rank 0 is late before one collective, rank 1 before the next: each waits for the other."""
    (tmp_path / "run" / "events").mkdir(parents=True)
    for rank in range(2):
        late = ("backward", "optimizer")[rank]
        waits = ("world: all_reduce step facts", "dp: all_reduce gradients")
        lines = []
        for step in range(1, 41):
            communication_s = {waits[rank]: 0.102, waits[1 - rank]: 0.002}
            phases_s = {"forward": 0.1, late: 0.1, "collective": 0.104}
            event = StepFinished(
                step, 2.0, 2048, 2048 * step, 1e-3, 1.0, 0.304, 1.0, phases_s, 0.0, 1,
                cpu_s=0.304, communication_s=communication_s,
            )  # fmt: skip
            lines.append(wrap_event_in_envelope(event, rank=rank, attempt=0, seq=step).to_line())
        path = tmp_path / "run" / "events" / f"rank-{rank:04}-attempt-00.jsonl"
        path.write_text("\n".join(lines) + "\n")
    (cause,) = judge(tmp_path / "run").causes
    assert (cause.kind, cause.share) == ("uneven steps", pytest.approx(0.1 / 0.304, abs=0.01))
    assert "one rank is late before one of them, another before the next" in cause.evidence[0]


def test_too_few_steps_do_not_suffice(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path / "run", {2: {"forward": 1.0}}, num_steps=12))
    assert not verdict.causes
    assert list_verdict_lines(verdict) == [
        "the evidence does not suffice: 9 steps after the first ones; it takes 10"
    ]


def give_run_a_second_attempt(run: Path, num_steps: int) -> None:
    """Rank files of an attempt that goes on from step 40, on two ranks of four."""
    for rank in range(2):
        start = RunStarted("run", "digest", 2, 40, 100, "cpu", {"dp_replicate": 2})
        told: list[Event] = [start]
        told += [
            StepFinished(
                40 + number, 2.0, 8, 8, 1e-3, 1.0, 0.5, 16.0, {"forward": 0.5}, 0.0, 1
            )
            for number in range(1, num_steps + 1)
        ]  # fmt: skip
        lines = [
            wrap_event_in_envelope(event, rank=rank, attempt=1, seq=seq).to_line()
            for seq, event in enumerate(told)
        ]
        path = run / "events" / f"rank-{rank:04}-attempt-01.jsonl"
        path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("num_steps", [0, 1, 12])
def test_where_the_last_attempt_has_too_few_steps_those_before_are_judged_and_named(
    num_steps: int, tmp_path: Path
) -> None:
    """As of a run whose rank died in its last evaluation, or that has just been started again."""
    run = write_run(tmp_path / "run", {2: {"forward": 0.06}})
    give_run_a_second_attempt(run, num_steps)
    facts = collect_run_facts(run)
    verdict = facts.bottleneck
    assert verdict is not None
    assert verdict.main is not None
    assert (verdict.attempt, verdict.num_ranks, verdict.main.rank) == (0, 4, 2)
    (basis,) = [text for text in list_verdict_lines(verdict) if text.startswith("looked at")]
    words = "steps 4 to 40 of 4 ranks in attempt 0 (the last one has too few)"
    assert basis.startswith(f"looked at: {words}, ")
    assert any(words in line for line in list_end_of_run_lines(facts))
    assert "steps 4 to 40 of attempt 0 (the last one has too few)" in render_page(facts)


def test_a_last_attempt_with_enough_steps_is_judged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {2: {"forward": 0.06}})
    give_run_a_second_attempt(run, 13)
    facts = collect_run_facts(run)
    assert facts.bottleneck is not None
    assert (facts.bottleneck.attempt, facts.bottleneck.num_ranks) == (1, 2)
    assert "in attempt" not in describe_basis(facts.bottleneck)


def test_where_no_attempt_has_enough_steps_it_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {2: {"forward": 1.0}}, num_steps=12)
    give_run_a_second_attempt(run, 0)
    why = "9 steps after the first ones; it takes 10"
    assert judge(run).why_not == why
    give_run_a_second_attempt(run, 8)
    assert judge(run).why_not == why.replace("9", "5")


def test_the_end_of_a_short_run_says_that_the_evidence_does_not_suffice(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {2: {"forward": 1.0}}, num_steps=12)
    why = "9 steps after the first ones; it takes 10"
    assert list_end_of_run_lines(collect_run_facts(run)) == [
        f"bounds  the evidence does not suffice: {why}"
    ]


def test_one_rank_alone_has_no_straggler_and_no_communication(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path / "run", {0: {"forward": 0.5}}, num_ranks=1), {})
    assert [cause.kind for cause in verdict.causes] == ["compute"]
    assert describe_basis(verdict).startswith("steps 4 to 40 of 1 rank, ")


def test_what_no_phase_times_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "run", {})
    layout = {**PLAN.get("layout", {}), "tp": 2}
    compiled = judge(tmp_path / "run", {**PLAN, "layout": layout, "compile": True})
    assert any("compiled blocks are not timed" in text for text in compiled.not_judged)
    unused = {**PLAN, "parallel": {"unused_parameters": "allow"}}
    assert any("DDP's last one" in text for text in judge(tmp_path / "run", unused).not_judged)
    for plan in (PLAN, {**PLAN, "compile": True}, {**PLAN, "layout": layout}):
        not_judged = " ".join(judge(tmp_path / "run", plan).not_judged)
        assert "compiled" not in not_judged
        assert "DDP" not in not_judged


def test_damaged_and_missing_files_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {2: {"forward": 0.06}})
    path = run / "events" / "rank-0003-attempt-00.jsonl"
    path.write_bytes(path.read_bytes()[:-70] + b"\n\xff\xfe{]\n")
    (run / "events" / "rank-0001-attempt-00.jsonl").unlink()
    main = judge(run, {"layout": [], "zero_stage": "x", "device": 7}).main
    assert main is not None
    assert main.rank == 2
    assert judge_run(tmp_path / "nowhere", PLAN) is None
