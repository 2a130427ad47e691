"""Each way of keeping less from the forward: the same gradients, drawn with the same numbers,
gathered as often.

That each equals one process in its layouts is judged by verify (test_verify.py); here is what
verify does not see.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models import (
    LAYOUTS,
    VOCAB,
    OneBlockTwice,
    SharedAcrossBlocks,
    decoder,
    global_batches,
    plan,
    replace_activations,
    share,
)
from models import shape as small_shape
from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.offload import activations as offload_activations
from phalanx.parallel.parallelize import parallelize
from phalanx.parallel.recompute import segment as stretch
from phalanx.parallel.recompute.transform import choose_recompute_segments
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.segments import Segment, list_recompute_segments
from ranks import run_ranks

NUM_BLOCKS = 5
MODES = ("selective", "full", "every-k", "mixed", "sqrt")


class Dropping(nn.Module):
    """Blocks that draw, with a loop that does something of its own before the last of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)

        def block() -> nn.Sequential:
            return nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.4), nn.Linear(12, 12), nn.GELU())

        self.lookup, self.out = nn.Embedding(VOCAB, 12), nn.Linear(12, VOCAB)
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.out(x + self.blocks[-1](torch.tanh(x)))


def with_mode(a_plan: Plan, mode: str, num_blocks: int = NUM_BLOCKS, **changes: Any) -> Plan:
    segments = list_recompute_segments(mode, num_blocks, 2)
    shape = {**a_plan.shape, "num_layers": num_blocks}
    a_plan = replace_activations(
        a_plan, recompute=mode, recompute_every=2, recompute_segments=segments
    )
    return replace(a_plan, shape=shape, **changes)


def objective(outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0] @ outputs[1].T
    return logits.square().sum(), torch.tensor(batch["inputs"].numel())


def gradients(
    module: nn.Module, a_plan: Plan, mesh: Mesh, phases: PhaseTimer | None = None
) -> dict[str, torch.Tensor]:
    """Local ones, after two microbatches; the numbers that are drawn begin at the same place
    each time."""
    model = parallelize(module, a_plan, mesh, phases=phases)
    torch.manual_seed(100 + mesh.rank)
    batch = {"inputs": global_batches(1)[0]["inputs"]}
    model.forward_backward([batch, {"inputs": batch["inputs"][:3]}], objective)
    found = {name: p.grad for name, p in model.named_parameters()}
    return {
        name: (g.to_local() if hasattr(g, "to_local") else g).clone() for name, g in found.items()
    }


def compare_modes(rank: int, layouts: tuple[str, ...]) -> dict[str, float]:
    errors: dict[str, float] = {}
    builds: dict[str, Callable[[], nn.Module]] = {
        "dropping": Dropping,
        "shared": lambda: SharedAcrossBlocks().double(),
        "twice": lambda: OneBlockTwice().double(),
    }
    for layout in layouts:
        a_plan = plan(2, 1, **LAYOUTS[2][layout])
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            for name, build in builds.items():
                torch.manual_seed(0)
                state = {key: tensor.clone() for key, tensor in build().state_dict().items()}

                def again(build: Any = build, state: Any = state) -> nn.Module:
                    module = build()
                    module.load_state_dict(state)
                    return module

                num_blocks = len(dict.fromkeys(build().blocks))
                wanted = gradients(again(), a_plan, mesh)
                for mode in MODES if name == "dropping" else ("sqrt",):
                    for offloads in (
                        (False, True) if name == "dropping" and mode != "full" else (False,)
                    ):
                        changed = with_mode(a_plan, mode, num_blocks)
                        changed = replace_activations(changed, offload=offloads)
                        found = gradients(again(), changed, mesh)
                        off = [
                            (found[key] - wanted[key]).abs().max().item()
                            for key in wanted
                            if wanted[key].numel()
                        ]
                        errors[f"{layout} {name} {mode} {offloads}"] = max(off)
    return errors


# What is recomputed is replicated or gathered again: as with ZeRO-1 and ZeRO-2 without recomputation.
@pytest.mark.parametrize(
    "layouts",
    [("ddp", "zero3"), pytest.param(tuple(LAYOUTS[2]), marks=pytest.mark.long)],
    ids=["two", "all"],
)
def test_gradients_are_those_of_a_forward_that_keeps_everything(layouts: tuple[str, ...]) -> None:
    """With dropout in the blocks, blocks that share weights, and one that is called twice; bit
    by bit or nearly."""
    for errors in run_ranks(2, compare_modes, layouts):
        assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}
        assert len(errors) == len(layouts) * (9 + 1 + 1)


def forget_the_draws(rank: int) -> float:
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    wanted = gradients(Dropping(), plan(1), mesh)
    stretch.make_recompute_context_factory = lambda *_: lambda: (nullcontext(), nullcontext())  # type: ignore[assignment]
    found = gradients(Dropping(), with_mode(plan(1), "sqrt"), mesh)
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def test_other_draws_would_be_seen() -> None:
    assert run_ranks(1, forget_the_draws)[0] > 1e-3


def count_work(rank: int) -> dict[str, tuple[int, int, int]]:
    """(forwards of attention, its matmuls, gathers) of a step with one microbatch."""
    found = {}
    a_plan = plan(2, 1, dp_shard=2, zero_stage=3)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        for mode in ("none", *MODES):
            module = Decoder(small_shape(num_layers=4))
            for parameter in module.parameters():
                nn.init.ones_(parameter)
            calls: list[int] = []
            for block in module.blocks:
                block.attention.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            gathers: list[int] = []
            phases = Gathers(gathers)
            model = parallelize(module, with_mode(a_plan, mode, 4), mesh, phases=phases)
            batch = share(global_batches(1)[0], rank, 2, 1)
            model.forward_backward(batch, causal_cross_entropy(16))
            gathers.clear()
            calls.clear()
            with Products() as products:
                model.forward_backward(batch, causal_cross_entropy(16))
            found[mode] = (len(calls), products.num, len(gathers))
    return found


class Gathers(PhaseTimer):
    def __init__(self, gathers: list[int]) -> None:
        super().__init__()
        self._gathers = gathers

    def enter(self, name: str, words: str = "", *, axis: str = "") -> None:
        super().enter(name, words, axis=axis)
        if words == "all_gather parameters":
            self._gathers.append(1)


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts attention's forward."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.num += "scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


def test_what_is_done_again_and_what_is_not() -> None:
    """Parity would not see a recompute that does nothing, and a segment of two FSDP units
    gathers each once more."""
    for found in run_ranks(2, count_work):
        forwards = {mode: calls for mode, (calls, _, _) in found.items()}
        assert forwards == {
            "none": 4,
            "selective": 8,
            "full": 8,
            "every-k": 6,
            "mixed": 8,
            "sqrt": 8,
        }
        kernels = {mode: products for mode, (_, products, _) in found.items()}
        assert kernels["selective"] == kernels["none"] == 4
        assert kernels["full"] == kernels["sqrt"] == 8
        assert len({gathers for _, _, gathers in found.values()}) == 1, found


def keep_nothing(rank: int) -> list[bool]:
    """Whether a pass through a segment is still there after its backward, and after a forward
    without one."""
    passes: list[weakref.ref[Any]] = []
    make = stretch._SegmentForward.__init__

    def noting(self: Any) -> None:
        make(self)
        passes.append(weakref.ref(self))

    stretch._SegmentForward.__init__ = noting  # type: ignore[method-assign]
    gc.disable()
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    model = parallelize(Dropping(), with_mode(plan(1), "sqrt"), mesh)
    batch = {"inputs": global_batches(1)[0]["inputs"]}
    model.forward_backward([batch], objective)
    loss = model.call_then(batch, lambda outputs: objective(outputs, batch)[0])
    del loss
    gc.enable()
    return [ref() is not None for ref in passes]


def test_a_segment_leaves_nothing_behind() -> None:
    """No cycle through the graph, which no garbage collector could see."""
    (alive,) = run_ranks(1, keep_nothing)
    assert len(alive) == 4
    assert not any(alive)


def park(rank: int) -> dict[str, Any]:
    """What goes to host memory in a forward of the decoder, beside what autograd keeps."""
    found: dict[str, Any] = {}
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    batch = share(global_batches(1)[0], 0, 1, 1)
    keeps = parallelize(decoder(tied=True, dtype=torch.float32), plan(1), mesh)
    keeps.forward_backward(batch, causal_cross_entropy(16))
    trips: list[Any] = []
    make = offload_activations.SavedTensorOffloader.__init__
    offload_activations.SavedTensorOffloader.__init__ = lambda self, lane: (
        make(self, lane),
        trips.append(self),
    )[0]  # type: ignore[method-assign, assignment]
    weights: list[bool] = []
    pack = offload_activations.SavedTensorOffloader.offload_saved_tensor

    def noting(self: Any, tensor: torch.Tensor) -> Any:
        packed = pack(self, tensor)
        if not isinstance(packed, torch.Tensor):
            weights.append(offload_activations.is_parameter_or_derived(tensor))
        return packed

    offload_activations.SavedTensorOffloader.offload_saved_tensor = noting  # type: ignore[method-assign]
    for precision in ("fp32", "bf16"):
        a_plan = replace_activations(plan(1, precision=precision), offload=True)
        model = parallelize(decoder(tied=True, dtype=torch.float32), a_plan, mesh)
        model.forward_backward(batch, causal_cross_entropy(16))
    found["fp32"], found["kept"] = trips[0].num_bytes, keeps.saved_bytes
    found["weights"] = any(weights)
    found["evaluation"] = (model.evaluate(batch, causal_cross_entropy(16)), len(trips))[1]
    return found


def test_activations_are_parked_once_and_weights_stay() -> None:
    (found,) = run_ranks(1, park)
    assert found["fp32"] == pytest.approx(found["kept"], rel=0.02)
    assert not found["weights"]
    assert found["evaluation"] == 2, "a forward without gradients parks nothing"


class Forgetful(nn.Module):
    """Saves another tensor the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.linear(x) if self.num_calls % 2 else self.linear(x).exp()


def refused(rank: int, what: str) -> str:
    mesh = Mesh(Layout(), 0, 0, torch.device("cpu"))
    a_plan = plan(1)
    try:
        if what == "compiled":
            parallelize(Dropping(), with_mode(a_plan, "sqrt", compile=True), mesh)
        elif what == "every":
            changed = replace_activations(a_plan, recompute="every-k", recompute_every=9)
            choose_recompute_segments(changed, NUM_BLOCKS)
        elif what == "budget":
            parallelize(Dropping(), replace_activations(a_plan, recompute="budget"), mesh)
        else:
            blocks = nn.Sequential(Forgetful(), Forgetful())
            model = parallelize(blocks, with_mode(a_plan, "sqrt", 2), mesh)
            model(torch.randn(3, 4)).sum().backward()
    except LayoutError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("compiled", ["train.recompute=sqrt", "train.compile=false"]),
        ("every", ["train.recompute_every 9 recomputes nothing in full", "5"]),
        ("budget", ["train.recompute=budget", "5"]),
        ("forgetful", ["Forgetful", "does something else", "train.recompute=none"]),
    ],
)
def test_what_cannot_be_is_refused(what: str, words: list[str]) -> None:
    (said,) = run_ranks(1, refused, what)
    assert [word for word in words if word not in said] == [], said


def test_what_the_modes_mean() -> None:
    """The blocks, counted from 0, of each segment."""

    def blocks(mode: str, num_blocks: int, every: int = 1) -> list[list[int]]:
        return [
            list(range(s.start, s.stop)) for s in list_recompute_segments(mode, num_blocks, every)
        ]

    assert blocks("none", 4) == []
    assert blocks("full", 3) == blocks("selective", 3) == blocks("every-k", 3, 1) == [[0], [1], [2]]
    assert blocks("every-k", 7, 3) == [[2], [5]]
    modes = [segment.mode for segment in list_recompute_segments("mixed", 5, 2)]
    assert modes == ["selective", "full", "selective", "full", "selective"]
    assert blocks("sqrt", 12) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert blocks("sqrt", 5) == [[0, 1, 2], [3, 4]]
    assert blocks("sqrt", 1) == [[0]]
    assert list_recompute_segments("full", 1) == (Segment(0, 1, "full"),)
