"""The time of a step: what must hold for every model, machine and layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from phalanx.core.errors import LayoutError
from phalanx.job.model import build_preset_shape
from phalanx.job.presets import find_preset
from phalanx.job.shapes.stored import BuiltInShape
from phalanx.job.work import AttentionWork, ModelWork
from phalanx.plan.accelerators import find_accelerator
from phalanx.plan.layout import Layout
from phalanx.plan.pipeline.generate import (
    generate_1f1b,
    generate_gpipe,
    generate_interleaved,
    generate_interleaved_zero_bubble,
)
from phalanx.plan.pipeline.schedule import Schedule
from phalanx.plan.pipeline.simulate import StageCosts, simulate_timeline
from phalanx.plan.timing.attention import estimate_attention_times
from phalanx.plan.timing.block import BLOCK_TIME_PARTS, BlockTimeEstimator
from phalanx.plan.timing.collectives import all_to_all_s, build_group_links
from phalanx.plan.timing.columns import build_setup_columns
from phalanx.plan.timing.constants import (
    TimingConstants,
    list_timing_constants,
    load_timing_constants,
)
from phalanx.plan.timing.machine import MachineRates, build_rates_of_accelerator
from phalanx.plan.timing.matmul import (
    compute_power_speed_factor,
    count_prologue_elements,
    estimate_matmul_s,
)
from phalanx.plan.timing.pipeline import StageTimes, estimate_bubble_s
from phalanx.plan.timing.setup import (
    MEGATRON_STACK,
    PHALANX_COMPILED_STACK,
    PHALANX_STACK,
    Precision,
    Recompute,
    StepSetup,
)
from phalanx.plan.timing.step import (
    estimate_step_columns,
    estimate_step_times,
    estimate_steps_of_setups,
)
from phalanx.plan.timing.step_time import STEP_TERMS, StepTime

LAYOUT = Layout(pp=2, dp_shard=4, tp=4)
BY_RANK = replace(MEGATRON_STACK, expert_dispatch="by rank")
IN_ORDER = replace(MEGATRON_STACK, expert_dispatch="by rank in order", launches_in_order=True)


def build_builtin_shape(name: str = "llama3-8b") -> BuiltInShape:
    preset = find_preset(name)
    assert preset is not None
    return build_preset_shape(preset)


@pytest.fixture(scope="module")
def machine() -> MachineRates:
    return build_rates_of_accelerator(find_accelerator("h100-sxm"))


def setup_of(**keys: object) -> StepSetup:
    plain = StepSetup(LAYOUT, zero_stage=1, num_microbatches=8, seq_len=4096, stack=MEGATRON_STACK)
    return replace(plain, **keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_computed_after_the_blocks_takes_as_long_as_in_one(
    machine: MachineRates, recompute: Recompute
) -> None:
    """A decoder behind an encoder had no time at all. It is never computed again, and is cut by no
    rule."""
    work = build_builtin_shape().work(4096)
    assert work is not None
    uncut = replace(
        work.blocks[0],
        matmuls=tuple(replace(matmul, cut="none") for matmul in work.blocks[0].matmuls),
        num_params=0,
    )

    def time(work: ModelWork, precision: Precision = "bf16", **keys: object) -> dict[str, float]:
        setup = setup_of(layout=Layout(dp_replicate=4), zero_stage=0, **keys)
        columns = build_setup_columns([setup])
        return estimate_step_columns(work, machine, precision, columns).take(0).terms

    moved = replace(work, blocks=work.blocks[:-8], after_blocks=(uncut,) * 8)
    assert moved.matmul_flops == work.matmul_flops
    assert moved.attention_flops == work.attention_flops
    once, inside = time(moved, recompute=recompute), time(work, recompute=recompute)
    plain = time(work)
    # 24 of 32 blocks are computed again.
    expected = plain["attention"] + (inside["attention"] - plain["attention"]) * 24 / 32
    assert once["attention"] == pytest.approx(expected)
    assert once["ideal"] == pytest.approx(plain["ideal"])
    # Outside of the blocks nothing multiplies in fp8.
    blocks = 4096 * 8 * sum(matmul.flops_per_token for matmul in uncut.matmuls)
    slower = time(moved, "fp8")["ideal"] / time(work, "fp8")["ideal"]
    head = work.num_head_tokens * work.head.flops_per_token
    in_fp8 = (work.matmul_flops - head) / 2
    assert slower == pytest.approx((in_fp8 + head + blocks / 2) / (in_fp8 + head), rel=0.01)


def test_terms_add_up_in_their_order(machine: MachineRates) -> None:
    time = estimate_step_times(build_builtin_shape(), machine, setup_of())
    assert tuple(time.terms) == STEP_TERMS
    assert time.total_s == pytest.approx(sum(time.terms.values()))
    assert time.low_s < time.total_s < time.high_s
    assert StepTime.from_json(time.to_json()) == time


def test_one_gpu_communicates_with_none(machine: MachineRates) -> None:
    setup = setup_of(layout=Layout(), zero_stage=0)
    terms = estimate_step_times(build_builtin_shape(), machine, setup).terms
    for term in ("tp", "cp", "ep", "bubble", "dp exposed", "offload"):
        assert terms[term] == 0.0
    assert terms["ideal"] > 0


@pytest.mark.parametrize("key", ["micro_batch_size", "num_microbatches", "seq_len"])
def test_more_work_takes_longer(machine: MachineRates, key: str) -> None:
    times = []
    for factor in (1, 2, 4):
        setup = setup_of()
        setup = replace(setup, **{key: factor * getattr(setup, key)})
        times.append(estimate_step_times(build_builtin_shape(), machine, setup).total_s)
    assert times == sorted(times)
    assert times[2] > 1.5 * times[0]


def test_more_layers_take_longer(machine: MachineRates) -> None:
    shape = build_builtin_shape()
    times = []
    for num_layers in (16, 32, 64):
        model = replace(shape, num_layers=num_layers)
        times.append(estimate_step_times(model, machine, setup_of()).total_s)
    assert times == sorted(times)


def test_many_setups_take_as_long_as_each_alone(machine: MachineRates) -> None:
    setups = [
        setup_of(),
        setup_of(recompute="full"),
        setup_of(layout=Layout(dp_shard=32), zero_stage=3),
        setup_of(layout=Layout(dp_shard=16, cp=2), zero_stage=3),
    ]
    together = estimate_steps_of_setups(build_builtin_shape(), machine, setups)
    for row, setup in enumerate(setups):
        alone = estimate_step_times(build_builtin_shape(), machine, setup)
        assert together.take(row).terms == pytest.approx(alone.terms)
    assert np.all(together.total_s > 0)


def test_blocks_that_take_equal_times_are_timed_once(machine: MachineRates) -> None:
    layouts = [Layout(dp_shard=16), Layout(pp=2, dp_shard=8), Layout(dp_shard=8, tp=2)]
    layouts.append(Layout(dp_replicate=4, dp_shard=4))
    setups = [setup_of(layout=layout, zero_stage=3 - row) for row, layout in enumerate(layouts)]
    setups.append(setup_of(recompute="full"))
    columns = build_setup_columns(setups)
    different, index = columns.group_by_block_times()
    assert (len(different.tp), len(different.pp)) == (3, 0)
    assert index[0] == index[1] == index[3]
    work = build_builtin_shape().work(4096)
    timer = BlockTimeEstimator(machine, "bf16", columns, load_timing_constants(), work.num_tokens)
    [(block, _)] = work.block_kinds
    expected = timer.estimate_block_times(block)
    found = replace(timer, columns=different).estimate_block_times(block).take(index)
    for part in BLOCK_TIME_PARTS:
        assert np.array_equal(getattr(found.forward, part), getattr(expected.forward, part))
        assert np.array_equal(getattr(found.backward, part), getattr(expected.backward, part))


def build_moved_constants(
    names: list[str],
) -> tuple[TimingConstants, npt.NDArray[np.bool_]]:
    """The constants as columns: first as they are, then with one of `names` moved in each row."""
    constants, specs = load_timing_constants(), list_timing_constants()
    columns = {}
    for row, name in enumerate(names):
        value, spec = getattr(constants, name), specs[name]
        other = spec.low if value > (spec.low + spec.high) / 2 else spec.high
        column = np.full((len(names) + 1, 1), value)
        column[row + 1] = 0.5 * (value + other)
        columns[name] = column
    return replace(constants, **columns), np.zeros(len(names), dtype=np.bool_)


def test_every_constant_moves_some_output() -> None:
    moe, dense = build_builtin_shape("deepseek-v2-lite"), build_builtin_shape()
    plain = replace(MEGATRON_STACK, attention="flash", overlaps_ep=True, overlaps_tp=True)
    setups = {
        "dense": (dense, setup_of()),
        "overlapped": (dense, setup_of(stack=plain, stages_per_rank=2)),
        "unfused": (dense, setup_of(stack=replace(MEGATRON_STACK, attention="unfused"))),
        "eager": (dense, setup_of(layout=Layout(dp_shard=32), zero_stage=3, stack=PHALANX_STACK)),
        "compiled": (
            dense,
            setup_of(layout=Layout(dp_shard=8, cp=2), stack=PHALANX_COMPILED_STACK),
        ),
        "by tensor": (
            dense,
            setup_of(stack=replace(plain, gathers_each_tensor=True, overlaps_gather=False)),
        ),
        "graph": (dense, setup_of(stack=replace(MEGATRON_STACK, launch="graph"))),
        "offload": (dense, setup_of(layout=Layout(dp_shard=16), zero_stage=3, offload="optimizer")),
        "experts": (moe, setup_of(layout=Layout(dp_shard=16, ep=16), stack=plain)),
        "by rank": (moe, setup_of(layout=Layout(dp_shard=16, ep=16), stack=BY_RANK)),
        "in order": (moe, setup_of(layout=Layout(dp_shard=16, ep=16), stack=IN_ORDER)),
        "8 bits": (dense, setup_of(precision="fp8")),
        "attention in 8 bits": (
            dense,
            setup_of(stack=replace(MEGATRON_STACK, attention_has_8_bits=True)),
        ),
        "4 bits": (dense, setup_of(precision="fp4")),
        "32 bits": (dense, setup_of(precision="fp32")),
    }
    odd = replace(dense, ffn_dim=14_330, head_dim=64, num_heads=64)
    setups["odd"] = (odd, setup_of(layout=Layout(dp_shard=8), zero_stage=1))
    machines = []
    for name in ("v100-sxm", "a100-sxm", "h100-sxm", "b200-sxm", "gb300"):
        machines.append(build_rates_of_accelerator(find_accelerator(name), power_share=0.8))

    names = [
        name for name in list_timing_constants() if not name.startswith("anchored_band")
    ]  # of scores of rows
    constants, moved = build_moved_constants(names)
    for machine in machines:
        for shape, setup in setups.values():
            work, columns = shape.work(setup.seq_len), build_setup_columns([setup])
            times = estimate_step_columns(work, machine, setup.precision, columns, constants)
            for values in (times.total_s, times.band):
                column = np.broadcast_to(values, (len(names) + 1, 1))[:, 0]
                moved |= column[1:] != column[0]
    assert [
        name for name, has_weight_moved in zip(names, moved, strict=True) if not has_weight_moved
    ] == []


@pytest.mark.parametrize(
    ("name", "v", "schedule"),
    [
        ("gpipe", 1, generate_gpipe(4, 12)),
        ("1f1b", 1, generate_1f1b(4, 12)),
        ("interleaved", 2, generate_interleaved(4, 12, 2)),
        ("interleaved-zero-bubble", 1, generate_interleaved_zero_bubble(4, 12, 1)),
    ],
)
def test_closed_forms_are_the_event_simulation(
    machine: MachineRates, name: str, v: int, schedule: Schedule
) -> None:
    pp, count, num_layers = 4, 12, 16
    setup = setup_of(layout=Layout(pp=pp), num_microbatches=count, schedule=name, stages_per_rank=v)
    one = np.ones(1)
    # A second a block: messages of no bytes are nothing beside it.
    stage = StageTimes(num_layers, one, 2 * one, one, 0 * one, 0 * one, 1.0, 0.0, 0.0)
    bubble = estimate_bubble_s(
        stage, 0 * one, build_setup_columns([setup]), machine, load_timing_constants()
    )
    per_stage = num_layers / (pp * v)
    costs = [StageCosts(per_stage, per_stage, per_stage)] * (pp * v)
    simulated = float(simulate_timeline(schedule, costs).step_s)
    busy = count * 3 * num_layers / pp
    assert busy + bubble[0] == pytest.approx(simulated, rel=1e-3)


def test_placement_decides_and_not_the_size_of_a_group(machine: MachineRates) -> None:
    four = np.full(3, 4.0)
    strides = np.array([1.0, 4.0, 8.0])
    group = build_group_links(four, strides, machine, load_timing_constants())
    # All in one node; two and two in two nodes, which share two NICs; one in each of four.
    assert list(group.together) == [4.0, 2.0, 1.0]
    inside, pairs, apart = group.ring_bytes_s
    assert inside > pairs > apart
    assert pairs == pytest.approx(2 * apart)
    assert group.latency_s[2] > group.latency_s[1] > group.latency_s[0]


def test_recomputing_more_takes_longer(machine: MachineRates) -> None:
    times = []
    for recompute in ("none", "selective", "per-op", "full"):
        times.append(
            estimate_step_times(
                build_builtin_shape(), machine, setup_of(recompute=recompute)
            ).total_s
        )
    assert times == sorted(times)


def test_faster_links_and_gpus_take_no_longer(machine: MachineRates) -> None:
    setup = setup_of(layout=Layout(dp_shard=32), zero_stage=3, num_microbatches=1)
    slow = build_rates_of_accelerator(find_accelerator("h100-sxm"), nic_gb_s=5.0)
    assert estimate_step_times(build_builtin_shape(), slow, setup).total_s > (
        estimate_step_times(build_builtin_shape(), machine, setup).total_s
    )
    older = build_rates_of_accelerator(find_accelerator("a100-sxm"))
    assert estimate_step_times(build_builtin_shape(), older, setup_of()).total_s > (
        estimate_step_times(build_builtin_shape(), machine, setup_of()).total_s
    )


def test_constants_out_of_bounds_are_refused() -> None:
    with pytest.raises(LayoutError, match="between"):
        load_timing_constants().override({"memory_efficiency": 1.5})
    with pytest.raises(LayoutError, match="memory_efficency"):
        load_timing_constants().override({"memory_efficency": 0.8})


def test_tensors_that_travel_alone_take_longer_the_more_ranks_share(machine: MachineRates) -> None:
    extra = []
    for ranks in (8, 64, 512):
        seconds = []
        for gathers_each_tensor in (False, True):
            stack = replace(
                MEGATRON_STACK, overlaps_gather=False, gathers_each_tensor=gathers_each_tensor
            )
            setup = setup_of(layout=Layout(dp_shard=ranks), stack=stack)
            seconds.append(estimate_step_times(build_builtin_shape(), machine, setup).total_s)
        extra.append(seconds[1] - seconds[0])
    assert 0 < extra[0] < extra[1] < extra[2]


def time_experts(
    machine: MachineRates, precision: Precision = "fp8", **stack: object
) -> dict[str, float]:
    """The terms of a step of a model with experts, on `stack`."""
    shape = build_builtin_shape("deepseek-v2-lite")
    layout = Layout(dp_shard=16, ep=16)
    changed = replace(MEGATRON_STACK, **stack)  # type: ignore[arg-type]
    setup = setup_of(layout=layout, precision=precision, stack=changed)
    return dict(estimate_step_times(shape, machine, setup).terms)


def test_experts_whose_sizes_the_cpu_reads_leave_the_gpu_without_work(
    machine: MachineRates,
) -> None:
    reading, knowing = time_experts(machine), time_experts(machine, reads_expert_sizes=False)
    num_forwards, num_blocks_with_experts = 8, 26
    waits = num_forwards * num_blocks_with_experts * load_timing_constants().expert_sync_s
    assert reading["launch"] - knowing["launch"] == pytest.approx(waits)
    graphs = [time_experts(machine, launch="graph", reads_expert_sizes=it) for it in (True, False)]
    assert graphs[0] == graphs[1]


def test_fused_experts_move_less_memory(machine: MachineRates) -> None:
    for precision in ("bf16", "fp8"):
        apart = time_experts(machine, precision)
        fused = time_experts(machine, precision, fuses_experts=True)
        assert fused["elementwise"] < apart["elementwise"]
        assert fused["matmul loss"] == apart["matmul loss"]


def test_tokens_beside_another_microbatch_leave_contention_alone(machine: MachineRates) -> None:
    shown = time_experts(machine)["ep"]
    contention = load_timing_constants().overlap_contention
    assert time_experts(machine, overlaps_experts=True)["ep"] == pytest.approx(contention * shown)


def test_a_dispatch_by_rank_sends_no_token_twice_to_a_place(machine: MachineRates) -> None:
    constants = load_timing_constants()
    constants = replace(constants, dispatch_efficiency=1.0, all_to_all_efficiency=1.0)
    num_bytes, no, yes = np.array([1e9]), np.zeros(1, bool), np.ones(1, bool)

    def send_s(ranks: int, copies: int, sends_by_rank: npt.NDArray[np.bool_]) -> float:
        group = build_group_links(np.array([float(ranks)]), np.ones(1), machine, constants)
        seconds = all_to_all_s(group, num_bytes, copies, sends_by_rank, constants)
        return float((seconds - group.latency_s)[0])

    # Of 8 copies drawn evenly over the 8 ranks of a node, 5.25 ranks get at least one; over the
    # two nodes of 16 ranks, both but for one in 128 tokens.
    assert send_s(8, 8, yes) / send_s(8, 8, no) == pytest.approx(1 - (7 / 8) ** 8)
    assert send_s(16, 8, yes) / send_s(16, 8, no) == pytest.approx(2 * (1 - 0.5**8) / 8)
    for ranks in (8, 16):
        assert send_s(ranks, 1, yes) == pytest.approx(send_s(ranks, 1, no))


def test_tokens_that_arrive_in_order_are_moved_less(machine: MachineRates) -> None:
    by_rank = time_experts(machine, expert_dispatch="by rank")
    in_order = time_experts(machine, expert_dispatch="by rank in order")
    assert in_order["elementwise"] < by_rank["elementwise"]
    assert in_order["ep"] == by_rank["ep"]


def test_fewer_blocks_beside_the_head_make_up_for_it(machine: MachineRates) -> None:
    one = np.ones(1)
    # A head of 6 seconds a microbatch beside 16 blocks of 3.
    stage = StageTimes(16, one, 2 * one, one, 0 * one, 6 * one, 1.0, 0.0, 2.0)
    bubbles = []
    for blocks in (0, 3, 2, 1):
        setup = setup_of(layout=Layout(pp=4), num_microbatches=12, last_stage_blocks=blocks)
        columns = build_setup_columns([setup])
        bubble = estimate_bubble_s(stage, 0 * one, columns, machine, load_timing_constants())
        bubbles.append(float(bubble[0]))
    # 4 blocks and the head take 18, 3 and it 15, 2 and it 12 (the others 15), 1 and it 9.
    assert bubbles[0] == pytest.approx(bubbles[1] + 12 * 3)
    assert bubbles[1] == pytest.approx(bubbles[2])
    assert bubbles[2] == pytest.approx(bubbles[3])


@pytest.mark.parametrize(
    ("gpu", "heads", "head_dim", "value_dim", "window", "eight_bits", "measured_s"),
    [
        ("gb200", 256, 192, 128, None, False, (0.977e-3, 3.383e-3)),
        ("gb300", 256, 192, 128, None, False, (0.864e-3, 3.127e-3)),
        ("gb200", 128, 128, 128, None, False, (0.391e-3, 1.198e-3)),
        ("gb200", 256, 64, 64, 128, False, (0.210e-3, 0.465e-3)),
        # The backward in 8 bits computes the pairs outside of the window as well.
        ("gb200", 256, 64, 64, 128, True, (0.195e-3, 1.731e-3)),
    ],
)
def test_attention_takes_about_what_cudnn_measured(
    gpu: str,
    heads: int,
    head_dim: int,
    value_dim: int,
    window: int | None,
    eight_bits: bool,
    measured_s: tuple[float, float],
) -> None:
    # NVIDIA/cudnn-frontend at 3929da2e, benchmark/sdpa_benchmark_training/results: causal.
    num_tokens = 4096
    pairs = num_tokens * (num_tokens + 1) // 2
    if window:
        pairs = num_tokens * window - window * (window - 1) // 2
    attention = AttentionWork(heads, heads, head_dim, value_dim, num_tokens, pairs, True)
    assert attention.has_window == bool(window)
    stack = replace(MEGATRON_STACK, attention_has_8_bits=eight_bits)
    columns = build_setup_columns([setup_of(layout=Layout(), seq_len=num_tokens, stack=stack)])
    machine = build_rates_of_accelerator(find_accelerator(gpu))
    constants = load_timing_constants()
    forward, backward = estimate_attention_times(attention, machine, "bf16", columns, constants)
    assert float((forward + backward)[0]) == pytest.approx(sum(measured_s), rel=0.35)


def test_a_short_inner_side_costs_faster_products_more(machine: MachineRates) -> None:
    # DeepGEMM's README of March 2025: fp8 on H800, 4,096 rows, TFLOP/s by columns and inner side.
    measured = {
        (32_768, 512): 590,
        (24_576, 1536): 990,
        (7168, 2048): 1025,
        (4096, 7168): 1304,
        (7168, 16_384): 1358,
    }
    constants = load_timing_constants()
    speeds = {}
    for (outputs, inputs), tflops in measured.items():
        sides = (np.array([4096.0]), np.array([float(outputs)]), np.array([float(inputs)]))
        prologue = count_prologue_elements(machine, "fp8", constants)
        seconds = estimate_matmul_s(*sides, 1.0, 1979e12, machine, constants, prologue, 1.0)
        speeds[inputs] = 2 * 4096 * outputs * inputs / float(seconds[0]) / tflops
    for inputs in (512, 1536, 2048, 7168):
        assert speeds[inputs] / speeds[16_384] == pytest.approx(1.0, abs=0.3), inputs
    elements = [
        count_prologue_elements(build_rates_of_accelerator(find_accelerator(gpu)), of, constants)
        for gpu, of in (("a100-sxm", "bf16"), ("h100-sxm", "bf16"), ("h100-sxm", "fp8"))
    ]
    assert elements[0] == pytest.approx(constants.matmul_prologue)
    assert elements[2] == pytest.approx(2 * elements[1], rel=0.01)
    assert 2.4 < elements[1] / elements[0] < 2.8


def test_blackwell_ultra_is_faster_than_its_watts_say() -> None:
    constants = load_timing_constants()
    plain, ultra = (
        build_rates_of_accelerator(find_accelerator(name)) for name in ("gb200", "gb300")
    )
    factors = [compute_power_speed_factor(machine, constants) for machine in (plain, ultra)]
    watts = (1400 / 1200) ** constants.power_exponent
    assert factors[1] / factors[0] == pytest.approx(watts * constants.ultra_speed)


def test_a_stated_latency_of_a_level_makes_its_steps_longer(machine: MachineRates) -> None:
    setup = setup_of(layout=Layout(pp=2, dp_shard=16, tp=8))
    seconds = []
    for latency_s in (0.0, 1e-6, 1e-3, 1e-2):
        outer = replace(machine.links[1], latency_s=latency_s)
        slower = replace(machine, links=(machine.links[0], outer))
        seconds.append(estimate_step_times(build_builtin_shape(), slower, setup).total_s)
    # A microsecond is less than any software takes.
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]


@pytest.mark.parametrize("gpu", ["v100-sxm", "t4", "a100-sxm", "h100-sxm"])
def test_fp32_is_no_faster_than_the_peak_outside_of_tensor_cores(gpu: str) -> None:
    accelerator = find_accelerator(gpu)
    machine = build_rates_of_accelerator(accelerator)
    shape, layout = build_builtin_shape(), Layout(dp_shard=8)
    setup = setup_of(layout=layout, zero_stage=3, seq_len=2048, precision="fp32")
    times = estimate_step_times(shape, machine, setup)
    work = shape.work(2048)
    assert work is not None
    flops = 3 * work.matmul_flops * setup.num_sequences
    floor_s = flops / (8 * accelerator.fp32_tflops * 1e12)
    assert times.terms["ideal"] == pytest.approx(floor_s)
    assert times.terms["matmul loss"] > 0
    # 4 bytes for 2, and attention without FlashAttention.
    half = estimate_step_times(shape, machine, replace(setup, precision="fp16"))
    for term in ("elementwise", "attention"):
        assert times.terms[term] > 1.2 * half.terms[term], term
