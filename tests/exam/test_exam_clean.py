"""What the clean side draws: every kind of model, every row of the trainer, narrow types."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from exam.clean import MODELS, NARROW_TYPES, OWN_MODULES, CleanRun, plan_clean_runs, run_clean
from exam.score import Row
from exam.sit import MODULES, ROW_SCHEMA, Processes
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


class KeptCommands(Processes):
    """Runs no command: keeps it, and answers with these rows and exit code."""

    def __init__(self, rows: Sequence[Row] = (), exit_code: int = 0) -> None:
        super().__init__()
        self.commands: list[Sequence[str]] = []
        lines = [json.dumps({"schema": ROW_SCHEMA, **row}) for row in rows]
        self._out, self._exit_code = "\n".join(lines), exit_code

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        num_timeouts: int = 1,
    ) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        return subprocess.CompletedProcess(list(command), self._exit_code, self._out, "it ended")


def build_row(layout: str, dtype: str, refused: str = "") -> Row:
    ok = None if refused else True
    usual = {"layout": layout, "dtype": dtype, "refused": refused, "ok": ok}
    return {**usual, "crashed": "", "first": None}


@pytest.mark.parametrize("types", ["", "float64,bf16"])
def test_a_clean_run_asks_for_its_types(types: str) -> None:
    processes = KeptCommands()
    score = run_clean(CleanRun("gpt2", 3, ("ddp", "tp2"), types), processes)
    assert score.alarms == ("4 rows missing, the first ddp float64: it ended",)
    (command,) = processes.commands
    assert list(command[-2:]) == (["--types", types] if types else ["4", "--no-resume"])


ALL_ROWS = [
    build_row("plain", "float64"),
    build_row("ddp", "float64"),
    build_row("ddp-powersgd", "float64"),
    build_row("ddp", "bfloat16"),
    build_row("tp4", "", refused="heads"),
]


@pytest.mark.parametrize(
    ("num_rows", "exit_code", "alarms"),
    [
        # Neither a module beside its definition nor compression is judged in a narrow type.
        (5, 0, ()),
        (5, 3, ()),
        (3, 0, ("3 rows missing, the first tp4 float64",)),
        (5, 1, ("exit code 1",)),
        (5, 11, ("exit code 11",)),
        (2, 1, ("4 rows missing", "exit code 1")),
    ],
)
def test_a_clean_run_that_broke_off_is_an_alarm(
    num_rows: int, exit_code: int, alarms: tuple[str, ...]
) -> None:
    run = CleanRun("gpt2", 3, ("ddp", "ddp-powersgd", "plain", "tp4"), "float64,bf16")
    score = run_clean(run, KeptCommands(ALL_ROWS[:num_rows], exit_code))
    assert len(score.alarms) == len(alarms)
    assert all(map(str.startswith, score.alarms, alarms)), score.alarms
