"""What the clean side draws: every kind of model, every row of the trainer, narrow types."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from exam.clean import MODELS, NARROW_TYPES, OWN_MODULES, CleanRun, plan_clean_runs, run_clean
from exam.sit import MODULES, Processes
from phalanx.verify.trainer_cases import list_trainer_case_names

EXPERT_MODELS = {"small-mixtral", "small-deepseek"}


def test_each_row_of_the_trainer_is_drawn() -> None:
    """Those of experts that ranks share out, too, and of models that have experts alone."""
    runs = list(plan_clean_runs(5000))
    drawn = {layout for run in runs for layout in run.layouts}
    assert set(list_trainer_case_names(4, experts=True)) <= drawn
    assert {run.model for run in runs if "trainer-zero3-ep2" in run.layouts} == EXPERT_MODELS


def test_each_model_is_drawn_in_each_narrow_type() -> None:
    runs = list(plan_clean_runs(20_000))
    names = {f"float64,{name}" for name in NARROW_TYPES}
    for model in (*MODELS, *OWN_MODULES):
        types = [run.types for run in runs if run.model == model]
        assert set(types) == {"", *names}, model
        assert 0.6 < types.count("") / len(types) < 0.9, model
    assert len({run.name for run in runs}) == len(runs)


def test_a_model_of_transformers_is_found_by_its_config() -> None:
    (run,) = (run for run in plan_clean_runs(1000) if run.model == "hf:llama")
    assert "/" not in run.name
    assert run.job[:2] == ("--model", f"hf:{MODULES / 'llama' / 'config.json'}")
    assert "--shrink" not in run.job


@pytest.mark.parametrize("types", ["", "float64,bf16"])
def test_a_clean_run_asks_for_its_types(types: str) -> None:
    commands: list[Sequence[str]] = []

    class KeptCommands(Processes):
        def run(
            self,
            command: Sequence[str],
            folder: Path,
            environment: Mapping[str, str],
            *,
            num_timeouts: int = 1,
        ) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(list(command), 0, "", "nothing ran")

    score = run_clean(CleanRun("gpt2", 3, ("ddp", "tp2"), types), KeptCommands())
    assert score.alarms == ("no row: nothing ran",)
    (command,) = commands
    assert list(command[-2:]) == (["--types", types] if types else ["4", "--no-resume"])
