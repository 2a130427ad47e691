"""`phalanx verify` of every causal language model of transformers that can be made small:
`python benchmarks/architectures.py --out ROWS.jsonl`.

A model is tiny, of random weights; its configuration is written beside ROWS.jsonl, so that a row
can be run again by hand. A row holds what `verify --layouts ddp,zero3,tp2 --ranks 2` said of one
model: a layout is equal, refused with the reason, differs, or crashed. What is in ROWS.jsonl
already is not run again. `--only NAME ...` takes some; `--types` as of verify. The end is a summary
for docs/hugging-face.md.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

WIDTHS: Mapping[str, Any] = {
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "n_positions": 64,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "state_size": 4,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Queries and keys of a latent have parts of their own widths.
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
}
MAX_PARAMETERS = 3_000_000
MAX_SECONDS_TO_BUILD = 60
LAYOUTS = "ddp,zero3,tp2"


def list_architectures() -> list[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    return sorted(set(KNOWN) & set(CONFIG_MAPPING_NAMES))


def write_small_config(name: str, directory: Path) -> str:
    """Write `directory`/config.json; returns why that cannot be, "" if it can."""
    if (directory / "config.json").is_file():
        return ""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--write-config", name, str(directory)],
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS_TO_BUILD,
        )
    except subprocess.TimeoutExpired:
        return f"it is not built within {MAX_SECONDS_TO_BUILD} s"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit {done.returncode}"


def build_and_write_config(name: str, directory: Path) -> None:
    """Raises whatever transformers raises of settings that do not go together."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = CONFIG_MAPPING[name]
    known = {*inspect.signature(settings).parameters, *getattr(settings, "__annotations__", {})}
    widths = dict(WIDTHS)
    if "qk_rope_head_dim" in known:
        widths |= LATENT
    config = settings(**{key: value for key, value in widths.items() if key in known})
    model = AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"its settings have other names: {num_parameters:,} parameters")
    model(input_ids=torch.randint(3, 90, (2, 16)), use_cache=False)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config.to_json_string())


def judge(name: str, directory: Path, types: str) -> dict[str, Any]:
    """What verify says of the model, by layout and type."""
    began = time.monotonic()
    command = [
        *(sys.executable, "-m", "phalanx", "verify", "--model", f"hf:{directory}", "--ranks", "2"),
        *("--layouts", LAYOUTS, "--types", types, "--json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    layouts: dict[str, str] = {}
    error = "" if done.returncode in (0, 11) else "it said nothing"
    for row in map(json.loads, done.stdout.splitlines()):
        if "layout" not in row:
            # The line of a command that was refused.
            error = f"{row['error']}: {row['what']}"
            continue
        verdict = "equal"
        if row["refused"]:
            verdict = f"refused: {row['refused']}"
        elif row["crashed"]:
            verdict = f"crashed: {row['crashed']}"
        elif not row["ok"]:
            first = row["first"] or {}
            verdict = f"differs: {first.get('text', '')} ({first.get('cause', '')})"
        layouts[f"{row['layout']} {row['dtype']}"] = verdict
    return {
        "name": name,
        "exit": done.returncode,
        "layouts": layouts,
        "error": error,
        "seconds": round(time.monotonic() - began, 1),
    }


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def summarize(rows: Sequence[Mapping[str, Any]]) -> str:
    judged = [row for row in rows if row["layouts"]]
    verdicts = Counter(
        verdict.partition(":")[0] for row in judged for verdict in row["layouts"].values()
    )
    differing = [
        f"  {row['name']}, {layout}: {verdict}"
        for row in judged
        for layout, verdict in row["layouts"].items()
        if verdict.startswith(("differs", "crashed"))
    ]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return "\n".join(
        (
            f"{len(judged)} architectures judged, {len(rows) - len(judged)} not: {counts}",
            *differing,
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--types", default="float64,float32")
    parser.add_argument("--write-config", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write_config:
        build_and_write_config(options.write_config[0], Path(options.write_config[1]))
        return 0
    if options.out is None:
        parser.error("--out is needed")
    names = options.only or list_architectures()
    known = {row["name"] for row in read_rows(options.out)}
    for number, name in enumerate(names, 1):
        if name in known:
            continue
        directory = options.out.with_suffix("") / name
        why = write_small_config(name, directory.absolute())
        row = {"name": name, "exit": None, "layouts": {}, "error": f"no small one: {why}"}
        if not why:
            row = judge(name, directory.absolute(), options.types)
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(names)}  {name}: {row['layouts'] or row['error']}", flush=True)
    print(summarize(list(read_rows(options.out))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
