"""One plant sits the exam: `phalanx verify` runs on the edited code, and its rows are scored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from exam.plant import PACKAGE, Plant, edit_sources
from exam.score import ALL_LAYOUTS, OWN_LAYOUTS, Row, Score, add_marks, score_rows

HERE = Path(__file__).parent
HOOK, MODULES = HERE / "hook", HERE / "modules"
PROBE_TIMEOUT_S = 300.0
ROW_SCHEMA = "phalanx.verify-row"
NUM_TIMEOUTS_OF_ALL_LAYOUTS = 12  # of about 200 rows, where a plant names a few


class ClosedError(Exception):
    """The exam ends: what was running was ended, and nothing else is started."""


@dataclass
class Processes:
    """The commands under way, which another thread may end."""

    timeout_s: float = PROBE_TIMEOUT_S
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        num_timeouts: int = 1,
    ) -> subprocess.CompletedProcess[str] | None:
        """The finished process, or None if it took more than `num_timeouts` times `timeout_s` and
        was killed, with all that it started. Raises ClosedError."""
        with self._lock:
            if self._is_closed:
                raise ClosedError
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        try:
            out, err = process.communicate(timeout=num_timeouts * self.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate()
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        if self._is_closed:
            raise ClosedError
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def close(self) -> None:
        """End all that runs, in its own way: `phalanx verify` ends its ranks."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)


def sit(
    plant: Plant,
    processes: Processes | None = None,
    *,
    types: str = "",
    asked: str = OWN_LAYOUTS,
) -> Score:
    """The score of `phalanx verify` with the plant's edits, run in processes of its own: in `types`,
    or those that it takes by itself, with the plant's layouts or, if `asked` is ALL_LAYOUTS, as a
    user of the job would who knows nothing of the bug."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exam-") as directory:
        folder = Path(directory)
        environment = write_edits(plant, folder)
        done = (processes or Processes()).run(
            build_sitting_command(plant, types=types, asked=asked),
            folder,
            environment,
            num_timeouts=NUM_TIMEOUTS_OF_ALL_LAYOUTS if asked == ALL_LAYOUTS else 1,
        )
        marks = set(os.listdir(folder / "ran"))
    seconds = round(time.monotonic() - began, 1)
    if done is None:
        return Score(plant.name, "hung", seconds=seconds, asked=asked)
    score = score_rows(plant, read_rows(done.stdout), exit_code=done.returncode, text=done.stderr)
    acted = any(mark.endswith(".acted") for mark in marks)
    score = add_marks(score, is_reached=bool(marks), acted=acted, text=done.stderr)
    return replace(score, seconds=seconds, asked=asked)


def build_sitting_command(plant: Plant, *, types: str, asked: str) -> list[str]:
    """The command that judges a plant in `types` ("": those that verify takes by itself), in the
    layouts that it names or in all of its job."""
    layouts = ",".join(dict.fromkeys((*plant.shows, *plant.clean)))
    if asked == ALL_LAYOUTS:
        layouts = ALL_LAYOUTS
    command = verify_command(plant.job, layouts, plant.num_ranks)
    if types:
        command += ("--types", types)
    return command


def verify_command(job: Sequence[str], layouts: str, num_ranks: int) -> list[str]:
    return [
        *(sys.executable, "-m", "phalanx", "verify", "--json", *job),
        *("--layouts", layouts, "--ranks", str(num_ranks), "--no-resume"),
    ]


def read_rows(text: str) -> list[Row]:
    """The rows among the lines that `phalanx verify --json` printed."""
    bodies = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [body for body in bodies if body.get("schema", "").startswith(ROW_SCHEMA)]


def write_edits(plant: Plant, folder: Path) -> dict[str, str]:
    """Write the edited sources to `folder`; the environment in which processes import them."""
    texts = edit_sources(plant)
    (folder / "edits.json").write_text(json.dumps(texts), encoding="utf-8")
    (folder / "ran").mkdir()
    return {
        **build_environment(),
        "EXAM_EDITS": str(folder / "edits.json"),
        "EXAM_RAN": str(folder / "ran"),
    }


def build_environment() -> dict[str, str]:
    """The environment of `phalanx verify`: one thread a rank, the modules of the exam, and the code
    of this checkout, which plants edit, whatever the environment has installed."""
    before = os.environ.get("PYTHONPATH")
    paths = [str(HOOK), str(MODULES), str(PACKAGE.parent), *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
