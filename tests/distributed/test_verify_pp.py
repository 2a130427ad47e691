"""`verify` finds bugs planted in pipelines, names tensor, stage, schedule and likely cause; else
all rows are equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from test_verify import Plant, Rows, clip_by_local_norms, rows_of
from torch.distributed.fsdp import FSDPModule

from commands import run
from phalanx.job.module_probe import measure_foreign_shape
from phalanx.job.schema import Job
from phalanx.mesh.logical import ReplicaPosition
from phalanx.mesh.mesh import Mesh
from phalanx.parallel.data_parallel import replicate as dp_replicate
from phalanx.parallel.data_parallel import shard as dp_shard
from phalanx.parallel.dropout.interceptor import RandomOpInterceptor
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.pipeline import tied_params as pp_ties
from phalanx.parallel.pipeline.executor import PipelineExecutor
from phalanx.parallel.pipeline.p2p import P2PQueue
from phalanx.parallel.pipeline.weight_grads import DeferredWeightGrads
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.step_reducer import StepReducer
from phalanx.parallel.step_stats import LocalLoss
from phalanx.plan.pipeline.generate import SCHEDULE_NAMES
from phalanx.verify.verified_job import shrink_job
from plants import some

BOTH = ("pp2-1f1b", "pp2-zb-v")
SPLIT = ("interleaved-zero-bubble", "zb-v", "dualpipe-v")  # schedules with a W


def deep_job(num_layers: int = 4, **model: Any) -> Job:
    """A decoder with a block for each stage."""
    body = {
        "model": {"num_layers": num_layers, "tie_embeddings": True, **model},
        "data": {"seq_len": 8},
    }
    return shrink_job(Job.model_validate(body), num_blocks=num_layers)[0]


def differing(rows: Rows) -> dict[str, Any]:
    return {name: row["first"] for name, row in rows.items() if not row["ok"]}


def every(num_ranks: int, *places: str) -> tuple[str, ...]:
    """The names of all schedules in these places."""
    names = {2: "pp2", 4: "pp4"} if "" in places else {2: "pp2", 4: "pp2"}
    return tuple(
        f"{names[num_ranks]}{place}-{schedule}" for place in places for schedule in SCHEDULE_NAMES
    )


DTYPES = ("float64", "float32")
VARIANTS = (
    "pp2-full-zb-v",
    "pp2-selective-1f1b",
    "pp2-sqrt-interleaved-zero-bubble",
    "pp2-uneven-1f1b",
)


@pytest.mark.parametrize(
    ("num_ranks", "num_layers", "names", "dtypes"),
    [
        (2, 4, ("pp2-interleaved", "pp2-dualpipe-v", "pp2-full-zb-v"), DTYPES),
        (4, 4, ("pp2-zero3-zb-v", "pp2-tp2-interleaved-zero-bubble"), ("float64",)),
        pytest.param(4, 4, ("pp2-zero1-1f1b", "pp2-ddp-zb-v"), DTYPES, marks=pytest.mark.long),
        pytest.param(2, 4, (*every(2, ""), *VARIANTS), DTYPES, marks=pytest.mark.long),
        pytest.param(4, 7, every(4, ""), DTYPES, marks=pytest.mark.long),
        pytest.param(4, 4, every(4, "-zero3", "-tp2"), DTYPES, marks=pytest.mark.long),
        pytest.param(
            8,
            4,
            tuple(f"pp2-zero3-tp2-{s}" for s in SCHEDULE_NAMES),
            DTYPES,
            marks=pytest.mark.long,
        ),
    ],
)
def test_pipelines_equal_the_reference(
    num_ranks: int, num_layers: int, names: tuple[str, ...], dtypes: tuple[str, ...]
) -> None:
    """With tied embeddings, in fp64 and fp32, against the plain loop in one process."""
    rows = rows_of(deep_job(num_layers), None, num_ranks, dtypes, only=names)
    assert set(rows) == {f"{name} {dtype}" for name in names for dtype in dtypes}
    assert differing(rows) == {}
    assert all(row["errors"]["gradient"] > 0 for row in rows.values()), "something was compared"


# Planted bugs


def gradients_reduced_before_the_last_w() -> None:
    """Data parallelism reduces when the last gradient has left the rank: a W that is still to
    come is too late."""
    do = PipelineExecutor._run_scheduled_action

    def early(self: Any, action: Any, post: Any, microbatches: Any, *rest: Any) -> None:
        do(self, action, post, microbatches, *rest)
        row = self._get_schedule_for_num_microbatches(len(microbatches)).actions[
            self.staged.stage_group.rank
        ]
        if action == [other for other in row if other.kind in ("B", "I")][-1]:
            if not hasattr(self, "reduce"):
                self.reduce, self.context.optimizer_params.before_update[0] = (
                    self.context.optimizer_params.before_update[0],
                    lambda: None,
                )
            self.reduce()

    PipelineExecutor._run_scheduled_action = early  # type: ignore[method-assign]


def weights_freed_between_the_halves() -> None:
    """As `fully_shard` does by itself under torch's schedules: it reduces, and frees weights,
    after the first half."""
    keep = dp_shard.keep_weights_gathered_for_pipeline

    def left_to_fsdp(context: ParallelContext, units: Any) -> None:
        keep(context, units)
        hooks, root = context.hooks, cast(FSDPModule, context.root)
        context.optimizer_params.before_update.pop()

        @contextmanager
        def with_bug(is_last: bool) -> Iterator[None]:
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
            yield

        hooks.around_microbatch.append(with_bug)

    dp_shard.keep_weights_gathered_for_pipeline = left_to_fsdp


def a_dropped_w() -> None:
    do = DeferredWeightGrads.compute_deferred_gradients

    def forgetful(self: DeferredWeightGrads, key: Any) -> None:
        if key == (1, 2):  # stage, microbatch
            self._due[key].clear()
        do(self, key)

    DeferredWeightGrads.compute_deferred_gradients = forgetful  # type: ignore[method-assign]


def w_of_the_microbatch_before() -> None:
    """A W does the work of the one that its stage had before; the last one's is never done."""
    do = DeferredWeightGrads.compute_deferred_gradients
    before: dict[int, Any] = {}

    def late(self: DeferredWeightGrads, key: Any) -> None:
        own = list(self._due[key])
        if key[1] > 0:
            self._due[key] = before[key[0]]
        before[key[0]] = own
        do(self, key)

    DeferredWeightGrads.compute_deferred_gradients = late  # type: ignore[method-assign]


def tied_gradients_not_added_up() -> None:
    pp_ties.sum_gradients_of_tied_parameters = lambda staged, module, phases: None


def norm_of_a_stage() -> None:
    """Each rank takes the norm of its own stages for that of all."""
    reduce = Mesh.all_reduce_sum

    def forget_squares(self: Mesh, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.clone()
        reduce(self, tensor)
        if tensor.ndim == 1 and len(tensor) == 3:  # loss, targets, squares
            tensor[2] = own[2]
        return tensor

    Mesh.all_reduce_sum = forget_squares  # type: ignore[method-assign]


def norm_of_the_first_rank_twice() -> None:
    gradients = StepReducer._collect_gradients_and_squares

    def twice(self: Any) -> Any:
        found, squares = gradients(self)
        return found, squares * (2 if self._mesh.coordinates["pp"] == 0 else 1)

    StepReducer._collect_gradients_and_squares = twice  # type: ignore[method-assign]


def tied_weight_counted_by_each_holder() -> None:
    shard = ReplicaPosition.shard

    def alone(self: ReplicaPosition, *args: Any, **options: Any) -> Any:
        return shard(replace(self, copies={}), *args, **options)

    ReplicaPosition.shard = alone  # type: ignore[method-assign]


def swap_parcels(*, on: int, are_gradients: bool) -> None:
    """On one rank of the pipeline the first two messages from another one are mixed up."""
    init = P2PQueue.__init__

    def swapped(self: Any, *args: Any) -> None:
        init(self, *args)
        for source, coming in self._coming.items() if self._stage_group.rank == on else ():
            places = [
                at for at, parcel in enumerate(coming) if parcel.is_gradient is are_gradients
            ][:2]
            if len(places) == 2 and coming[places[0]].stage == coming[places[1]].stage:
                first, second = places
                coming[first], coming[second] = coming[second], coming[first]
                self._places |= {coming[at]: (source, at) for at in places}

    P2PQueue.__init__ = swapped  # type: ignore[method-assign]


def activations_of_another_microbatch() -> None:
    swap_parcels(on=1, are_gradients=False)


def gradients_of_another_microbatch() -> None:
    swap_parcels(on=0, are_gradients=True)


def a_stage_that_ends_a_block_early() -> None:
    compute = PipelineExecutor._compute_stage_forward

    def early(self: Any, stage: int, given: Any, batch: Any, objective: Any) -> Any:
        pipeline, stages = self.staged.pipeline, self.staged.pipeline.stages
        if stage == 0 and stages.num_blocks[0] > 1:
            blocks = (stages.num_blocks[0] - 1, *stages.num_blocks[1:])
            self.staged.pipeline = replace(pipeline, stages=replace(stages, num_blocks=blocks))
        try:
            return compute(self, stage, given, batch, objective)
        finally:
            self.staged.pipeline = pipeline

    PipelineExecutor._compute_stage_forward = early  # type: ignore[method-assign]


def mean_of_means() -> None:
    """The step's loss is the mean of the microbatches' means, which the last stage's rank has."""
    forward, finish = ParallelModel.forward_backward, ParallelModel.reduce_and_clip

    def noting(self: Any, microbatches: Any, objective: Any) -> LocalLoss:
        self.means = []

        def noted(outputs: Any, batch: Any) -> Any:
            loss, count = objective(outputs, batch)
            if loss.requires_grad:
                self.means.append(loss.detach().double() / count)
            return loss, count

        return forward(self, microbatches, noted)

    def averaged(self: Any, sums: LocalLoss, **options: Any) -> Any:
        facts = finish(self, sums, **options)
        own = torch.tensor([sum(map(float, self.means)), len(self.means)], dtype=torch.float64)
        total, count = self.mesh.all_reduce_sum(own).tolist()
        return replace(facts, loss=total / count)

    ParallelModel.forward_backward = noting  # type: ignore[method-assign]
    ParallelModel.reduce_and_clip = averaged  # type: ignore[assignment, method-assign]


def replicas_of_a_stage_not_averaged() -> None:
    dp_replicate.average_gradients_in_one_collective = lambda bucket, group, phases: None


ZERO = tuple(f"pp2-zero3-{schedule}" for schedule in ("1f1b", "interleaved-zero-bubble", "zb-v"))
W = "a W is left out or is of another microbatch, or gradients were reduced"
EXPECTED: dict[
    Plant, tuple[int, tuple[str, ...], tuple[str, ...], str, str, tuple[int, ...] | None, str]
] = {
    # bug: (ranks, layouts that are judged, those it is in, what differs first, a part of its name,
    # stages, cause)
    a_dropped_w: (2, BOTH, BOTH[1:], "gradient", "blocks.1.", (1,), W),
    gradients_reduced_before_the_last_w: (
        4,
        (*ZERO, "pp2-zero1-zb-v"),
        (*ZERO[1:], "pp2-zero1-zb-v"),
        "gradient",
        ".ffn.down.weight",
        None,
        W,
    ),
    weights_freed_between_the_halves: (4, ZERO, ZERO[1:], "gradient", ".ffn.down.weight", None, W),
    w_of_the_microbatch_before: (2, BOTH, BOTH[1:], "gradient", "blocks.3.", (3,), W),
    tied_gradients_not_added_up: (
        2,
        BOTH[:1],
        BOTH[:1],
        "gradient",
        "embed.weight",
        (0, 1),
        "not added up",
    ),
    norm_of_a_stage: (
        2,
        BOTH,
        BOTH,
        "gradient norm",
        "",
        (),
        "those of the other stages are missing",
    ),
    norm_of_the_first_rank_twice: (2, BOTH, BOTH, "gradient norm", "", (), "are counted twice"),
    tied_weight_counted_by_each_holder: (
        2,
        BOTH,
        BOTH[:1],  # with zb-v one rank has both ends
        "gradient norm",
        "",
        (),
        "embed.weight is counted twice",
    ),
    activations_of_another_microbatch: (
        2,
        BOTH,
        BOTH,
        "loss",
        "",
        (),
        "hidden states of another microbatch",
    ),
    gradients_of_another_microbatch: (2, BOTH, BOTH, "gradient", "", None, "sends back to stage 0"),
    a_stage_that_ends_a_block_early: (
        2,
        BOTH,
        BOTH[:1],
        "loss",
        "",
        (),
        "does not compute its own blocks",
    ),
    mean_of_means: (2, BOTH, BOTH, "loss", "", (), "a mean of means"),
    clip_by_local_norms: (
        2,
        BOTH,
        BOTH,
        "gradient",
        "norm.weight",
        None,
        "clipped by local norms",
    ),
    replicas_of_a_stage_not_averaged: (
        4,
        ("pp2-ddp-zb-v",),
        ("pp2-ddp-zb-v",),
        "gradient",
        "norm.weight",
        (3,),
        "never averaged",
    ),
}


@pytest.mark.parametrize("plant", some(EXPECTED, 6), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_and_named(plant: Plant) -> None:
    num_ranks, layouts, wrong, what, name, stages, cause = EXPECTED[plant]
    rows = rows_of(deep_job(), plant, num_ranks, ("float64",), only=layouts)
    assert len(rows) == len(layouts)
    for layout in layouts:
        row = rows[f"{layout} float64"]
        assert row["ok"] is (layout not in wrong), (layout, row["first"])
        if row["ok"]:
            continue
        first = row["first"]
        assert (first["what"], name in first["name"], cause in first["cause"]) == (
            what,
            True,
            True,
        ), first
        assert layout.endswith(first["schedule"])
        assert first["schedule"]
        assert f"in schedule {first['schedule']}" in first["text"]
        assert first["error"] > row["tolerance"]
        if stages is not None:
            assert tuple(first["stages"]) == stages, first


WITH_BOTH = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, p, is_mixing):
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), nn.Dropout(p)
        self.norm = nn.BatchNorm1d(16) if is_mixing else nn.LayerNorm(16)
        self.is_mixing = is_mixing

    def forward(self, hidden):
        found = self.linear(hidden)
        found = self.norm(found.transpose(1, 2)).transpose(1, 2) if self.is_mixing else self.norm(found)
        return hidden + self.drop(torch.tanh(found))


class Model(nn.Module):
    def __init__(self, p=0.0, is_mixing=False, refuses="", counts=False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(256, 16), nn.ModuleList(Block(p, is_mixing) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 256)
        self.p, self.refuses = p, refuses
        if counts:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        if hasattr(self, "calls"):
            self.calls += 1
        hidden = F.dropout(self.embed(tokens), self.p, self.training)
        for block in self.blocks:
            hidden = block(hidden)
        if self.refuses == "always" or self.refuses == "training" and self.training:
            hidden = hidden + self.embed.weight.mean()
        return self.head(self.norm(hidden))
"""


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, **arguments: Any) -> Any:
    (folder / f"{name}.py").write_text(WITH_BOTH)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # type: ignore[no-untyped-call]
    job = Job.model_validate(
        {"model": {"kind": f"{name}:Model", "args": arguments}, "data": {"seq_len": 8}}
    )
    return job, measure_foreign_shape(job)


def masks_in_the_order_of_the_schedule() -> None:
    """Microbatches draw by when a stage computes them in a step, counted by each rank over all
    of its stages."""
    microbatch = RandomOpInterceptor.drawing_in_microbatch
    counts: dict[int, int] = {}

    def counted(self: Any, step: int, index: int, batch: Any) -> Any:
        counts[step] = counts.get(step, -1) + 1
        return microbatch(self, step, counts[step] % 4, batch)

    RandomOpInterceptor.drawing_in_microbatch = counted  # type: ignore[method-assign]


@pytest.mark.long
def test_dropout_in_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and a call of F.dropout drop what one process drops; masks by the order of the
    schedule are found."""
    job, shape = own(tmp_path, monkeypatch, "stages_with_dropout", p=0.2)
    names = ("pp2-interleaved", "pp2-full-zb-v")
    right = rows_of(job, None, 2, ("float64",), shape, only=names)
    assert (set(right), differing(right)) == ({f"{name} float64" for name in names}, {})
    wrong = rows_of(
        job, masks_in_the_order_of_the_schedule, 2, ("float64",), shape, only=("pp2-zb-v",)
    )
    first = wrong["pp2-zb-v float64"]["first"]
    assert (first["what"], "masks depend on the layout" in first["cause"]) == ("dropout", True)


def test_statistics_of_a_batch_are_compared_at_equal_microbatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of BatchNorm in blocks have a reference with as many microbatches as the pipeline."""
    job, shape = own(tmp_path, monkeypatch, "stages_with_batchnorm", is_mixing=True)
    rows = rows_of(job, None, 2, ("float64",), shape, only=(*BOTH, "ddp"))
    assert len(rows) == 3
    assert differing(rows) == {}
    assert all("buffer" in row["errors"] for row in rows.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"refuses": "always"}, "is used after the blocks, and stage 1 does not hold it"),
        pytest.param({"counts": True}, "moves the buffer calls", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_one_stage_refuses_all_ranks_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], words: str
) -> None:
    """And the next layout is judged as if nothing had been."""
    job, shape = own(tmp_path, monkeypatch, f"refusing_{next(iter(arguments))}", **arguments)
    rows = rows_of(job, None, 4, ("float64",), shape, only=("pp2-zero3-1f1b", "zero3"))
    assert (rows["pp2-zero3-1f1b float64"]["ok"], rows["zero3 float64"]["ok"]) == (None, True)
    assert words in rows["pp2-zero3-1f1b float64"]["refused"]


def test_what_only_shows_amid_a_schedule_ends_the_group(tmp_path: Path) -> None:
    """The other ranks wait for the one that refuses: it is a crash, with its words, and no hang."""
    (tmp_path / "refusing.py").write_text(WITH_BOTH)
    job = ("model.kind=refusing:Model", 'model.args={refuses = "training"}', "data.seq_len=8")
    done = run("verify", *job, "parallel.pp=2", "parallel.schedule=gpipe", "--json", cwd=tmp_path)
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert (done.code, [row["ok"] for row in rows]) == (11, [False, False]), done.err
    for row in rows:
        assert "embed.weight is used after the blocks" in row["crashed"]
        assert row["parallel"] == {"pp": 2, "schedule": "gpipe"}
