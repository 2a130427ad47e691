"""The bugs of other libraries in examples/found are still there, and docs/found.md shows each.

Where one is gone, its test fails and says what to take away.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from ranks import run_ranks

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "examples" / "found"
REPRODUCTIONS = sorted(path.stem for path in FOUND.glob("*.py") if path.stem != "outcome")
FROM_TRANSFORMERS = {"apertus_activation", "fused_load", "packed_with_cache", "permuted_save"}
BY_FROM_PRETRAINED = {"fused_load", "permuted_save"}


def _is_wrong(rank: int, name: str) -> bool:
    logging.disable(logging.WARNING)
    # What a library warns of is no error here: some of these bugs are announced.
    with warnings.catch_warnings(action="ignore"):
        outcome = importlib.import_module(name).reproduce()
    return bool(outcome.is_wrong)


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_a_bug_is_still_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in FROM_TRANSFORMERS:
        pytest.importorskip("transformers")
    if name in BY_FROM_PRETRAINED:
        pytest.importorskip("accelerate", reason="transformers' from_pretrained wants it for ranks")
    monkeypatch.syspath_prepend(FOUND)
    num_ranks = importlib.import_module(name).RANKS
    wrong = run_ranks(num_ranks, _is_wrong, name)
    assert any(wrong), (
        f"what examples/found/{name}.py shows is mended in torch {torch.__version__}, or in"
        " transformers: take the file and its section of docs/found.md out, and what phalanx does"
        " about it"
    )


def test_each_has_its_lines_on_the_page() -> None:
    page = (ROOT / "docs" / "found.md").read_text(encoding="utf-8")
    for name in REPRODUCTIONS:
        assert f"<!-- from examples/found/{name}.py [reproduction] -->" in page
    with_examples = runpy.run_path(str(ROOT / "docs" / "generate.py"))["with_examples"]
    assert with_examples(page) == page, "run make docs"


def test_transformers_own_tensor_parallelism_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of docs/transformers-plans.md finds the bug of one model, and none in another."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = runpy.run_path(str(ROOT / "docs" / "transformers_table.py"), run_name="script")
    with warnings.catch_warnings(action="ignore"), script["quiet"]():
        equal, differs = (script["judge"](name, {"tp_size": 2}) for name in ("llama", "apertus"))
    assert equal.verdict is not None
    assert equal.verdict.first is None
    assert differs.verdict is not None
    assert differs.verdict.errors["loss"] < 1e-12
    first = differs.verdict.first
    assert first.what == "gradient"
    assert ".mlp.act_fn.alpha_" in first.name
    assert "each rank of tp has its own part" in first.cause
