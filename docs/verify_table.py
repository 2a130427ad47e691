"""Writes docs/verified.md: `phalanx verify` over every model and layout of `JUDGED`, as it ran
here.

python docs/verify_table.py              about a quarter of an hour on two cores
python docs/verify_table.py "vision"     what begins so, the rest of the page as it is
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from phalanx.plan.pipeline.generate import SCHEDULE_NAMES
from phalanx.verify.cases import list_all_layouts, list_gradient_compression_layouts
from phalanx.verify.combined_layouts import list_expert_layouts, list_three_axis_layouts
from phalanx.verify.pipelines import list_pipeline_layouts
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE
from throughput.machine import cpu_model, num_cores

HERE = Path(__file__).parent
SOME = "ddp,zero3,ddp-tp2,zero3-tp2,tp4"
ON_EIGHT = (
    "ddp,zero1,zero3,hsdp2x4-zero3,hsdp4x2-zero1,ddp-tp2,zero1-tp2,zero3-tp2,hsdp2x2-zero3-tp2,ddp-tp4,zero3-tp4,tp8,"
    "cp8,cp8-all-gather,zero3-cp4,tp2-cp4,hsdp4x2-zero3-cp2"
)
ON_FOUR_STAGED = ",".join(name for name, _ in list_pipeline_layouts(4))
ON_EIGHT_STAGED = ",".join(
    [
        f"{place}-{schedule}"
        for place in ("pp4-zero3", "pp4-tp2", "pp2-zero3-tp2")
        for schedule in SCHEDULE_NAMES
    ]
    + ["pp2-hsdp2x2-zero3-1f1b", "pp2-hsdp2x2-zero3-zb-v", "pp2-zero3-uneven-1f1b"]
)
ALONE_ON_EIGHT = ",".join(f"pp8-{schedule}" for schedule in SCHEDULE_NAMES)
STAGED = (
    "model.dim=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=90",
    "model.vocab_size=251",
    "data.seq_len=16",
)
PRODUCTS = ",".join(
    [name for name, _ in list_three_axis_layouts(8)]
    + ["pp2-zero3-tp2-1f1b", "pp2-zero3-tp2-zb-v", "hsdp2x2-zero3-tp2"]
)
PRODUCTS_OF_EXPERTS = (
    "hsdp2x4-zero3-ep4,pp2-zero3-tp2-ep2-1f1b,pp2-zero3-tp2-ep2-zb-v,pp2-zero3-cp2-ep4-1f1b,zero3-tp2-cp2-ep4,"
    "hsdp2x4-zero3-cp2-ep4,hsdp2x2-zero3-tp2-ep2,zero3-ep8"
)
SOME_OF_EXPERTS = "pp2-zero3-tp2-ep2-zb-v,zero3-tp2-cp2-ep4,hsdp2x4-zero3-cp2-ep4"
WITH_SOME_EXPERTS = (
    "ddp,cp4,ddp-ep4,zero3-ep2,zero3-ep4-selective,cp4-ep4,zero3-tp2-ep2,zero3-cp2-ep4,"
    "pp2-zero3-ep2-zb-v"
)
WITH_EXPERTS = ",".join(["ddp", "tp4", "cp4", *(name for name, _ in list_expert_layouts(4))])
BALANCED = (
    "model.expert_capacity=1.0",
    "model.balance_loss=0.05",
    "model.balance_bias=0.01",
    "data.seq_len=32",
)
OF_EACH_KIND = "ddp,zero3,zero3-full,tp2,pp2-1f1b"
HF_CONFIGS = Path(tempfile.gettempdir()) / "phalanx-hf-configs"  # written by main()
EIGHT_HEADS = (
    "model.dim=64",
    "model.num_layers=2",
    "model.num_heads=8",
    "model.num_kv_heads=2",
    "data.seq_len=32",
)


@dataclass(frozen=True)
class Judged:
    """A model, its layouts, and what it stands for."""

    what: str
    ranks: int
    layouts: str
    arguments: tuple[str, ...]
    place: str = "."  # where it is run


def whole(num_ranks: int) -> str:
    """All layouts but pipelines, which have models of their own: with a block for each stage."""
    every = (*list_all_layouts(num_ranks), *list_gradient_compression_layouts(num_ranks))
    return ",".join(name for name, axes in every if "pp" not in axes)


JUDGED = (
    Judged("dense decoder", 2, whole(2), ("--shrink",)),
    Judged("dense decoder", 4, whole(4), ("--shrink",)),
    Judged("dense decoder", 8, ON_EIGHT, EIGHT_HEADS),
    Judged(
        "pipelines", 4, ON_FOUR_STAGED, (*STAGED, "model.num_layers=8", "model.tie_embeddings=true")
    ),
    Judged("pipelines", 8, ON_EIGHT_STAGED, (*STAGED, "model.num_layers=7")),
    Judged(
        "pipelines",
        8,
        ALONE_ON_EIGHT,
        (*STAGED, "model.num_layers=15", "model.tie_embeddings=true"),
    ),
    Judged(
        "products of axes", 8, PRODUCTS, (*STAGED, "model.num_layers=4", "model.num_kv_heads=4")
    ),
    Judged(
        "experts, as in Mixtral",
        4,
        WITH_EXPERTS,
        ("--shrink", "--model=mixtral-8x7b", "data.seq_len=32"),
    ),
    Judged(
        "experts, as in Mixtral",
        8,
        PRODUCTS_OF_EXPERTS,
        ("--shrink", "--model=mixtral-8x7b", "data.seq_len=32"),
    ),
    Judged(
        "experts, as in DeepSeek, balanced",
        4,
        WITH_SOME_EXPERTS,
        ("--shrink", "--model=small-deepseek", *BALANCED),
    ),
    Judged(
        "experts, as in DeepSeek, balanced",
        8,
        SOME_OF_EXPERTS,
        ("--shrink", "--model=small-deepseek", *BALANCED),
    ),
    Judged(
        "experts, as in Qwen 3",
        4,
        "ddp,zero3-ep4,zero3-tp2-ep2,cp4-ep4",
        ("--shrink", "--model=qwen3-30b-a3b"),
    ),
    Judged(
        "tied, GPT-style: learned positions, biases, LayerNorm",
        4,
        SOME,
        ("--shrink", "--model=gpt2"),
    ),
    Judged(
        "grouped queries, two key heads on four ranks", 4, SOME, ("--shrink", "--model=llama3-8b")
    ),
    Judged("norms of queries and keys, tied", 4, SOME, ("--shrink", "--model=qwen3-0.6b")),
    Judged(
        "latent attention, latent queries",
        2,
        "ddp,zero3,tp2,tp2-whole-sequence,cp2,pp2-1f1b,pp2-zb-v",
        ("--shrink", "--model=small-latent"),
    ),
    Judged(
        "latent attention, latent queries",
        4,
        "zero3-tp2,tp4,tp2-cp2,cp4-ulysses,pp2-tp2-zb-v",
        ("--shrink", "--model=small-latent"),
    ),
    Judged(
        "sliding windows, norms after, scaled embeddings",
        4,
        SOME,
        ("--shrink", "--model=gemma3-1b"),
    ),
    Judged("vision transformer", 4, SOME, ("--shrink", "--model=small-vit")),
    *(
        Judged(
            f"Hugging Face: {name}",
            2,
            OF_EACH_KIND,
            ("--model", f"hf:{name}"),
            place=str(HF_CONFIGS),
        )
        for name in (
            "llama",
            "qwen2",
            "qwen3",
            "mistral",
            "gemma",
            "gemma2",
            "gpt2",
            "phi",
            "vit",
            "mixtral",
            "qwen3_moe",
        )
    ),
    Judged(
        "convolutions and BatchNorm, own",
        4,
        "ddp,zero2,zero3,hsdp2x2-zero3",
        ("job.toml",),
        place="examples/digits",
    ),
)
SHORT = (  # what every run of the tests judges
    Judged("dense decoder", 2, "ddp,zero3,tp2,cp2,pp2-1f1b,pp2-zb-v", ("--shrink",)),
    Judged(
        "experts, as in Mixtral",
        2,
        "ddp-ep2,zero3-ep2",
        ("--shrink", "--model=mixtral-8x7b", "data.seq_len=32"),
    ),
    Judged("Hugging Face: qwen3", 2, "zero3,tp2", ("--model", "hf:qwen3"), place=str(HF_CONFIGS)),
)
EASED = "judged by what rounding to float32 costs"  # begins the note on it
STEPS = 2  # gradients of the second are those of weights that the layout has moved
ERRORS = ("loss", "norm", "gradient", "weight", "update")
LOSSY = "lossy:"


HEAD = (
    (
        "What `phalanx verify` measured: layouts beside one process, as [verify.md](verify.md)"
        " defines the errors."
    ),
    f"Each row is {STEPS} optimizer steps of several microbatches, with uneven numbers of targets.",
    (
        "Allowed are 1e-10 in float64 and 1e-5 in float32, unless a cell says otherwise: models"
        " that compute in float32 on their way (the norms of most Hugging Face models do) are"
        ' judged by that in float64, too, but for "update", and casts of gradients by what they'
        " round."
    ),
    (
        'Compressed gradients equal nothing by design ("lossy"): of int8, powersgd and topk'
        ' "gradient" is what a step sends and what it newly keeps, added up.'
    ),
    "A layout that a model cannot have is refused, with the nearest that it can.",
    "A section is of the `verify` of its day, below: what it compares has grown since 2026-11-23.",
)


def judge(
    judged: Judged, phalanx: Sequence[str] = (sys.executable, "-m", "phalanx")
) -> list[dict[str, Any]]:
    """The rows of `phalanx verify`; ends the process if there are none."""
    arguments = [
        "verify",
        *judged.arguments,
        "--json",
        f"--steps={STEPS}",
        f"--ranks={judged.ranks}",
        f"--layouts={judged.layouts}",
    ]
    command, shown = [*phalanx, *arguments], " ".join(["phalanx", *arguments])
    print(shown, file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=HERE.parent / judged.place, stdout=subprocess.PIPE, text=True, check=False
    )
    print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if done.returncode not in (0, 11):
        sys.exit(f"{shown}: exit code {done.returncode}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def lines_of(judged: Judged, rows: list[dict[str, Any]]) -> list[str]:
    layouts = dict.fromkeys(row["layout"] for row in rows)
    found = []
    for layout in layouts:
        mine = {row["dtype"]: row for row in rows if row["layout"] == layout}
        refused = next((row["refused"] for row in mine.values() if row["ok"] is None), "")
        if refused:
            found.append(f"| {layout} | {judged.ranks} | refused: {refused} | |")
            continue
        cells = [cell_of(mine[dtype]) if dtype in mine else "" for dtype in TOLERANCE_OF_DTYPE]
        found.append(f"| {layout} | {judged.ranks} | {cells[0]} | {cells[1]} |")
    return found


def cell_of(row: dict[str, Any]) -> str:
    """The errors of a layout in one type, and what is allowed where it is not what the page's
    head says."""
    if not row["ok"]:
        return f"**differs**: {(row['first'] or {}).get('text', '')}"
    told = [name for name in ERRORS if name in row["errors"]]
    found = f"{LOSSY} " if row["compress"] != "none" else ""
    found += ", ".join(f"{name} {row['errors'][name]:.0e}" for name in told)
    if row["tolerance"] != TOLERANCE_OF_DTYPE[row["dtype"]]:
        found += f" (allowed {row['tolerance']:.0e})"
    if any(note.startswith(EASED) for note in row["notes"]):
        found += " (gradient: allowed what rounding costs)"
    return found + (f" (flipped: {len(row['flips'])})" if row["flips"] else "")


def main(parts: list[str]) -> None:
    """Judge all of `JUDGED`, or what begins as one of `parts` does, whose sections of the page
    are written anew."""
    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    from hf_zoo import ZOO, write_config

    titles = list(dict.fromkeys(judged.what for judged in JUDGED))
    unknown = [part for part in parts if not any(title.startswith(part) for title in titles)]
    if unknown:
        sys.exit(f"{unknown[0]}: nothing that is judged begins so; there is: {', '.join(titles)}")
    for name in ZOO:
        write_config(HF_CONFIGS / name, name)
    page = HERE / "verified.md"
    began, again = time.monotonic(), {}
    for judged in JUDGED:
        if not parts or judged.what.startswith(tuple(parts)):
            again.setdefault(_title(judged.what), []).extend(lines_of(judged, judge(judged)))
    minutes = (time.monotonic() - began) / 60
    ran = (
        f"in {minutes:.1f} minutes on {num_cores()} cores ({cpu_model()}), torch"
        f" {torch.__version__}, "
    )
    ran += f"{time.strftime('%Y-%m-%d')}."
    before, sections = _read(page) if parts else ([], {})
    sections |= again
    order = list(dict.fromkeys(_title(judged.what) for judged in JUDGED))
    counts = _counts(line for lines in sections.values() for line in lines)
    of_parts = f"`{' '.join(parts)}` again, {ran}" if parts else ""
    written = [line for line in before if line.startswith("Written by")] or [
        f"Written by `python docs/verify_table.py` {ran}"
    ]
    written += [line for line in before if " again, in " in line] + (
        [f"Of it {of_parts}"] if parts else []
    )
    text = [
        "# Verified",
        "",
        *HEAD,
        "",
        summary_of(counts),
        *written,
    ]
    for what in sorted(sections, key=order.index):
        text += [
            "",
            f"## {what}",
            "",
            "| layout | ranks | float64 | float32 |",
            "|---|---:|---|---|",
            *sections[what],
        ]
    page.write_text("\n".join(text) + "\n")
    sys.exit(11 if counts["differ"] else 0)


def _title(what: str) -> str:
    return f"{what[0].upper()}{what[1:]}"


def _read(page: Path) -> tuple[list[str], dict[str, list[str]]]:
    """(the lines above the sections, the rows of each section)."""
    above, *sections = page.read_text().split("\n## ")
    rows = {}
    for section in sections:
        title, *lines = section.splitlines()
        rows[title] = [
            line for line in lines if line.startswith("| ") and not line.startswith("| layout")
        ]
    return above.splitlines(), rows


def _counts(lines: Iterable[str]) -> dict[str, int]:
    """A layout and a type are a row of `phalanx verify`."""
    counts = {"equal": 0, "lossy": 0, "refused": 0, "differ": 0}
    begins = {"refused": "refused", "**differs": "differ", LOSSY: "lossy"}
    for line in lines:
        _, _, _, *cells, _ = line.split("|")
        for cell in filter(None, map(str.strip, cells)):
            counts[
                next((kind for words, kind in begins.items() if cell.startswith(words)), "equal")
            ] += 1
    return counts


def summary_of(counts: dict[str, int]) -> str:
    equal, lossy = (
        f"{counts['equal']} rows are equal",
        f"{counts['lossy']} with compressed gradients do what they should",
    )
    return f"{equal}, {lossy}, {counts['differ']} differ, {counts['refused']} are refused."


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(sys.argv[1:])
