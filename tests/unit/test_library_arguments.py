"""The library's functions say what is wrong with their arguments."""

from __future__ import annotations

from typing import Any

import pytest

import phalanx


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: phalanx.train_job("job.toml"), r"a phalanx\.Job is needed, and not 'job\.toml'"),
        (lambda: phalanx.train_job(None), "a phalanx.Job is needed"),
        (lambda: phalanx.verify_job({}), "a phalanx.Job is needed"),
        (lambda: phalanx.make_plan("job.toml"), "a phalanx.Job is needed"),
        (lambda: phalanx.make_plan(phalanx.Job(), num_ranks=0), "num_ranks=0"),
        (lambda: phalanx.make_plan(phalanx.Job(), num_ranks="2"), "num_ranks='2'"),
        (lambda: phalanx.verify_job(phalanx.Job(), []), "layouts are one name or more"),
        (lambda: phalanx.verify_job(phalanx.Job(), 3), "layouts are one name or more"),
        (lambda: phalanx.verify_job(phalanx.Job(), ranks="2"), "ranks='2'"),
        (lambda: phalanx.load_job(3), "takes the path of a file"),
        (lambda: phalanx.load_job(None, "train.steps=3"), "overrides are a list of strings"),
        (lambda: phalanx.load_job(None, [3]), "overrides are a list of strings"),
    ],
)
def test_arguments_of_another_type_are_told_in_a_line(call: Any, said: str) -> None:
    with pytest.raises(phalanx.PhalanxError, match=said) as refused:
        call()
    assert "\n" not in str(refused.value)
