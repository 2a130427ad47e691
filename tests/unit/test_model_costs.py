"""Planning asks a model what it knows, whatever shape it has."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from phalanx.core.units import GIB
from phalanx.job.costs import ModelFlops
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.job.param_holder import ParamHolder
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.decoder_activations import DecoderActivations
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.job.shapes.stored_keys import STORED_SHAPE_DEFAULTS
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan

CPU = Cluster("cpu", 4, 1024 * GIB)
DECODER = DecoderShape(4, 64, 4, 2, 16, 160, 257, False)


@dataclass(frozen=True)
class TracedModule(MeasuredModule):
    """A user's module of which somebody has found out what it computes."""

    @property
    def activations(self) -> DecoderActivations:
        return DECODER.activations

    def flops(self, seq_len: int) -> ModelFlops:
        return DECODER.flops(seq_len)


def order_of_forward(holder: ParamHolder) -> int:
    """A module registers its parts so: what comes before the first block is the first stage's."""
    return ["embed", "blocks", "norm", "head"].index(holder.name.partition(".")[0])


TRACED = TracedModule(
    "mine:build",
    DECODER.num_layers,
    *(DECODER.num_params,) * 2,
    DECODER.block_params,
    DECODER.blocks_params,
    blocks=tuple((f"blocks.{layer}", DECODER.block_params) for layer in range(4)),
    holders=tuple(sorted(DECODER.holders, key=order_of_forward)),
)


def planned(shape: DecoderShape | MeasuredModule, *keys: str) -> Plan:
    job = load_job(None, ["train.global_batch_size=8", *keys])
    return make_plan(job, cluster=CPU, shape=shape, vocab_size=257, num_ranks=2)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("parallel.zero_stage=3", "precision.compute=bf16"),
        ("train.recompute=budget", "train.recompute_budget_gib=0.004"),
        ("parallel.pp=2", "train.recompute=selective"),
    ],
)
def test_a_module_that_answers_more_is_planned_like_a_model_of_ours(keys: tuple[str, ...]) -> None:
    ours, traced = planned(DECODER, *keys), planned(TRACED, *keys)
    assert traced.chosen.predicted_bytes == ours.chosen.predicted_bytes
    assert traced.chosen.predicted_bytes["activations"] > 0
    assert traced.activations.recompute_segments == ours.activations.recompute_segments
    assert traced.flops_per_token == ours.flops_per_token
    assert traced.pipeline == ours.pipeline


@pytest.mark.parametrize("shape", [DECODER, TRACED], ids=["ours", "traced"])
@pytest.mark.parametrize(
    ("keys", "num_blocks_again"),
    [
        (("train.recompute=none",), 0),
        (("train.recompute=selective",), 0),
        (("train.recompute=full",), 4),
        (("train.recompute=every-k", "train.recompute_every=2"), 2),
    ],
)
def test_hardware_flops_have_the_forwards_that_are_done_again(
    shape: DecoderShape | MeasuredModule, keys: tuple[str, ...], num_blocks_again: int
) -> None:
    plan = planned(shape, *keys)
    assert plan.flops_per_token is not None
    assert plan.hardware_flops_per_token is not None
    # A block is 2 FLOPs for each of its weights that multiplies, and attention, for each token.
    block = DECODER.flops(plan.seq_len).blocks[0].forward / plan.seq_len
    again = plan.hardware_flops_per_token - plan.flops_per_token
    assert again == pytest.approx(num_blocks_again * block, abs=1)


@pytest.mark.parametrize(("num_frozen", "is_counted"), [(1, True), (20_000, False)])
def test_training_with_frozen_weights_is_not_three_forwards(
    num_frozen: int, is_counted: bool
) -> None:
    """A weight that is not trained needs no gradient; a table of positions is no such weight."""
    shape = replace(TRACED, num_trainable_params=TRACED.num_params - num_frozen)
    plan = planned(shape)
    assert (plan.flops_per_token is not None) == is_counted
    assert (plan.hardware_flops_per_token is not None) == is_counted


def test_what_is_not_known_is_not_predicted() -> None:
    module = MeasuredModule("mine:build", 4, 1000, 1000, 100, 400)
    plan = planned(module)
    assert plan.flops_per_token is None
    assert plan.hardware_flops_per_token is None
    assert plan.chosen.predicted_bytes["activations"] == 0
    assert any("activations" in line and "not predicted" in line for line in plan.reasons)


def test_every_shape_is_stored_with_the_same_keys_in_the_same_order() -> None:
    image = build_model_shape(load_job(None, ["model.kind=vit", "data.source=my.data:set"]), 1)
    module = MeasuredModule("mine:build", 4, 1000, 1000, 100, 400, image_size=8)
    for shape in (DECODER, image, module):
        stored = shape.to_json()
        assert list(stored) == list(STORED_SHAPE_DEFAULTS)
        assert parse_stored_shape(stored) == shape
    assert module.to_json()["dim"] == image.to_json()["vocab_size"] == 0


def test_the_old_name_of_a_shape_warns() -> None:
    import phalanx.job.shape

    with pytest.warns(DeprecationWarning, match="is now phalanx"):
        assert phalanx.job.shape.ModelShape is DecoderShape
