"""Pipelines of other people's modules, in every precision and with every recomputation; and what
cannot be cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_model_layouts import SHAPES, build
from torch import nn

import pipeline_zoo as zoo
from bare_loop import Tensors, Trace, train_in_microbatches
from compilers import needs_cpp_compiler
from models import SEQ_LEN, VOCAB, fill
from models import shape as small_shape
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Optim
from phalanx.mesh.casts import disabling_cast_cache, sharing_casts_between_autocast_regions
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import token_cross_entropy
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.parallel.pipeline.weight_grads import linear_with_deferred_gradient as split_linear
from phalanx.parallel.saved_tensors import is_parameter_or_derived
from phalanx.run.one_process.dropout_masks import DropoutMasks
from pipelines import (
    BATCH,
    LAYERS,
    LR,
    MICRO,
    OBJECTIVE,
    SEED,
    Case,
    in_pipelines,
    own_microbatches,
    pipeline_plan,
    token_batches,
    worst,
)
from ranks import run_ranks

Make = Callable[[], nn.Module]


def filled(make: Make, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    module = make()
    fill(module)
    return module.to(dtype)


def plain_batches() -> list[Tensors]:
    return token_batches(positions=False)


def dict_objective(outputs: Any, batch: Any) -> Any:
    return token_cross_entropy(outputs["logits"], batch)


# Modules of others

CAN_BE_CUT: dict[str, Make] = {
    "sequential, parameters at the root": zoo.SequentialAtRoot,
    "in place": zoo.in_place,
    "BatchNorm inside": zoo.batch_norm,
    "tied by hand": zoo.TiedByHand,
    "frozen embedding": zoo.frozen("embed"),
    "first half frozen": zoo.frozen("embed", *(f"blocks.{index}" for index in range(4))),
    "second half frozen": zoo.frozen(*(f"blocks.{index}" for index in range(4, 8)), "norm", "head"),
    "unused": zoo.Unused,
    "shared in a stage": zoo.SharedInAStage,
    "a block has the embedding": zoo.BlockHasEmbedding,
    "head first": zoo.HeadFirst,
    "torch's encoder": zoo.TorchEncoder,
    "arguments": zoo.Arguments,
    "a part of all blocks": zoo.SharedPart,
}
WEIGHT_DECAY = 0.1  # moves what has zeros for a gradient in place of none
HOLDS = {"head first": {"first_stage": ("embed",), "last_stage": ("head", "norm")}}


def zoo_references(rank: int) -> dict[str, Trace]:
    return {
        name: train_in_microbatches(
            filled(make),
            plain_batches(),
            micro=MICRO,
            lr=LR,
            max_norm=0.5,
            weight_decay=WEIGHT_DECAY,
        )
        for name, make in CAN_BE_CUT.items()
    }


@pytest.fixture(scope="module")
def zoo_traces() -> dict[str, Trace]:
    return run_ranks(1, zoo_references)[0]


def zoo_case(name: str, **parallel: Any) -> Case:
    options = {
        "objective": token_cross_entropy,
        "batches": plain_batches,
        "holds": HOLDS.get(name, {}),
        "weight_decay": WEIGHT_DECAY,
    }
    return Case(
        f"{name} {parallel}", partial(filled, CAN_BE_CUT[name]), parallel, reference=name, **options
    )


def require_parity(
    num_ranks: int, cases: list[Case], traces: dict[str, Trace], tolerance: float = 1e-10
) -> None:
    found = run_ranks(num_ranks, in_pipelines, num_ranks, cases, traces, deadline_s=900.0)
    off = {
        one.name: worst([mine[place] for mine in found], traces[one.reference], tolerance)
        for place, one in enumerate(cases)
    }
    assert {name: errors for name, errors in off.items() if errors} == {}


@pytest.mark.long
def test_modules_of_others(zoo_traces: dict[str, Trace]) -> None:
    cases = [
        zoo_case(name, pp=2, schedule=schedule)
        for name in CAN_BE_CUT
        for schedule in ("1f1b", "zb-v")
    ]
    require_parity(2, cases, zoo_traces)


DATA_PARALLEL = {
    "ddp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
}
FSDP_REFUSES = [
    ("in place", "zero2"),
    ("in place", "zero3"),
]  # FSDP2 hooks what blocks are given: torch forbids it then
# Statistics of a microbatch: of all ranks under the plan's default, which the reference of MICRO
# rows does not have.
PER_SAMPLE = [name for name in CAN_BE_CUT if name != "BatchNorm inside"]


@pytest.mark.parametrize(
    "names",
    [PER_SAMPLE[::2], pytest.param(PER_SAMPLE, marks=pytest.mark.long)],
    ids=["half", "all"],
)
def test_modules_of_others_with_data_parallelism(
    names: list[str], zoo_traces: dict[str, Trace]
) -> None:
    """Each module with one kind of data parallelism, and each kind with a module or several."""
    kinds = list(DATA_PARALLEL.values())
    cases = [
        zoo_case(
            name, pp=2, schedule=("interleaved-zero-bubble", "1f1b")[place % 2], **kinds[place % 4]
        )
        for place, name in enumerate(names)
    ]
    require_parity(4, cases, zoo_traces)


@pytest.mark.long
def test_modules_of_others_with_all_data_parallelism(zoo_traces: dict[str, Trace]) -> None:
    cases = [
        zoo_case(name, pp=2, schedule=schedule, **how)
        for name in PER_SAMPLE
        for schedule in ("gpipe", "interleaved", "zb-v", "dualpipe-v", "1f1b")
        for kind, how in DATA_PARALLEL.items()
        if (name, kind) not in FSDP_REFUSES
    ]
    require_parity(4, cases, zoo_traces)


# What cannot be cut

CANNOT: dict[str, tuple[Make, str]] = {
    "no blocks": (zoo.NoBlocks, "no repeated blocks"),
    "few blocks": (zoo.FewBlocks, "has 5 blocks, 8 were planned"),
    "tuples": (zoo.Tuples, "block 0 returns tuple"),
    "skip": (zoo.Skip, "output depends on what comes before"),
    "chooses": (partial(zoo.Chooses, "number"), "before the blocks the model decides something"),
    "chooses by token": (
        partial(zoo.Chooses, "token"),
        "before the blocks the model decides something",
    ),
    "skip of a tied embedding": (zoo.TiedSkip, "output depends on what comes before"),
    "value embeddings": (
        zoo.ValueEmbeddings,
        "an argument of block . depends on what comes before",
    ),
    "tied value embeddings": (
        zoo.TiedValueEmbeddings,
        "an argument of block . depends on what comes before",
    ),
    "through the back": (zoo.ThroughTheBack, "depends on what comes before"),
    "U-net": (zoo.UNet, "an argument of block 5 depends on what comes before"),
    "norms outside": (zoo.OuterNorms, "make it a part of the blocks"),
    "BatchNorm outside": (zoo.OuterBatchNorm, "statistics is a BatchNorm outside the blocks"),
    "one object": (zoo.OneObject, "has 4 blocks, 8 were planned"),
    "by keyword": (zoo.ByKeyword, "not given hidden states first"),
    "asks blocks": (zoo.AsksBlocks, "block's own forward alone"),
    "weights of blocks": (zoo.WeightsOfBlocks, "block's own forward alone"),
    **{name: (partial(zoo.InOrder, order), "in order") for name, order in zoo.ORDERS.items()},
}


def refusals(rank: int, num_ranks: int) -> dict[str, str]:
    """What each says that cannot be cut; also where the first and the last stage are one rank's."""
    found = {}
    for schedule in ("1f1b", "zb-v"):
        a_plan = pipeline_plan(num_ranks, pp=num_ranks, schedule=schedule)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            for name, (make, _) in CANNOT.items():
                try:
                    model = parallelize(filled(make), a_plan, mesh)
                    model.forward_backward(
                        own_microbatches(plain_batches()[0], a_plan, 0), token_cross_entropy
                    )
                    found[f"{name} {schedule}"] = "it ran"
                except LayoutError as error:
                    found[f"{name} {schedule}"] = str(error)
    return found


def test_what_cannot_be_cut_is_refused_on_all_ranks_alike() -> None:
    """In one line, without a rank that waits for another: the next module uses the same mesh."""
    found = run_ranks(2, refusals, 2)
    assert found[0] == found[1]
    wrong = {}
    for key, text in found[0].items():
        words = CANNOT[key.rpartition(" ")[0]][1]
        if "\n" in text or not re.search(words, text):
            wrong[key] = text
    assert wrong == {}


def refused_by_the_cut(rank: int) -> dict[str, str]:
    found = {}
    for name, make, holds in (
        ("as registered", zoo.HeadFirst, {}),
        ("embedding told", zoo.HeadFirst, {"first_stage": ("embed",)}),
        ("norm told", zoo.HeadFirst, {"first_stage": ("embed",), "last_stage": ("norm",)}),
        ("unknown", zoo.HeadFirst, {"first_stage": ("embedding",)}),
        ("shared", zoo.SharedAcross, {}),
    ):
        a_plan = pipeline_plan(2, pp=2)
        assert a_plan.pipeline is not None
        a_plan = replace(a_plan, pipeline=replace(a_plan.pipeline, **holds))
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            try:
                model = parallelize(filled(make), a_plan, mesh)
                model.forward_backward(
                    own_microbatches(plain_batches()[0], a_plan, 0), token_cross_entropy
                )
                found[name] = "it ran"
            except LayoutError as error:
                found[name] = str(error)
    return found


def test_a_part_in_the_wrong_place_is_refused_with_the_key_that_puts_it_right() -> None:
    """One by one, until it works (test_modules_of_others, "head first")."""
    for found in run_ranks(2, refused_by_the_cut):
        assert 'parallel.first_stage=["embed"]' in found["as registered"]
        assert 'parallel.last_stage=["norm"]' in found["embedding told"]
        assert 'parallel.last_stage=["head"]' in found["norm told"]
        assert "the model has no 'embedding'" in found["unknown"]
        assert "blocks.0.up.weight and blocks.7.up.weight are one parameter" in found["shared"]


def own_checkpoint(rank: int) -> None:
    a_plan = pipeline_plan(2, pp=2)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallelize(filled(zoo.OwnCheckpoint), a_plan, mesh)
        model.forward_backward(own_microbatches(plain_batches()[0], a_plan, 0), token_cross_entropy)


def test_a_model_that_recomputes_its_blocks_itself_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"recomputes its blocks .*train.recompute=full"):
        run_ranks(2, own_checkpoint)


# Models of every style, and what is done to them


STYLES = {
    name: replace(found, num_layers=LAYERS) for name, found in SHAPES.items() if name != "vit"
} | {"vit": replace(SHAPES["vit"], num_layers=LAYERS)}


def styled(name: str) -> nn.Module:
    SHAPES[name] = STYLES[name]
    return filled(partial(build, name))


def style_batches(name: str) -> list[Tensors]:
    if name != "vit":
        return token_batches(documents=True)
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(2):
        labels = torch.randint(5, (BATCH,), generator=generator)
        labels[3:6] = -100
        images = torch.randn(BATCH, 2, 8, 8, generator=generator)
        found.append({"inputs": images.double(), "targets": labels})
    return found


def style_references(rank: int) -> dict[str, Trace]:
    return {
        name: train_in_microbatches(
            styled(name), style_batches(name), micro=MICRO, lr=LR, max_norm=0.5
        )
        for name in STYLES
    }


RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "every-k": {"recompute": "every-k", "recompute_every": 3},
    "sqrt": {"recompute": "sqrt"},
}


def style_case(name: str, recompute: str = "none", **parallel: Any) -> Case:
    how = {"train": RECOMPUTED[recompute]}
    batches = partial(style_batches, name)
    return Case(
        f"{name} {recompute} {parallel}",
        partial(styled, name),
        parallel,
        how,
        reference=name,
        batches=batches,
    )


@pytest.mark.long
@pytest.mark.parametrize("each_with_each", [False, pytest.param(True, marks=pytest.mark.long)])
def test_models_of_every_style_and_every_recomputation(each_with_each: bool) -> None:
    """Learned positions, windows, documents, images; GQA is in all of test_pipeline."""
    traces = run_ranks(1, style_references)[0]
    hows = list(
        zip(RECOMPUTED, ("gpipe", "1f1b", "zb-v", "interleaved", "dualpipe-v"), strict=True)
    )
    cases = [
        style_case(name, recompute, pp=2, schedule=schedule)
        for number, name in enumerate(STYLES)
        for recompute, schedule in (
            hows if each_with_each else (hows[number % 5], hows[(number + 2) % 5])
        )
    ]
    assert {case.how["train"].get("recompute", "none") for case in cases} == set(RECOMPUTED)
    require_parity(2, cases, traces)
    sharded = {"dp_shard": 2, "zero_stage": 3, "pp": 2}
    cases = [style_case(name, "full", schedule="zb-v", **sharded) for name in STYLES]
    cases += [
        style_case("gpt2", mode, schedule="interleaved-zero-bubble", **sharded)
        for mode in ("selective", "sqrt")
    ]
    cases.append(style_case("gemma3 with untied head", "full", pp=2, tp=2, schedule="zb-v"))
    require_parity(4, cases, traces)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@needs_cpp_compiler
def test_compiled_blocks() -> None:
    """Also under a schedule that splits backwards, which compiled code does not do: a B in two
    halves is whole in I."""
    traces = run_ranks(1, style_references)[0]
    cases = [
        replace(one, how={"train": {**RECOMPUTED[mode], "compile": True}})
        for mode in ("none", "full")
        for one in (style_case("gpt2", mode, pp=2), style_case("gpt2", mode, pp=2, schedule="zb-v"))
    ]
    require_parity(2, cases, traces, tolerance=1e-9)


# Dropout


def dropped_reference(rank: int) -> dict[str, Trace]:
    module = filled(zoo.Dropped)
    masks = DropoutMasks(module, SEED)

    def around(step: int, row: int) -> Any:
        return masks.dropping_by_masks(step + 1, row, MICRO)

    options = {"micro": MICRO, "lr": LR, "max_norm": 0.5, "around": around}
    return {"dropped": train_in_microbatches(module, plain_batches(), **options)}


@pytest.mark.long
def test_dropout_drops_what_one_process_drops() -> None:
    traces = run_ranks(1, dropped_reference)[0]

    def one(recompute: str, **parallel: Any) -> Case:
        how, options = (
            {"train": RECOMPUTED[recompute]},
            {"objective": token_cross_entropy, "batches": plain_batches},
        )
        module = partial(filled, zoo.Dropped)
        return Case(
            f"{recompute} {parallel}", module, parallel, how, reference="dropped", **options
        )

    cases = [
        one(r, pp=2, schedule=s) for r in ("none", "full") for s in ("1f1b", "zb-v", "interleaved")
    ]
    require_parity(2, [*cases, one("sqrt", pp=2)], traces)
    require_parity(
        4, [one("full", pp=2, dp_shard=2, zero_stage=3), one("none", pp=2, dp_replicate=2)], traces
    )


def local_dropout(rank: int) -> list[float]:
    a_plan = pipeline_plan(2, pp=2, dropout="local")
    losses = []
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        for seed in (1, 1, 2):
            model = parallelize(filled(zoo.Dropped), a_plan, mesh)
            torch.manual_seed(seed)
            mine = own_microbatches(plain_batches()[0], a_plan, 0)
            losses.append(
                model.reduce_and_clip(model.forward_backward(mine, token_cross_entropy)).loss
            )
    return losses


def test_local_dropout_is_torchs_own() -> None:
    for first, again, other in run_ranks(2, local_dropout):
        assert first == again != other


# Precision


def wide_reference(rank: int) -> dict[str, Trace]:
    return {
        "wide": train_in_microbatches(
            small_decoder(torch.float32), token_batches(), micro=16, lr=LR, max_norm=0.5
        )
    }


def small_decoder(dtype: torch.dtype) -> nn.Module:
    return filled(lambda: Decoder(small_shape(num_layers=LAYERS)), dtype)


def low_case(precision: str, **parallel: Any) -> Case:
    how = {"precision": precision}
    return Case(
        f"{precision} {parallel}",
        partial(small_decoder, torch.float32),
        parallel,
        how,
        reference="wide",
    )


BESIDE = {"alone": {}, "ddp": {"dp_replicate": 2}, "zero3": {"dp_shard": 2, "zero_stage": 3}}


@pytest.mark.parametrize(
    ("precision", "kinds"),
    [
        ("fp16", ("ddp",)),
        pytest.param("bf16", ("alone", "zero3"), marks=pytest.mark.long),
        pytest.param("bf16", ("ddp",), marks=pytest.mark.long),
        pytest.param("fp16", ("alone", "zero3"), marks=pytest.mark.long),
    ],
)
def test_low_precision_is_as_good_as_without_a_pipeline(
    precision: str, kinds: tuple[str, ...]
) -> None:
    """Reference: fp32, and how far off the same data parallelism is from it on as many samples."""
    traces = run_ranks(1, wide_reference)[0]
    for name in kinds:
        how: dict[str, Any] = BESIDE[name]
        plain = run_ranks(
            2 if how else 1, in_pipelines, 2 if how else 1, [low_case(precision, **how)], traces
        )
        cases = [
            low_case(precision, pp=2, schedule=schedule, **how) for schedule in ("1f1b", "zb-v")
        ]
        num_ranks = 4 if how else 2
        for mine in zip(*run_ranks(num_ranks, in_pipelines, num_ranks, cases, traces), strict=True):
            for what in traces["wide"].after:
                usual = sum(errors[0].get(what, 0.0) ** 2 for errors in plain) ** 0.5
                found = max(errors.get(what, 0.0) for errors in mine)
                assert found <= 2 * usual + 1e-4, (name, what, found, usual)
            assert any(errors["loss 1"] > 1e-7 for errors in mine), "it was not fp32"


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24}


def casts_that_autograd_keeps(rank: int, schedule: str, changes: dict[str, Any]) -> tuple[int, int]:
    """(bytes of the casts of weights that all microbatches of a step saved, number of this
    rank's weights)."""
    a_plan = pipeline_plan(2, pp=2, schedule=schedule, precision="bf16")
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if is_parameter_or_derived(tensor) and tensor.dtype is torch.bfloat16:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with open_mesh(a_plan.layout, device="cpu") as mesh:
        module = filled(
            lambda: Decoder(replace(small_shape(num_layers=LAYERS), **changes)), torch.float32
        )
        model = parallelize(module, a_plan, mesh)
        (batch,) = token_batches(steps=1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.forward_backward(own_microbatches(batch, a_plan, 0), OBJECTIVE)
        return sum(storage.nbytes() for storage in kept.values()), sum(
            p.numel() for p in model.module.parameters()
        )


@pytest.mark.parametrize(
    ("schedule", "changes"),
    [
        ("1f1b", EXPERTS),
        ("zb-v", EXPERTS),
        # What is cast is a matter of modules, all of which are in those above.
        *(pytest.param(name, {}, marks=pytest.mark.long) for name in ("gpipe", "interleaved")),
    ],
)
def test_microbatches_in_flight_share_one_copy_of_cast_weights(
    schedule: str, changes: dict[str, Any]
) -> None:
    """As the plan counts: two bytes for each weight that a rank holds, however many microbatches
    wait."""
    for num_bytes, num_params in run_ranks(2, casts_that_autograd_keeps, schedule, changes):
        assert num_bytes <= 2.1 * num_params  # norms cast their few weights themselves
        assert num_bytes > num_params or schedule == "zb-v", (
            "nothing was cast, and so nothing was tested"
        )


def mixed_uses(rank: int) -> dict[str, torch.Tensor]:
    """Gradients where a weight is used with and without gradients, by torch and by layers whose
    gradient can wait."""
    torch.manual_seed(0)
    found = {}
    for shares in (False, True):
        lin = nn.Linear(8, 8)
        nn.init.constant_(lin.weight, 0.3)
        x = torch.linspace(-1, 1, 16).reshape(2, 8).requires_grad_()
        with sharing_casts_between_autocast_regions() if shares else nullcontext():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    with torch.no_grad(), disabling_cast_cache():
                        lin(x)
                    y = split_linear(x, lin.weight, lin.bias) + torch.nn.functional.linear(
                        x, lin.weight
                    )
                y.float().sum().backward()
        assert lin.weight.grad is not None
        found[str(shares)] = lin.weight.grad
    return found


def test_shared_casts_lose_no_gradient() -> None:
    (found,) = run_ranks(1, mixed_uses)
    assert torch.equal(found["True"], found["False"])
    assert float(found["True"].abs().sum()) > 0


def overflow(rank: int) -> list[Any]:
    found = []
    for schedule, how in (
        ("1f1b", {"dp_replicate": 2}),
        ("zb-v", {"dp_shard": 2, "zero_stage": 3}),
    ):
        a_plan = pipeline_plan(4, pp=2, schedule=schedule, precision="fp16", **how)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(small_decoder(torch.float32), a_plan, mesh)
            optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
            for step, batch in enumerate(token_batches(steps=3)):
                is_large = step == 1 and mesh.data_parallel_rank == 1
                optimizer.zero_grad()
                before = {name: shard.tensor.clone() for name, shard in model.shards().items()}
                mine = own_microbatches(batch, a_plan, mesh.data_parallel_rank)
                facts = model.reduce_and_clip(
                    model.forward_backward(mine, _times(1e30 if is_large else 1.0)), max_norm=1.0
                )
                if facts.should_apply:
                    model.update(optimizer)
                kept = all(
                    torch.equal(shard.tensor, before[name])
                    for name, shard in model.shards().items()
                )
                found.append((facts.reason_to_skip, facts.loss_scale, kept))
    return found


def _times(factor: float) -> Any:
    def large(outputs: Any, batch: Any) -> Any:
        loss, targets = OBJECTIVE(outputs, batch)
        return loss * factor, targets

    return large


def test_an_overflow_of_one_pipeline_is_skipped_by_all_stages_of_all() -> None:
    one = [(None, 65536.0, False), ("overflow", 65536.0, True), (None, 32768.0, False)]
    assert run_ranks(4, overflow) == [one * 2] * 4


# Steps that differ, and what is not a step


def frozen_stage(rank: int) -> list[float]:
    """The job's own optimizer where a stage has nothing to train."""
    a_plan = pipeline_plan(2, pp=2)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallelize(filled(CAN_BE_CUT["first half frozen"], torch.float32), a_plan, mesh)
        optimizer = build_optimizer(model, Optim(lr=1e-2))
        losses = []
        for _ in range(3):
            mine = own_microbatches(plain_batches()[0], a_plan, 0)
            losses.append(
                model.reduce_and_clip(
                    model.forward_backward(mine, token_cross_entropy), max_norm=1.0
                ).loss
            )
            model.update(optimizer)
            optimizer.zero_grad()
    return losses


def test_a_stage_without_anything_to_train() -> None:
    first, second = run_ranks(2, frozen_stage)
    assert first == second
    assert first[0] > first[1] > first[2]


Step = list[Tensors]


def changing_steps() -> list[Step]:
    """Microbatches of other lengths in one step and in the next, and of another number than was
    planned."""
    lengths = [(8, 5, 8, 3), (6,) * 8, (8,) * 8, (4, 8, 1, 8)]
    generator, steps = torch.Generator().manual_seed(3), []
    for row in lengths:
        step = []
        for length in row:
            tokens = torch.randint(VOCAB, (MICRO, length + 1), generator=generator)
            step.append({"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()})
        steps.append(step)
    return steps


def evaluated() -> list[Step]:
    """Five microbatches, the last of fewer rows; three; one."""
    generator, found = torch.Generator().manual_seed(4), []
    for rows in ((2, 2, 2, 2, 1), (1, 3, 2), (5,)):
        step = []
        for count in rows:
            tokens = torch.randint(VOCAB, (count, SEQ_LEN + 1), generator=generator)
            step.append({"inputs": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()})
        found.append(step)
    return found


def one_process_walks(rank: int) -> tuple[list[float], list[float], list[float], Tensors]:
    """Losses of steps, losses of evaluations after each, logits of a call after each; weights at
    the end."""
    module, losses, evaluations, sums = filled(zoo.Lm), [], [], []
    for step in changing_steps():
        num_targets = sum(batch["targets"].numel() for batch in step)
        module.zero_grad()
        total = sum(_loss_of(module, batch) for batch in step)
        (total / num_targets).backward()
        losses.append(total.item() / num_targets)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= LR * parameter.grad
            for some in evaluated():
                targets = sum(batch["targets"].numel() for batch in some)
                evaluations.append(sum(_loss_of(module, batch).item() for batch in some) / targets)
            sums += [
                module(step[0]["inputs"][:, :length])[:, -1].sum().item() for length in (1, 2, 3)
            ]
    return losses, evaluations, sums, {name: p.detach() for name, p in module.named_parameters()}


def _loss_of(module: nn.Module, batch: Tensors) -> torch.Tensor:
    logits = module(batch["inputs"])
    return F.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), reduction="sum")


WALKS: dict[int, list[dict[str, Any]]] = {
    2: [{"pp": 2, "schedule": schedule} for schedule in ("gpipe", "1f1b", "zb-v", "interleaved")],
    4: [
        {"pp": 2, "dp_shard": 2, "zero_stage": 3, "schedule": "interleaved-zero-bubble"},
        {"pp": 2, "dp_shard": 2, "zero_stage": 1, "schedule": "dualpipe-v"},
        {"pp": 4},
    ],
}


def walk(rank: int, num_ranks: int) -> list[Any]:
    """Every pipeline of data parallelism has the same microbatches: their means are those of
    one."""
    found = []
    for parallel in WALKS[num_ranks]:
        a_plan = pipeline_plan(num_ranks, **parallel)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model = parallelize(filled(zoo.Lm), a_plan, mesh)
            optimizer = torch.optim.SGD(list(model.parameters()), lr=LR)
            losses, evaluations, sums = [], [], []
            for step in changing_steps():
                optimizer.zero_grad()
                losses.append(
                    model.reduce_and_clip(model.forward_backward(step, token_cross_entropy)).loss
                )
                model.update(optimizer)
                model.train(False)
                for some in evaluated():
                    evaluations.append(
                        model.reduce_sums(model.evaluate(some, token_cross_entropy))[0]
                    )
                for length in (1, 2, 3):
                    batch = {"inputs": step[0]["inputs"][:, :length]}
                    sums.append(model.call_then(batch, lambda logits: logits[:, -1].sum()).item())
                model.train(True)
            whole = {name: _all_of(model, name) for name, _ in zoo.Lm().named_parameters()}
            found.append((losses, evaluations, sums, whole))
    return found


def _all_of(model: ParallelModel, name: str) -> torch.Tensor:
    """Put together from all ranks' boxes."""
    shard = model.shards().get(name)
    mine = (
        []
        if shard is None
        else [(box, _part(shard.tensor, box.local_offset, box.size)) for box in shard.boxes]
    )
    shape = None if shard is None else shard.global_shape
    every: list[Any] = [None] * model.mesh.world_size
    torch.distributed.all_gather_object(every, (shape, mine))
    whole = torch.full(
        next(shape for shape, _ in every if shape is not None), torch.nan, dtype=torch.float64
    )
    for _, boxes in every:
        for box, part in boxes:
            _part(whole, box.global_offset, box.size).copy_(part)
    return whole


def _part(tensor: torch.Tensor, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_steps_of_other_lengths_evaluations_and_calls_between_them(num_ranks: int) -> None:
    """Reference: one process that does the same, in fp64."""
    losses, evaluations, sums, weights = run_ranks(1, one_process_walks)[0]
    for outcome in run_ranks(num_ranks, walk, num_ranks):
        for parallel, found in zip(WALKS[num_ranks], outcome, strict=True):
            assert found[0] == pytest.approx(losses, rel=1e-10), parallel
            assert found[1] == pytest.approx(evaluations, rel=1e-10), parallel
            assert found[2] == pytest.approx(sums, rel=1e-9), parallel
            off = {
                name: float((found[3][name] - w).norm() / w.norm()) for name, w in weights.items()
            }
            assert {name: error for name, error in off.items() if not error < 1e-10} == {}, parallel


def called_alone(rank: int) -> str:
    a_plan = pipeline_plan(2, pp=2)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallelize(filled(zoo.Lm), a_plan, mesh)
        try:
            model(torch.zeros(1, 4, dtype=torch.int64))
        except LayoutError as error:
            return str(error)
    return "it ran"


def test_a_stage_cannot_be_called_alone() -> None:
    assert all("no rank can call it alone" in text for text in run_ranks(2, called_alone))
