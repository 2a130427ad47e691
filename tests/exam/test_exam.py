"""The plants of the exam apply to the code as it is, their rows are scored rightly, and a few of
them are found."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exam.curves import ShortRun, measure_difference, plan_short_runs, score_curves, train_short_run
from exam.generate import SEAMS, SIZES, generate_variants
from exam.page import format_blocks, format_narrow
from exam.plant import (
    PACKAGE,
    Edit,
    Plant,
    editing_loaded_modules,
    find_stale,
    list_plants,
    load_plant,
)
from exam.results import Results
from exam.score import Score, add_marks, score_rows
from exam.short_run import NUM_STEPS, ONE_PROCESS
from exam.sit import MODULES, Processes, sit
from models import CPU
from phalanx.job.schema import Job
from phalanx.verify.cases import list_all_layouts, plan_layout_cases
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.rank import run_verify_cases
from phalanx.verify.row import ROWS_FILE_NAME
from phalanx.verify.verified_job import make_verified_job, shrink_job
from ranks import run_ranks

NUM_SAMPLE_RANKS = 4

ANCHORS_S = 5.0  # of computing, for the edits of all plants

SAMPLE = (
    "rank_1_spoils_one_gradient",
    "blocks_merged_without_weights",
    "chunks_forget_their_second_weight_gradient",
)


def test_every_plant_applies() -> None:
    """Each edit's text stands once in its symbol; layouts, files and names are as they should be.
    That takes so little computing that it is asked with every change of the code."""
    began_s = time.process_time()
    plants = [*list_plants(), *generate_variants(0)]
    assert [line for plant in plants for line in find_stale(plant)] == []
    assert time.process_time() - began_s < 3 * ANCHORS_S
    assert len({plant.name for plant in plants}) == len(plants) >= 100
    assert len({(plant.edits, plant.job) for plant in plants}) == len(plants)
    assert all(not set(plant.shows) & set(plant.clean) for plant in plants)
    assert all(part == part.lower() for plant in plants for part in plant.cause)


def test_a_module_of_ones_own_has_cases_in_narrow_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is traced in the job's precision alone."""
    from phalanx.job.load import load_job
    from phalanx.verify.choose import select_layout_cases

    monkeypatch.syspath_prepend(MODULES)
    job = load_job(None, ["model.kind=exam_models:WithDropout", "data.seq_len=16"])
    selection = select_layout_cases(
        job, ["ddp"], ranks=2, steps=1, shrink=False, types="float64,bf16"
    )
    assert [(dtype, case.refused) for dtype, case in selection.work] == [
        ("float64", ""),
        ("bfloat16", ""),
    ]


def test_the_anchors_are_checked_without_torch() -> None:
    code = (
        "import sys; from exam.plant import *; plants = list_plants(); list(find_stale(plants[0]));"
        " print('torch' in sys.modules, len(plants) > 100)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False True\n"


def test_the_package_knows_nothing_of_the_exam() -> None:
    for path in PACKAGE.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "__planted__" not in source, path
        if path.is_relative_to(PACKAGE / "verify"):
            assert "exam" not in set(imports_of(source)), path


def imports_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_what_is_wrong_with_a_plant_is_told() -> None:
    good = load_plant("clips_to_half")
    (edit,) = good.edits

    def lines(**changes: Any) -> list[str]:
        return list(find_stale(replace(good, edits=(replace(edit, **changes),))))

    assert lines() == []
    assert "no ParallelModel.gone" in lines(symbol="ParallelModel.gone")[0]
    assert "stands 0 times" in lines(old="factor *= 3")[0]
    assert "does not call __planted__()" in lines(new="factor = 2")[0]
    assert "there is no parallel/gone.py" in lines(file="parallel/gone.py")[0]
    judged = Edit(
        "verify/compare.py", "TraceComparison", "class TraceComparison", "class __planted__(), ("
    )
    assert "edits the judge" in next(find_stale(replace(good, edits=(judged,))))


# Scores

PLANT = Plant(
    axis="loss",
    source="",
    mistake="",
    edits=(),
    shows=("zero3", "tp4"),
    clean=("ddp",),
    tensors=("*norm.weight",),
    blamed=(1,),
    cause=("clip",),
    name="some",
)


def row(layout: str, dtype: str = "float64", **values: Any) -> dict[str, Any]:
    usual = {"first": None, "refused": "", "crashed": "", "errors": {"loss": 1e-16, "norm": 1e-16}}
    return {"layout": layout, "dtype": dtype, **usual, **values}


def first(
    name: str = "blocks.0.ffn_norm.weight", rank: int = 1, cause: str = "Clipped twice"
) -> Any:
    return {"name": name, "rank": rank, "cause": cause, "text": "gradient is off"}


def test_a_difference_is_scored_by_what_it_names() -> None:
    rows = [
        row("ddp"),
        row("zero3", first=first()),
        row("tp4"),
        row("tp4", "float32", first=first()),
    ]
    score = score_rows(PLANT, rows, exit_code=11, text="")
    assert (score.outcome, score.tensor, score.rank, score.cause) == ("found", True, True, True)
    assert (score.layouts_found, score.layouts_missed, score.false_alarms) == (
        ("zero3", "tp4"),
        (),
        (),
    )
    assert (score.types, score.num_clean_rows) == (("float64", "float32"), 1)
    wrong = score_rows(
        PLANT, [row("tp4", first=first("head.weight", 0, "rounding"))], exit_code=11, text=""
    )
    assert (wrong.outcome, wrong.tensor, wrong.rank, wrong.cause) == ("found", False, False, False)
    assert wrong.layouts_missed == ("zero3",)


def test_a_difference_in_a_clean_layout_is_a_false_alarm_and_finds_nothing() -> None:
    score = score_rows(PLANT, [row("ddp", first=first()), row("zero3")], exit_code=11, text="")
    assert (score.outcome, score.false_alarms) == ("missed", ("ddp",))


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([], "crashed"),
        ([row("zero3"), row("tp4")], "missed"),
        ([row("zero3", crashed="on rank 1")], "crashed"),
        ([row("zero3", refused="no"), row("tp4", refused="no")], "refused"),
    ],
)
def test_what_is_not_found_is_told_apart(rows: list[dict[str, Any]], outcome: str) -> None:
    assert score_rows(PLANT, rows, exit_code=11, text="").outcome == outcome


def test_what_differs_though_no_bug_acted_is_a_false_alarm() -> None:
    exact = row("zero3", first=first(), errors={"gradient": 0.5})
    narrow = row("zero3", "bfloat16", first=first(), tolerance=0.1)
    differs = score_rows(PLANT, [row("ddp"), exact, narrow], exit_code=11, text="")
    assert not differs.is_found
    acted = add_marks(differs, is_reached=True, acted=True, text="")
    assert (acted.is_found, acted.outcome, acted.false_alarms) == (True, "found", ())
    assert acted.narrow == {"bfloat16": "found"}
    idle = add_marks(differs, is_reached=True, acted=False, text="")
    assert (idle.outcome, idle.tensor, idle.types) == ("missed", False, ())
    assert (idle.false_alarms, idle.layouts_found, idle.narrow) == (("zero3",), (), {})
    unread = add_marks(differs, is_reached=False, acted=False, text="an error")
    assert (unread.outcome, unread.message, unread.narrow) == ("not run", "an error", {})
    assert unread.false_alarms == ("zero3",)


@pytest.mark.parametrize("norm", [float("nan"), None, 2e-5])
def test_what_curves_would_show(norm: float | None) -> None:
    rows = [row("zero3", errors={"loss": 1e-7, "norm": norm}), row("tp4", errors={})]
    score = score_rows(PLANT, rows, exit_code=0, text="")
    assert (score.shows_in_loss, score.shows_in_norm) == (False, True)


def _find_curves(losses: dict[str, list[float]]) -> Any:
    """Bodies of the four runs of PLANT: each step has a loss and the norm 1."""
    runs = dict(
        zip(("one", "clean", "edited_one", "edited"), plan_short_runs([PLANT]), strict=True)
    )
    bodies = {
        runs[name].key: {"steps": [[loss, 1.0] for loss in steps], "message": "it\nfailed"}
        for name, steps in losses.items()
    }
    return bodies.get


@pytest.mark.parametrize(
    ("edited", "shows"),
    [
        ([2.0, 2.0], False),
        ([2.0, 2.00004], False),
        ([2.0, 2.0001], True),
        ([2.0, float("nan")], True),
        ([2.0], True),
        ([], True),
    ],
)
def test_a_bug_shows_in_curves_that_differ_by_more_than_rounding(
    edited: list[float], shows: bool
) -> None:
    rounding = [2.0, 2.00002]
    curves = {"one": [2.0, 2.0], "clean": rounding, "edited_one": [2.0, 2.0], "edited": edited}
    score = score_curves(PLANT, _find_curves(curves))
    assert score is not None
    assert (score.shows_in_loss, score.message) == (shows, "")
    assert score.shows_in_norm == (len(edited) < 2)


def test_without_curves_of_the_unchanged_code_nothing_is_said() -> None:
    curves: dict[str, list[float]] = {"one": [2.0], "clean": [], "edited_one": [2.0]}
    assert score_curves(PLANT, _find_curves(curves)) is None
    score = score_curves(PLANT, _find_curves(curves | {"edited": []}))
    assert score is not None
    assert score.message == "failed"
    blocks = format_blocks(
        [(PLANT, Score(PLANT.name, "found", acted=True))],
        [],
        [],
        curves={PLANT.name: score},
        about="here",
        seconds=60.0,
        num_plants=1,
    )
    assert "Not trained: some (failed)." in blocks["totals"]
    assert "| not trained | not trained |" in blocks["plants"]


@pytest.mark.parametrize(
    ("gradient", "is_found", "outcome"),
    [(0.5, True, "found"), (0.5, False, "missed"), (0.01, False, "below")],
)
def test_a_narrow_type_must_find_what_is_far_above_its_band(
    gradient: float, is_found: bool, outcome: str
) -> None:
    exact = row("zero3", first=first(), errors={"gradient": gradient})
    narrow = row("zero3", "bfloat16", first=first() if is_found else None, tolerance=0.1)
    score = score_rows(PLANT, [exact, narrow], exit_code=11, text="")
    assert score.narrow == {"bfloat16": outcome}
    assert f"| bfloat16 | {int(is_found)} |" in format_narrow(
        [(PLANT, score)], num_plants=1, about=""
    )


def test_scores_and_results_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    score = score_rows(PLANT, [row("zero3", first=first())], exit_code=11, text="")
    Results(path).add("key", score.to_json())
    with path.open("a") as file:
        file.write('{"key": "half')
    assert Score.from_json(Results(path).find("key") or {}) == score
    assert Results(path).find("half") is None


def test_variants_are_those_of_their_seed() -> None:
    variants = list(generate_variants(7))
    assert variants == list(generate_variants(7)) != list(generate_variants(8))
    assert len(variants) == len(SEAMS) * len(SIZES)


# Real runs

SAMPLE_IN_RANKS = (
    "rank_1_spoils_one_gradient",
    "blocks_merged_without_weights",
    "tp_norms_not_summed",
    "second_microbatch_weighs_more",
)


def judge_sample(rank: int, directory: str) -> dict[str, tuple[dict[str, Any], bool]]:
    """Plant -> (the row of its first layout, whether its bug acted) on this rank; "" -> that of the
    code as it is."""
    job = make_verified_job(shrink_job(Job.model_validate({}))[0], NUM_SAMPLE_RANKS)
    judged: dict[str, tuple[dict[str, Any], bool]] = {}
    rows_file = Path(directory) / ROWS_FILE_NAME

    def judge(layout: str) -> dict[str, Any]:
        axes = dict(list_all_layouts(NUM_SAMPLE_RANKS))[layout]
        (case,) = plan_layout_cases(
            job, [(layout, axes)], num_ranks=NUM_SAMPLE_RANKS, cluster=CPU, shape=None
        )
        assert case.plan is not None, case.refused
        work = (VerifyCase("float64", layout, case.parallel, case.plan),)
        run_verify_cases(
            VerifyPayload(job, Path(directory), None, 3, NUM_SAMPLE_RANKS, "small", work)
        )
        if rank != 0:
            return {}
        row: dict[str, Any] = json.loads(rows_file.read_text().splitlines()[-1])
        return row

    # First, for the reference that it writes is that of all.
    judged[""] = judge("cp4"), False
    for name in SAMPLE_IN_RANKS:
        plant = load_plant(name)
        with editing_loaded_modules(plant, rank) as acted:
            row = judge(plant.shows[0])
        judged[name] = row, bool(acted)
    return judged


def test_a_sample_of_plants_is_found_and_named(tmp_path: Path) -> None:
    of_ranks = run_ranks(NUM_SAMPLE_RANKS, judge_sample, str(tmp_path))
    row, _ = of_ranks[0].pop("")
    assert row["ok"], row["first"]
    for name, (row, _) in of_ranks[0].items():
        assert any(judged[name][1] for judged in of_ranks), f"{name} never acted"
        score = score_rows(load_plant(name), [row], exit_code=11, text="")
        assert (score.outcome, score.tensor, score.rank, score.cause) == (
            *("found", True),
            *(True, True),
        ), (name, row["first"])


@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLE)
def test_a_plant_is_found_and_named(name: str) -> None:
    score = sit(load_plant(name))
    assert (score.outcome, score.acted, score.tensor, score.rank) == ("found", True, True, True), (
        score
    )
    assert score.false_alarms == ()


@pytest.mark.long
def test_curves_of_twenty_steps_are_trained() -> None:
    plant = load_plant("third_microbatch_lost")
    curves = [
        train_short_run(run, Processes())["steps"]
        for run in (
            ShortRun(plant.job, ONE_PROCESS, plant.num_ranks),
            ShortRun(plant.job, "ddp", plant.num_ranks),
            ShortRun(plant.job, "ddp", plant.num_ranks, plant),
        )
    ]
    assert [len(steps) for steps in curves] == [NUM_STEPS] * 3
    assert measure_difference(curves[1], curves[0], 0) < 1e-5
    assert measure_difference(curves[2], curves[0], 0) > 0.1


@pytest.mark.long
@pytest.mark.parametrize("plant", list_plants(), ids=lambda plant: plant.name)
def test_a_plant_runs(plant: Plant) -> None:
    """It acts and is found; no clean layout may differ."""
    score = sit(plant)
    assert json.loads(json.dumps(score.to_json()))["plant"] == plant.name
    assert (score.is_found, score.false_alarms) == (True, ()), score
