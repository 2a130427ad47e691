"""The fields that docs/drills.md lists of each schema of `phalanx drill` are those that are printed,
with what null means where a value can be null."""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli._app import run_command_line
from phalanx.cli._json import build_json_body
from phalanx.drills.campaign import Circumstances, TrialRow
from phalanx.drills.command import CommandEnd
from phalanx.drills.job import load_drilled_job
from phalanx.drills.judge import Bars, Check, Measured, MeasuredAnswer, build_bars
from phalanx.drills.record import RunRecord
from phalanx.drills.soak.drive import SoakedRun, SoakPlan, SoakRequest, SoakResult
from phalanx.drills.soak.measure import AnsweredStrike, measure_strikes
from phalanx.drills.soak.mix import FaultLeftOut, FaultMix, PlannedStrike, draw_strikes
from phalanx.drills.soak.totals import SoakGoodput, judge_checkpoints
from phalanx.drills.trials import DrillShape, TrialPlace, load_fault

PAGE = Path(__file__).parents[2] / "docs" / "drills.md"
SHAPE = DrillShape(num_ranks=2, num_steps=200, save_every_steps=10)
NOW = Circumstances("0.1.0", "abc", "2026-01-01", "a machine", "a job")
NOT_NULL = "–"


def read_tables() -> dict[str, dict[str, str]]:
    """By heading of the section "The facts": what null means, by field."""
    section = PAGE.read_text(encoding="utf-8").split("\n## The facts\n")[1].split("\n## ")[0]
    tables: dict[str, dict[str, str]] = {}
    for part in section.split("\n### ")[1:]:
        heading, *lines = part.splitlines()
        table = tables[heading] = {}
        for line in lines:
            if line.startswith("| `"):
                names, _, null = line.strip("| ").split(" | ")
                for name in re.findall(r"`(\w+)`", names):
                    assert name not in table, (heading, name)
                    table[name] = null
    return tables


def make_soak_body() -> dict[str, Any]:
    """What a soak prints whose disturbed run recorded nothing, and is not kept."""
    mix = FaultMix(("kill", "freeze"), (FaultLeftOut("oom", "the run ends with it"),))
    record = RunRecord(Path("nowhere"), (), ())
    run = SoakedRun(record, CommandEnd(0, 9.0, False, 9.0, 9.0, 0), None, None)
    strikes = tuple(draw_strikes(mix.faults, SHAPE, gap_steps=100, seed=0))
    result = SoakResult(
        SoakRequest(None, (), mix, 1.0),
        SoakPlan(load_drilled_job(None, (), num_steps=200), SHAPE, 0.1, 100, strikes, ("a=b",)),
        run,
        run,
        tuple(measure_strikes(record, strikes, SHAPE, 0.1)),
        (judge_checkpoints(record, keeps_all=True),),
        SoakGoodput(None, None, 1.0, None),
        NOW,
    )
    return build_json_body("drill-soak", result.to_json())


def make_trial() -> dict[str, Any]:
    """The line of a trial that ran."""
    place = TrialPlace(1, 7, "data")
    bars = build_bars(load_fault("kill").expectation, rank=1, shape=SHAPE, step_p99_s=0.1)
    measured = Measured(
        has_struck=True,
        verdict="killed",
        verdict_text="",
        ranks=(1,),
        detected_s=0.1,
        detected_steps=0,
        false_verdicts=(),
        trained_again_s=None,
        lost_steps=0,
        is_bit_equal=None,
        exit_codes=(0,),
        is_overdue=False,
        num_left=0,
        goodput=None,
        wall_s=1.0,
    )
    row = TrialRow("kill", 0, 0, place, ("kill:rank=1,step=7",), NOW, bars, measured)
    return dict(json.loads(row.to_line()))


def print_body(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    run_command_line([*words, "--json"])
    return dict(json.loads(capsys.readouterr().out))


def require_described(heading: str, printed: Mapping[str, Any], record: type | None = None) -> None:
    """The table has the fields that are printed, and no other; and says what null means of those
    that are null, or can be by the type of `record`."""
    table = read_tables()[heading]
    assert table.keys() == printed.keys(), heading
    can_be_null = {name for name, value in printed.items() if value is None}
    if record is not None:
        for name, hint in typing.get_type_hints(record).items():
            if isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint):
                can_be_null.add(name)
    described = {name for name, null in table.items() if null != NOT_NULL}
    assert can_be_null <= described, heading
    if record is not None:
        assert described - can_be_null <= {"passed", "share_of_ceiling", "needless_restarts"}


def test_a_trial_has_the_fields_that_the_page_lists() -> None:
    trial = make_trial()
    assert trial["schema"] == "phalanx.drill-trial/1"
    require_described("`phalanx.drill-trial/1`", trial, TrialRow)
    for name, record in (
        ("place", TrialPlace),
        ("circumstances", Circumstances),
        ("bars", Bars),
        ("measured", Measured),
    ):
        require_described(f"`{name}`", trial[name], record)
    require_described("`checks`", trial["checks"][0], Check)


def test_a_drill_and_its_faults_have_the_fields_that_the_page_lists(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Skipped, as nobody could see it: no run.
    body = print_body(capsys, "drill", "flip_parameter", "parallel.dp_shard=2")
    assert body["schema"] == "phalanx.drill/1"
    require_described("`phalanx.drill/1`", body)
    (trial,) = body["trials"]
    assert trial.keys() == make_trial().keys() - {"schema"}
    require_described("`phalanx.drill-trial/1`", {"schema": "", **trial})
    listed = print_body(capsys, "drill", "--list")
    assert listed["schema"] == "phalanx.drill-faults/1"
    require_described("`phalanx.drill-faults/1`", listed)
    for fault in listed["faults"]:
        require_described("`faults`", fault)


def test_a_soak_has_the_fields_that_the_page_lists() -> None:
    body = make_soak_body()
    assert body["schema"] == "phalanx.drill-soak/1"
    require_described("`phalanx.drill-soak/1`", body)
    require_described("`goodput` of a soak", body["goodput"], SoakGoodput)
    require_described("`left_out` of a soak", body["left_out"][0], FaultLeftOut)
    strike = body["strikes"][0]
    require_described("`strikes` of a soak", strike, AnsweredStrike)
    # What a strike's own records have, the page says in words.
    (words,) = re.findall(r"\| `measured` \| (as of a trial, until .*) \| –", PAGE.read_text())
    assert re.findall(r"`(\w+)`", words) == list(strike["measured"])
    assert strike["measured"].keys() == typing.get_type_hints(MeasuredAnswer).keys()
    assert strike["planned"].keys() == typing.get_type_hints(PlannedStrike).keys()
    assert strike["checks"][0].keys() == make_trial()["checks"][0].keys()
    assert strike["bars"].keys() == make_trial()["bars"].keys()
    assert body["circumstances"].keys() == make_trial()["circumstances"].keys()
