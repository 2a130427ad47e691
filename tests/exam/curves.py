"""What a comparison of training curves would have found: twenty steps of the plant's job in its
first layout beside the same steps in one process, both of the edited code.

The unchanged code is trained the same way: what its two curves differ by is rounding, and a bug
shows if its curves differ by a multiple of that.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exam.plant import Plant
from exam.short_run import ONE_PROCESS
from exam.sit import Processes, build_environment, write_edits

TESTS = Path(__file__).parents[1]
MULTIPLE = 4  # of the difference that rounding makes
SMALLEST = 1e-6  # the relative difference below which nobody looks
Find = Callable[[str], Mapping[str, Any] | None]


@dataclass(frozen=True)
class ShortRun:
    """Twenty steps of a job in a layout; of the unchanged code if `plant` is None."""

    job: tuple[str, ...]
    layout: str
    num_ranks: int
    plant: Plant | None = None

    @property
    def name(self) -> str:
        owner = self.plant.name if self.plant is not None else " ".join(self.job)
        return f"curve of {owner} in {self.layout}"

    @property
    def key(self) -> str:
        edits = self.plant.digest if self.plant is not None else ""
        return f"curve/{self.job}/{self.layout}/{self.num_ranks}/{edits}"

    @property
    def unchanged(self) -> ShortRun:
        return ShortRun(self.job, self.layout, self.num_ranks)

    @property
    def in_one_process(self) -> ShortRun:
        layout = ONE_PROCESS
        if "pp" in self.layout or "odd" in self.layout:
            layout = f"{ONE_PROCESS} of {self.layout}"
        return ShortRun(self.job, layout, self.num_ranks, self.plant)


@dataclass(frozen=True)
class CurveScore:
    """The largest relative difference, over the steps, of the edited code's two curves, and of
    those of the unchanged code. `message`: why there is none."""

    layout: str
    loss: float = 0.0
    norm: float = 0.0
    loss_of_rounding: float = 0.0
    norm_of_rounding: float = 0.0
    message: str = ""

    @property
    def shows_in_loss(self) -> bool:
        return not self.loss <= max(MULTIPLE * self.loss_of_rounding, SMALLEST)

    @property
    def shows_in_norm(self) -> bool:
        return not self.norm <= max(MULTIPLE * self.norm_of_rounding, SMALLEST)


def plan_short_runs(plants: Iterable[Plant]) -> Iterator[ShortRun]:
    """The four runs of each plant, those of the unchanged code once."""
    seen: set[ShortRun] = set()
    for plant in plants:
        run = _edited_run(plant)
        for each in (run.unchanged.in_one_process, run.unchanged, run.in_one_process, run):
            if each not in seen:
                seen.add(each)
                yield each


def train_short_run(run: ShortRun, processes: Processes) -> dict[str, Any]:
    """The losses and norms of a run's steps; `message` says why there are none."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="exam-") as directory:
        folder = Path(directory)
        environment = build_environment()
        if run.plant is not None:
            environment = write_edits(run.plant, folder)
        environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(TESTS)])
        request = {
            "job": list(run.job),
            "layout": run.layout,
            "num_ranks": run.num_ranks,
            "folder": directory,
        }
        command = [sys.executable, "-m", "exam.short_run", json.dumps(request)]
        done = processes.run(command, folder, environment)
    body: dict[str, Any] = {"steps": [], "outcome": "hung", "message": "it hung"}
    if done is not None:
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        body = {"outcome": "failed", "steps": [], "message": done.stderr[-300:]}
        if lines:
            answer = json.loads(lines[-1])
            body |= {"steps": answer["steps"], "outcome": answer["status"]}
    return body | {"seconds": round(time.monotonic() - began, 1)}


def score_curves(plant: Plant, find: Find) -> CurveScore | None:
    """The score of a plant from the bodies that `find` has of its runs; None without all four."""
    run = _edited_run(plant)
    bodies = [find(each.key) for each in (run, run.in_one_process)]
    unchanged = [find(each.key) for each in (run.unchanged, run.unchanged.in_one_process)]
    edited_curves = [body["steps"] for body in bodies if body]
    curves = [body["steps"] for body in unchanged if body]
    if len(edited_curves) < 2 or len(curves) < 2:
        return None
    if not all(curves):
        words = [body["message"] for body in unchanged if body and not body["steps"]]
        return CurveScore(run.layout, message=words[0].strip().splitlines()[-1])
    loss, norm = (measure_difference(*edited_curves, column) for column in (0, 1))
    rounding = [measure_difference(*curves, column) for column in (0, 1)]
    return CurveScore(run.layout, loss, norm, *rounding)


def measure_difference(
    steps: Sequence[Sequence[float]], others: Sequence[Sequence[float]], column: int
) -> float:
    """The largest relative difference of a column; infinite where a step is missing or no number.

    A run that stops early is seen by anybody.
    """
    if len(steps) != len(others) or not steps:
        return float("inf")
    worst = 0.0
    for step, other in zip(steps, others, strict=True):
        difference = abs(step[column] - other[column]) / max(abs(other[column]), 1e-30)
        is_number = difference == difference
        worst = max(worst, difference if is_number else float("inf"))
    return worst


def _edited_run(plant: Plant) -> ShortRun:
    return ShortRun(plant.job, plant.shows[0], plant.num_ranks, plant)
