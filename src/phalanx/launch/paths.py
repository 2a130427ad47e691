"""Where the files of an attempt lie inside RUN, and which number the next attempt has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from phalanx.core.logs import blank_out
from phalanx.core.secrets import secret_values

_ATTEMPT = re.compile(r"rank-\d+-attempt-(\d+)\.")


def rank_log(run_dir: Path, rank: int, attempt: int) -> Path:
    return run_dir / "logs" / f"rank-{rank:04d}-attempt-{attempt:02d}.log"


def error_report(run_dir: Path, rank: int, attempt: int) -> Path:
    return run_dir / "logs" / f"rank-{rank:04d}-attempt-{attempt:02d}.error.json"


def server_log(run_dir: Path) -> Path:
    return run_dir / "logs" / "server.log"


def black_box(run_dir: Path, rank: int) -> Path:
    return run_dir / "blackbox" / f"rank-{rank:04d}"


def next_attempt(run_dir: Path) -> int:
    """One more than any attempt that left a file, so that a resumed run never writes over earlier ones."""
    names = [path.name for folder in ("events", "logs") for path in (run_dir / folder).glob("rank-*-attempt-*")]
    return max((int(found[1]) for name in names if (found := _ATTEMPT.match(name))), default=-1) + 1


def clear_black_boxes(run_dir: Path) -> None:
    """Forget where the ranks of an earlier attempt were last seen."""
    for path in (run_dir / "blackbox").glob("rank-*"):
        path.unlink(missing_ok=True)


def blank_out_logs(run_dir: Path, environ: Mapping[str, str]) -> None:
    """Overwrite secrets of `environ` in the logs of processes that have ended: C code and child processes print too."""
    secrets = {secret for group in secret_values(environ).values() for secret in group}
    for path in (run_dir / "logs").glob("*.log"):
        try:
            blank_out(path, secrets)
        except OSError:  # a log that is gone or cannot be written holds nothing that could be mended here
            pass
