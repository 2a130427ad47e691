"""The benchmark's arithmetic, its rows, its options; nothing is measured here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ExitCode, UsageError
from phalanx.core.units import MIB
from phalanx.job.load import load_job
from throughput.__main__ import QUICK_STEPS, main, parse, run
from throughput.cases import (
    BARE,
    CASES,
    CEILING,
    NO_SINKS,
    PHALANX,
    WHOLE_LOGITS,
    WHOLE_LOGITS_CASE,
    plan_rows,
)
from throughput.contenders import BARE_LOOP, RankTimes, command_of, find_rank_pids, read_times
from throughput.machine import default_label, machine_facts
from throughput.measure import RowError, _environment, summarise
from throughput.tables import (
    Ratio,
    as_markdown,
    as_text,
    extra_lines,
    geometric_mean,
    median_of,
    ratio_of,
    table,
    value_of,
)


def record(contender: str, repeat: int, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    measured = {
        "tokens_per_s": tokens_per_s,
        "median_step_s": 1000 / tokens_per_s,
        "first_step_s": 5.0,
    }
    head = {
        "case": {"name": "tiny"},
        "contender": contender,
        "repeat": repeat,
        "machine": machine_facts(),
    }
    return head | measured | {"peak_bytes": [300 * MIB, 200 * MIB]} | more


RECORDS = [
    record(PHALANX, 0, 100.0),
    record(BARE, 0, 80.0, first_step_s=10.0),
    record(PHALANX, 1, 90.0),
    record(BARE, 1, 90.0, first_step_s=10.0),
    record(PHALANX, 2, 110.0),
    {"case": {"name": "tiny"}, "contender": BARE, "repeat": 2, "error": "exit status 1"},
]


def test_the_bare_loop_stays_what_one_writes_by_hand():
    assert len(BARE_LOOP.read_text().splitlines()) < 120


def test_a_list_counts_by_its_largest_value():
    assert value_of({"peak_bytes": [1, 3, 2]}, "peak_bytes") == 3.0


def test_medians_leave_failed_rows_out():
    assert median_of(RECORDS, "tiny", PHALANX, "tokens_per_s") == 100.0
    assert median_of(RECORDS, "tiny", BARE, "tokens_per_s") == 85.0
    assert median_of(RECORDS, "tiny", CEILING, "tokens_per_s") is None


def test_a_ratio_uses_only_repetitions_that_both_have():
    ratio = ratio_of(RECORDS, "tiny", PHALANX, BARE, "tokens_per_s")
    assert ratio == Ratio(95.0 / 85.0, 1.0, 1.25, 2)
    assert str(ratio) == "1.118 (1.000 to 1.250)"
    assert str(Ratio(0.5, 0.5, 0.5, 1)) == "0.500"
    assert ratio_of(RECORDS, "tiny", PHALANX, CEILING, "tokens_per_s") is None


def test_the_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


def test_the_table_has_a_line_for_each_case_and_gaps_where_nothing_was_measured():
    header, line = table(RECORDS)
    assert len(line) == len(header)
    first = str(Ratio(0.5, 0.5, 0.5, 2))
    assert line[:6] == ["tiny", "100", "85", "", "1.118 (1.000 to 1.250)", ""]
    assert line[6:] == ["5.0", "10.0", first, "300", "300", "1.000 (1.000 to 1.000)"]


def test_text_is_aligned_and_markdown_has_a_rule():
    lines = [["case", "x"], ["a", "10"]]
    assert as_text(lines) == "case   x\na     10"
    assert as_markdown(lines).splitlines() == ["| case | x |", "| --- | ---: |", "| a | 10 |"]


def test_optional_rows_are_told_in_words():
    records = [
        *RECORDS,
        record(NO_SINKS, 0, 101.0),
        record(WHOLE_LOGITS, 0, 50.0, peak_bytes=[600 * MIB]),
    ]
    said = "\n".join(extra_lines(records))
    assert "tokens/s over the bare loop: 1.118 (geometric mean of 1, least 1.118)" in said
    assert "step time with default sinks over none: 1.010" in said
    assert "tokens/s over the bare loop with whole logits: 2.000" in said
    assert "peak memory over the bare loop with whole logits: 0.500" in said


def test_contenders_of_a_case_are_side_by_side_and_repetitions_outermost():
    rows = plan_rows(CASES[:2], 2)
    assert [row.contender for row in rows[:6]] == [PHALANX, BARE, CEILING] * 2
    assert [row.repeat for row in rows] == [0] * 6 + [1] * 6


def test_optional_rows():
    assert {row.contender for row in plan_rows(CASES[:1], 1, observe=True)} == {
        PHALANX,
        BARE,
        CEILING,
        NO_SINKS,
    }
    whole = [row for row in plan_rows(CASES, 1) if row.contender == WHOLE_LOGITS]
    assert [row.case.name for row in whole] == [WHOLE_LOGITS_CASE]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["256x6-v4096+bare"], {"256x6-v4096-fp32/bare", "256x6-v4096-bf16/bare"}),
        (
            ["512x8-v4096-bf16+phalanx", "512x8-v4096-bf16+ceiling"],
            {"512x8-v4096-bf16/phalanx", "512x8-v4096-bf16/ceiling"},
        ),
    ],
)
def test_only_keeps_rows_by_name(only, names):
    assert {row.name for row in plan_rows(CASES, 1, only=only)} == names


def test_only_refuses_what_keeps_nothing():
    with pytest.raises(UsageError, match=r"256x6-v4096-fp16: no row .*256x6-v4096-bf16"):
        plan_rows(CASES, 1, only=["256x6-v4096-fp16"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--warmup", "0"],
        ["--repeats", "-1"],
        ["--budget-s", "0"],
        ["--budget-s", "nan"],
        ["--label", "a/b"],
    ],
)
def test_impossible_options_are_usage_errors(arguments, capsys):
    assert main(arguments) == ExitCode.USAGE
    assert arguments[0] in capsys.readouterr().err


def test_quick_changes_only_what_was_not_said():
    assert (parse(["--quick"]).steps, parse(["--quick"]).repeats) == (QUICK_STEPS, 1)
    assert (parse(["--quick", "--steps", "7"]).steps, parse([]).repeats) == (7, 3)


def test_a_spent_budget_starts_no_row_and_says_which(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("throughput.__main__._warm_file_cache", lambda: None)
    options = parse(["--quick", "--budget-s", "1e-9", "--out", str(tmp_path)])
    assert run(options, plan_rows(CASES[:1], 1, only=["bare"])) == ExitCode.OK
    assert "left out: 256x6-v4096-fp32/bare (repeat 1)" in capsys.readouterr().out


def test_a_step_is_the_time_between_ends_on_the_slowest_rank():
    ranks = [
        RankTimes([10.0, 11.0, 12.0, 13.5], [4.0, 3.0, 2.0, 1.0]),
        RankTimes([10.5, 11.0, 12.2, 13.2], [2.0] * 4),
    ]
    found = summarise(
        ranks, [1, 2], started_unix_s=8.0, ended_unix_s=20.0, steps=2, warmup=2, tokens_per_step=300
    )
    assert found.step_s == [1.2, 1.5]
    assert found.median_step_s == pytest.approx(1.35)
    assert found.tokens_per_s == pytest.approx(300 / 1.35)
    assert found.first_step_s == pytest.approx(2.5)
    assert found.losses == [3.0, 2.5, 2.0, 1.5]


def test_a_rank_with_missing_steps_is_an_error():
    with pytest.raises(RowError, match="rank 0 has 1 steps instead of 4"):
        summarise(
            [RankTimes([1.0], [1.0])],
            [1],
            started_unix_s=0,
            ended_unix_s=2,
            steps=3,
            warmup=1,
            tokens_per_step=1,
        )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_phalanx_and_the_bare_loop_are_given_the_same_work(case):
    train = command_of(PHALANX, case, data=Path("ids.npy"), out=Path("out"), steps=9)
    job = load_job(None, train[train.index("train") + 1 :])
    bare = command_of(BARE, case, data=Path("ids.npy"), out=Path("out"), steps=9)
    flags = dict(
        word.removeprefix("--").split("=") for word in bare[bare.index(str(BARE_LOOP)) + 1 :]
    )
    assert int(flags["steps"]) == job.train.steps
    assert int(flags["micro-batch"]) * int(flags["microbatches"]) * 2 == job.train.global_batch_size
    assert int(flags["micro-batch"]) == job.train.micro_batch_size
    widths = (
        job.model.dim,
        job.model.num_layers,
        job.model.num_heads,
        job.model.vocab_size,
        job.data.seq_len,
    )
    assert (
        tuple(int(flags[key]) for key in ("dim", "layers", "heads", "vocab", "seq-len")) == widths
    )
    assert flags["precision"] == job.precision.compute
    assert not job.checkpoint.at_end
    assert job.eval.tokens == 0


def test_only_the_ceiling_is_told_to_be_alone():
    for contender in (BARE, CEILING, WHOLE_LOGITS):
        command = command_of(contender, CASES[0], data=Path("d"), out=Path("o"), steps=1)
        assert ("--alone" in command, "--whole-logits" in command) == (
            contender == CEILING,
            contender == WHOLE_LOGITS,
        )


def test_a_row_that_left_nothing_is_said_to_have_left_nothing(tmp_path):
    assert find_rank_pids(PHALANX, os.getpid(), tmp_path) == []
    assert find_rank_pids(BARE, os.getpid(), tmp_path) == []
    with pytest.raises(OSError, match="rank-0"):
        read_times(BARE, tmp_path)


def test_every_contender_has_one_thread_and_no_launcher_around_it():
    environment = _environment(
        {"RANK": "1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "8", "HOME": "/nowhere"}
    )
    assert not {"RANK", "WORLD_SIZE"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "1"


def test_a_result_names_no_machine():
    facts = machine_facts()
    assert facts["cores"] >= 1
    assert os.uname().nodename not in facts.values()
    assert default_label().endswith(f"-{facts['cores']}c")
