"""train.deterministic: torch is told before CUDA starts, and an operation that it refuses is one
line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from commands import TINY, environment, run, write_text
from phalanx.core.errors import EnvironmentProblem, LayoutError
from phalanx.core.files import write_json_atomically
from phalanx.job.load import load_job
from phalanx.mesh.determinism import (
    CUBLAS_VARIABLE,
    raising_layout_error_for_nondeterminism,
    using_deterministic_algorithms,
)
from phalanx.run.resume import load_resumed_job

# put_ without accumulate has no deterministic implementation, on CPUs either.
OBJECTIVE = """
import os
import torch
from phalanx.nn.objective import causal_cross_entropy

whole = causal_cross_entropy(2048)


def objective(outputs, batch):
    enabled, variable = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if "RANK" in os.environ:  # and not in the process that asks whether rows are mixed
        with open(os.environ["SEEN"], "a") as file:
            print(enabled, variable, file=file)
    torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2))
    return whole(outputs, batch)
"""


def put() -> None:
    torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2))


@pytest.fixture(autouse=True)
def without_cublas_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, "")  # so that it is as it was afterwards
    monkeypatch.delenv(CUBLAS_VARIABLE)


def settings() -> tuple[bool, bool, str | None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return enabled, torch.backends.cudnn.benchmark, os.environ.get(CUBLAS_VARIABLE)


def test_torch_is_told_and_told_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with using_deterministic_algorithms(False):
        assert settings() == (False, True, None)
    with using_deterministic_algorithms(True):
        assert settings() == (True, False, ":4096:8")
    assert settings()[:2] == (False, True)


@pytest.mark.parametrize("value", [":16:8", ":4096:8"])
def test_the_users_own_value_stays(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, value)
    with using_deterministic_algorithms(True, device="cuda"):
        assert settings()[2] == value


def test_a_value_with_which_cublas_varies_is_refused_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CUBLAS_VARIABLE, ":0:0")
    with pytest.raises(
        EnvironmentProblem, match=r"is ':0:0', .*; unset it, or set it to :4096:8 or :16:8"
    ):
        using_deterministic_algorithms(True, device="cuda").__enter__()
    with using_deterministic_algorithms(True, device="cpu"):
        assert settings() == (True, False, ":0:0")


def test_a_refusal_names_the_operation_and_the_line() -> None:
    with pytest.raises(LayoutError) as caught, using_deterministic_algorithms(True):
        put()
    line = put.__code__.co_firstlineno + 1
    assert (
        str(caught.value)
        == f"{__file__}:{line}: torch has no deterministic implementation of put_, and"
        " train.deterministic is true; use another operation in your model or objective, or set"
        " train.deterministic=false"
    )
    assert caught.value.exit_code == 3
    assert settings()[0] is False


def test_a_refusal_that_became_another_error_is_one_still() -> None:
    def wrapped() -> None:
        try:
            put()
        except RuntimeError as error:
            raise ValueError("in the first forward") from error

    with (
        pytest.raises(LayoutError, match="implementation of put_"),
        using_deterministic_algorithms(True),
    ):
        wrapped()


def test_other_errors_are_not_touched() -> None:
    for error in (RuntimeError("boom"), KeyError("x")):
        with pytest.raises(type(error)) as caught, using_deterministic_algorithms(True):
            raise error
        assert caught.value is error
    torch.use_deterministic_algorithms(
        True
    )  # of the user's own accord, and so not by a key of the job
    try:
        with (
            pytest.raises(RuntimeError, match="put_ does not have"),
            raising_layout_error_for_nondeterminism(False),
        ):
            put()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
def test_a_run_with_an_operation_that_has_none_is_refused_in_a_line(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    (tmp_path / "puts.py").write_text(OBJECTIVE)
    own = (
        "model.objective=puts:objective",
        "data.source=text",
        "parallel.ranks=2",
        "run.dir=refused",
    )
    variables = environment(SEEN=str(tmp_path / "seen"))
    done = run("train", *TINY, *own, "train.deterministic=true", cwd=tmp_path, env=variables)
    assert done.code == 3, done.err
    assert "torch has no deterministic implementation of put_" in done.problem
    assert "puts.py:14: " in done.problem
    assert set((tmp_path / "seen").read_text().splitlines()) == {"True :4096:8"}, "in every rank"
    assert not (tmp_path / "refused").exists(), (
        "refused before its first step: as if it had never been"
    )


def test_a_run_may_change_it(tmp_path: Path) -> None:
    write_json_atomically(tmp_path / "job.json", load_job(None, ["cluster.device=cpu"]).to_json())
    resumed = load_resumed_job(str(tmp_path), ["train.deterministic=true"])
    assert not resumed.is_other_training
    assert resumed.summary_lines() == [
        "changed train.deterministic false -> true: the same mathematics, rounded otherwise, on"
        " GPUs"
    ]
