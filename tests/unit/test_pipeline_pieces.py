"""The pieces of a pipeline's runtime, each alone: door and placeholders, post, weight gradients
that wait, holdings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import LayoutError
from phalanx.parallel.pipeline.p2p import P2PQueue, PipelineProcessGroups, TensorSpec
from phalanx.parallel.pipeline.placeholder import AbsentParameterPlaceholder
from phalanx.parallel.pipeline.stage_forward import StageBoundaryReached, StageForward
from phalanx.parallel.pipeline.transform import PipelineParameterPlacement
from phalanx.parallel.pipeline.weight_grads import (
    DeferredWeightGrads,
    defer_weight_gradients_of_linears,
)
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.messages import (
    NUM_RECEIVES_AHEAD,
    P2PMessage,
    output_of,
    plan_rank_messages,
)
from phalanx.plan.pipeline.pipeline_plan import Pipeline, build_named_pipeline

CPU = torch.device("cpu")

# Placeholders


def stand_in(door: StageForward, **options: Any) -> AbsentParameterPlaceholder:
    return AbsentParameterPlaceholder.create_for_parameter(
        torch.ones(3, 4, dtype=torch.bfloat16), "embed.weight", door, CPU, **options
    )


def test_what_a_stand_in_says_of_itself_is_free() -> None:
    """Outside of any stage, too: shape, type and device are those of what it stands for."""
    found = stand_in(StageForward(num_blocks=4, num_stages=2))
    assert (found.shape, found.dtype, found.device) == ((3, 4), torch.bfloat16, CPU)
    assert (found.size(1), found.dim(), found.numel(), len(found)) == (4, 2, 12, 3)
    assert found.is_floating_point()
    assert found.untyped_storage().nbytes() == 2


def test_a_stand_in_is_used_before_the_blocks_of_a_later_stage_alone() -> None:
    door = StageForward(num_blocks=4, num_stages=2)
    found, inside = stand_in(door), stand_in(door, in_block=True)
    with pytest.raises(LayoutError, match="no rank can call it alone"):
        found + 1
    arrived = torch.zeros(2, 4)
    with door.running_as_stage(1, (2, 4), arrived):
        used = F.embedding(torch.tensor([0, 2]), found)
        assert type(used) is torch.Tensor
        assert bool(used.isnan().all())
        assert door.window is not None
        door.window.position = "between"
        with pytest.raises(
            LayoutError,
            match=r"used between the blocks, and stage 1 .*make it a part of the blocks",
        ):
            F.embedding(torch.tensor([0]), found)
        with pytest.raises(LayoutError, match="in the block's own forward alone"):
            inside.sum()
        door.window.position = "after"
        with pytest.raises(
            LayoutError, match=r'used after the blocks.*parallel.last_stage=\["embed"\]'
        ):
            arrived @ found.T.float()
    with (
        door.running_as_stage(0, (0, 2), None),
        pytest.raises(LayoutError, match=r'before.*parallel.first_stage=\["embed"\]'),
    ):
        found * 2


# The door


class Adding(nn.Module):
    """Adds its number to each hidden state, and a tenth of what it is given besides."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(number + 1)))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return x * self.weight + (0 if more is None else 0.1 * more)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.tensor(3.0))
        self.blocks = nn.ModuleList(Adding(number) for number in range(4))
        self.after = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        x = x * self.before
        for block in self.blocks:
            x = block(x, more)
        return x + self.after


def guarded(num_stages: int) -> tuple[Chain, StageForward]:
    chain, door = Chain(), StageForward(4, num_stages)
    for index, block in enumerate(chain.blocks):
        door.intercept_block(block, index)
    return chain, door


CUTS = [
    ((0, 2), (2, 4)),
    ((0, 0), (0, 3), (3, 4)),
    ((0, 4), (4, 4)),
    ((0, 0), (0, 4), (4, 4)),
    ((0, 1), (1, 2), (2, 4)),
]


@pytest.mark.parametrize("cut", CUTS)
def test_stages_one_after_the_other_are_the_whole_forward_and_its_gradients(cut: Any) -> None:
    """Also a first stage of no blocks, and a last one. Gradients go back through what arrived."""
    x, more = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    whole = Chain().double()
    expected = whole(x, more)
    expected.sum().backward()
    chain, door = guarded(len(cut))
    chain.double()
    given: list[torch.Tensor | None] = [None]
    made: list[torch.Tensor] = []
    for stage, blocks in enumerate(cut):
        with door.running_as_stage(stage, blocks, given[-1]):
            try:
                made.append(chain(x, more))
                assert stage == len(cut) - 1
            except StageBoundaryReached as end:
                made.append(end.hidden)
        assert torch.is_grad_enabled()
        given.append(made[-1].detach().requires_grad_())
    torch.testing.assert_close(made[-1], expected)
    made[-1].sum().backward()
    for stage in reversed(range(len(cut) - 1)):
        arrived = given[stage + 1]
        assert arrived is not None
        made[stage].backward(arrived.grad)
    for (name, found), parameter in zip(chain.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, parameter.grad, msg=name)


def test_the_class_of_a_guarded_block_is_still_its_own() -> None:
    chain, _ = guarded(2)
    assert all(
        isinstance(block, Adding) and type(block).__name__ == "Adding" for block in chain.blocks
    )
    assert len({type(block) for block in chain.blocks}) == 1


def test_shape_inference_shows_what_would_not_reach_the_first_stage() -> None:
    """A rank that holds what comes before the blocks, for another stage, computes it here
    without gradients."""
    chain, door = guarded(2)
    door.outside = ((chain, "before"), (chain, "after"))
    kept = chain.before
    leaks = lambda x: x * chain.before  # noqa: E731
    door.is_inferring_shapes = True
    with door.running_as_stage(1, (2, 4), torch.zeros(3)):
        door.require_outputs_without_placeholders(chain(torch.ones(3)))
        assert chain.before is kept
    with door.running_as_stage(1, (2, 4), torch.zeros(3)):
        start = leaks(torch.ones(3))
        with pytest.raises(
            LayoutError, match="the model's output depends on what comes before the blocks"
        ):
            door.require_outputs_without_placeholders(chain(torch.ones(3)) + start)
    with (
        door.running_as_stage(1, (2, 4), torch.zeros(3)),
        pytest.raises(LayoutError, match="an argument of block 2"),
    ):
        chain(torch.ones(3), leaks(torch.ones(3)))
    assert chain.before is kept
    assert door.window is None


# The post


@dataclass
class Recording(PipelineProcessGroups):
    """PipelineProcessGroups whose messages are noted and arrive at once, filled with the number of their turn."""

    asked: list[int] = field(default_factory=list)
    sent: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def start_send(self, tensor: torch.Tensor, target: int) -> Any:
        self.sent.append((target, tensor))
        return Done()

    def start_receive(self, tensor: torch.Tensor, source: int) -> Any:
        tensor.fill_(len(self.asked))
        self.asked.append(source)
        return Done()


class Done:
    def wait(self) -> None:
        pass


def recording(rank: int, num_ranks: int) -> Recording:
    return Recording(rank, tuple(range(num_ranks)), None, None, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zb-v", "dualpipe-v"]
)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("in_one_queue", [False, True])
def test_messages_are_asked_for_in_the_order_in_which_they_are_made(
    name: str, num_ranks: int, in_one_queue: bool
) -> None:
    """Between each two ranks; each as it is needed, and a few ahead. Shapes tell them apart."""
    per_rank = 1 if name in ("gpipe", "1f1b") else 2
    schedule = generate_schedule(name, num_ranks, 8, per_rank)
    num_stages = schedule.num_stages
    forms = {
        (s, m): TensorSpec((s, m + 1), torch.float32)
        for s in range(1, num_stages)
        for m in range(8)
    }
    for rank in range(num_ranks):
        peers = recording(rank, num_ranks)
        messages = plan_rank_messages(schedule, rank, in_one_queue=in_one_queue)
        post = P2PQueue(peers, messages, schedule.rank_of_stage, forms)
        num_taken: dict[int, int] = {}
        coming: dict[int, list[P2PMessage]] = {}
        for source, row in enumerate(schedule.actions):
            made = [output_of(action, num_stages) for action in row]
            coming[source] = [
                p for p in made if p is not None and schedule.rank_of_stage[p.stage] == rank
            ]
        handed: dict[P2PMessage, torch.Tensor] = {}
        for at, action in enumerate(schedule.actions[rank]):
            post.start_receives_for_action(at)
            edge = 0 if action.kind == "F" else num_stages - 1
            if action.kind != "W" and action.stage != edge:
                parcel = P2PMessage(action.stage, action.microbatch, action.kind != "F")
                before = action.stage - 1 if action.kind == "F" else action.stage + 1
                source = schedule.rank_of_stage[before]
                found = post.receive(parcel)
                if source == rank:
                    assert found is handed[parcel]
                else:
                    place = coming[source].index(parcel)
                    form = forms[parcel.stage + int(parcel.is_gradient), parcel.microbatch]
                    assert tuple(found.shape) == form.shape
                    turns = [turn for turn, asked in enumerate(peers.asked) if asked == source]
                    if found.numel():
                        assert found.flatten()[0] == turns[place]
                    num_taken[source] = max(num_taken.get(source, 0), place + 1)
                    assert len(turns) <= num_taken[source] + NUM_RECEIVES_AHEAD + 1 or in_one_queue
            made_here = output_of(action, num_stages)
            if made_here is not None:
                handed[made_here] = torch.ones(2)
                sent_before = peers.sent_bytes
                post.send(made_here, handed[made_here])
                is_own = schedule.rank_of_stage[made_here.stage] == rank
                assert peers.sent_bytes - sent_before == (0 if is_own else 8)
        post.wait_for_sends()
        assert all(
            peers.asked.count(source) == len(some)
            for source, some in coming.items()
            if source != rank
        )


# Weight gradients that wait


def mlp(bias: bool = True) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7, bias), nn.GELU(), nn.Linear(7, 3, bias)).double()


def recomputed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = checkpoint(module, x, use_reentrant=False)
    return out


def in_bf16(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: torch.Tensor = module.float()(x.float())
    return out.float()


def frozen_weight(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module[0].weight.requires_grad_(False)  # type: ignore[index]
    out: torch.Tensor = module(x)
    return out


def frozen_bias(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module[2].bias.requires_grad_(False)  # type: ignore[index]
    out: torch.Tensor = module(x)
    return out


def used_twice(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x) + module(2 * x)
    return out


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "plain": lambda module, x: module(x),
    "recomputed": recomputed,
    "autocast": in_bf16,
    "frozen weight": frozen_weight,
    "frozen bias": frozen_bias,
    "used twice": used_twice,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5)])
@pytest.mark.parametrize("waits", [True, False])
def test_gradients_that_wait_are_those_of_autograd(
    way: str, shape: tuple[int, ...], waits: bool
) -> None:
    """Two microbatches under way together, their weights done in the other order; also where
    nothing waits."""
    plain, split = mlp(), mlp()
    defer_weight_gradients_of_linears(split)
    xs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for x in xs:
        WAYS[way](plain, x).square().sum().backward()
    wanted = [x.grad for x in xs]
    deferred = DeferredWeightGrads()
    for x in xs:
        x.grad = None
    losses = [WAYS[way](split, x).square().sum() for x in xs]
    for key, loss in enumerate(losses):
        if not waits:
            loss.backward()
            continue
        before = {
            name: None if p.grad is None else p.grad.clone() for name, p in split.named_parameters()
        }
        with deferred.deferring_to(key):
            loss.backward()
        weights = [name for name in before if name.endswith("weight")]
        assert all(_same(split.get_parameter(name).grad, before[name]) for name in weights), (
            "weights wait"
        )
    assert deferred.num_deferred_microbatches == (2 if waits else 0)
    for key in (1, 0) if waits else ():
        deferred.compute_deferred_gradients(key)
    assert deferred.num_deferred_microbatches == 0
    tolerance = (
        {"rtol": 2e-2, "atol": 5e-2} if way == "autocast" else {"rtol": 1e-12, "atol": 1e-12}
    )
    for x, gradient in zip(xs, wanted, strict=True):
        torch.testing.assert_close(x.grad, gradient, **tolerance)
    for (name, found), parameter in zip(split.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (parameter.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, parameter.grad, **tolerance, msg=name)


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def test_a_layer_without_a_bias_and_one_that_is_called_without_gradients() -> None:
    module = mlp(bias=False)
    defer_weight_gradients_of_linears(module)
    x = torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(module(x), mlp(bias=False)(x))
    deferred = DeferredWeightGrads()
    with deferred.deferring_to("a"):
        module(x).sum().backward()
    assert all(p.grad is None for p in module.parameters())
    deferred.compute_deferred_gradients("a")
    assert all(p.grad is not None for p in module.parameters())


# Who holds what


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.embed = nn.Embedding(5, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(2), nn.Linear(2, 5, bias=False)


def pipeline(name: str, blocks: tuple[int, ...], **more: Any) -> Pipeline:
    return build_named_pipeline(name, 2, 4, StageCut(blocks), **more)


def held(module: nn.Module, how: Pipeline) -> list[set[str]]:
    holding = PipelineParameterPlacement(module, list(module.blocks), how)  # type: ignore[arg-type]
    return [
        {
            name.removesuffix(".weight")
            for name in holding.ranks_by_parameter_of_rank(rank)
            if "bias" not in name
        }
        for rank in (0, 1)
    ]


def test_parameters_are_held_where_the_order_of_registration_says_or_the_user() -> None:
    plain = held(Model(), pipeline("1f1b", (1, 3)))
    assert plain == [
        {"scale", "embed", "blocks.0"},
        {"blocks.1", "blocks.2", "blocks.3", "norm", "head"},
    ]
    more = held(
        Model(), pipeline("1f1b", (4, 0), first_stage=("norm",), last_stage=("scale", "emb*"))
    )
    assert more == [
        {"scale", "embed", "norm", *(f"blocks.{n}" for n in range(4))},
        {"norm", "head", "scale", "embed"},
    ]
    in_a_v = held(Model(), pipeline("zb-v", (1, 1, 1, 1)))
    assert in_a_v == [
        {"scale", "embed", "blocks.0", "blocks.3", "norm", "head"},
        {"blocks.1", "blocks.2"},
    ]


def test_what_two_stages_share_both_have() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    model.last_stage = ("scale",)  # type: ignore[assignment]
    holding = PipelineParameterPlacement(model, list(model.blocks), pipeline("1f1b", (2, 2)))
    for name in ("embed.weight", "head.weight", "scale"):
        assert holding.ranks_holding(name) == (0, 1)
    assert holding.ranks_holding("norm.weight") == (1,)
    holding.require_one_name_per_shared_parameter()
    model.blocks[3].weight = model.blocks[1].weight
    with pytest.raises(LayoutError, match=r"blocks.1.weight and blocks.3.weight are one parameter"):
        PipelineParameterPlacement(
            model, list(model.blocks), pipeline("1f1b", (2, 2))
        ).require_one_name_per_shared_parameter()
    PipelineParameterPlacement(
        model, list(model.blocks), pipeline("1f1b", (1, 3))
    ).require_one_name_per_shared_parameter()
