"""`phalanx checkpoint ls | verify | diff | prune`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from phalanx.checkpoint.best import read_best
from phalanx.checkpoint.diff import describe, diff_checkpoints
from phalanx.checkpoint.locks import hold_run_lock
from phalanx.checkpoint.manifest import MANIFEST, list_checkpoints, read_manifest, step_of
from phalanx.checkpoint.retention import Retention
from phalanx.checkpoint.retention import prune as remove_old
from phalanx.checkpoint.verify import verify_checkpoint
from phalanx.cli._json import print_json, printing_json
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import CheckpointError, ExitCode, UsageError
from phalanx.core.units import format_bytes


def ls(run: str, as_json: bool) -> int:
    """The verb."""
    with printing_json(as_json):
        found = [_facts(path) for path in _all_of(Path(run))]
        best = read_best(Path(run))
    if as_json:
        print_json("checkpoints", {"run": run, "best": best.step if best else None, "checkpoints": found}, indent=1)
        return ExitCode.OK
    for facts in found:
        mark = "  best" if best and best.step == facts["step"] else ""
        if facts["error"]:
            print(f"{facts['name']:<14} damaged: {facts['error']}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["written_unix_s"]))
        size = format_bytes(facts["num_bytes"])
        cut = " ".join(f"{axis}={degree}" for axis, degree in facts["layout"].items() if degree > 1) or "one rank"
        print(f"{facts['name']:<14} {when}  {size:>10} in {facts['num_files']} files  written by {cut}{mark}")
    return ExitCode.OK


def _facts(path: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": path.name, "step": step_of(path), "error": None}
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return facts | {"error": str(error)}
    return facts | {
        "written_unix_s": (path / MANIFEST).stat().st_mtime,
        "num_bytes": manifest.num_bytes,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "layout": manifest.layout,
        "facts": manifest.facts,
    }


def verify(place: str, all_of_them: bool, as_json: bool) -> int:
    """The verb. Every problem on a line of its own."""
    with printing_json(as_json):
        chosen = _all_of(Path(place)) if all_of_them and not _is_one(Path(place)) else [_one(Path(place))]
    results = []
    for path in chosen:
        total = sum(file.stat().st_size for file in path.iterdir())
        with ProgressLine(f"verifying {path.name}") as line:
            passed = [0]

            def show(more: int, passed: list[int] = passed, line: ProgressLine = line, total: int = total) -> None:
                passed[0] += more
                line.update(passed[0], total)

            problems = verify_checkpoint(path, show)
        results.append(
            {"path": str(path), "num_bytes": total, "ok": not problems, "problems": [str(p) for p in problems]}
        )
        if not as_json:
            for problem in problems:
                print(f"phalanx: {problem}", file=sys.stderr)
            verdict = f"damaged {path}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
            print(verdict if problems else f"whole   {path}: {format_bytes(total)}, every checksum holds")
    if as_json:
        print_json("checkpoint-verify", {"checkpoints": results}, indent=1)
    return ExitCode.OK if all(result["ok"] for result in results) else ExitCode.CHECKPOINT


def diff(a: str, b: str, as_json: bool) -> int:
    """The verb."""
    with printing_json(as_json):
        first, second = _one(Path(a)), _one(Path(b))
        found = diff_checkpoints(first, second)
    if as_json:
        print_json("checkpoint-diff", {"a": str(first), "b": str(second), **found.to_json()}, indent=1)
    else:
        print(f"first   {first}\nsecond  {second}")
        for text in describe(found):
            print(text)
    return ExitCode.OK if found.same else ExitCode.VERIFICATION


def prune(run: str, keep_last: int, keep_every: int | None, dry_run: bool, as_json: bool) -> int:
    """The verb. Holds the run's lock: a job that is using the directory prunes by itself."""
    run_dir = Path(run)
    best = read_best(run_dir)
    retention = Retention(keep_last, keep_every, frozenset({best.step}) if best else frozenset())
    said: list[str] = []
    with printing_json(as_json):
        before = _all_of(run_dir)
        with hold_run_lock(run_dir):
            gone = remove_old(run_dir, retention, dry_run=dry_run, say=said.append)
    kept = [path.name for path in before if path not in gone]
    if as_json:
        facts = {"run": run, "dry_run": dry_run, "removed": [path.name for path in gone], "kept": kept, "notes": said}
        print_json("checkpoint-prune", facts, indent=1)
        return ExitCode.OK
    for text in said:
        print(f"note    {text}")
    print(f"{'would remove' if dry_run else 'removed'}  {', '.join(path.name for path in gone) or 'nothing'}")
    print(f"{'would keep' if dry_run else 'kept'}  {', '.join(kept)}")
    return ExitCode.OK


def _is_one(place: Path) -> bool:
    return (place / MANIFEST).is_file() or place.parent.name == "checkpoints"


def _one(place: Path) -> Path:
    """A checkpoint: the one that was named, or the newest of a run."""
    return place if place.is_dir() and _is_one(place) else _all_of(place)[-1]


def _all_of(run_dir: Path) -> list[Path]:
    if not run_dir.is_dir():
        raise UsageError("no such directory", where=str(run_dir), fix="give a run's directory, or a checkpoint's")
    found = list_checkpoints(run_dir)
    if not found:
        fix = "checkpoint.every_steps and checkpoint.at_end say when a run saves"
        raise CheckpointError("no checkpoint is there", where=str(run_dir), fix=fix)
    return found
