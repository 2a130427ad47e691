"""`phalanx bench scaling` as a user runs it: real runs on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import TINY, run

QUICK = ("--repeats", "1", "--steps", "10")
# Keys that only longer runs can have.
LONG = (
    "train.steps=100",
    "optim.warmup_steps=50",
    "eval.tokens=64",
    "eval.keep_best=true",
    'observe.trace_steps=["50:52"]',
)


def test_two_ranks_are_compared_with_one(tmp_path: Path) -> None:
    """What a step takes beyond linear scaling is split into its terms, and nothing is left out."""
    done = run("bench", "scaling", *TINY, *LONG, *QUICK, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    body = json.loads(done.out)
    assert body["schema"] == "phalanx.scaling/1"
    one, two = body["points"]
    assert (one["num_ranks"], two["num_ranks"]) == (1, 2)
    # No ranks in the job: its batch is that of the smallest number.
    assert two["global_batch_size"] == 2 * one["global_batch_size"] == 16
    # Two ranks have twice the tokens of a step, and each a term that one rank has not.
    assert two["efficiency"] == pytest.approx(one["step_s"] / two["step_s"])
    beyond = (two["step_s"] - one["step_s"]) / two["step_s"]
    assert sum(two["lost"].values()) == pytest.approx(beyond, abs=1e-2)
    assert two["lost"]["dp: all_reduce gradients"] > 0
    # What no phase accounts for is a term of its own, however little; how little is a benchmark's
    # to say (benchmarks/ledger_sums.py): a busy machine takes a rank off its core between phases.
    assert {"unaccounted", "ranks apart"} < set(two["lost"])
    assert not list(tmp_path.glob("runs/*")), "nothing is kept of the runs"


def test_a_number_of_ranks_that_fails_is_a_row(tmp_path: Path) -> None:
    """Heads are two: tp=2 on one rank is no layout, on two it is."""
    settings = (*TINY, "parallel.tp=2", "parallel.ranks=2")
    done = run("bench", "scaling", *settings, *QUICK, "--ranks", "2,3", cwd=tmp_path)
    assert done.code == 1, done.out
    assert "3 ranks  failed: " in done.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--ranks", "2"), "needs two numbers"),
        (("--ranks", "1,x"), "numbers from 1 to 64"),
        (("--ranks", "0,1"), "numbers from 1 to 64"),
        (("train.global_batch_size=9", "--ranks", "2,3"), "no whole share"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = run("bench", "scaling", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert says in done.err
