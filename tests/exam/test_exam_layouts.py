"""The layouts of plants: they exist, `phalanx verify JOB --layouts all` has them, none is refused; and
the command that a plant sits with."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import exam.__main__
from exam.__main__ import main
from exam.generate import generate_variants
from exam.plant import DEFAULT_JOB, Plant, list_plants, load_plant
from exam.score import ALL_LAYOUTS
from exam.sit import MODULES, NUM_TIMEOUTS_OF_ALL_LAYOUTS, Processes, build_environment, sit
from phalanx.cli._arguments import build_overrides_of_model, split_job_file_and_overrides
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job
from phalanx.verify.cases import (
    ONE_PROCESS_ROWS,
    list_all_layouts,
    list_gradient_compression_layouts,
)
from phalanx.verify.choose import select_layout_cases
from phalanx.verify.trainer_cases import list_trainer_case_names
from phalanx.verify.verified_job import SHRUNK_VOCAB_SIZE


def load_job_of_plant(plant: Plant) -> Job:
    words = [word for word in plant.job if word != "--shrink"]
    model = None
    if words[:1] == ["--model"]:
        _, model, *words = words
    job_file, overrides = split_job_file_and_overrides(words)
    return load_job(job_file, build_overrides_of_model(model, overrides))


def group_by_command() -> dict[tuple[tuple[str, ...], int], list[Plant]]:
    """(job, ranks) -> the plants and variants that are judged with both."""
    plants: dict[tuple[tuple[str, ...], int], list[Plant]] = {}
    for plant in (*list_plants(), *generate_variants(0)):
        plants.setdefault((plant.job, plant.num_ranks), []).append(plant)
    return plants


def list_rows_of_all_layouts(job: Job, num_ranks: int) -> set[str]:
    """The names of rows, refused ones among them, that `--layouts all` has."""
    experts = (
        not job.model.is_foreign and build_model_shape(job, SHRUNK_VOCAB_SIZE).experts is not None
    )
    layouts = [
        *list_all_layouts(num_ranks, experts=experts),
        *list_gradient_compression_layouts(num_ranks),
    ]
    names = [*ONE_PROCESS_ROWS, *list_trainer_case_names(num_ranks, experts=experts)]
    return {*names, *(name for name, _ in layouts)}


def test_all_layouts_of_a_job_have_those_of_its_plants(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a user who knows nothing of a bug runs what shows it."""
    monkeypatch.syspath_prepend(MODULES)
    for (_, num_ranks), plants in group_by_command().items():
        names = list_rows_of_all_layouts(load_job_of_plant(plants[0]), num_ranks)
        for plant in plants:
            assert {*plant.shows, *plant.clean} <= names, plant.name


@pytest.mark.long
def test_all_layouts_of_a_job_judge_those_of_its_plants(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is refused. Reference: the rows of verify's own selection."""
    monkeypatch.syspath_prepend(MODULES)
    for (job, num_ranks), plants in group_by_command().items():
        selection = select_layout_cases(
            load_job_of_plant(plants[0]),
            ALL_LAYOUTS,
            ranks=num_ranks,
            steps=3,
            shrink=True if "--shrink" in job else None,
        )
        assert {case.name for case in selection.cases} == list_rows_of_all_layouts(
            load_job_of_plant(plants[0]), num_ranks
        )
        judged = {case.name for _, case in selection.work}
        for plant in plants:
            assert {*plant.shows, *plant.clean} <= judged, plant.name


@pytest.mark.long
def test_no_layout_of_a_plant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MODULES)
    for plant in (*list_plants(), *generate_variants(0)):
        selection = select_layout_cases(
            load_job_of_plant(plant),
            [*plant.shows, *plant.clean],
            ranks=plant.num_ranks,
            steps=3,
            shrink="--shrink" in plant.job,
        )
        refused = {case.name: case.refused for case in selection.cases if case.refused}
        assert refused == {}, plant.name


# The command


class RecordedProcesses(Processes):
    """Runs nothing: keeps the commands, and answers that zero3 differs in float64."""

    def __init__(self, *, timeout_s: float = 0.0) -> None:
        super().__init__(timeout_s)
        self.commands: list[tuple[str, ...]] = []
        self.num_timeouts = 0

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        num_timeouts: int = 1,
    ) -> subprocess.CompletedProcess[str]:
        self.commands.append(tuple(command))
        self.num_timeouts = num_timeouts
        first = {"name": "norm.weight", "rank": 0, "cause": "none", "text": "off"}
        usual = {"refused": "", "crashed": "", "errors": {}, "tolerance": 0.0}
        schema = "phalanx.verify-row/1"
        rows: list[dict[str, Any]] = [
            {"schema": schema, "layout": "ddp", "dtype": "float64", "first": None, **usual},
            {"schema": schema, "layout": "zero3", "dtype": "float64", "first": first, **usual},
        ]
        (Path(environment["EXAM_RAN"]) / "phalanx.some").touch()
        (Path(environment["EXAM_RAN"]) / "phalanx.some.acted").touch()
        text = "\n".join(map(json.dumps, rows))
        return subprocess.CompletedProcess(list(command), 11, text, "")


def find_option(command: Sequence[str], name: str) -> str:
    return command[list(command).index(name) + 1]


def test_a_plant_sits_in_its_own_layouts_or_in_all_of_its_job() -> None:
    plant = load_plant("adamw_never_counts_when_sharded")
    processes = RecordedProcesses()
    own = sit(plant, processes, types="float64,bf16")
    assert (own.asked, own.outcome, processes.num_timeouts) == ("own", "found", 1)
    natural = sit(plant, processes, asked=ALL_LAYOUTS)
    assert (natural.asked, natural.is_found) == ("all", True)
    assert processes.num_timeouts == NUM_TIMEOUTS_OF_ALL_LAYOUTS
    assert natural.num_clean_rows == 1  # ddp is what this plant names as clean
    first, second = processes.commands
    assert find_option(first, "--layouts") == "zero1,zero3,ddp,tp4"
    assert find_option(first, "--types") == "float64,bf16"
    assert find_option(second, "--layouts") == "all"
    assert "--types" not in second
    for command in (first, second):
        assert find_option(command, "--ranks") == "4"
        assert set(DEFAULT_JOB) <= set(command)


def test_an_exam_in_all_layouts_has_results_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found in a plant's own layouts is not taken for what all of them find; --sample
    draws as ever."""
    made: list[RecordedProcesses] = []

    def make_processes(**options: Any) -> RecordedProcesses:
        made.append(RecordedProcesses(**options))
        return made[-1]

    monkeypatch.setattr(exam.__main__, "Processes", make_processes)
    options = ["--sample", "2", "--seed", "3", "--generated", "0", "--clean", "0"]
    options += ["--results", str(tmp_path / "results.jsonl")]
    for extra in ([], ["--natural"], ["--natural"]):
        assert main([*options, *extra]) == 0
    own, natural, again = (processes.commands for processes in made)
    drawn = random.Random(3).sample(list_plants(), 2)
    layouts = [",".join(dict.fromkeys((*plant.shows, *plant.clean))) for plant in drawn]
    assert sorted(find_option(command, "--layouts") for command in own) == sorted(layouts)
    assert [find_option(command, "--layouts") for command in natural] == ["all", "all"]
    assert again == []
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["body"]["asked"] for line in lines) == [
        "all",
        "all",
        "own",
        "own",
    ]


def test_the_code_of_this_checkout_is_judged_whatever_is_installed() -> None:
    place = Path(__file__).parent
    environment = build_environment() | {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import phalanx; print(phalanx.__file__)"]
    found = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)
    assert Path(found.stdout.strip()) == place.parents[1] / "src" / "phalanx" / "__init__.py"
