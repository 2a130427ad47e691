"""The command: one system after the other, rows as they come, and what was found by then
whenever it ends."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu_check import gpu, table
from gpu_check.carried import unpack
from gpu_check.cases import FULL, SYSTEMS, TINY, Case, System
from gpu_check.children import NO_TIME, Row, run_system

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 580.0  # all in all: a little below ten minutes
LEAST_S = 5.0  # a system that would have less is not begun
NO_GPU, WRONG = 6, 11


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model of a few thousand weights: does the check work?",
    )
    parser.add_argument("--preset", help="another model of phalanx (phalanx plan --models)")
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch-size", type=int, help="sequences")
    parser.add_argument("--only", help="systems by their file's name, separated by commas")
    parser.add_argument(
        "--total-s", type=float, default=TOTAL_S, help="no system is begun or goes on after so long"
    )
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / "build" / "wheels", help="what `make wheels` fetched"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu-check")
    )
    return parser.parse_args(argv)


def case_of(args: argparse.Namespace) -> Case:
    case = replace(TINY if args.tiny else FULL, device=args.device)
    if args.preset:
        case = replace(case, model=(f"model.preset={args.preset}",))
    changes = {"seq_len": args.seq_len, "batch_size": args.batch_size}
    return replace(case, **{key: value for key, value in changes.items() if value is not None})


def main(argv: Sequence[str], systems: Sequence[System] = SYSTEMS) -> int:
    """0: phalanx trained and no kernel differs; 6: there is no GPU; 11: something is wrong, and
    the table says what."""
    args = parse(argv)
    until_s = time.monotonic() + args.total_s
    if args.device == "cuda" and (why := gpu.why_not()):
        print(
            f"gpu-check: no GPU here ({why}); --device cpu --tiny tries the check itself",
            file=sys.stderr,
        )
        return NO_GPU
    if args.only:
        systems = [system for system in systems if system.file in args.only.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            _run_all(systems, case_of(args), args, Path(folder), until_s, rows)
    finally:  # whatever ends it, an interrupt too
        _finish(rows, case_of(args), args.out)
    return 0 if table.is_right(rows) else WRONG


def _run_all(
    systems: Sequence[System],
    case: Case,
    args: argparse.Namespace,
    folder: Path,
    until_s: float,
    rows: list[Row],
) -> None:
    site = folder / "site"
    carried = unpack(args.wheels, site)
    print(
        f"carried: {', '.join(carried) or f'nothing ({args.wheels}; make wheels fetches it)'}",
        flush=True,
    )
    environ = _environment(site, folder, case.device)
    with open(args.out / "gpu-check.log", "w") as log:
        for system in systems:
            left_s = until_s - time.monotonic()
            if left_s < LEAST_S:
                rows.append(
                    {
                        "system": system.name,
                        "status": NO_TIME,
                        "why": f"of {args.total_s:.0f} s",
                        "wall_s": 0.0,
                    }
                )
            else:
                deadline_s = min(system.deadline_s, left_s)
                row, said = run_system(
                    system, case, deadline_s=deadline_s, folder=folder, environ=environ
                )
                rows.append(row)
                log.write(f"== {system.name}\n{said}\n")
            print(table.line(rows, rows[-1]), flush=True)
            _write_json(rows, case, args.out)  # a killed check leaves what it has


def _environment(site: Path, folder: Path, device: str) -> dict[str, str]:
    """Carried wheels, then this repository's phalanx, then what is installed; one GPU, of however
    many.

    Compiled kernels and initial weights are shared: all trainers begin with the same blocks and
    numbers.
    """
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    one = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": first}
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join([str(site), str(ROOT / "src"), *inherited])
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    cache = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    cache["GPU_CHECK_WEIGHTS"] = str(folder / "initial-weights.pt")
    return {**os.environ, **offline, **cache, **one, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _finish(rows: Sequence[Row], case: Case, out: Path) -> None:
    speed, parity, verdict = table.speed_table(rows), table.parity_table(rows), table.verdict(rows)
    print("", table.as_text(speed), "", table.as_text(parity), "", *verdict, sep="\n", flush=True)
    head = f"{', '.join(case.model)}; {case.batch_size} x {case.seq_len:,} tokens a step"
    if case.device == "cpu":
        verdict = ["on a CPU: this tries the check, its numbers say nothing of a GPU", *verdict]
    facts = [table.facts(rows, row) for row in rows if "square_flops_per_s" in row]
    parts = [
        *facts,
        head,
        table.as_markdown(speed),
        table.as_markdown(parity),
        "\n".join(f"- {v}" for v in verdict),
    ]
    (out / "gpu-check.md").write_text("\n\n".join(parts) + "\n")
    _write_json(rows, case, out)
    print(f"\nwritten: {out}/gpu-check.json, gpu-check.md, gpu-check.log")


def _write_json(rows: Sequence[Row], case: Case, out: Path) -> None:
    body = {"case": json.loads(case.to_json()), "rows": list(rows), "verdict": table.verdict(rows)}
    (out / "gpu-check.json").write_text(json.dumps(body, indent=1) + "\n")
