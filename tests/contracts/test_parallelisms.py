"""What every transform of phalanx.parallel keeps, whichever it is: covered by being in the
folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from models import (
    LAYOUTS,
    decoder,
    global_batches,
    plan,
    replace_activations,
    replace_parallel,
    share,
)
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.compute.fp8 import Float8LinearLayers
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import discover_transforms, parallelize
from phalanx.parallel.pipeline.tied_params import SumTiedParameterGradients
from phalanx.parallel.pipeline.transform import PipelineStages
from phalanx.parallel.protocol import (
    ModuleTransform,
    ModuleWithObjective,
    ParallelContext,
    TransformOrder,
)
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from ranks import run_ranks

EVERY = [
    pytest.param(transform, id=type(transform).__name__) for transform in discover_transforms()
]


def needing_plans() -> list[Plan]:
    """One plan for each reason to transform anything."""
    plans = [plan(2, **LAYOUTS[2][layout]) for layout in LAYOUTS[2]]
    return [
        *plans,
        plan(2, tp=2),
        plan(2, cp=2),
        plan(2, num_experts=4, dp_shard=2, ep=2),
        plan(2, num_microbatches=2, pp=2),
        plan(2, recompute="full", dp_replicate=2),
        replace(plan(2, dp_replicate=2), compile=True),
        replace_activations(plan(2, dp_replicate=2), offload=True),
        plan(2, dp_replicate=2, offload="optimizer"),
        replace(plan(2, dp_replicate=2), is_layout_free=True),
        replace(plan(2, dp_replicate=2), precision="fp8"),
    ]


def needing(transform: ModuleTransform) -> Plan:
    """The first plan that wants it; a new transform that none of them wants needs one here."""
    return next(a_plan for a_plan in needing_plans() if transform.is_needed(a_plan))


def decoder_for(a_plan: Plan) -> Decoder:
    return decoder(tied=True, dtype=torch.float32, num_experts=a_plan.model_shape.num_experts)


def test_they_are_in_order_and_all_there() -> None:
    orders = [transform.order for transform in discover_transforms()]
    assert orders == list(TransformOrder), (
        "every place in the order is one transform's, and no two share it"
    )
    names = {type(transform).__name__ for transform in discover_transforms()}
    assert {"DpShard", "DpReplicate", "Recompute", "CompileBlocks"} <= names


@pytest.mark.parametrize("transform", EVERY)
def test_it_has_an_order_and_is_wanted_only_by_plans_that_need_it(
    transform: ModuleTransform,
) -> None:
    assert isinstance(transform.order, TransformOrder)
    assert transform.is_needed(replace_parallel(plan(1), dropout="local")) is False
    assert transform.is_needed(needing(transform)) is True


def test_one_data_parallelism_at_most_is_wanted() -> None:
    """Both wrap the root."""
    for num_ranks, layouts in LAYOUTS.items():
        for layout in layouts.values():
            a_plan = plan(num_ranks, **layout)
            data_parallel = (TransformOrder.REPLICATE, TransformOrder.SHARD)
            wanted = [
                t for t in discover_transforms() if t.order in data_parallel and t.is_needed(a_plan)
            ]
            assert len(wanted) == (num_ranks > 1)


def apply_alone(rank: int, index: int) -> dict[str, Any]:
    transform = discover_transforms()[index]
    a_plan = needing(transform)
    module = decoder_for(a_plan)
    before = [name for name, _ in module.named_parameters()]
    shapes = {name: p.shape for name, p in module.named_parameters()}
    root = ModuleWithObjective(module)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        names = frozenset(full_name(name) for name, _ in module.named_modules())
        blocks = find_repeated_blocks(module)
        context = ParallelContext(
            root=root,
            plan=a_plan,
            mesh=mesh,
            phases=PhaseTimer(),
            blocks=blocks,
            outer=root,
            names=names,
        )
        if isinstance(
            transform, SumTiedParameterGradients
        ):  # it is about what that one leaves on several ranks
            PipelineStages().apply(context)
        transform.apply(context)
        model = ParallelModel(context)
        found: dict[str, Any] = {
            "held": (held := [name for name in before if name in model.shards()]),
            "names": [full_name(name) for name, _ in model.named_parameters()] == held,
            "raw names": [name for name, _ in model.named_parameters()] == held,
            "shapes": all(
                shard.global_shape == shapes[name] for name, shard in model.shards().items()
            ),
            "module": model.module is module,
        }
        if not a_plan.compile:
            batch = share(global_batches(1)[0], mesh.data_parallel_rank, 2, 1)
            facts = model.reduce_and_clip(model.forward_backward(batch, causal_cross_entropy(16)))
            found["phases closed"] = model.phases.current == ""
            found["trains"] = facts.should_apply and all(
                p.grad is not None for p in model.parameters()
            )
    return found


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # inductor's own
@pytest.mark.parametrize("transform", EVERY)
def test_applied_alone_it_keeps_names_and_shapes_and_trains(
    transform: ModuleTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are the user's module's own, without even a wrapper's prefix; global shapes stay."""
    if isinstance(transform, Float8LinearLayers):
        pytest.importorskip("torchao")
        monkeypatch.setattr(Float8LinearLayers, "emulate", True)
    index = [type(t) for t in discover_transforms()].index(type(transform))
    held: set[str] = set()
    for found in run_ranks(2, apply_alone, index):
        assert [what for what, kept in found.items() if not kept] == []
        held |= set(found["held"])
    assert held == {name for name, _ in decoder_for(needing(transform)).named_parameters()}


def count_block_forwards(rank: int) -> dict[str, int]:
    found = {}
    for recompute in ("none", "full"):
        module = decoder(tied=True, dtype=torch.float32)
        calls: list[int] = []
        module.blocks[0].attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        model = parallelize(
            module, plan(1, recompute=recompute), Mesh(Layout(), 0, 0, torch.device("cpu"))
        )
        model.forward_backward(share(global_batches(1)[0], 0, 1, 1), causal_cross_entropy(16))
        found[recompute] = len(calls)
    return found


def test_recompute_computes_each_block_twice() -> None:
    """Parity alone would not see a recompute that does nothing."""
    assert run_ranks(1, count_block_forwards) == [{"none": 1, "full": 2}]
