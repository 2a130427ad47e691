"""What `make exam` writes of docs/exam.md: the blocks between marks, and only those that its results
are for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest

import exam.__main__
from exam.__main__ import PAGE, list_sittings, main
from exam.clean import CleanScore
from exam.generate import generate_variants
from exam.page import format_blocks, format_ladder, replace_blocks
from exam.plant import Plant, list_plants, load_plant
from exam.results import Results, digest_sources
from exam.score import ALL_LAYOUTS, OWN_LAYOUTS, Score
from exam.sit import Processes

NAME = "rank_1_spoils_one_gradient"
BLOCKS = ("sat", "totals", "clean", "narrow", "ladder", "plants", "variants")
PROSE = "Written by hand, before and after."
ONLY_PLANTS = ("--generated", "0", "--clean", "0")


def build_blocks(plants: Sequence[Plant], clean: Sequence[CleanScore] = ()) -> dict[str, str]:
    sat = [(plant, Score(plant.name, "found", tensor=True, acted=True)) for plant in plants]
    generated = [
        (p, Score(p.name, "found", acted=True, types=("float64",))) for p in generate_variants(0)
    ]
    return format_blocks(
        sat,
        generated,
        clean,
        curves={},
        about="of this machine",
        seconds=60.0,
        num_plants=len(plants),
    )


def test_blocks_have_every_plant() -> None:
    plants = list_plants()
    blocks = build_blocks(plants)
    assert all(f"| {plant.name}: " in blocks["plants"] for plant in plants)
    assert "| gradient | float64 | 1/1 |" in blocks["ladder"]
    assert f"| **all** | {len(plants)} | {len(plants)} | 0 |" in blocks["totals"]
    assert f"{len(plants)} of {len(plants)} plants sat, on " in blocks["sat"]


def test_only_what_could_be_wrong_counts_as_right() -> None:
    """Of the first any tensor and any rank are right; the second names one of each."""
    anything, one = load_plant("factor_forgets_cp"), load_plant("rank_1_spoils_one_gradient")
    assert (anything.asks_tensor, anything.asks_rank) == (False, False)
    assert (one.asks_tensor, one.asks_rank) == (True, True)
    sat = [
        (plant, Score(plant.name, "found", tensor=True, rank=True, acted=True))
        for plant in (anything, one)
    ]
    blocks = format_blocks(sat, [], [], curves={}, about="", seconds=0.0, num_plants=2)
    assert "| 1/1 | 1/1 | 0 |" in blocks["totals"].splitlines()[-1]
    first, second = blocks["plants"].splitlines()[-2:]
    assert "| found |  |  | no |" in first
    assert "| found | yes | yes | no |" in second


@pytest.mark.parametrize(("asked", "layouts"), [(OWN_LAYOUTS, "..."), (ALL_LAYOUTS, "all")])
def test_the_page_says_which_command_and_how_many_jobs(asked: str, layouts: str) -> None:
    plants = [load_plant("tp_norms_averaged"), load_plant("hf_embeddings_decay_under_tp")]
    sat = [(plant, Score(plant.name, "found", acted=True)) for plant in plants]
    blocks = format_blocks(
        sat, sat, [], curves={}, about="here", seconds=60.0, num_plants=2, asked=asked
    )
    assert f"`phalanx verify JOB --json --layouts {layouts} --ranks N`" in blocks["sat"]
    assert "2 of 2 plants sat, on 2 jobs; here; 1 minutes" in blocks["sat"]
    for name in ("ladder", "variants"):
        assert ("in all layouts" in blocks[name]) == (asked == ALL_LAYOUTS)


def test_the_ladder_has_each_type_that_results_have() -> None:
    """A type in which nothing was found, too; old results do not say their types."""
    (variant, *_) = generate_variants(0)
    types = ("float64", "bfloat16", "float16", "fp8")
    found = Score(variant.name, "found", acted=True, types=types[:2], types_judged=types)
    lines = format_ladder([(variant, found)], about="here").splitlines()
    shown = [line.split(" | ")[1:3] for line in lines if line.startswith("| gradient")]
    assert shown == [["float64", "1/1"], ["bfloat16", "1/1"], ["float16", "0/1"], ["fp8", "0/1"]]
    old = Score(variant.name, "found", acted=True, types=("float64",))
    lines = format_ladder([(variant, old)], about="here").splitlines()
    shown = [line.split(" | ")[1:3] for line in lines if line.startswith("| gradient")]
    assert shown == [["float64", "1/1"], ["float32", "0/1"]]


def test_the_page_keeps_what_was_written_by_hand() -> None:
    """Reference: the lines of the page outside of marks, before and after all blocks are new."""
    page = PAGE.read_text(encoding="utf-8")
    new = dict.fromkeys(BLOCKS, "of this machine\n") | build_blocks(
        list_plants(), [CleanScore("clean_gpt2_0", 0, 50, 2, ())]
    )
    assert set(new) == set(BLOCKS)
    replaced = replace_blocks(page, new)
    assert list_lines_of_hand(replaced) == list_lines_of_hand(page)
    assert replaced.count("of this machine") == 5
    assert "50 rows of the unchanged code, over 1 seeds, had 0 alarms" in replaced
    for prose in (" sat together on ", "of which 12 were found", "## Bugs of examiners"):
        assert any(prose in line for line in list_lines_of_hand(replaced))
    assert replace_blocks(replaced, new) == replaced


def list_lines_of_hand(page: str) -> list[str]:
    """The lines that stand outside of marks, and the marks."""
    lines, is_by_hand = [], True
    for line in page.splitlines():
        is_end = line.startswith("<!-- end of ")
        if is_by_hand or is_end:
            lines.append(line)
        is_by_hand = (is_by_hand or is_end) and not line.endswith(": written by make exam -->")
    return lines


def test_the_page_describes_each_field_of_results() -> None:
    """`--json` prints a score, a clean score, or the body of a short run."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("## The results as JSON\n")[2].partition("\n## ")[0]
    described = {
        (field, kind)
        for fields_, kinds in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE)
        for field in re.findall(r"`(\w+)`", fields_)
        for kind in kinds.split(", ")
    }
    names = {
        "plant": {field.name for field in fields(Score)} - {"seconds"},
        "clean": {field.name for field in fields(CleanScore)} - {"seconds"},
        "curve": {"steps", "outcome", "message"},
        "all": {"schema", "seconds"},
    }
    assert described == {(field, kind) for kind in names for field in names[kind]}


def test_a_page_without_a_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="no block 'totals'"):
        replace_blocks("# The exam\n", {"totals": "new\n"})


# Whole runs, of which all is known before


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page whose blocks say "before", with prose around each."""
    path = tmp_path / "exam.md"
    marks = (f"<!-- {n}: written by make exam -->\nbefore {n}\n<!-- end of {n} -->" for n in BLOCKS)
    path.write_text("\n".join(f"{PROSE}\n{block}\n{PROSE}" for block in marks), encoding="utf-8")
    monkeypatch.setattr(exam.__main__, "PAGE", path)
    return path


def keep_narrow_score(folder: Path, types: str) -> Path:
    """Results in which the plant NAME has sat in `types`, and was found in bf16, too."""
    results = folder / "results.jsonl"
    (work,) = list_sittings([load_plant(NAME)], digest_sources(), Processes(), types)
    narrow = {"bfloat16": "found"}
    score = Score(NAME, "found", acted=True, narrow=narrow, bands={"bfloat16": 0.07})
    Results(results).add(work.key, score.to_json())
    return results


def list_unchanged_blocks(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    assert text.count(PROSE) == 2 * len(BLOCKS)
    return [name for name in BLOCKS if f"before {name}" in text]


def test_a_plant_whose_job_is_narrow_writes_the_totals(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked decides: verify takes the narrow type of a job by itself."""
    monkeypatch.setattr(exam.__main__, "list_plants", lambda: [load_plant(NAME)])
    results = keep_narrow_score(tmp_path, "")
    assert main([*ONLY_PLANTS, "--results", str(results)]) == 0
    assert list_unchanged_blocks(page) == ["clean", "narrow", "ladder", "variants"]
    assert "| **all** | 1 | 1 |" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(("types", "is_narrow"), [("float64,bf16", True), ("float64", False)])
def test_a_run_in_types_writes_those_alone(
    types: str, is_narrow: bool, page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exam.__main__, "list_plants", lambda: [load_plant(NAME)])
    results = keep_narrow_score(tmp_path, types)
    assert main([*ONLY_PLANTS, "--types", types, "--results", str(results)]) == 0
    kept = [name for name in BLOCKS if name != "narrow" or not is_narrow]
    assert list_unchanged_blocks(page) == kept
    assert ("| bfloat16 | 1 | 0 | 100 % |" in page.read_text(encoding="utf-8")) == is_narrow


def test_some_plants_leave_the_page_as_all_of_them_wrote_it(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reference: the page before. What one plant is found as in narrow types is printed."""
    before = page.read_text(encoding="utf-8")
    results = keep_narrow_score(tmp_path, "float64,bf16")
    options = [*ONLY_PLANTS, "--only", NAME, "--types", "float64,bf16"]
    assert main([*options, "--results", str(results)]) == 0
    assert page.read_text(encoding="utf-8") == before
    assert "| bfloat16 | 1 | 0 | 100 % |" in capsys.readouterr().err
