"""A plan for described GPUs of a module and a dataset of the user's own: traced with the form of
the first sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cli import _app
from phalanx.core.errors import DataError, LayoutError
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.plan.search.describe import find_counted_unit_of_task, format_search_result
from phalanx.plan.search.remarks import list_remarks_of_task
from phalanx.plan.workload import build_workload
from phalanx.run.search_job import prepare_layout_search, search_layouts_of_job

CODE = """
import numpy as np
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.first = nn.Linear(30, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU()) for _ in range(3))
        self.last = nn.Linear(dim, 5)

    def forward(self, inputs, extra):
        x = self.first(inputs)
        x = x + extra["scale"].reshape(-1, *[1] * (x.dim() - 1))
        for block in self.blocks:
            x = block(x)
        return self.last(x if x.dim() == 2 else x.mean(1))

class Dataset:
    def __init__(self, shape=(30,)):
        self.shape = shape

    def __len__(self):
        return 100

    def __getitem__(self, index):
        features = np.zeros(self.shape, np.float32)
        return {"inputs": features, "extra": {"scale": np.float32(1)}, "labels": index % 5}

def build():
    return Model()

def dataset(split):
    return Dataset()

def patches(split):
    return Dataset((7, 30))

def raising(split):
    raise OSError("the disk is gone")

def cross_entropy(outputs, batch):
    loss = nn.functional.cross_entropy(outputs.float(), batch["labels"], reduction="sum")
    return loss, len(batch["labels"])

def numbers(outputs, batch):
    return outputs.sum() * batch["labels"].float().mean().item(), 1
"""


def load_own_job(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str, name: str = "own_samples"
) -> Job:
    (directory / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setattr("phalanx.job.module_probe.SHAPE_CACHE_DIR", directory / "cache")
    keys = [
        *(f"model.kind={name}:build", f"model.objective={name}:cross_entropy"),
        *(f"data.source={name}:dataset", "train.global_batch_size=256"),
        *("cluster.gpu=h100-sxm", "cluster.nodes=1"),
    ]
    return load_job(None, [*keys, *overrides])


def test_a_module_is_traced_with_the_first_sample_of_its_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused: samples of a dataset of your own are not traced."""
    searched = search_layouts_of_job(load_own_job(tmp_path, monkeypatch))
    shape = searched.task.shape
    assert isinstance(shape, MeasuredModule)
    assert shape.has_own_samples
    flops = shape.flops(128)
    # Of one sample, however long a sequence of the job would be.
    assert flops is not None
    assert flops.embedding.matmul == 2 * 30 * 64
    assert [block.matmul for block in flops.blocks] == 3 * [2 * 64 * 64]
    assert searched.result.winner is not None
    assert searched.result.sample_tokens == 1
    text = "\n".join(format_search_result(searched.result, searched.task.cluster))
    assert "samples/s/GPU" in text
    assert "256 samples a step" in text
    assert "a million samples" in text
    # As a table of numbers of GPUs heads them.
    assert find_counted_unit_of_task(searched.task) == "samples"
    # All samples of a rank at once: nothing is faster for so short ones.
    assert searched.result.winner.micro_batch_size == 32


def test_a_sample_counts_as_many_tokens_as_its_products_have_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one, products were taken to be so small that a step took ten times as long."""
    job = load_own_job(tmp_path, monkeypatch, "data.source=own_samples:patches")
    task = prepare_layout_search(job)
    assert isinstance(task.shape, MeasuredModule)
    assert task.shape.count_sample_tokens(128) == 7
    assert not list_remarks_of_task(task)
    longer = job.model_copy(update={"data": job.data.model_copy(update={"seq_len": 333})})
    remarks = list_remarks_of_task(replace(task, job=longer))
    assert remarks == ("remark  data.seq_len 333 has no effect: samples have 7 tokens",)
    work = build_workload(job, task.shape, micro_batch_size=1, num_microbatches=1, tp=1)
    assert work.seq_len == 7


def test_a_dataset_that_cannot_be_read_is_told_with_what_it_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_own_job(tmp_path, monkeypatch, "data.source=own_samples:raising")
    with pytest.raises(DataError, match=r"first sample of own_samples:raising .*disk is gone"):
        prepare_layout_search(job)


def test_a_loss_that_needs_numbers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_own_job(tmp_path, monkeypatch, "model.objective=own_samples:numbers")
    with pytest.raises(LayoutError, match=r"cannot be traced \(it reads num"):
        prepare_layout_search(job)


def test_a_dry_run_has_batches_of_the_form_of_the_first_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were token ids, and the module was said to need what fake tensors lack."""
    (tmp_path / "dry_samples.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    keys = [
        *("model.kind=dry_samples:build", "model.objective=dry_samples:cross_entropy"),
        *("data.source=dry_samples:dataset", "parallel.ranks=2", "train.global_batch_size=8"),
    ]
    code = _app.run_command_line(["plan", *keys, "--dry-run"])
    done = capsys.readouterr()
    assert (code, "the program itself, with fake tensors" in done.out) == (0, True), done.err
