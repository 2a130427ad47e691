"""`verify` finds bugs planted in the transforms, names tensor and likely cause; without them all
rows are equal.

The bugs are planted in the code under judgement, in forked ranks, never in what compares. The judge
itself imports its reference from a module that knows no layouts (tests/unit/test_verify_judge.py
holds that).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from models import CPU
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh import logical
from phalanx.mesh.mesh import Mesh
from phalanx.mesh.shared_memory.opening import shares_memory
from phalanx.parallel.batchnorm import layer as batchnorm
from phalanx.parallel.batchnorm import transform as sync_batchnorm
from phalanx.parallel.data_parallel import replicate as dp_replicate
from phalanx.parallel.data_parallel import shard as dp_shard
from phalanx.parallel.data_parallel import zero1
from phalanx.parallel.data_parallel.compression import GradientCompression
from phalanx.parallel.data_parallel.ddp_buckets import WholeReduction
from phalanx.parallel.data_parallel.own_rows import OwnRowsReduction
from phalanx.parallel.dropout.rng import DropoutRng
from phalanx.parallel.dropout.transform import LayoutIndependentDropout
from phalanx.parallel.hooks import int8
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.offload import activations as offload_activations
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.recompute import segment as stretch
from phalanx.parallel.recompute import transform as recompute
from phalanx.parallel.step_stats import LocalLoss
from phalanx.parallel.wire import Wire
from phalanx.verify import rank as verify_rank
from phalanx.verify.cases import (
    RECOMPUTE_LAYOUTS,
    list_all_layouts,
    list_gradient_compression_layouts,
    plan_layout_cases,
)
from phalanx.verify.payloads import VerifyCase, VerifyPayload
from phalanx.verify.row import OVERFLOW, ROWS_FILE_NAME
from phalanx.verify.verified_job import make_verified_job, shrink_job
from plants import some
from ranks import run_ranks

Rows = dict[str, dict[str, Any]]
Plant = Callable[[], None]
EVERY = ("ddp", "zero1", "zero2", "zero3")  # without ways of running them


def small_job(**model: Any) -> Job:
    return shrink_job(Job.model_validate({"model": model, "data": {"seq_len": 16}}))[0]


def judge_all(
    rank: int,
    num_ranks: int,
    job: Job,
    directory: str,
    plant: Plant | None,
    dtypes: list[str],
    shape: DecoderShape | None = None,
    only: tuple[str, ...] = (),
    compressed: bool = False,
) -> None:
    """One rank's part of `phalanx verify --layouts all`, or of some of them, with a bug in it."""
    if plant is not None:
        plant()
    judged = make_verified_job(job, num_ranks)
    layouts = [
        (name, keys)
        for name, keys in (
            list_gradient_compression_layouts(num_ranks)
            if compressed
            else list_all_layouts(num_ranks, experts=True)
        )
        if not only or name in only
    ]
    cases = plan_layout_cases(judged, layouts, num_ranks=num_ranks, cluster=CPU, shape=shape)
    work = [
        VerifyCase(dtype, case.name, case.parallel, case.plan)
        for dtype in dtypes
        for case in cases
        if case.plan is not None
    ]
    verify_rank.run_verify_cases(
        VerifyPayload(judged, Path(directory), None, 3, num_ranks, "small", tuple(work))
    )


def rows_with(
    plant: Plant | None,
    num_ranks: int = 2,
    dtypes: tuple[str, ...] = ("float64",),
    only: tuple[str, ...] = EVERY,
    **model: Any,
) -> Rows:
    return rows_of(small_job(**model), plant, num_ranks, dtypes, only=only)


def rows_of(
    job: Job,
    plant: Plant | None,
    num_ranks: int,
    dtypes: tuple[str, ...],
    shape: DecoderShape | None = None,
    only: tuple[str, ...] = EVERY,
    compressed: bool = False,
) -> Rows:
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(
            num_ranks,
            judge_all,
            num_ranks,
            job,
            directory,
            plant,
            list(dtypes),
            shape,
            only,
            compressed,
        )
        lines = (Path(directory) / ROWS_FILE_NAME).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {f"{row['layout']} {row['dtype']}": row for row in rows}


DTYPES = ("float64", "float32")
HYBRID = ("hsdp2x2-zero1", "hsdp2x2-zero2", "hsdp2x2-zero3")
TENSOR = ("tp2", "tp2-whole-sequence", "tp2-chunks")
TENSOR_4 = (
    "ddp-tp2",
    "zero1-tp2",
    "zero2-tp2",
    "zero3-tp2",
    "tp4",
    "tp4-whole-sequence",
    "tp4-chunks",
)


@pytest.mark.parametrize(
    ("preset", "num_ranks", "names", "dtypes"),
    [
        ("gpt2", 4, ("zero3-tp2",), ("float64",)),
        pytest.param(
            "gpt2",
            4,
            ("zero3-tp2", "zero1", "zero3", "hsdp2x2-zero2", "tp4-chunks"),
            DTYPES,
            marks=pytest.mark.long,
        ),
        pytest.param(
            "small-latent",
            2,
            ("ddp", "zero3", "tp2", "tp2-whole-sequence", "cp2", "pp2-1f1b"),
            DTYPES,
            marks=pytest.mark.long,
        ),
        pytest.param("gpt2", 4, (*EVERY, *HYBRID, *TENSOR_4), DTYPES, marks=pytest.mark.long),
        pytest.param(
            "gemma3-1b", 2, (*EVERY, *TENSOR, *RECOMPUTE_LAYOUTS), DTYPES, marks=pytest.mark.long
        ),
    ],
)
def test_layouts_equal_the_reference(
    preset: str, num_ranks: int, names: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    """Every layout of these ranks, and variants, in fp64 and fp32, against the plain loop."""
    rows = rows_with(None, num_ranks, dtypes, only=names, preset=preset)
    assert set(rows) == {f"{name} {dtype}" for name in names for dtype in dtypes}
    assert {name: row["first"] for name, row in rows.items() if not row["ok"]} == {}
    assert all(row["errors"]["gradient"] > 0 for row in rows.values()), "something was compared"


# Planted bugs


def sum_instead_of_average() -> None:
    """DDP and FSDP2 average over ranks; here they sum."""

    def summed(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations, and knows no strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    replicate, shard = dp_replicate.DpReplicate.apply, dp_shard.DpShard.apply

    def apply_ddp(self: Any, context: ParallelContext) -> None:
        replicate(self, context)
        if not shares_memory(context.mesh.data_parallel_group()):
            context.outer.register_comm_hook(None, summed)

    def attach(self: Any, ddp: Any) -> None:
        ddp.register_comm_hook(None, summed)

    def apply_fsdp(self: Any, context: ParallelContext) -> None:
        shard(self, context)
        for unit in context.root.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)

    dp_replicate.DpReplicate.apply = apply_ddp  # type: ignore[method-assign]
    WholeReduction.attach_to_ddp = attach  # type: ignore[method-assign]
    OwnRowsReduction.attach_to_ddp = attach  # type: ignore[method-assign]
    dp_shard.DpShard.apply = apply_fsdp  # type: ignore[method-assign]


def norm_of_shards() -> None:
    """Each rank takes the norm of what it holds for the norm of all."""
    reduce = Mesh.all_reduce_sum

    def forget_squares(self: Mesh, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone()
        reduce(self, tensor)
        if (
            self.layout.dp_shard > 1 and tensor.ndim == 1 and len(tensor) == 3
        ):  # loss, targets, squares
            tensor[2] = own[2]
        return tensor

    Mesh.all_reduce_sum = forget_squares  # type: ignore[method-assign]


def mean_of_means() -> None:
    """The step's loss is the mean of the microbatches' means."""
    forward = ParallelModel.forward_backward
    finish = ParallelModel.reduce_and_clip

    def noting(self: Any, microbatches: Any, objective: Any) -> LocalLoss:
        self.means = []

        def noted(outputs: Any, batch: Any) -> Any:
            loss, count = objective(outputs, batch)
            self.means.append(loss.detach().double() / count)
            return loss, count

        return forward(self, microbatches, noted)

    def averaged(self: Any, sums: LocalLoss, **options: Any) -> Any:
        facts = finish(self, sums, **options)
        mean = (
            self.mesh.all_reduce_sum(torch.stack(self.means).mean().reshape(1))
            / self.mesh.world_size
        )
        return type(facts)(
            float(mean), facts.num_targets, facts.grad_norm, facts.finite, facts.flags
        )

    ParallelModel.forward_backward = noting  # type: ignore[method-assign]
    ParallelModel.reduce_and_clip = averaged  # type: ignore[assignment, method-assign]


def clip_by_local_norms() -> None:
    """Each rank clips by the norm of what it holds."""
    finish = ParallelModel.reduce_and_clip

    def local(self: Any, sums: LocalLoss, *, max_norm: float | None = None, flags: Any = ()) -> Any:
        facts = finish(self, sums, flags=flags)
        if max_norm is None:
            return facts
        gradients = [
            p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in self.parameters()
        ]
        norm = sum(g.square().sum() for g in gradients) ** 0.5
        for gradient in gradients:
            gradient *= min(1.0, max_norm / float(norm))
        return facts

    ParallelModel.reduce_and_clip = local  # type: ignore[assignment, method-assign]


def stale_copy_of_a_tied_weight() -> None:
    """A transform that makes two tensors of one: the head no longer follows the embedding."""
    apply = dp_replicate.DpReplicate.apply

    def untie(self: Any, context: ParallelContext) -> None:
        context.materialize()
        module: Any = context.root.module
        copy = nn.Linear(1, 1, bias=False)
        copy.weight = nn.Parameter(module.embed.weight.detach().clone())
        module.stale_head = copy
        forward = module.forward

        def with_stale_head(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            return type(out)(out.hidden_BTD, module.stale_head.weight)

        module.forward = with_stale_head
        apply(self, context)

    dp_replicate.DpReplicate.apply = untie  # type: ignore[method-assign]


def one_rank_misses_a_reduction() -> None:
    """After the reduction rank 1 puts its own gradient of one tensor back."""
    after = ParallelModel.reduce_and_clip

    def spoil(self: Any, sums: LocalLoss, **options: Any) -> Any:
        if self.mesh.rank == 1:
            named = dict(self.named_parameters())
            gradient = named["blocks.1.ffn.up.weight"].grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local += (
                0.1 * torch.linspace(-1, 1, local.numel()).reshape(local.shape) * local.abs().max()
            )
        return after(self, sums, **options)

    ParallelModel.reduce_and_clip = spoil  # type: ignore[assignment, method-assign]


def same_share_on_every_rank() -> None:
    """Every rank reads the share of rank 0."""
    share = verify_rank.select_rank_rows
    verify_rank.select_rank_rows = lambda steps, rank, size: share(steps, 0, size)  # type: ignore[assignment]


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

    from phalanx.optim.groups import WeightDecayGroups

    with_decay = WeightDecayGroups.with_decay

    def all_decay(self: WeightDecayGroups, *args: Any, **options: Any) -> Any:
        groups = with_decay(self, *args, **options)
        if any(isinstance(p, DTensor) for p in self.parameters()):
            for group in groups:
                group["weight_decay"] = 0.1
        return groups

    WeightDecayGroups.with_decay = all_decay  # type: ignore[method-assign]


def shard_borders_by_the_floor() -> None:
    """The borders of shards of uneven sizes are taken from the floor of size / ranks; even ones
    are right."""
    place = logical.compute_local_shape_and_global_offset

    def floored(shape: Any, mesh: Any, placements: Any) -> Any:
        size, offset = place(shape, mesh, placements)
        if shape[0] % mesh.size():
            offset = (mesh.get_local_rank() * (shape[0] // mesh.size()), *offset[1:])
        return size, offset

    logical.compute_local_shape_and_global_offset = floored


def running_statistics_that_stay() -> None:
    """Synchronised BatchNorm normalises rightly, and forgets to move what evaluation reads."""
    batchnorm.SynchronisedBatchNorm._update_running_statistics = lambda self, found: None  # type: ignore[method-assign]


def batchnorm_by_rank() -> None:
    """Each rank normalises over its own rows."""
    sync_batchnorm.SyncBatchNorm.apply = lambda self, context: None  # type: ignore[method-assign]


def same_masks_on_every_rank() -> None:
    """Each rank drops as if its rows were those of rank 0."""
    microbatch = DropoutRng.drawing_in_microbatch

    def of_rank_0(self: DropoutRng, step: int, first_row: int, num_rows: int) -> Any:
        return microbatch(self, step, first_row - dist.get_rank() * num_rows, num_rows)

    DropoutRng.drawing_in_microbatch = of_rank_0  # type: ignore[assignment, method-assign]


def dropout_drawn_by_rank() -> None:
    """Dropout layers are left to torch, whose generator each rank has its own of."""
    LayoutIndependentDropout.apply = lambda self, context: (
        torch.manual_seed(context.mesh.rank) and None
    )  # type: ignore[method-assign]
    DropoutRng.draw_mask = lambda self, *args, **options: None  # type: ignore[method-assign]


def recomputed_with_other_masks() -> None:
    """A recomputation goes on counting the calls of each layer."""
    DropoutRng.replay_contexts = lambda self: (nullcontext(), nullcontext())  # type: ignore


def gradients_reduced_in_bfloat16() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16, cast_forward_inputs=False)
    dp_shard._build_mixed_precision_policy = lambda *args, **kwargs: policy


def other_draws_when_recomputed() -> None:
    """A recomputed block does not draw what its forward drew: here it adds noise, and its
    forward did not."""
    checkpoint, call_again, make_recompute_context_factory = (
        recompute.checkpoint,
        stretch._replay_block_call,
        recompute.make_recompute_context_factory,
    )
    selective = []

    def noted(block: Any, mode: str, draws: Any) -> Any:
        found = make_recompute_context_factory(block, mode, draws)
        selective.extend([found] if mode == "selective" else [])
        return found

    def drawing(forward: Any, *args: Any, **options: Any) -> Any:
        if (
            options["context_fn"] in selective
        ):  # torch itself sees that other operations are called, and raises
            return checkpoint(forward, *args, **options)

        def again(x: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return forward(
                x if len(calls) == 1 else x + 0.1 * torch.randn_like(x.detach()), *rest, **kwargs
            )

        calls: list[int] = []
        return checkpoint(again, *args, **options)

    def drawing_again(call: Any, before: Any, fill: Any) -> Any:
        forward = call.forward
        changed = replace(
            call, forward=lambda x, *rest: forward(x + 0.1 * torch.randn_like(x.detach()), *rest)
        )
        return call_again(changed, before, fill)

    recompute.make_recompute_context_factory, recompute.checkpoint = noted, drawing  # type: ignore[assignment]
    stretch._replay_block_call = drawing_again


def segments_that_detach() -> None:
    """What enters a segment is cut off from what came before it."""
    call = stretch._SegmentForward.call_block

    def cut(self: Any, block: Any, forward: Any, contexts: Any, args: Any, kwargs: Any) -> Any:
        if not self._calls:
            args = (args[0].detach().requires_grad_(), *args[1:])
        return call(self, block, forward, contexts, args, kwargs)

    stretch._SegmentForward.call_block = cut  # type: ignore[method-assign]


def offload_that_mixes_up() -> None:
    """What comes back from host memory begins an element too late."""
    fetch = offload_activations.SavedTensorOffloader._fetch_storage_to_device

    def rolled(self: Any, parked: Any) -> None:
        fetch(self, parked)
        if parked.back.numel() > 4096:
            parked.back.copy_(parked.host.roll(-8))

    offload_activations.SavedTensorOffloader._fetch_storage_to_device = rolled  # type: ignore[method-assign]


def evaluation_of_something_else() -> None:
    """A forward without gradients does not give the loss of one with them."""
    evaluate = ParallelModel.evaluate

    def stale(self: Any, microbatches: Any, objective: Any) -> LocalLoss:
        sums = evaluate(self, microbatches, objective)
        return type(sums)(sums.loss_sum * 1.01, sums.num_targets)

    ParallelModel.evaluate = stale  # type: ignore[assignment, method-assign]


def updated_weights_that_stay_away() -> None:
    """ZeRO-1: rank 1 takes part in the gather and keeps its own weights."""
    gather = zero1.UpdatedParameterGather.gather_updated_parameters

    def forget(self: Any) -> None:
        before = [parameter.detach().clone() for parameter, _ in self._cut]
        gather(self)
        if self._rank == 1:
            with torch.no_grad():
                for (parameter, _), kept in zip(self._cut, before, strict=True):
                    parameter.copy_(kept)

    zero1.UpdatedParameterGather.gather_updated_parameters = forget  # type: ignore[method-assign]


def a_slice_updated_with_the_gradient_of_the_step_before() -> None:
    """ZeRO-1: on rank 1 the optimizer sees what the first slice was handed a step ago."""
    update = ParallelModel.update

    def stale(self: Any, optimizer: torch.optim.Optimizer) -> None:
        part = next(iter(self._context.optimizer_params.shards.values()), None)
        if part is not None and self.mesh.rank == 1:
            gradient = part.updated.grad.to_local()
            before, self.kept = getattr(self, "kept", gradient.clone()), gradient.clone()
            gradient.copy_(before)
        update(self, optimizer)

    ParallelModel.update = stale  # type: ignore[method-assign]


EXPECTED = {
    # bug: (layouts it is in, what differs first, a part of the name, a part of the cause)
    sum_instead_of_average: (
        EVERY,
        "gradient",
        "norm.weight",
        "summed over the data-parallel ranks",
    ),
    norm_of_shards: (("zero1", "zero2", "zero3"), "gradient norm", "", "norm of what rank"),
    mean_of_means: (EVERY, "loss", "", "a mean of means"),
    clip_by_local_norms: (
        ("zero1", "zero2", "zero3"),
        "gradient",
        "norm.weight",
        "clipped by local norms",
    ),
    stale_copy_of_a_tied_weight: (
        ("ddp", "zero1"),
        "no tensor of the module:",
        "stale_head.weight",
        "tied weight",
    ),
    one_rank_misses_a_reduction: (EVERY, "gradient", "blocks.1.ffn.up.weight", "only rank 1"),
    same_share_on_every_rank: (EVERY, "number of targets", "", "other shares of the batch"),
    decay_of_everything: (
        ("zero1", "zero2", "zero3"),
        "update",
        "embed.weight",
        "as if this tensor decayed (by 0.1)",
    ),
    shard_borders_by_the_floor: (
        ("zero1", "zero2", "zero3"),
        "initial weight",
        "embed.weight",
        "borders of shards",
    ),
    gradients_reduced_in_bfloat16: (
        ("zero2", "zero3"),
        "gradient",
        "norm.weight",
        "bfloat16's rounding",
    ),
    evaluation_of_something_else: (EVERY, "evaluation loss", "", "a forward without gradients"),
    updated_weights_that_stay_away: (
        ("zero1",),
        "update",
        "embed.weight",
        "stale rows",
    ),
    a_slice_updated_with_the_gradient_of_the_step_before: (
        ("zero1",),
        "update",
        "embed.weight",
        "1 update agrees, and then one does not: as if in some of its elements it took the gradient",
    ),
    weights_by_rank: (EVERY, "initial weight", "embed.weight", "depend on the layout"),
}

EXPECTED_OF_RECOMPUTE = {
    other_draws_when_recomputed: ("zero3-full", "zero3-sqrt", "ddp-every2", "zero2-mixed"),
    segments_that_detach: ("zero3-sqrt",),
    offload_that_mixes_up: ("ddp-offload-activations", "zero3-selective"),
}


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(segments_that_detach, marks=pytest.mark.long),
        pytest.param(other_draws_when_recomputed, marks=pytest.mark.long),
        pytest.param(offload_that_mixes_up, marks=pytest.mark.long),
    ],
    ids=lambda plant: plant.__name__,
)
def test_bugs_of_recompute_are_found_in_the_variants_that_have_them(plant: Plant) -> None:
    """In the gradient, with loss and initial weights as they should be; what keeps everything is
    equal."""
    rows = rows_with(plant, only=("zero3", *RECOMPUTE_LAYOUTS))
    assert len(rows) == 1 + len(RECOMPUTE_LAYOUTS)
    wrong = {name.split()[0]: row["first"] for name, row in rows.items() if not row["ok"]}
    assert set(wrong) == set(EXPECTED_OF_RECOMPUTE[plant])
    assert {(first["what"], first["step"]) for first in wrong.values()} == {("gradient", 0)}


@pytest.mark.parametrize("plant", some(EXPECTED, 5), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_and_named(plant: Plant) -> None:
    layouts, what, name, cause = EXPECTED[plant]
    rows = rows_with(plant, tie_embeddings=True)
    for layout in EVERY:
        row = rows[f"{layout} float64"]
        assert row["ok"] is (layout not in layouts), (layout, row["first"])
        if not row["ok"]:
            first = row["first"]
            is_whole = (plant, layout) == (
                shard_borders_by_the_floor,
                "zero1",
            )  # there weights have no borders
            expected = ("gradient" if is_whole else what, True, True)
            assert (
                first["what"],
                name in first["name"],
                cause in first["cause"],
            ) == expected, first
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


@pytest.mark.long
def test_batchnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias whose true gradient is zero is no alarm; statistics that stay, or are those of a
    rank, are one."""
    (tmp_path / "with_batchnorm.py").write_text(WITH_BATCHNORM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
    job = Job.model_validate({"model": {"kind": "with_batchnorm:Model"}, "data": {"seq_len": 16}})
    shape = measure_foreign_shape(job)
    right = rows_of(job, None, 2, ("float64", "float32"), shape)
    assert {name: row["first"] for name, row in right.items() if not row["ok"]} == {}
    assert set(right) == {
        f"{layout} {dtype}" for layout in EVERY for dtype in ("float64", "float32")
    }
    assert all(row["errors"]["buffer"] > 0 for row in right.values())
    for row in rows_of(job, running_statistics_that_stay, 2, ("float64",), shape).values():
        assert (row["first"]["what"], row["first"]["name"]) == (
            "buffer",
            "norm.running_mean",
        )
    for row in rows_of(job, batchnorm_by_rank, 2, ("float64",), shape).values():
        assert (row["first"]["what"], "other rows" in row["first"]["cause"]) == ("loss", True)


WITH_DROPOUT = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, hidden):
        return hidden + self.drop(torch.tanh(self.linear(hidden)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, 16), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        hidden = F.dropout(self.embed(tokens), 0.1, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)
"""


@pytest.mark.long
def test_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and a call of F.dropout, equal in every layout; masks by rank, or of another
    recomputation, are found."""
    (tmp_path / "with_dropout.py").write_text(WITH_DROPOUT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
    model = {"model": {"kind": "with_dropout:Model"}, "data": {"seq_len": 16}}
    job, recomputed = (
        Job.model_validate(model | {"train": {"recompute": how}}) for how in ("none", "full")
    )
    shape = measure_foreign_shape(job)
    right = rows_of(recomputed, None, 2, ("float64", "float32"), shape)
    assert {name: row["first"] for name, row in right.items() if not row["ok"]} == {}
    assert {name: row["notes"] for name, row in right.items()} == {
        f"{layout} {dtype}": [] for layout in EVERY for dtype in ("float64", "float32")
    }
    for row in rows_of(job, same_masks_on_every_rank, 2, ("float64",), shape).values():
        first = row["first"]
        assert (first["what"], first["name"], first["ranks"]) == ("dropout", "blocks.0.drop", [1])
        assert "those of the others are not" in first["cause"]
    for row in rows_of(job, dropout_drawn_by_rank, 2, ("float64",), shape).values():
        first = row["first"]
        assert (first["what"], first["name"], first["ranks"]) == (
            "dropout",
            "blocks.0.drop",
            [0, 1],
        )
    for row in rows_of(recomputed, recomputed_with_other_masks, 2, ("float64",), shape).values():
        assert (row["first"]["what"], "goes wrong where it meets" in row["first"]["cause"]) == (
            "gradient",
            True,
        )


# Compressed gradients


def second_rounding_forgotten() -> None:
    """The rank that adds a part up keeps nothing of what its own rounding loses."""
    quantise = int8._quantise_blocks_to_int8

    def forgetful(blocks: torch.Tensor) -> Any:
        numbers, scales = quantise(blocks)
        if len(blocks) == 1:  # the mean of this rank's share
            blocks.copy_(int8._dequantise_int8_blocks(numbers, scales, blocks.dtype))
        return numbers, scales

    int8._quantise_blocks_to_int8 = forgetful


def own_places_for_all() -> None:
    """A rank puts what others sent at the places of its own largest elements."""
    gather = Wire.gather

    def confused(self: Wire, mine: torch.Tensor) -> torch.Tensor:
        every = gather(self, mine)
        return mine.expand_as(every).clone() if mine.dtype == torch.int32 else every

    Wire.gather = confused  # type: ignore[method-assign]


def sum_on_the_wire() -> None:
    """The mean over ranks is never taken."""
    reduce = GradientCompression.average_gradients_over_ranks

    def summed(self: GradientCompression, parameters: Any, tensors: Any) -> None:
        tensors = list(tensors)
        reduce(self, parameters, tensors)
        for tensor in tensors:
            tensor.mul_(self._wire.num_ranks)

    GradientCompression.average_gradients_over_ranks = summed  # type: ignore[method-assign]


def overflow_of_int8_becomes_zeros() -> None:
    """A block whose scale is not finite arrives as zeros."""
    dequantise = int8._dequantise_int8_blocks

    def silent(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantise(numbers, scales, dtype).nan_to_num(0.0)

    int8._dequantise_int8_blocks = silent


def overflow_forgets_what_was_not_sent() -> None:
    """What a rank has not sent of a gradient is gone once that is not finite."""
    reduce = GradientCompression.average_gradients_over_ranks

    def forgetful(self: GradientCompression, parameters: Any, tensors: Any) -> None:
        parameters, tensors = list(parameters), list(tensors)
        overflowed = [not bool(tensor.isfinite().all()) for tensor in tensors]
        reduce(self, parameters, tensors)
        for parameter, is_lost in zip(parameters, overflowed, strict=True):
            if is_lost and self._hook.keeps_error:
                self._slots[self._names[parameter]]["error"].zero_()

    GradientCompression.average_gradients_over_ranks = forgetful  # type: ignore[method-assign]


COMPRESSED = ("bf16", "fp16", "int8", "powersgd", "topk")
EXPECTED_COMPRESSED = {
    second_rounding_forgotten: (("int8",), "gradient", "norm.weight", ""),
    own_places_for_all: (("topk",), "gradient", "norm.weight", ""),
    sum_on_the_wire: (COMPRESSED, "gradient", "norm.weight", ""),
    overflow_of_int8_becomes_zeros: (("int8",), OVERFLOW, "", "its overflow is not seen"),
    overflow_forgets_what_was_not_sent: (
        ("int8", "powersgd", "topk"),
        OVERFLOW,
        "",
        "what was not sent is lost",
    ),
}


@pytest.mark.long
def test_compressed_gradients_lose_nothing() -> None:
    """On three ranks: each hook, and what the row says of it."""
    rows = rows_of(small_job(), None, 3, ("float64", "float32"), only=(), compressed=True)
    assert {name: row["first"] for name, row in rows.items() if not row["ok"]} == {}
    assert {row["compress"] for row in rows.values()} == set(COMPRESSED)
    for row in rows.values():
        is_cast = row["compress"] in ("bf16", "fp16")
        assert ("sent" in row["errors"]) is not is_cast
        assert ("rounds gradients" if is_cast else "changes gradients by design") in row["notes"][
            -1
        ]


@pytest.mark.parametrize("plant", some(EXPECTED_COMPRESSED, 3), ids=lambda plant: plant.__name__)
def test_planted_bugs_of_compression_are_found(plant: Plant) -> None:
    kinds, what, name, cause = EXPECTED_COMPRESSED[plant]
    # Those that have it, and one that has not.
    judged = [*kinds, *[kind for kind in COMPRESSED if kind not in kinds][:1]]
    only = tuple(f"ddp-{kind}" for kind in judged)
    rows = rows_of(small_job(), plant, 2, ("float64",), only=only, compressed=True)
    for kind in judged:
        row = rows[f"ddp-{kind} float64"]
        assert row["ok"] is (kind not in kinds), (kind, row["first"])
        if not row["ok"]:
            first = row["first"]
            assert (first["what"], name in first["name"], cause in first["cause"]) == (
                what,
                True,
                True,
            ), first


def one_rank_rounds_otherwise() -> None:
    """What rank 1 makes of the bytes differs in the last place: no loss shows it for a long
    time."""
    reduce = GradientCompression.average_gradients_over_ranks

    def odd(self: GradientCompression, parameters: Any, tensors: Any) -> None:
        tensors = list(tensors)
        reduce(self, parameters, tensors)
        if dist.get_rank() == 1:
            for tensor in tensors:
                tensor.mul_(1 + 2**-50)

    GradientCompression.average_gradients_over_ranks = odd  # type: ignore[method-assign]


def test_ranks_that_drift_apart_are_found() -> None:
    only = ("ddp-bf16", "ddp-topk")
    rows = rows_of(
        small_job(), one_rank_rounds_otherwise, 2, ("float64",), only=only, compressed=True
    )
    assert len(rows) == len(only)
    for row in rows.values():
        assert row["first"]["what"] == "replica of gradient"
        assert row["first"]["ranks"] == [1]
        assert "replicas drift apart" in row["first"]["cause"]
