"""The selection of tests by what they assert, and the runner of `make test-elsewhere` on a
folder of three tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import elsewhere
import marks
from elsewhere import Variant, is_in_tenth, read_complete_record, read_plan, run_variant

TESTS = Path(marks.TESTS)
BITS = """
import os

def equal(one: float, other: float) -> bool:
    return one == other

def same() -> bool:
    return equal(1.0, 1.0)

def test_bits() -> None:
    assert same()

def test_fails_until_it_is_mended() -> None:
    assert equal(1.0, 1.0) and os.path.exists(os.environ["MENDED"])
"""
OTHERS = "\n".join(f"def test_other_{i}() -> None: ..." for i in range(60))
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("path", "test", "expected"),
    [
        ("distributed/test_bad_input.py", "test_a_run_directory_in_use", {"bits"}),
        (
            "unit/test_verify_routing_differences.py",
            "test_forced_choices_are_taken_and_those_that_differ_are_told",
            {"bits"},
        ),
        ("unit/test_verify_routing_differences.py", "test_ranks_that_disagree_are_found", set()),
        (
            "contracts/test_hooks.py",
            "test_all_ranks_get_the_same_bits",
            {"bits"},
        ),  # its fixture compares
        (
            "distributed/test_launch.py",
            "test_a_killed_rank_is_restarted_and_a_resumed_run_appends",
            {"deadline"},
        ),
    ],
)
def test_marks_are_read_from_what_a_test_uses(path: str, test: str, expected: set[str]) -> None:
    assert marks.marks_of_tests(TESTS / path)[test] == expected


def test_the_tenth_is_a_tenth_and_depends_on_the_seed() -> None:
    names = [f"tests/test_x.py::test_{i}" for i in range(2000)]
    first, other = ({name for name in names if is_in_tenth(name, seed)} for seed in (0, 1))
    assert 150 < len(first) < 250
    assert first != other


@pytest.mark.long
def test_a_variant_runs_its_tests_and_goes_on_from_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, records, mended = tmp_path / "tests", tmp_path / "records", tmp_path / "mended"
    tests.mkdir()
    records.mkdir()
    (tests / "test_bits.py").write_text(BITS)
    (tests / "test_others.py").write_text(OTHERS)
    monkeypatch.setenv("MENDED", str(mended))
    variant = Variant("plain", ("bits",), {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})

    stopped = run_variant(variant, records, 0, 0.0, CORES, tests)
    assert stopped.not_run > 0
    assert not stopped.is_good

    first = run_variant(variant, records, 0, 60.0, CORES, tests)
    assert [name.rpartition("::")[2] for name in first.failed] == ["test_fails_until_it_is_mended"]
    assert (first.not_run, first.is_good) == (0, False)
    planned = read_plan(records / "plain.jsonl")
    assert 2 < len(planned) < 30, "both that compare bits, and a part of the others"
    num_lines = len(read_complete_record(records / "plain.jsonl"))

    mended.touch()
    second = run_variant(variant, records, 0, 60.0, CORES, tests)
    assert second.is_good
    assert second.passed == len(planned)
    assert len(read_complete_record(records / "plain.jsonl")) == num_lines + 1, (
        "only what had failed ran again"
    )


@pytest.mark.long
def test_what_this_machine_is_not_is_skipped_and_what_did_not_take_hold_is_a_problem(
    tmp_path: Path,
) -> None:
    missing = run_variant(Variant("none", ("bits",), needs_flag="avx99"), tmp_path, 0, 9.0, CORES)
    assert missing.skipped == "this CPU has no avx99"
    assert missing.is_good
    (tmp_path / "test_bits.py").write_text(BITS)
    other = run_variant(
        Variant("other", ("bits",), capability="AVX99"), tmp_path, 0, 9.0, CORES, tmp_path
    )
    assert other.problem.startswith("pytest ended with 4")
    assert not other.is_good


def test_every_variant_of_the_list_can_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert len({variant.name for variant in elsewhere.VARIANTS}) == len(elsewhere.VARIANTS)
    with pytest.raises(SystemExit):
        elsewhere.main(["no-such"])
    assert "no such variant: no-such" in capsys.readouterr().err
