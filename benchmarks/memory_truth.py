"""The plan's memory beside the true peak of each rank: `python benchmarks/memory_truth.py
--rows 60 --seed 1 --to FILE.jsonl`.

Configurations of every class are drawn from the seed before anything runs. Each is a run of
`phalanx train` of a few steps; true is the kernel's peak of pages of the rank's own (VmHWM), above
what it had before the model was built. Only ranks of at least 256 MiB are judged. A run that is
stopped goes on where it was: rows in FILE are not run again. `--markdown` prints the table of
docs/memory.md from FILE; `--plan-again` first plans its rows anew, with the formulas of today.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
JUDGED_FROM_BYTES = 256 * MIB
HEADROOM = 0.06
TIMEOUT_S = 600
COMMON = (
    "train.steps=3",
    "train.sample_tokens=0",
    "eval.tokens=1024",
    "observe.sinks=[]",
    "optim.warmup_steps=1",
)


@dataclass(frozen=True)
class Case:
    """A configuration: its class, and the overrides that make its job. `files` are written beside
    the run before it starts."""

    name: str
    overrides: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()


Draw = Callable[[random.Random], Case]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model and its batch. `states` and `activations`: the parts of them that one
    rank is roughly to have."""

    dim: int
    num_layers: int
    num_heads: int
    vocab: int
    seq_len: int
    micro_batch: int
    num_microbatches: int


def draw_sizes(
    rng: random.Random,
    *,
    states: float = 1.0,
    activations: float = 1.0,
    layers: tuple[int, ...] = (4, 5, 6, 8, 10),
    lengths: tuple[int, ...] = (128, 256, 512),
    vocabs: tuple[int, ...] = (512, 4096, 16384),
) -> Sizes:
    """Sizes for which a rough count, not the plan's, says 256 to 700 MiB."""
    while True:
        dim = rng.choice((256, 384, 512, 640, 768))
        sizes = Sizes(
            dim,
            rng.choice(layers),
            rng.choice([heads for heads in (4, 8, 16) if dim % heads == 0 and dim // heads >= 32]),
            rng.choice(vocabs),
            rng.choice(lengths),
            rng.choice((1, 2, 4, 8)),
            rng.choice((1, 1, 2)),
        )
        params = 12 * dim * dim * sizes.num_layers + 2 * sizes.vocab * dim
        tokens = sizes.micro_batch * sizes.seq_len
        kept = 90 * dim * tokens * sizes.num_layers
        rough = 16 * params * states + kept * activations
        if 300 * MIB < rough < 640 * MIB and tokens >= 128 and kept < 450 * MIB:
            return sizes


def describe_model(sizes: Sizes) -> list[str]:
    return [
        f"model.dim={sizes.dim}",
        f"model.num_layers={sizes.num_layers}",
        f"model.num_heads={sizes.num_heads}",
        f"model.vocab_size={sizes.vocab}",
    ]


def describe_batch(sizes: Sizes, readers: int) -> list[str]:
    return [
        f"data.seq_len={sizes.seq_len}",
        f"train.micro_batch_size={sizes.micro_batch}",
        f"train.global_batch_size={sizes.micro_batch * sizes.num_microbatches * readers}",
    ]


def draw_decoder_style(rng: random.Random) -> list[str]:
    """A family's manner of norms, activations, heads and positions."""
    style = rng.choice(("llama", "gpt2", "tied", "plain"))
    if style == "gpt2":
        return [
            "model.norm=layernorm",
            "model.activation=gelu_tanh",
            "model.bias=all",
            "model.positions=learned",
            "model.max_positions=1024",
        ]
    return {"llama": ["model.tie_embeddings=false"], "tied": ["model.tie_embeddings=true"]}.get(
        style, []
    )


def draw_built_in(name: str, *extra: str, readers: int = 2, ranks: int = 2, **shares: Any) -> Draw:
    def draw(rng: random.Random) -> Case:
        sizes = draw_sizes(rng, **shares)
        overrides = [
            *describe_model(sizes),
            *draw_decoder_style(rng),
            *describe_batch(sizes, readers),
            f"parallel.ranks={ranks}",
            *extra,
        ]
        return Case(name, tuple(overrides))

    return draw


def draw_precision(draw: Draw) -> Draw:
    """The same in fp32 or, half of the time, in bf16."""

    def draw_either(rng: random.Random) -> Case:
        precision = rng.choice(("fp32", "bf16"))
        case = draw(rng)
        return Case(case.name, (*case.overrides, f"precision.compute={precision}"), case.files)

    return draw_either


def draw_pipeline(schedule: str) -> Draw:
    def draw(rng: random.Random) -> Case:
        sizes = draw_sizes(rng, states=0.5, activations=1.5, layers=(4, 8, 12))
        num_microbatches = rng.choice((2, 4))
        overrides = [
            *describe_model(sizes),
            *draw_decoder_style(rng),
            f"data.seq_len={sizes.seq_len}",
            f"train.micro_batch_size={sizes.micro_batch}",
            f"train.global_batch_size={sizes.micro_batch * num_microbatches}",
            "parallel.ranks=2",
            "parallel.pp=2",
            f"parallel.schedule={schedule}",
        ]
        return Case(f"pp {schedule}", tuple(overrides))

    return draw


def draw_experts(name: str, *extra: str, states: float = 1.0) -> Draw:
    def draw(rng: random.Random) -> Case:
        sizes = draw_sizes(rng, states=states * 1.8, layers=(2, 3, 4), vocabs=(512, 4096))
        overrides = [
            "model.preset=small-mixtral",
            *describe_model(sizes),
            f"model.num_kv_heads={sizes.num_heads}",
            f"model.num_experts={rng.choice((4, 8))}",
            "model.experts_per_token=2",
            f"model.expert_ffn_dim={sizes.dim}",
            *describe_batch(sizes, 2),
            "parallel.ranks=2",
            *extra,
        ]
        return Case(name, tuple(overrides))

    return draw


def draw_vit(rng: random.Random) -> Case:
    sizes = draw_sizes(rng, lengths=(256,), vocabs=(512,))
    size = rng.choice((96, 128, 160))
    overrides = [
        "model.preset=small-vit",
        f"model.dim={sizes.dim}",
        f"model.num_layers={sizes.num_layers}",
        f"model.num_heads={sizes.num_heads}",
        f"model.image_size={size}",
        "model.patch_size=8",
        "model.num_classes=100",
        "data.source=memory_models:images",
        f"data.args={{size={size}, num_classes=100}}",
        f"train.micro_batch_size={sizes.micro_batch}",
        f"train.global_batch_size={2 * sizes.micro_batch * sizes.num_microbatches}",
        "parallel.ranks=2",
    ]
    return Case("vit", tuple(overrides))


def draw_hugging_face(name: str, *extra: str, states: float = 1.0) -> Draw:
    """Llama, GPT-2, Qwen 2 or Gemma of transformers, of a config.json."""

    def draw(rng: random.Random) -> Case:
        sizes = draw_sizes(rng, states=states)
        family = rng.choice(("llama", "gpt2", "qwen2", "gemma"))
        config = {
            "model_type": family,
            "vocab_size": sizes.vocab,
            "hidden_size": sizes.dim,
            "intermediate_size": 3 * sizes.dim,
            "num_hidden_layers": sizes.num_layers,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_heads,
            "head_dim": sizes.dim // sizes.num_heads,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": rng.random() < 0.5,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
        }
        if family == "gpt2":
            config = {
                "model_type": family,
                "vocab_size": sizes.vocab,
                "n_embd": sizes.dim,
                "n_layer": sizes.num_layers,
                "n_head": sizes.num_heads,
                "n_positions": 1024,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "bos_token_id": 0,
                "eos_token_id": 0,
            }
        overrides = [
            "model.kind=hf:FOLDER/config.json",
            "data.tokenizer=bytes",
            *describe_batch(sizes, 2),
            "parallel.ranks=2",
            *extra,
        ]
        return Case(name, tuple(overrides), (("config.json", json.dumps(config)),))

    return draw


def draw_own(name: str, *extra: str, states: float = 1.0) -> Draw:
    def draw(rng: random.Random) -> Case:
        sizes = draw_sizes(rng, states=states, lengths=(128, 256))
        args = f"vocab={sizes.vocab}, dim={sizes.dim}, num_layers={sizes.num_layers}"
        kind = rng.choice(("plain", "convolution"))
        if kind == "plain":
            args += f", num_heads={sizes.num_heads}, length={sizes.seq_len}"
        overrides = [
            f"model.kind=memory_models:build_{kind}",
            f"model.args={{{args}}}",
            *describe_batch(sizes, 2),
            "parallel.ranks=2",
            *extra,
        ]
        return Case(name, tuple(overrides))

    return draw


def list_draws() -> dict[str, Draw]:
    """How each class of configurations is drawn."""
    tp = ("parallel.tp=2",)
    half = {"states": 0.5, "activations": 0.7}
    classes: dict[str, Draw] = {
        "ddp": draw_precision(draw_built_in("ddp")),
        "hugging face": draw_precision(draw_hugging_face("hugging face")),
        "tp + sp": draw_precision(draw_built_in("tp + sp", *tp, readers=1, **half)),
        "pp 1f1b": draw_precision(draw_pipeline("1f1b")),
        "zero3": draw_precision(
            draw_built_in("zero3", "parallel.dp_shard=2", "parallel.zero_stage=3", states=0.6)
        ),
        "own": draw_precision(draw_own("own")),
        "recompute full": draw_built_in("recompute full", "train.recompute=full", activations=0.3),
        "experts": draw_precision(draw_experts("experts")),
        "vit": draw_precision(draw_vit),
        "zero1": draw_precision(
            draw_built_in("zero1", "parallel.dp_shard=2", "parallel.zero_stage=1", states=0.75)
        ),
        "tp": draw_precision(
            draw_built_in("tp", *tp, "parallel.sequence_parallel=false", readers=1, **half)
        ),
        "cp ring": draw_precision(
            draw_built_in("cp ring", "parallel.cp=2", readers=1, activations=0.5)
        ),
        "hf zero3": draw_precision(
            draw_hugging_face(
                "hf zero3", "parallel.dp_shard=2", "parallel.zero_stage=3", states=0.6
            )
        ),
        "recompute selective": draw_built_in(
            "recompute selective", "train.recompute=selective", activations=0.6
        ),
        "pp gpipe": draw_precision(draw_pipeline("gpipe")),
        "ep": draw_precision(draw_experts("ep", "parallel.ep=2", states=0.6)),
        "zero2": draw_precision(
            draw_built_in("zero2", "parallel.dp_shard=2", "parallel.zero_stage=2", states=0.75)
        ),
        "compile": draw_built_in("compile", "train.compile=true"),
        "pp interleaved": draw_precision(draw_pipeline("interleaved")),
        "hsdp": draw_precision(
            draw_built_in(
                "hsdp",
                "parallel.dp_replicate=2",
                "parallel.dp_shard=2",
                "parallel.zero_stage=3",
                readers=4,
                ranks=4,
                states=0.6,
            )
        ),
        "cp ulysses": draw_built_in(
            "cp ulysses",
            "parallel.cp=2",
            "parallel.cp_attention=ulysses",
            readers=1,
            activations=0.5,
        ),
        "own zero3": draw_own(
            "own zero3", "parallel.dp_shard=2", "parallel.zero_stage=3", states=0.6
        ),
        "recompute every-k": draw_built_in(
            "recompute every-k",
            "train.recompute=every-k",
            "train.recompute_every=2",
            activations=0.6,
        ),
        "pp interleaved-zero-bubble": draw_pipeline("interleaved-zero-bubble"),
        "hf recompute": draw_hugging_face("hf recompute", "train.recompute=full"),
        "recompute sqrt": draw_built_in("recompute sqrt", "train.recompute=sqrt", activations=0.5),
        "pp zb-v": draw_pipeline("zb-v"),
        "tp 4": draw_built_in("tp 4", "parallel.tp=4", readers=1, ranks=4, states=0.3),
        "hf tp": draw_hugging_face("hf tp", "parallel.tp=2", states=0.6),
        "own pp": draw_own("own pp", "parallel.pp=2", "train.global_batch_size=16", states=0.6),
    }
    return classes


def draw_cases(seed: int, rows: int) -> list[Case]:
    """`rows` configurations, the classes in turn."""
    rng = random.Random(seed)
    draws = list(list_draws().values())
    return [draws[index % len(draws)](rng) for index in range(rows)]


def run_case(case: Case) -> dict[str, Any]:
    """The row of one run: of each rank its plan and its true peak by the kernel."""
    with tempfile.TemporaryDirectory(prefix="memory-truth-") as folder:
        for name, text in case.files:
            Path(folder, name).write_text(text)
        overrides = [override.replace("FOLDER", folder) for override in case.overrides]
        command = [sys.executable, "-m", "phalanx", "train", f"run.dir={folder}/run"]
        search = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        began = time.monotonic()
        try:
            done = subprocess.run(
                [*command, *COMMON, *overrides],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=os.environ | {"PYTHONPATH": search},
            )
        except subprocess.TimeoutExpired:
            return {"case": case.name, "failed": f"took longer than {TIMEOUT_S} s"}
        row: dict[str, Any] = {"case": case.name, "seconds": round(time.monotonic() - began, 1)}
        if done.returncode != 0:
            ending = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
            return row | {"failed": " | ".join(ending[-3:])[:600]}
        return row | {"ranks": read_ranks(Path(folder))}


def read_ranks(run_dir: Path) -> list[dict[str, Any]]:
    ranks = []
    for path in sorted(run_dir.rglob("events/*.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event.get("event") == "memory_measured":
                keys = ("rank", "predicted_bytes", "measured_bytes", "peak_step", "peak_phase")
                ranks.append({key: event[key] for key in keys})
    return ranks


def error_of(rank: dict[str, Any]) -> float:
    """How far the true peak lies above the plan, as a fraction of the plan."""
    return float(rank["measured_bytes"]["peak"] / rank["predicted_bytes"]["peak"] - 1)


def find_worst_rank(row: dict[str, Any]) -> dict[str, Any] | None:
    """The judged rank with the largest error; None if no rank is judged."""
    judged = []
    for rank in row.get("ranks", ()):
        if rank["measured_bytes"]["peak"] >= JUDGED_FROM_BYTES:
            judged.append(rank)
    return max(judged, key=lambda rank: abs(error_of(rank)), default=None)


def summarize(rows: list[dict[str, Any]]) -> str:
    errors, failed, small = [], 0, 0
    for row in rows:
        worst = find_worst_rank(row)
        failed += "failed" in row
        if worst is not None:
            errors.append(error_of(worst))
        elif "failed" not in row:
            small += 1
    if not errors:
        return f"0 judged, {failed} failed, {small} below 256 MiB"
    sizes = sorted(map(abs, errors))
    p90 = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    too_low = sum(error > HEADROOM for error in errors)
    return (
        f"{len(errors)} judged, {failed} failed, {small} below 256 MiB: |true / plan - 1| median"
        f" {statistics.median(sizes):.1%}, p90 {p90:.1%}, max {sizes[-1]:.1%}, bias"
        f" {statistics.mean(errors):+.1%}; true more than {HEADROOM:.0%} above the plan: {too_low}"
    )


def print_markdown(rows: list[dict[str, Any]]) -> None:
    print("| class | plan | true | true / plan - 1 | at |")
    print("| --- | ---: | ---: | ---: | --- |")
    judged = []
    for row in rows:
        worst = find_worst_rank(row)
        if worst is not None:
            judged.append((row, worst))
    judged.sort(key=lambda pair: -abs(error_of(pair[1])))
    for row, rank in judged:
        plan, true = rank["predicted_bytes"]["peak"], rank["measured_bytes"]["peak"]
        moment = f"step {rank['peak_step']}, {rank['peak_phase']}"
        print(
            f"| {row['case']} | {plan / MIB:,.0f} MiB | {true / MIB:,.0f} MiB |"
            f" {error_of(rank):+.1%} | {moment} |"
        )
    print()
    print(summarize(rows))


def plan_again(rows: list[dict[str, Any]]) -> None:
    """Put what the plan says today in the place of what it said when the rows were run."""
    from phalanx.job.load import load_job
    from phalanx.plan.planner import make_plan

    sys.path.insert(0, str(Path(__file__).parent))
    for row in rows:
        if "failed" in row:
            continue
        case = draw_cases(row["seed"], row["index"] + 1)[-1]
        with tempfile.TemporaryDirectory() as folder:
            for name, text in case.files:
                Path(folder, name).write_text(text)
            overrides = [override.replace("FOLDER", folder) for override in case.overrides]
            job = load_job(None, [*COMMON, *overrides])
            # Text as bytes, and the end of a document.
            plan = make_plan(job, vocab_size=257)
        for rank in row["ranks"]:
            peak = plan.chosen.total_bytes
            if plan.pipeline is not None:
                ranks = plan.pipeline.predicted_rank_bytes
                peak = ranks[rank["rank"] % len(ranks)]
            rank["predicted_bytes"] = {"peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True, help="JSON lines; gone on with")
    parser.add_argument("--only", action="append", help="a class; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="print the table of what is there")
    parser.add_argument("--plan-again", action="store_true", help="by the formulas of today")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.to.exists():
        rows = [json.loads(line) for line in options.to.read_text().splitlines()]
    if options.plan_again:
        plan_again(rows)
    if options.markdown or options.plan_again:
        print_markdown(rows)
        return
    cases = draw_cases(options.seed, options.rows)
    known = {row["index"] for row in rows}
    began = time.monotonic()
    todo = [index for index in range(len(cases)) if index not in known]
    if options.only:
        todo = [index for index in todo if cases[index].name in options.only]
    for num_run, index in enumerate(todo, 1):
        row = {"index": index, "seed": options.seed} | run_case(cases[index])
        row["overrides"] = list(cases[index].overrides)
        rows.append(row)
        with options.to.open("a") as file:
            file.write(json.dumps(row) + "\n")
        left_s = (time.monotonic() - began) / num_run * (len(todo) - num_run)
        print(f"{num_run}/{len(todo)} {describe_row(row)}  ETA {left_s / 60:.0f} min", flush=True)
    print(summarize(rows))


def describe_row(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['case']}: failed: {row['failed']}"
    worst = find_worst_rank(row)
    if worst is None:
        return f"{row['case']}: below 256 MiB"
    plan, true = worst["predicted_bytes"]["peak"], worst["measured_bytes"]["peak"]
    return (
        f"{row['case']}: plan {plan / MIB:,.0f}, true {true / MIB:,.0f} MiB"
        f" ({error_of(worst):+.1%}) in {worst['peak_phase']}"
    )


if __name__ == "__main__":
    main()
