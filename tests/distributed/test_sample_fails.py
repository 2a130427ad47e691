"""A sample of text comes after the last step is done and saved: whatever is wrong with it, the
run is finished."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import TINY, run
from commands import events as events_of
from phalanx.observe.events import Note, RankFailed, RunFinished, TextGenerated
from phalanx.train.generate import generate_tokens

MODULE = """
import os

import torch
from torch import nn


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(257, 16)
        self.out = nn.Linear(16, 257)

    def forward(self, inputs):
        if not self.training and os.environ["RANK"] in os.environ["FAILS_ON"].split(","):
            raise RuntimeError("a mistake that only sampling shows")
        return self.out(self.lookup(inputs))


def build():
    return Bigram()
"""


@pytest.mark.long
@pytest.mark.parametrize("fails_on", [pytest.param("0,1", marks=pytest.mark.long), "1"])
def test_a_sample_that_fails_does_not_fail_a_finished_run(
    fails_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all ranks, or on one that the others then wait for in the weights' gathering."""
    (tmp_path / "own_bigram.py").write_text(MODULE)
    monkeypatch.setenv("FAILS_ON", fails_on)
    keys = [key for key in TINY if not key.startswith(("model.", "train.sample_tokens"))]
    keys += [
        "model.kind=own_bigram:build",
        "parallel.ranks=2",
        "parallel.dp_shard=2",
        "train.steps=5",
    ]
    done = run("train", *keys, "train.sample_tokens=8", "run.dir=R", cwd=tmp_path)
    assert done.code == 0, done.err
    found = [line.event for line in events_of(tmp_path / "R")]
    notes = [
        event.facts["why"]
        for event in found
        if isinstance(event, Note) and event.code == "no_sample"
    ]
    assert "RuntimeError: a mistake that only sampling shows" in notes
    assert not [event for event in found if isinstance(event, RankFailed | TextGenerated)]


ABORTING = """
import os

import torch.distributed as dist
from own_bigram import Bigram


class Watched(Bigram):
    def forward(self, inputs):
        if self.training or os.environ["RANK"] in os.environ["FAILS_ON"].split(","):
            return super().forward(inputs)
        try:
            dist.barrier()  # which the rank that fails never joins
        except RuntimeError:
            os.abort()  # as NCCL's watchdog does


def build():
    return Watched()
"""


def test_ranks_that_die_of_a_sample_that_failed_elsewhere_do_not_fail_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_bigram.py").write_text(MODULE)
    (tmp_path / "own_watched.py").write_text(ABORTING)
    monkeypatch.setenv("FAILS_ON", "1")
    keys = [key for key in TINY if not key.startswith(("model.", "train.sample_tokens"))]
    keys += ["model.kind=own_watched:build", "parallel.ranks=2", "train.steps=5"]
    done = run("train", *keys, "train.sample_tokens=8", "run.dir=R", cwd=tmp_path)
    assert done.code == 0, done.err
    found = [line.event for line in events_of(tmp_path / "R")]
    assert [event.status for event in found if isinstance(event, RunFinished)] == ["finished"]
    assert not [event for event in found if isinstance(event, RankFailed)]


class OnDevice(torch.Tensor):
    """A tensor as one on a GPU is: a generator of the CPU does not draw from it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.multinomial and kwargs["generator"].device.type == "cpu":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        return super().__torch_function__(func, types, args, kwargs)


class StagedModel:
    """Answers as a pipeline does on GPUs: logits come from the last stage, on the rank's own
    device."""

    mesh = SimpleNamespace(device=torch.device("cpu"))

    def train(self, mode: bool) -> None: ...

    def call_then(self, batch: Any, then: Any) -> torch.Tensor:
        logits = torch.zeros(9, dtype=torch.float64)
        logits[int(batch["inputs"][0, -1]) + 1] = 1e6
        return logits.as_subclass(OnDevice)


def test_logits_of_another_device_are_sampled_on_the_cpu() -> None:
    assert generate_tokens(StagedModel(), [0], num_tokens=4, context=8, seed=1) == [1, 2, 3, 4]  # type: ignore[arg-type]
