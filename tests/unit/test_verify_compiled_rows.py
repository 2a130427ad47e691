"""Rows of compiled layouts, where the compiler does not work."""

from __future__ import annotations

import pytest

from phalanx.job.schema import Job
from phalanx.verify.choose import select_layout_cases


def test_without_a_compiler_that_works_compiled_layouts_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not judged to have crashed."""
    monkeypatch.setenv("CXX", "/bin/false")
    job = Job.model_validate({"train": {"compile": True}})
    (case,) = select_layout_cases(job, "ddp", ranks=2, steps=2, shrink=True).cases
    assert case.plan is None
    assert case.refused.startswith("train.compile needs a C++ compiler, and /bin/false ")
    job = Job.model_validate({})
    (case,) = select_layout_cases(job, "ddp", ranks=2, steps=2, shrink=True).cases
    assert case.plan is not None
