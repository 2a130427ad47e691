"""The numbers of docs/strategies.md: formulas of the field, and what phalanx's own planner says.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

from phalanx.core.units import GIB, format_bytes
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster, rank_capacity_bytes
from phalanx.plan.communication import cp_sent_bytes_per_step, pp_sent_bytes_per_step
from phalanx.plan.communication import ep_sent_bytes_per_step as sent_over_ep
from phalanx.plan.memory import MIXED_FP16_ADAM_STATE_BYTES, predict_model_state_bytes
from phalanx.plan.pipeline.closed_forms import (
    closed_form_bubble,
    closed_form_idle_s,
    closed_form_peak_in_flight,
)
from phalanx.plan.pipeline.simulate import StageCosts, simulate_timeline
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import Workload, build_workload, shard_shape

GPUS = 8
CARD = Cluster("cuda", GPUS, 80 * GIB)
ROOM = Cluster("cuda", GPUS, 2**50)  # so that what does not fit is planned, too
MODEL = (
    *(
        "model.preset=llama2-7b",
        "data.seq_len=4096",
        "train.global_batch_size=64",
        "train.micro_batch_size=1",
    ),
    *("precision.compute=bf16", f"parallel.ranks={GPUS}"),
)
LAYOUTS = (
    "dp_replicate=8",
    "zero_stage=1",
    "zero_stage=2",
    "zero_stage=3",
    "dp_replicate=2 dp_shard=4",
    "tp=8",
    "tp=2 zero_stage=3",
    "pp=8",
    "pp=8 schedule=zb-v",
    "pp=4 zero_stage=1",
    "cp=8 zero_stage=3",
)
WAYS = (
    "recompute=none",
    "recompute=selective",
    "recompute=full",
    "recompute=every-k recompute_every=2",
    "recompute=sqrt",
    "recompute=none offload_activations=true",
)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zb-v", "dualpipe-v")
EVEN = StageCosts(
    Fraction(1), Fraction(1), Fraction(1)
)  # forward and both halves of the backward take equally long


# What is sent, per rank, by ring algorithms


def all_reduce(num_bytes: float, ranks: int) -> float:
    return 2 * num_bytes * (ranks - 1) / ranks


def all_gather(num_bytes: float, ranks: int) -> float:
    """Of what is made; a reduce-scatter of what is taken, and an all-to-all, send as much."""
    return num_bytes * (ranks - 1) / ranks


def data_parallel_bytes(
    stage: int,
    params: float,
    root: float,
    ranks: int,
    *,
    microbatches: int = 1,
    compute: int = 4,
    staged: bool = False,
) -> float:
    """Of one step, as phalanx does it: fp32 gradients, weights gathered in `compute` bytes an
    element.

    `root`: parameters outside of blocks, which zero3 keeps from forward to backward. `staged`: in a
    pipeline, where weights are gathered once per step.
    """
    if stage == 0:
        return all_reduce(4 * params, ranks)
    if stage == 1:
        return 2 * all_gather(4 * params, ranks)
    once = staged or stage == 2
    gathered = params if once else 2 * (params - root) + root
    return all_gather(compute * gathered * (1 if staged else microbatches) + 4 * params, ranks)


def tensor_parallel_bytes(layers: int, tokens: float, dim: int, compute: int, tp: int) -> float:
    """Of one microbatch, with the sequence cut: four gathers and as many scatters a block, which
    send what four all-reduces do; two gathers a block once more in the backward, of inputs that
    nobody keeps whole; for embedding and head what two all-reduces send."""
    one = tokens * dim * compute
    return (4 * layers + 2) * all_reduce(one, tp) + 2 * layers * all_gather(one, tp)


# Tables


def job_of(section: str, keys: str) -> Job:
    return load_job(None, [*MODEL, *(f"{section}.{key}" for key in keys.split())])


def plan_of(job: Job) -> tuple[Plan, Workload]:
    plan = make_plan(job, cluster=ROOM)
    layout = plan.layout
    counts = {"micro_batch_size": plan.micro_batch_size, "num_microbatches": plan.num_microbatches}
    return plan, build_workload(
        job, plan.model_shape, **counts, tp=layout.tp, cp=layout.cp, ep=layout.ep
    )


def state_bytes_sent(plan: Plan) -> float:
    """Gradients and weights that one rank sends in a step."""
    layout, shape, staged = plan.layout, plan.model_shape, plan.layout.pp > 1
    params = shard_shape(shape, layout.tp).num_params / layout.pp
    root = (shape.num_params - shape.blocks_params) / layout.tp
    shards = layout.dp_shard * layout.cp if plan.parallel.zero_stage else layout.data_parallel_size
    sent = data_parallel_bytes(
        plan.parallel.zero_stage,
        params,
        root,
        shards,
        microbatches=plan.num_microbatches,
        compute=2,
        staged=staged,
    )
    if plan.parallel.zero_stage and layout.dp_replicate > 1:
        sent += all_reduce(4 * params / shards, layout.dp_replicate)
    return sent


def activation_bytes_sent(plan: Plan, work: Workload) -> float:
    """Activations and their gradients that one rank sends in a step; of a pipeline, the rank
    that sends most."""
    layout, shape = plan.layout, plan.model_shape
    sent = 0.0
    if layout.tp > 1:
        of_one = tensor_parallel_bytes(
            shape.num_layers, work.tokens, shape.dim, work.compute_bytes, layout.tp
        )
        sent += of_one * work.num_microbatches
    if layout.cp > 1:
        sent += cp_sent_bytes_per_step(shard_shape(shape, layout.tp), work)
    if plan.pipeline is not None:
        here = shard_shape(shape, layout.tp)
        sent += max(
            pp_sent_bytes_per_step(here, work, plan.pipeline, rank) for rank in range(layout.pp)
        )
    return sent


def layouts() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        (
            *(
                "`[parallel]`",
                "microbatches",
                "state",
                "activations",
                "gathered",
                "a rank",
                "of 80 GiB",
            ),
            *("weights and gradients sent", "activations sent", "bubble"),
        )
    ]
    for keys in LAYOUTS:
        job = load_job(
            None,
            [*MODEL, "train.recompute=selective", *(f"parallel.{key}" for key in keys.split())],
        )
        plan, work = plan_of(job)
        memory, total = plan.chosen.predicted_bytes, plan.chosen.total_bytes
        states = sum(memory[part] for part in ("parameters", "gradients", "optimizer"))
        fits = "fits" if total <= rank_capacity_bytes(job, CARD, GPUS) else "does not fit"
        waits = (
            ""
            if plan.pipeline is None
            else _percent(simulate_timeline(plan.pipeline.schedule(), plan.pipeline.costs).bubble)
        )
        numbers = (states, memory["activations"] + memory["loss"], memory["communication"], total)
        sent = (
            state_bytes_sent(plan) if plan.layout.data_parallel_size * plan.layout.cp > 1 else 0.0,
        )
        sent += (activation_bytes_sent(plan, work),)
        words = [f"`{keys}`", str(plan.num_microbatches), *map(_gib, numbers), fits]
        rows.append([*words, *(format_bytes(size) if size else "" for size in sent), waits])
    return rows


def elsewhere() -> list[Sequence[str]]:
    """One layout planned for the GPUs, and for CPUs with as much memory."""
    rows: list[Sequence[str]] = [("`zero_stage=3`, planned for", "kept by the allocator", "a rank")]
    keys = ["train.recompute=selective", "parallel.zero_stage=3"]
    for name, cluster in {"the GPUs": ROOM, "CPUs": replace(ROOM, device="cpu")}.items():
        chosen = make_plan(load_job(None, [*MODEL, *keys]), cluster=cluster).chosen
        rows.append((name, _gib(chosen.predicted_bytes["allocator"]), _gib(chosen.total_bytes)))
    return rows


def ways() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("`[train]`", "activations and loss", "a rank")]
    for keys in WAYS:
        job = load_job(
            None, [*MODEL, "parallel.zero_stage=3", *(f"train.{key}" for key in keys.split())]
        )
        memory = make_plan(job, cluster=ROOM).chosen.predicted_bytes
        rows.append(
            (f"`{keys}`", _gib(memory["activations"] + memory["loss"]), _gib(sum(memory.values())))
        )
    for offload in ("optimizer", "parameters"):
        keys = ["parallel.zero_stage=3", "train.recompute=full", f"parallel.offload={offload}"]
        memory = make_plan(load_job(None, [*MODEL, *keys]), cluster=ROOM).chosen.predicted_bytes
        name = f"`recompute=full`, `parallel.offload={offload}`"
        rows.append(
            (name, _gib(memory["activations"] + memory["loss"]), _gib(sum(memory.values())))
        )
    return rows


def zero() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("ranks", "ZeRO-1", "ZeRO-2", "ZeRO-3", "optimizer state alone")]
    for ranks in (2, 4, 8, 64, 1024):
        found = [
            predict_model_state_bytes(1, stage, ranks, MIXED_FP16_ADAM_STATE_BYTES)
            for stage in (0, 1, 2, 3)
        ]
        whole, *split = [sum(part.values()) for part in found]
        less = found[0]["optimizer"] / found[1]["optimizer"]
        rows.append(
            (
                f"{ranks:,}",
                *(f"{whole / one:.4g} times less" for one in split),
                f"{less:,.0f} times less",
            )
        )
    return rows


def bubbles() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("ranks p", "microbatches m", "(p-1)/m, of the ideal time", "(p-1)/(m+p-1), of a step")
    ]
    for ranks in (4, 8, 16):
        for count in (ranks, 4 * (ranks - 1), 4 * ranks):
            idle, part = (
                closed_form_idle_s("1f1b", ranks, count, EVEN),
                closed_form_bubble("1f1b", ranks, count, 1, EVEN),
            )
            assert idle is not None
            assert part is not None
            rows.append(
                (str(ranks), str(count), _percent(Fraction(idle) / (3 * count)), _percent(part))
            )
    return rows


def schedules() -> list[Sequence[str]]:
    ranks, count = 8, 32
    rows: list[Sequence[str]] = [
        ("schedule", "stages per rank", "bubble", "held by rank 0, in parts of the model")
    ]
    for name in SCHEDULES:
        stages = 1 if name in ("gpipe", "1f1b") else 2
        part = closed_form_bubble(name, ranks, count, stages, EVEN)
        held = closed_form_peak_in_flight(name, ranks, count, stages, 0)
        assert part is not None
        assert held is not None
        rows.append((f"`{name}`", str(stages), _percent(part), f"{held} of 1/{ranks * stages}"))
    return rows


def compressions() -> list[Sequence[str]]:
    """Bytes per element and rank."""
    rows: list[Sequence[str]] = [("ranks", "fp32", "bf16, fp16", "int8", "topk, 1 %")]
    for ranks in (8, 64, 128):
        plain = all_reduce(4, ranks)
        found = [all_reduce(2, ranks), 2 * all_gather(1, ranks), 0.01 * 8 * (ranks - 1)]
        rows.append(
            (
                str(ranks),
                f"{plain:.2f}",
                *(f"{size:.2f} ({_percent(size / plain)})" for size in found),
            )
        )
    return rows


def experts() -> list[Sequence[str]]:
    """Of zero3, so that experts are split whichever way."""
    rows: list[Sequence[str]] = [
        (
            "model",
            "experts",
            "all else",
            "active per token",
            "a rank, zero3",
            "a rank, zero3 and ep=8",
            "sent over ep",
        )
    ]
    for name in ("mixtral-8x7b", "deepseek-moe-16b", "qwen3-30b-a3b"):
        keys = [
            *MODEL,
            f"model.preset={name}",
            "train.global_batch_size=8",
            "train.recompute=selective",
        ]
        plain, _ = plan_of(load_job(None, [*keys, "parallel.zero_stage=3"]))
        spread, work = plan_of(load_job(None, [*keys, "parallel.zero_stage=3", "parallel.ep=8"]))
        shape = plain.model_shape
        of_experts = shape.experts.count_chosen_params()
        words = [
            _billions(count)
            for count in (of_experts, shape.num_params - of_experts, shape.num_active_params)
        ]
        memory = [_gib(plan.chosen.total_bytes) for plan in (plain, spread)]
        rows.append((f"`{name}`", *words, *memory, format_bytes(sent_over_ep(shape, work))))
    return rows


TABLES = {
    f.__name__: f
    for f in (elsewhere, layouts, ways, zero, bubbles, schedules, compressions, experts)
}


def with_tables(page: str) -> str:
    """`page` with every table between its marks as it is today."""

    def table(match: re.Match[str]) -> str:
        head, *rows = TABLES[match["name"]]()
        lines = [head, ["---"] * len(head), *rows]
        return (
            f"{match['mark']}\n{''.join(_line(row) for row in lines)}<!-- end of"
            f" {match['name']} -->"
        )

    mark = r"(?P<mark><!-- (?P<name>\w+): generated by make docs -->)\n.*?<!-- end of (?P=name) -->"
    return re.sub(mark, table, page, flags=re.DOTALL)


def _line(words: Iterable[str]) -> str:
    return f"| {' | '.join(words)} |\n"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _percent(part: float | Fraction) -> str:
    return f"{float(part):.1%}"


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f} B"
