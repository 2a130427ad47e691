"""The plan's memory beside a dry run of the same job: `python benchmarks/plan_against_dry_run.py`.

Every case is planned, and one rank of each of its usual kinds is run with fake tensors
(docs/dry-run.md), which needs no GPU. The table compares tensors alone: what an allocator, NCCL and
libraries take besides is in no dry run. `--json` prints what each phase holds by category, `--only
NAME ...` runs some cases, `--write` puts the table into docs/memory.md with the command and date.
`--plan-again FILE ...` runs nothing: it plans the rows of earlier `--json` with the formulas of
today.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.job.load import load_job
from phalanx.run.plan_job import PlannedJob, plan_job
from phalanx.verify.dry_run.report import RankKindReport, sum_planned_tensor_bytes
from phalanx.verify.dry_run.run_plan import dry_run_plan

SCHEMA_VERSION = 1
GIB = 2**30
PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
BEGIN, END = "<!-- plan against dry run: begin -->", "<!-- plan against dry run: end -->"
COMMAND = "python benchmarks/plan_against_dry_run.py --write"
COMMAND_OF_ROWS = "python benchmarks/plan_against_dry_run.py --plan-again rows.json --write"
H100 = ("cluster.gpu=h100-sxm", "precision.compute=bf16", "train.micro_batch_size=1")
LLAMA_CONFIG = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """One job: its name in the table, and the keys that make it. FOLDER in a key stands for a
    folder with `config.json`."""

    name: str
    keys: tuple[str, ...]


def make_case(name: str, preset: str, nodes: int, tokens: int, batch: int, keys: str = "") -> Case:
    """A preset on `nodes` machines of 8 H100, `batch` sequences of `tokens` tokens a step, one in a
    microbatch; `keys` of [parallel] and [train] are words of one string."""
    return Case(
        name,
        (
            *H100,
            f"cluster.nodes={nodes}",
            f"model.preset={preset}",
            f"data.seq_len={tokens}",
            f"train.global_batch_size={batch}",
            *keys.split(),
        ),
    )


FULL, SELECTIVE = "train.recompute=full", "train.recompute=selective"
SMALL = (
    "model.preset=small",
    "model.dim=256",
    "model.num_layers=6",
    "data.seq_len=512",
    "train.micro_batch_size=4",
    "cluster.memory_gib=64",
    "cluster.device=cpu",
)
VIT = (
    *H100,
    "cluster.nodes=1",
    "model.preset=vit-l16",
    "data.source=memory_models:images",
    "data.args={size=224, num_classes=1000}",
)


def list_cases() -> list[Case]:
    """The jobs of the table, dense models first."""
    return [
        *list_llama_cases(),
        *list_expert_cases(),
        *list_cases_of_other_models(),
        *list_offload_cases(),
        *list_cpu_cases(),
    ]


def list_llama_cases() -> list[Case]:
    """Llamas on 8 to 1024 GPUs."""
    return [
        make_case("8B zero3", "llama3-8b", 4, 8192, 32, "parallel.dp_shard=32"),
        make_case("8B hsdp", "llama3-8b", 8, 8192, 64, f"parallel.dp_shard=8 {SELECTIVE}"),
        make_case(
            "8B zero3, 4 microbatches", "llama3-8b", 4, 4096, 128, f"parallel.dp_shard=32 {FULL}"
        ),
        make_case("8B tp8", "llama3-8b", 4, 8192, 16, "parallel.tp=8 parallel.dp_shard=4"),
        make_case(
            "8B tp8, no sp",
            "llama3-8b",
            1,
            4096,
            1,
            "parallel.tp=8 parallel.sequence_parallel=false",
        ),
        make_case("8B cp8", "llama3-8b", 4, 131072, 4, f"parallel.cp=8 parallel.dp_shard=4 {FULL}"),
        make_case(
            "8B pp4",
            "llama3-8b",
            1,
            4096,
            16,
            "parallel.pp=4 parallel.dp_shard=2 parallel.zero_stage=1",
        ),
        make_case(
            "8B pp4 zb-v, zero2",
            "llama3-8b",
            4,
            4096,
            64,
            "parallel.pp=4 parallel.dp_shard=8 parallel.zero_stage=2 parallel.schedule=zb-v",
        ),
        make_case("70B zero3, full", "llama3-70b", 64, 8192, 512, f"parallel.dp_shard=512 {FULL}"),
        make_case(
            "70B tp8 pp4 zero1, full",
            "llama3-70b",
            32,
            8192,
            48,
            "parallel.tp=8 parallel.pp=4 parallel.dp_shard=8 parallel.zero_stage=1"
            " train.recompute=full",
        ),
        make_case(
            "405B tp8 pp16 zero1, full",
            "llama3-405b",
            128,
            8192,
            48,
            "parallel.tp=8 parallel.pp=16 parallel.dp_shard=8 parallel.zero_stage=1"
            " train.recompute=full",
        ),
    ]


def list_expert_cases() -> list[Case]:
    """Models with experts."""
    return [
        make_case(
            "deepseek-v2-lite ep8",
            "deepseek-v2-lite",
            4,
            4096,
            32,
            "parallel.dp_shard=32 parallel.ep=8",
        ),
        make_case(
            "qwen3-30b ep64",
            "qwen3-30b-a3b",
            8,
            4096,
            64,
            f"parallel.dp_shard=64 parallel.ep=64 {FULL}",
        ),
        make_case(
            "mixtral-8x7b ep8, zero2",
            "mixtral-8x7b",
            8,
            4096,
            64,
            f"parallel.dp_shard=64 parallel.ep=8 parallel.zero_stage=2 {SELECTIVE}",
        ),
    ]


def list_cases_of_other_models() -> list[Case]:
    """A ViT, a model of a config.json, and gpt2-xl."""
    config = ("model.kind=hf:FOLDER/config.json", "data.tokenizer=bytes", "data.seq_len=2048")
    return [
        Case(
            "ViT-L ddp",
            (*VIT, "train.micro_batch_size=32", "train.global_batch_size=256"),
        ),
        Case(
            "Llama config, zero3",
            (*H100, "cluster.nodes=1", *config, "train.global_batch_size=8", "parallel.dp_shard=8"),
        ),
        make_case("gpt2-xl ddp", "gpt2-xl", 1, 1024, 8, "parallel.dp_shard=1"),
        make_case("gpt2-xl ddp, 4 microbatches", "gpt2-xl", 1, 1024, 32, "parallel.dp_shard=1"),
        make_case(
            "gpt2-xl zero1, 4 microbatches",
            "gpt2-xl",
            1,
            1024,
            32,
            "parallel.dp_shard=8 parallel.zero_stage=1",
        ),
    ]


def list_offload_cases() -> list[Case]:
    """A Llama on one node that keeps a part of it in host memory."""
    return [
        make_case(
            "8B zero3, offload=optimizer",
            "llama3-8b",
            1,
            4096,
            8,
            f"parallel.dp_shard=8 parallel.offload=optimizer {FULL}",
        ),
        make_case(
            "8B zero3, activations offloaded",
            "llama3-8b",
            1,
            4096,
            8,
            f"parallel.dp_shard=8 train.offload_activations=true {FULL}",
        ),
    ]


def list_cpu_cases() -> list[Case]:
    """Small models on CPUs."""
    return [
        Case("small ddp, CPU", (*SMALL, "parallel.ranks=2", "train.global_batch_size=8")),
        Case(
            "small tp2, CPU",
            (*SMALL, "parallel.ranks=2", "parallel.tp=2", "train.global_batch_size=4"),
        ),
        Case(
            "small zero3, CPU",
            (*SMALL, "parallel.ranks=4", "parallel.dp_shard=4", "train.global_batch_size=16"),
        ),
    ]


def plan_case(keys: Sequence[str], folder: Path) -> PlannedJob:
    """The plan of a case's keys, whose config.json is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    job = load_job(None, [key.replace("FOLDER", str(folder)) for key in keys])
    return plan_job(job, checks_initial=False)


def run_case(case: Case, *, uses_cache: bool) -> dict[str, Any]:
    """The row of one case: of each kind of rank the plan, the dry run, and both by phase."""
    with tempfile.TemporaryDirectory(prefix="plan-against-dry-run-") as folder:
        planned = plan_case(case.keys, Path(folder))
        report = dry_run_plan(planned.job, planned.plan, uses_cache=uses_cache)
    return {
        "case": case.name,
        "keys": list(case.keys),
        "layout": report.layout,
        "kinds": [describe_kind(kind) for kind in report.kinds],
    }


def plan_row_again(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with the plan of today beside the dry run that it has."""
    if "kinds" not in row:
        return row
    with tempfile.TemporaryDirectory(prefix="plan-against-dry-run-") as folder:
        plan = plan_case(row["keys"], Path(folder)).plan
    ranks_per_stage = plan.world_size // plan.layout.pp
    for kind in row["kinds"]:
        rank = 0
        if plan.layout.pp > 1:
            # "pipeline rank 3"
            rank = int(kind["name"].split()[-1]) * ranks_per_stage
        by_category = sum_planned_tensor_bytes(plan.memory_of_rank(rank))
        kind["plan_by_category"] = by_category
        kind["plan_bytes"] = sum(by_category.values())
        kind["error"] = kind["plan_bytes"] / kind["dry_run_bytes"] - 1
    return row


def describe_kind(kind: RankKindReport) -> dict[str, Any]:
    return {
        "name": kind.name,
        "plan_bytes": kind.planned_total_bytes,
        "dry_run_bytes": kind.peak_bytes,
        "error": kind.plan_error,
        "when": kind.peak_when,
        "wall_s": kind.wall_s,
        "plan_by_category": dict(kind.planned_bytes),
        "dry_run_by_category": dict(kind.peak_by_category),
        "phases": find_phase_peaks(kind),
    }


def find_phase_peaks(kind: RankKindReport) -> dict[str, dict[str, Any]]:
    """The highest moment of each phase of the dry run."""
    peaks: dict[str, dict[str, Any]] = {}
    for row in kind.timeline:
        phase = row.when.split()[0].rstrip(",")
        if " of loss" in row.when and phase == "forward":
            phase = "loss"
        highest = peaks.get(phase)
        if highest is None or row.total_bytes > highest["total_bytes"]:
            peaks[phase] = {
                "when": row.when,
                "total_bytes": row.total_bytes,
                "by_category": dict(row.by_category),
            }
    return peaks


def list_errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [abs(kind["error"]) for row in rows for kind in row.get("kinds", ())]


def format_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table in Markdown, and a line that sums it up."""
    lines = [
        "| job | rank | plan | dry run | plan / dry run - 1 | peak of the dry run |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['case']} | not run: {row['failed']} | | | | |")
        for kind in row.get("kinds", ()):
            plan, dry = kind["plan_bytes"] / GIB, kind["dry_run_bytes"] / GIB
            lines.append(
                f"| {row['case']} | {kind['name']} | {plan:.3f} GiB | {dry:.3f} GiB |"
                f" {100 * kind['error']:+.2f} % | {kind['when']} |"
            )
    errors = list_errors(rows)
    if errors:
        lines += [
            "",
            f"{len(errors)} ranks of {len(rows)} jobs: median"
            f" {100 * statistics.median(errors):.2f} %, at most {100 * max(errors):.2f} %.",
        ]
    return lines


def write_page(rows: Sequence[Mapping[str, Any]], command: str) -> None:
    """Put the table between the marks of docs/memory.md, with the command that made it."""
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    made = f"`{command}` ({date.today().isoformat()}):"
    table = "\n".join([made, "", *format_table(rows)])
    PAGE.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", default=(), help="cases whose names begin so")
    parser.add_argument("--no-cache", action="store_true", help="run again what was run before")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    parser.add_argument("--plan-again", nargs="+", metavar="FILE", help="plan rows of --json anew")
    options = parser.parse_args()
    # The modules of benchmarks/ that jobs name are imported by other processes, too.
    search = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    sys.path.insert(0, search[0])
    rows: list[dict[str, Any]] = []
    for path in options.plan_again or ():
        rows += [plan_row_again(row) for row in json.loads(Path(path).read_text())["rows"]]
    cases = list_cases()
    if options.plan_again:
        cases = []
    if options.only:
        cases = [case for case in cases if case.name.startswith(tuple(options.only))]
    for number, case in enumerate(cases, 1):
        print(f"{number} of {len(cases)}  {case.name}", file=sys.stderr)
        try:
            rows.append(run_case(case, uses_cache=not options.no_cache))
        except PhalanxError as error:
            rows.append({"case": case.name, "keys": list(case.keys), "failed": str(error)})
    if options.json:
        print(json.dumps({"version": SCHEMA_VERSION, "rows": rows}, indent=1))
    else:
        print("\n".join(format_table(rows)))
    if options.write:
        command = COMMAND
        if options.plan_again:
            command = COMMAND_OF_ROWS
        write_page(rows, command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
