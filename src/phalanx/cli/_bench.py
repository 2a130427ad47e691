"""Runs `phalanx bench`, shows how far it is, prints its table and writes the profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli._json import print_errors_as_json, print_json
from phalanx.cli._launched import refuse_launcher
from phalanx.cli._output_files import require_profile_or_new_file, require_writable_output
from phalanx.cli._progress import ProgressLine
from phalanx.core.errors import UsageError
from phalanx.core.units import format_seconds

if TYPE_CHECKING:
    from phalanx.bench.drive import BenchProgress, BenchRequest
    from phalanx.plan.profiles import MachineProfile


def run_and_print_bench(request: BenchRequest, out: Path | None, *, as_json: bool) -> int:
    """Measure what `request` says, write the profile and print it. Returns the exit code."""
    from phalanx.bench.drive import bench_machine
    from phalanx.cli._bench_table import describe_profile

    refuse_launcher("bench")
    with print_errors_as_json(as_json), ProgressLine("measuring") as line:
        if request.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device is auto, cpu or cuda, not {request.device!r}")
        _check_place_of_profile(out)
        result = bench_machine(
            request, on_progress=lambda progress: _show_bench_progress(line, progress)
        )
        if result.stop_code is not None:
            line.hide()
            print("stopped; nothing was written", file=sys.stderr)
            return result.stop_code
        profile, path = _save_beside_other_sections(result.profile, out)
    measured = result.profile
    if as_json:
        body = {"path": str(path), "wall_s": result.wall_s, **measured.to_json()}
        print_json("bench", body, indent=1)
        return 0
    for text in describe_profile(measured, result.wall_s):
        print(text)
    print(f"profile {path}")
    for text in describe_place_of_profile(request, profile, out):
        print(f"        {text}")
    return 0


def describe_place_of_profile(
    request: BenchRequest, profile: MachineProfile, out: Path | None
) -> list[str]:
    """What a plan does not find there: the whole profile, or sections that it lacks."""
    from phalanx.bench.items import list_group_sizes
    from phalanx.plan.cluster import detect_cluster

    missing = {"gemm", "comm", "storage"} - profile.sections.keys()
    lines = []
    is_comm_missing = "comm" in request.sections and "comm" in missing
    if is_comm_missing and not list_group_sizes(detect_cluster(request.device), request.ranks):
        missing.remove("comm")
        lines.append("without comm: one rank has no collectives")
    if out is not None:
        return ["plans do not look there"]
    if missing:
        lines.append(f"without {' and '.join(sorted(missing))}; phalanx bench all measures them")
    return lines


def _check_place_of_profile(out: Path | None) -> None:
    """Raises UsageError or ResourceError where the profile cannot be written: before a minute of
    measuring, and not after it."""
    from phalanx.core.places import expand_home
    from phalanx.plan.profiles import PROFILE_FOLDER

    if out is not None and out.is_dir():
        raise UsageError(f"--out {out} is a directory", fix="give a file, which is written")
    if out is not None:
        require_profile_or_new_file(out)
    # Of a machine that is not known yet: any file of the folder.
    path = out or expand_home(PROFILE_FOLDER) / "profile.json"
    require_writable_output(path, "writing the profile", option="--out")


def _show_bench_progress(line: ProgressLine, progress: BenchProgress) -> None:
    left_s = max(0.0, progress.total_s - progress.done_s)
    words = f"{progress.running}  eta {format_seconds(left_s)}"
    line.update(progress.done_s, progress.total_s, instead=words)


def _save_beside_other_sections(
    measured: MachineProfile, out: Path | None
) -> tuple[MachineProfile, Path]:
    """Write the profile: sections that were not measured now stay as an earlier bench of the same
    machine left them."""
    from phalanx.core.disk_errors import build_path_resource_error
    from phalanx.plan.profiles import get_profile_path, load_profile, save_profile

    path = out or get_profile_path(measured)
    profile = measured
    if out is None:
        try:
            earlier = load_profile(path)
        except (OSError, UsageError):
            # There is none, or one of another version: it is measured anew.
            earlier = measured
        profile = earlier.with_sections(measured.sections)
    try:
        save_profile(profile, path)
    except OSError as error:
        raise build_path_resource_error(error, "writing the profile", path, place="--out") from None
    return profile, path
