"""`verify` finds bugs planted in the transforms, names tensor and likely cause; without them all rows are equal.

The bugs are planted in the code under judgement, in forked ranks, never in what compares. The judge itself imports its
reference from a module that knows no layouts (tests/unit/test_verify_judge.py holds that).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from models import CPU
from phalanx.core.errors import ExitCode
from phalanx.job.schema import Job
from phalanx.job.shape import ModelShape
from phalanx.mesh import logical
from phalanx.mesh.mesh import Mesh
from phalanx.parallel import batchnorm, dp_replicate, dp_shard, sync_batchnorm
from phalanx.parallel.model import ParallelModel, StepSums
from phalanx.parallel.protocol import Workpiece
from phalanx.plan.planner import foreign_shape
from phalanx.verify import rank as verify_rank
from phalanx.verify.cases import all_layouts, judged_job, make_cases, shrunk
from phalanx.verify.row import ROWS
from ranks import run_ranks

Rows = dict[str, dict[str, Any]]
Plant = Callable[[], None]


def small_job(**model: Any) -> Job:
    return shrunk(Job.model_validate({"model": model, "data": {"seq_len": 16}}))[0]


def judge_all(
    rank: int,
    num_ranks: int,
    job: Job,
    directory: str,
    plant: Plant | None,
    dtypes: list[str],
    shape: ModelShape | None = None,
) -> None:
    """One rank's part of `phalanx verify --layouts all`, with a bug in it."""
    if plant is not None:
        plant()
    judged = judged_job(job, num_ranks)
    cases = make_cases(judged, list(all_layouts(num_ranks)), num_ranks=num_ranks, cluster=CPU, shape=shape)
    work = [
        {"dtype": dtype, "name": case.name, "parallel": dict(case.parallel), "plan": case.plan.to_json()}
        for dtype in dtypes
        for case in cases
        if case.plan is not None
    ]
    payload = {"run_dir": directory, "data_dir": "", "num_steps": 3, "num_ranks": num_ranks, "model": "small"}
    assert verify_rank.main({**payload, "job": judged.to_json(), "work": work}) == ExitCode.OK


def rows_with(plant: Plant | None, num_ranks: int = 2, dtypes: tuple[str, ...] = ("float64",), **model: Any) -> Rows:
    return rows_of(small_job(**model), plant, num_ranks, dtypes)


def rows_of(
    job: Job, plant: Plant | None, num_ranks: int, dtypes: tuple[str, ...], shape: ModelShape | None = None
) -> Rows:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(num_ranks, judge_all, num_ranks, job, directory, plant, list(dtypes), shape)
        lines = (Path(directory) / ROWS).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {f"{row['layout']} {row['dtype']}": row for row in rows}


@pytest.mark.parametrize(("preset", "num_ranks", "num_layouts"), [("gpt2", 4, 5), ("gemma3-1b", 2, 3)])
def test_layouts_equal_the_reference(preset: str, num_ranks: int, num_layouts: int) -> None:
    """Every layout of these ranks, in fp64 and fp32, against the plain loop."""
    rows = rows_with(None, num_ranks, ("float64", "float32"), preset=preset)
    assert len(rows) == 2 * num_layouts
    assert {name: row["first"] for name, row in rows.items() if not row["ok"]} == {}
    assert all(row["errors"]["gradient"] > 0 for row in rows.values()), "something was compared"


# Planted bugs


def sum_instead_of_average() -> None:
    """DDP and FSDP2 average over ranks; here they sum."""

    def summed(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and knows no strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    replicate, shard = dp_replicate.DpReplicate.apply, dp_shard.DpShard.apply

    def apply_ddp(self: Any, piece: Workpiece) -> None:
        replicate(self, piece)
        piece.outer.register_comm_hook(None, summed)

    def apply_fsdp(self: Any, piece: Workpiece) -> None:
        shard(self, piece)
        for unit in piece.root.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)

    dp_replicate.DpReplicate.apply = apply_ddp  # type: ignore[method-assign]
    dp_shard.DpShard.apply = apply_fsdp  # type: ignore[method-assign]


def norm_of_shards() -> None:
    """Each rank takes the norm of what it holds for the norm of all."""
    reduce = Mesh.all_reduce_sum

    def forget_squares(self: Mesh, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone()
        reduce(self, tensor)
        if self.layout.dp_shard > 1 and tensor.ndim == 1 and len(tensor) == 3:  # loss, targets, squares
            tensor[2] = own[2]
        return tensor

    Mesh.all_reduce_sum = forget_squares  # type: ignore[method-assign]


def mean_of_means() -> None:
    """The step's loss is the mean of the microbatches' means."""
    forward = ParallelModel.forward_backward
    finish = ParallelModel.finish_step

    def noting(self: Any, microbatches: Any, objective: Any) -> StepSums:
        self.means = []

        def noted(outputs: Any, batch: Any) -> Any:
            loss, count = objective(outputs, batch)
            self.means.append(loss.detach().double() / count)
            return loss, count

        return forward(self, microbatches, noted)

    def averaged(self: Any, sums: StepSums, **options: Any) -> Any:
        facts = finish(self, sums, **options)
        mean = self.mesh.all_reduce_sum(torch.stack(self.means).mean().reshape(1)) / self.mesh.world_size
        return type(facts)(float(mean), facts.num_targets, facts.grad_norm, facts.finite, facts.votes)

    ParallelModel.forward_backward = noting  # type: ignore[method-assign]
    ParallelModel.finish_step = averaged  # type: ignore[assignment, method-assign]


def clip_by_local_norms() -> None:
    """Each rank clips by the norm of what it holds."""
    finish = ParallelModel.finish_step

    def local(self: Any, sums: StepSums, *, max_norm: float | None = None, votes: Any = ()) -> Any:
        facts = finish(self, sums, votes=votes)
        if max_norm is None:
            return facts
        gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in self.parameters()]
        norm = sum(g.square().sum() for g in gradients) ** 0.5
        for gradient in gradients:
            gradient *= min(1.0, max_norm / float(norm))
        return facts

    ParallelModel.finish_step = local  # type: ignore[assignment, method-assign]


def stale_copy_of_a_tied_weight() -> None:
    """A transform that makes two tensors of one: the head no longer follows the embedding."""
    apply = dp_replicate.DpReplicate.apply

    def untie(self: Any, piece: Workpiece) -> None:
        piece.materialize()
        module: Any = piece.root.module
        copy = nn.Linear(1, 1, bias=False)
        copy.weight = nn.Parameter(module.embed.weight.detach().clone())
        module.stale_head = copy
        forward = module.forward

        def with_stale_head(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            return type(out)(out.hidden_BTD, module.stale_head.weight)

        module.forward = with_stale_head
        apply(self, piece)

    dp_replicate.DpReplicate.apply = untie  # type: ignore[method-assign]


def one_rank_misses_a_reduction() -> None:
    """After the reduction rank 1 puts its own gradient of one tensor back."""
    after = ParallelModel.finish_step

    def spoil(self: Any, sums: StepSums, **options: Any) -> Any:
        if self.mesh.rank == 1:
            named = dict(self.named_parameters())
            gradient = named["blocks.1.ffn.up.weight"].grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local += 0.1 * torch.linspace(-1, 1, local.numel()).reshape(local.shape) * local.abs().max()
        return after(self, sums, **options)

    ParallelModel.finish_step = spoil  # type: ignore[assignment, method-assign]


def same_share_on_every_rank() -> None:
    """Every rank reads the share of rank 0."""
    share = verify_rank.share_of
    verify_rank.share_of = lambda steps, rank, size: share(steps, 0, size)  # type: ignore[assignment]


def weights_by_rank() -> None:
    """Initial weights are drawn per rank."""
    from phalanx.nn.models.decoder import Decoder

    initialize = Decoder.initialize

    def drawn(self: Any, shards: Any, seed: int) -> None:
        initialize(self, shards, seed + (dist.get_rank() if dist.is_initialized() else 0))

    Decoder.initialize = drawn  # type: ignore[method-assign]


def decay_of_everything() -> None:
    """With DTensors the optimizer no longer spares what should not decay."""
    from torch.distributed.tensor import DTensor

    from phalanx.optim.groups import Groups

    with_decay = Groups.with_decay

    def all_decay(self: Groups, *args: Any, **options: Any) -> Any:
        groups = with_decay(self, *args, **options)
        if any(isinstance(p, DTensor) for p in self.parameters()):
            for group in groups:
                group["weight_decay"] = 0.1
        return groups

    Groups.with_decay = all_decay  # type: ignore[method-assign]


def shard_borders_by_the_floor() -> None:
    """The borders of shards of uneven sizes are taken from the floor of size / ranks; even ones are right."""
    place = logical.compute_local_shape_and_global_offset

    def floored(shape: Any, mesh: Any, placements: Any) -> Any:
        size, offset = place(shape, mesh, placements)
        if shape[0] % mesh.size():
            offset = (mesh.get_local_rank() * (shape[0] // mesh.size()), *offset[1:])
        return size, offset

    logical.compute_local_shape_and_global_offset = floored


def running_statistics_that_stay() -> None:
    """Synchronised BatchNorm normalises rightly, and forgets to move what evaluation reads."""
    batchnorm.Synchronised._track = lambda self, found: None  # type: ignore[method-assign]


def batchnorm_by_rank() -> None:
    """Each rank normalises over its own rows."""
    sync_batchnorm.SyncBatchNorm.apply = lambda self, piece: None  # type: ignore[method-assign]


def gradients_reduced_in_bfloat16() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    dp_shard._policy = lambda *args, **kwargs: policy


EXPECTED = {
    # bug: (layouts it is in, what differs first, a part of the name, a part of the cause)
    sum_instead_of_average: (
        ("ddp", "zero2", "zero3"),
        "gradient",
        "embed.weight",
        "summed over the data-parallel ranks",
    ),
    norm_of_shards: (("zero2", "zero3"), "gradient norm", "", "norm of what rank"),
    mean_of_means: (("ddp", "zero2", "zero3"), "loss", "", "a mean of means"),
    clip_by_local_norms: (("zero2", "zero3"), "gradient", "embed.weight", "clipped by local norms"),
    stale_copy_of_a_tied_weight: (("ddp",), "no tensor of the module:", "stale_head.weight", "tied weight"),
    one_rank_misses_a_reduction: (("ddp", "zero2", "zero3"), "gradient", "blocks.1.ffn.up.weight", "only rank 1"),
    same_share_on_every_rank: (("ddp", "zero2", "zero3"), "number of targets", "", "other shares of the batch"),
    decay_of_everything: (("zero2", "zero3"), "update", "embed.weight", "optimizer sees or keeps something else"),
    shard_borders_by_the_floor: (("zero2", "zero3"), "initial weight", "embed.weight", "borders of shards"),
    gradients_reduced_in_bfloat16: (("zero2", "zero3"), "gradient", "embed.weight", "bfloat16's rounding"),
    weights_by_rank: (("ddp", "zero2", "zero3"), "initial weight", "embed.weight", "depend on the layout"),
}


@pytest.mark.parametrize("plant", EXPECTED, ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_and_named(plant: Plant) -> None:
    layouts, what, name, cause = EXPECTED[plant]
    rows = rows_with(plant, tie_embeddings=True)
    for layout in ("ddp", "zero2", "zero3"):
        row = rows[f"{layout} float64"]
        assert row["ok"] is (layout not in layouts), (layout, row["first"])
        if not row["ok"]:
            first = row["first"]
            assert (first["what"], name in first["name"], cause in first["cause"]) == (what, True, True), first
            assert first["error"] > row["tolerance"]


WITH_BATCHNORM = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.linear, self.norm = nn.Embedding(256, 16), nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = self.linear(self.embed(tokens)).transpose(1, 2)
        return self.head(self.norm(hidden).relu().transpose(1, 2))
"""


def test_batchnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias whose true gradient is zero is no alarm; statistics that stay, or are those of a rank, are one."""
    (tmp_path / "with_batchnorm.py").write_text(WITH_BATCHNORM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
    job = Job.model_validate({"model": {"kind": "with_batchnorm:Model"}, "data": {"seq_len": 16}})
    shape = foreign_shape(job)
    right = rows_of(job, None, 2, ("float64", "float32"), shape)
    assert {name: row["first"] for name, row in right.items() if not row["ok"]} == {}
    assert len(right) == 6
    assert all(row["errors"]["buffer"] > 0 for row in right.values())
    for row in rows_of(job, running_statistics_that_stay, 2, ("float64",), shape).values():
        assert (row["first"]["what"], row["first"]["name"]) == ("buffer", "norm.running_mean")
    for row in rows_of(job, batchnorm_by_rank, 2, ("float64",), shape).values():
        assert (row["first"]["what"], "other rows" in row["first"]["cause"]) == ("loss", True)
