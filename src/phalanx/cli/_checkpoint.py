"""`phalanx checkpoint ls | verify | diff | prune`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NoReturn

from phalanx.checkpoint.best import BEST, Best, read_best
from phalanx.checkpoint.diff import describe, diff_checkpoints
from phalanx.checkpoint.folder import Folder
from phalanx.checkpoint.locks import hold_run_lock
from phalanx.checkpoint.manifest import read_manifest
from phalanx.checkpoint.owner import refusal_of
from phalanx.checkpoint.retention import Retention
from phalanx.checkpoint.retention import prune as remove_old
from phalanx.checkpoint.stores import find_checkpoint, is_checkpoint, is_url, run_at, store_of
from phalanx.checkpoint.verify import verify_checkpoint
from phalanx.cli._checkpoint_output import refusing, tell
from phalanx.cli._json import print_json
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import CheckpointError, ExitCode, UsageError
from phalanx.core.store_urls import local_directory
from phalanx.core.units import format_bytes, plural


def ls(run: str, as_json: bool) -> int:
    """The verb."""
    with refusing(as_json):
        found = [_facts(folder) for folder in ([_one(run)] if is_checkpoint(run) else _all_of(run))]
        best = _best(run)
    if as_json:
        print_json("checkpoints", {"run": run, "best": best.step if best else None, "checkpoints": found}, indent=1)
        return ExitCode.OK
    width = max(14, *(len(facts["name"]) for facts in found))
    for facts in found:
        mark = "  best" if best and best.step == facts["step"] else ""
        if facts["error"]:
            tell(f"{facts['name']:<{width}} damaged: {facts['error']}")
            continue
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts["written_unix_s"]))
        size = format_bytes(facts["num_bytes"])
        cut = " ".join(f"{axis}={degree}" for axis, degree in facts["layout"].items() if degree > 1) or "one rank"
        tell(f"{facts['name']:<{width}} {when}  {size:>10} in {facts['num_files']} files  written by {cut}{mark}")
    return ExitCode.OK


def _facts(folder: Folder) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": folder.name, "step": folder.step, "error": None}
    try:
        manifest = read_manifest(folder)
        written_unix_s = folder.written_unix_s()
    except (CheckpointError, OSError) as error:
        return facts | {"error": str(error)}
    return facts | {
        "written_unix_s": written_unix_s,
        "num_bytes": manifest.num_bytes,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "layout": manifest.layout,
        "facts": manifest.facts,
        "epoch": manifest.epoch,
    }


def verify(place: str, all_of_them: bool, as_json: bool) -> int:
    """The verb. Every problem on a line of its own."""
    with refusing(as_json):
        chosen = _all_of(place) if all_of_them and not is_checkpoint(place) else [_one(place)]
    results = []
    for folder in chosen:
        total = _num_bytes(folder)
        with ProgressLine(f"verifying {folder.name}") as line:
            passed = [0]

            def show(more: int, passed: list[int] = passed, line: ProgressLine = line, total: int = total) -> None:
                passed[0] += more
                line.update(passed[0], total)

            problems = verify_checkpoint(folder, show)
        results.append(
            {"path": folder.url, "num_bytes": total, "ok": not problems, "problems": [str(p) for p in problems]}
        )
        if not as_json:
            for problem in problems:
                tell(f"phalanx: {problem}", as_problem=True)
            verdict = f"damaged {folder.url}: {plural(len(problems), 'problem')}"
            whole = f"whole   {folder.url}: {format_bytes(total)}, every checksum holds"
            tell(verdict if problems else whole)
    if as_json:
        print_json("checkpoint-verify", {"checkpoints": results}, indent=1)
    return ExitCode.OK if all(result["ok"] for result in results) else ExitCode.CHECKPOINT


def diff(a: str, b: str, as_json: bool) -> int:
    """The verb."""
    with refusing(as_json):
        first, second = _one(a), _one(b)
        found = diff_checkpoints(first, second)
    if as_json:
        print_json("checkpoint-diff", {"a": first.url, "b": second.url, **found.to_json()}, indent=1)
    else:
        for text in (f"first   {first.url}", f"second  {second.url}", *describe(found)):
            tell(text)
    return ExitCode.OK if found.same else ExitCode.VERIFICATION


def prune(run: str, keep_last: int, keep_every: int | None, dry_run: bool, as_json: bool) -> int:
    """The verb. Holds the run's lock: a job that is using the directory prunes by itself."""
    said: list[str] = []
    with refusing(as_json):
        place = str(run_at(run))
        if is_url(place):
            why = "a store knows neither the job that writes it nor the best checkpoint; the run's directory does"
            fix = "prune the run: phalanx checkpoint prune RUN"
            raise UsageError("checkpoints at a URL are not pruned by themselves", where=run, why=why, fix=fix)
        _all_of(place)
        with hold_run_lock(Path(place)):
            store = store_of(place)
            if (refusal := refusal_of(store, Path(place))) is not None:
                raise refusal
            before = store.folders()
            retention = Retention(keep_last, keep_every, _best_steps(Path(place)))
            gone = remove_old(store, retention, dry_run=dry_run, say=said.append)
    kept = [folder.name for folder in before if folder not in gone]
    if as_json:
        facts = {
            "run": run,
            "dry_run": dry_run,
            "removed": [folder.name for folder in gone],
            "kept": kept,
            "notes": said,
        }
        print_json("checkpoint-prune", facts, indent=1)
        return ExitCode.OK
    for text in said:
        tell(f"note    {text}")
    tell(f"{'would remove' if dry_run else 'removed'}  {', '.join(folder.name for folder in gone) or 'nothing'}")
    tell(f"{'would keep' if dry_run else 'kept'}  {', '.join(kept)}")
    return ExitCode.OK


def _best(run: str) -> Best | None:
    """What the run's directory says; a store elsewhere does not know."""
    place = run_at(run)
    return None if is_url(place) else read_best(Path(place))


def _best_steps(run_dir: Path) -> frozenset[int]:
    """The step that must stay. Raises CheckpointError if there is one and nobody can say which."""
    best = read_best(run_dir)
    if best is None and os.path.lexists(run_dir / BEST):
        fix = "put it right, or remove it if no checkpoint is to be kept as the best"
        raise CheckpointError("what the best checkpoint is cannot be read", where=str(run_dir / BEST), fix=fix)
    return frozenset({best.step} if best else ())


def _num_bytes(folder: Folder) -> int:
    try:
        return sum(folder.sizes().values())
    except OSError:  # verification says it
        return 0


def _one(place: str) -> Folder:
    """A checkpoint: the one that was named, or the newest of a run."""
    if not is_checkpoint(place):
        return _all_of(place)[-1]
    directory = local_directory(place) or (None if is_url(place) else Path(place))
    if directory is not None and not os.path.lexists(directory):
        _refuse_nowhere(place)
    return find_checkpoint(place)


def _all_of(run: str) -> list[Folder]:
    run = str(run_at(run))
    if not is_url(run) and not Path(run).is_dir():
        _refuse_nowhere(run)
    found = store_of(run).folders()
    if not found and is_checkpoint(run):
        raise UsageError("this is one checkpoint, and not a run", where=run, fix="give the run's directory")
    if not found:
        fix = "checkpoint.every_steps and checkpoint.at_end say when a run saves"
        raise CheckpointError("no checkpoint is there", where=run, fix=fix)
    return found


def _refuse_nowhere(place: str) -> NoReturn:
    raise UsageError("no such directory", where=place, fix="give a run's directory, a checkpoint's, or a URL")
