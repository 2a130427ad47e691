"""What a job may say of data parallelism: that it happens, and changes nothing.

Reference: a plain loop.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from bare_loop import Tensors
from checkpoints import newest, restore_state, save_state
from collectives import CountCollectives
from models import VOCAB, decoder, global_batches, plan, share
from phalanx.core.block_sizes import BlockSizes, use_block_sizes
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Optim
from phalanx.mesh.compat import list_fsdp_parameters
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.shared_memory.opening import current_transport
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.build import build_optimizer
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.offload import optimizer as offload
from phalanx.parallel.parallelize import parallelize
from phalanx.train.state import TrainState
from phalanx.verify.cases import list_all_layouts
from ranks import run_ranks

OBJECTIVE = causal_cross_entropy(16)
STEPS = 3
ADAM = Optim(lr=1e-2, weight_decay=0.1, eps=1e-3)
SHARDED = {"dp_shard": 2, "zero_stage": 3}


class Strange(nn.Module):
    """A single number, fewer rows than ranks, a leading one, another order in memory, a frozen
    and a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = nn.Embedding(VOCAB, 8)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.places = nn.Parameter(torch.randn(1, 8, 8))
        self.three = nn.Parameter(torch.randn(3, 8))
        self.turned = nn.Parameter(torch.randn(8, 6).t())
        self.frozen = nn.Linear(6, 8)
        self.frozen.requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(8, VOCAB)
        self.out.weight = self.lookup.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs) * self.gain + self.places + self.three.sum(0)
        x = x + self.frozen(x @ self.turned.t())
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def strange() -> nn.Module:
    torch.manual_seed(5)
    return Strange().double()


def batches() -> list[Tensors]:
    return [{key: batch[key] for key in ("inputs", "targets")} for batch in global_batches(STEPS)]


def train_plain(rank: int) -> Tensors:
    module = strange()
    vectors = {"gain", "lookup.weight"} | {
        name for name, p in module.named_parameters() if p.ndim < 2
    }
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name not in vectors], "weight_decay": 0.1},
        {"params": [p for name, p in named if name in vectors], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3, foreach=False)
    for batch in batches():
        adam.zero_grad()
        loss, targets = OBJECTIVE(module(batch["inputs"]), batch)
        (loss / targets).backward()
        norm = sum(p.grad.square().sum() for _, p in named) ** 0.5
        for _, p in named:
            p.grad *= min(1.0, 0.05 / float(norm))
        adam.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_parallel(rank: int, num_ranks: int, copies: bool, root: Path) -> dict[str, Tensors]:
    """Weights of this rank as the model has them, by layout; saved and restored after the first
    step."""
    if copies:  # as on a GPU, where what the optimizer sees lies elsewhere
        offload.copy_to_pinned_host_memory = torch.clone
    found: dict[str, Tensors] = {}
    for name, axes in list_all_layouts(num_ranks):
        if {"tp", "cp", "pp"} & set(axes) or any(
            "." in key for key in axes
        ):  # of data parallelism alone
            continue
        a_plan = plan(num_ranks, 3, **axes)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            for step, batch in enumerate(batches()):
                if step < 2:
                    model = parallelize(strange(), a_plan, mesh)
                    state = TrainState(model, build_optimizer(model, ADAM), 0)
                if step == 1:
                    restore_state(state, newest(root / name))
                mine = share(batch, mesh.data_parallel_rank, num_ranks, 3)
                assert model.reduce_and_clip(
                    model.forward_backward(mine, OBJECTIVE), max_norm=0.05
                ).should_apply
                model.update(state.optimizer)
                state.optimizer.zero_grad()
                if step == 0:
                    save_state(state, root / name)
            named = dict(model.module.named_parameters())
            whole = {
                key: (p.full_tensor() if hasattr(p, "full_tensor") else p)
                for key, p in named.items()
            }
            found[name] = {key: tensor.detach().clone() for key, tensor in whole.items()}
    return found


@pytest.mark.parametrize(
    ("num_ranks", "copies"), [(2, True), pytest.param(4, False, marks=pytest.mark.long)]
)
def test_strange_modules_equal_a_plain_loop_in_every_layout(
    num_ranks: int, copies: bool, tmp_path: Path
) -> None:
    """Weights on every rank after three clipped AdamW steps in fp64, with a checkpoint of the
    same layout between."""
    (plain,) = run_ranks(1, train_plain)
    for found in run_ranks(num_ranks, train_parallel, num_ranks, copies, tmp_path):
        for layout, weights in found.items():
            assert set(weights) == set(plain)
            off = {
                name: ((weights[name] - plain[name]).norm() / plain[name].norm()).item()
                for name in plain
            }
            assert {name: error for name, error in off.items() if not error < 1e-9} == {}, layout


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": "sharded"},
    "pairs": {"blocks_per_unit": 2},
    "one unit": {"blocks_per_unit": "all"},
    "whole": {"keep_whole_below": 40},
}


def count(rank: int) -> dict[str, dict[str, int]]:
    found = {}
    for name, way in WAYS.items():
        a_plan = plan(2, 3, **SHARDED, **way)
        with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
            model = parallelize(decoder(tied=True, dtype=torch.float32), a_plan, mesh)
            mine = share(global_batches(1)[0], rank, 2, 3)
            model.forward_backward(mine, OBJECTIVE)
            with CountCollectives() as counter:
                model.forward_backward(mine, OBJECTIVE)
            split = sum(hasattr(p, "full_tensor") for p in model.module.parameters())
            found[name] = counter.counts | {"split": split}
    return found


def per_rank(counts: dict[str, int], name: str) -> int:
    """Over gloo a gather is a broadcast from each rank, and a scatter a reduction to each
    (phalanx.mesh.gloo_collectives)."""
    assert counts.get(name, 0) % 2 == 0
    return counts.get(name, 0) // 2


def test_each_choice_changes_what_is_communicated() -> None:
    """Two blocks and a root over three microbatches: units gathered, gradients scattered, small
    ones reduced once."""
    for found in run_ranks(2, count):
        scattered = {name: per_rank(counts, "reduce_") for name, counts in found.items()}
        assert scattered == {"plain": 3, "accumulate": 9, "pairs": 2, "one unit": 1, "whole": 3}
        gathered = {name: per_rank(counts, "broadcast_") for name, counts in found.items()}
        assert gathered == {"plain": 15, "accumulate": 15, "pairs": 9, "one unit": 6, "whole": 15}
        reduced = {name: counts.get("allreduce_", 0) for name, counts in found.items()}
        assert reduced == {"plain": 0, "accumulate": 0, "pairs": 0, "one unit": 0, "whole": 1}
        assert (
            found["whole"]["split"] == found["plain"]["split"] - 5
        )  # two norms in each block, and the last one


class SomeUnused(nn.Module):
    """`never` has no part in any loss, `at_times` in those of some steps, `on_one` on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.never, self.at_times, self.on_one = (nn.Linear(8, 8) for _ in range(3))
        self.uses_at_times = self.uses_on_one = False

    def prepare(self, step: int, rank: int) -> None:
        self.uses_at_times, self.uses_on_one = step == 1, rank == 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.lookup(inputs)
        if self.uses_at_times:
            x = x + self.at_times(x)
        if self.uses_on_one:
            x = x + self.on_one(x)
        return self.out(x)


def some_unused() -> SomeUnused:
    torch.manual_seed(0)
    return SomeUnused().double()


def train_some_unused_plainly() -> dict[str, Any]:
    """Weights, and how often each was updated: the gradient of who was not used is None."""
    module = some_unused()
    adam = build_optimizer(module, ADAM)
    for step, batch in enumerate(batches()):
        adam.zero_grad()
        targets = 0
        for rank in range(2):
            module.prepare(step, rank)
            for micro in share(batch, rank, 2, 2):
                loss, count = OBJECTIVE(module(micro["inputs"]), micro)
                loss.backward()
                targets += count
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad /= targets
        adam.step()
    return take_some_unused(module, module, adam)


def take_some_unused(model: Any, module: nn.Module, adam: torch.optim.Optimizer) -> dict[str, Any]:
    whole = {
        name: p.full_tensor() if isinstance(p, DTensor) else p
        for name, p in module.named_parameters()
    }
    updates = {f"updates of {n}": adam.state[p]["step"] for n, p in model.named_parameters()}
    return {name: value.detach().clone() for name, value in (whole | updates).items()}


SOME_UNUSED: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2, "unused_parameters": "allow"},
    "zero1": {"dp_shard": 2, "zero_stage": 1, "unused_parameters": "allow"},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": SHARDED,
    "zero3 in each microbatch": SHARDED | {"accumulate": "sharded"},
    "zero3 of large ones": SHARDED | {"keep_whole_below": 20},
    "zero3 beside a copy of the optimizer's": SHARDED | {"offload": "optimizer"},
}


def train_some_unused(rank: int) -> dict[str, Any]:
    offload.copy_to_pinned_host_memory = torch.clone
    found: dict[str, Any] = {}
    ways = [(name, axes, "auto") for name, axes in SOME_UNUSED.items()]
    for name, axes, collectives in (*ways, ("zero3 over gloo", SHARDED, "gloo")):
        module, a_plan = some_unused(), plan(2, 2, **axes)
        with open_mesh(a_plan.layout, device="cpu", collectives=collectives) as mesh:
            model = parallelize(module, a_plan, mesh)
            adam = build_optimizer(model, ADAM)
            for step, batch in enumerate(batches()):
                adam.zero_grad()
                module.prepare(step, rank)
                model.reduce_and_clip(model.forward_backward(share(batch, rank, 2, 2), OBJECTIVE))
                model.update(adam)
            found[name] = take_some_unused(model, module, adam)
            if "unused_parameters" in axes:
                found[f"names of {name}"] = sorted(model.unused_parameters)
    return found


def test_a_parameter_without_a_gradient_is_left_alone_as_by_one_process() -> None:
    """AdamW with decay. On rank 0 `on_one` has none, and is averaged with zeros; each rank of DDP
    names what it did not use."""
    plain = train_some_unused_plainly()
    updates = {name: int(plain[f"updates of {name}.weight"]) for name in ("never", "at_times")}
    assert updates == {"never": 0, "at_times": 1}
    for rank, found in enumerate(run_ranks(2, train_some_unused)):
        for layout, values in found.items():
            if layout.startswith("names of "):
                unused = ["at_times.bias", "at_times.weight", "never.bias", "never.weight"]
                on_one = ["on_one.bias", "on_one.weight"]
                assert values == (unused if rank else sorted(unused + on_one))
                continue
            for name, value in plain.items():
                assert torch.allclose(values[name], value, rtol=1e-10), (layout, name)


def forget_the_update(rank: int) -> dict[str, str]:
    found = {}
    for name, axes in (("zero1", {"dp_shard": 2, "zero_stage": 1}), ("ddp", {"dp_replicate": 2})):
        a_plan = plan(2, **axes)
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            model: ParallelModel = parallelize(
                decoder(tied=True, dtype=torch.float32), a_plan, mesh
            )
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            mine = share(global_batches(1)[0], rank, 2, 1)
            try:
                for _ in range(2):
                    model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE))
                    sgd.step()
                found[name] = "ran"
            except LayoutError as error:
                found[name] = str(error)
            of_module = torch.optim.SGD(model.module.parameters(), lr=0.1)
            try:
                model.update(of_module)
                found[f"{name} of the module"] = "ran"
            except LayoutError as error:
                found[f"{name} of the module"] = str(error)
            if name == "ddp":
                model.forward_backward(mine, OBJECTIVE)
                try:
                    model.update(sgd)
                except LayoutError as error:
                    found["not reduced"] = str(error)
                try:
                    model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE))
                except LayoutError as error:
                    found["one by one"] = str(error)
                # A step that is left out, in either way of taking its gradients back.
                for sets_to_none in (True, False):
                    model.forward_backward(mine, OBJECTIVE)
                    sgd.zero_grad(set_to_none=sets_to_none)
                    model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE))
                    model.update(sgd)
                    sgd.zero_grad()
                # An optimizer that has a part of the parameters takes no other gradients back.
                model.settle_buckets(mine[0], OBJECTIVE, step=1)
                model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE))
    return found


def test_a_step_that_never_reaches_the_model_is_refused() -> None:
    for found in run_ranks(2, forget_the_update):
        assert "model.update(optimizer)" in found["zero1"]
        assert "model.parameters()" in found["zero1 of the module"]
        assert found["ddp"] == found["ddp of the module"] == "ran"
        assert "call model.reduce_and_clip(local_loss)" in found["not reduced"]
        assert "all microbatches of a step in one call" in found["one by one"]


def bytes_sent(rank: int) -> dict[str, dict[str, int]]:
    found = {}
    for name, how in {
        "ddp": {"dp_replicate": 2},
        "zero1": {"dp_shard": 2, "zero_stage": 1},
    }.items():
        a_plan = plan(2, **how)
        with (
            use_block_sizes(BlockSizes(shared_rows_bytes=1)),
            open_mesh(a_plan.layout, device="cpu") as mesh,
        ):
            model = parallelize(decoder(tied=True, dtype=torch.float32), a_plan, mesh)
            with CountCollectives() as counter:
                sums = model.forward_backward(
                    share(global_batches(1)[0], rank, 2, 1), causal_cross_entropy(16)
                )
            found[name] = counter.num_bytes | {"told": model.reduce_and_clip(sums).sent_bytes}
    return found


def test_gradients_travel_half_as_far_under_zero1_as_under_ddp() -> None:
    size = sum(p.nbytes for p in decoder(tied=True, dtype=torch.float32).parameters())
    # An all-reduce of two ranks sends its size: 2 (w - 1) / w.
    for found in run_ranks(2, bytes_sent):
        assert found["ddp"] == {"allreduce_": size, "told": size}
        assert found["zero1"] == {"told": size / 2}, "and no all-reduce"


def require_shards_in_shared_memory(module: nn.Module) -> None:
    transport, group = current_transport(), dist.group.WORLD
    assert transport is not None
    assert group is not None
    shards = [p.to_local() for p in module.parameters() if isinstance(p, DTensor)]
    assert shards
    assert transport.find_places_of_all_ranks(group, shards).are_seen(range(len(shards)))


def train_with_late_ranks(rank: int, num_ranks: int, zero_stage: int, is_late: bool) -> Tensors:
    """Weights after some steps of two microbatches in float32, where FSDP's results are views; each
    rank is late at other modules and at its updates, or none is."""
    a_plan = plan(num_ranks, 2, dp_shard=num_ranks, zero_stage=zero_stage)
    lateness = random.Random(rank)

    def be_late(*_: object) -> None:
        if is_late:
            time.sleep(lateness.choice((0.0, 0.0, 0.01)))

    module = decoder(tied=True, dtype=torch.float32)
    for block in module.modules():
        if isinstance(block, nn.Linear):
            block.register_forward_hook(be_late)
            block.register_full_backward_hook(be_late)
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        model = parallelize(module, a_plan, mesh)
        require_shards_in_shared_memory(module)
        optimizer = build_optimizer(model, ADAM)
        for step, batch in enumerate(global_batches(STEPS)):
            mine = share(batch, mesh.data_parallel_rank, num_ranks, 2)
            model.reduce_and_clip(model.forward_backward(mine, OBJECTIVE), max_norm=0.05)
            if is_late and step % num_ranks == rank:
                # The others go on to their next forward, and need these shards.
                time.sleep(0.1)
            model.update(optimizer)
            optimizer.zero_grad()
        return {
            name: parameter.full_tensor().detach().clone()
            for name, parameter in module.named_parameters()
        }


@pytest.mark.parametrize(("num_ranks", "zero_stage"), [(2, 2), (3, 3)])
def test_late_ranks_change_no_bit_where_shards_are_read_without_waiting(
    num_ranks: int, zero_stage: int
) -> None:
    """Against the same ranks without delays."""
    punctual = run_ranks(num_ranks, train_with_late_ranks, num_ranks, zero_stage, False)
    late = run_ranks(num_ranks, train_with_late_ranks, num_ranks, zero_stage, True)
    for rank in range(num_ranks):
        for name, weight in punctual[0].items():
            assert torch.equal(late[rank][name], weight), (rank, name)


def fail_in_backward(rank: int) -> tuple[list[bool], list[int]]:
    """For each sharded parameter, whether it has a gradient after a backward that failed in the
    first block of this rank, while reductions of later units were open; and the bytes of the first
    block's weights that were gathered while the second one's backward was under way."""
    a_plan = plan(2, 1, dp_shard=2, zero_stage=3)
    module = decoder(tied=True, dtype=torch.float32)
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        model = parallelize(module, a_plan, mesh)
        require_shards_in_shared_memory(module)
        gathered: list[int] = []

        def fail(*_: object) -> None:
            raise ArithmeticError("as a user's function may")

        def look(*_: object) -> None:
            weights = [
                part for each in list_fsdp_parameters(first) for part in each.all_gather_outputs
            ]
            gathered.append(sum(weight.untyped_storage().nbytes() for weight in weights))

        first, second = module.blocks
        for block, hook in ((first, fail), (second, look)):
            linear = next(each for each in block.modules() if isinstance(each, nn.Linear))
            linear.register_full_backward_hook(hook)
        batch = share(global_batches(1)[0], rank, 2, 1)
        with pytest.raises(ArithmeticError):
            model.forward_backward(batch, OBJECTIVE)
        have_gradients = [p.grad is not None for p in module.parameters() if isinstance(p, DTensor)]
        return have_gradients, gathered


def test_after_an_error_in_the_backward_no_gradient_is_filled_later() -> None:
    """Reductions of later blocks may have begun: what they fill is no gradient any more. Nor was a
    block gathered before its own backward: on a CPU nothing would be gained by it."""
    for have_gradients, gathered in run_ranks(2, fail_in_backward):
        assert have_gradients
        assert not any(have_gradients)
        assert gathered == [0]


def evaluate_after_a_forward_alone(rank: int) -> list[float]:
    """Losses of a batch: before and after a forward that freed the head and then failed."""
    a_plan = plan(2, 1, dp_shard=2, zero_stage=3)
    module = decoder(tied=True, dtype=torch.float32)

    def fail(outputs: Any, batch: Tensors) -> Any:
        assert outputs.free_head is not None
        OBJECTIVE(outputs, batch)
        raise ArithmeticError("as a user's objective may")

    fail.frees_head = True  # type: ignore[attr-defined]
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        model = parallelize(module, a_plan, mesh)
        batch = share(global_batches(1)[0], rank, 2, 1)
        losses = [float(model.evaluate(batch, OBJECTIVE).loss_sum)]
        with pytest.raises(ArithmeticError):
            model.forward_backward(batch, fail)
        losses.append(float(model.evaluate(batch, OBJECTIVE).loss_sum))
        return losses


def test_a_head_that_was_freed_is_gathered_for_the_next_forward() -> None:
    for before, after in run_ranks(2, evaluate_after_a_forward_alone):
        assert before == after


class MomentumEncoder(nn.Module):
    """A frozen block that is an average of the trained one's past, written in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks[1].requires_grad_(False)
        self.wait_before_writing_s = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.wait_before_writing_s)
        trained, averaged = self.blocks
        with torch.no_grad():
            for new, mean in zip(trained.parameters(), averaged.parameters(), strict=True):
                mean.mul_(0.5).add_(new, alpha=0.5)
        x = self.lookup(inputs)
        return self.out(trained(x) + averaged(x))


def train_momentum_encoder(rank: int, is_late: bool) -> Tensors:
    a_plan = plan(2, 1, **SHARDED)
    torch.manual_seed(0)
    module = MomentumEncoder()
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        model = parallelize(module, a_plan, mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        for step, batch in enumerate(global_batches(STEPS)):
            module.wait_before_writing_s = 0.1 if is_late and step % 2 == rank else 0.0
            sgd.zero_grad()
            model.reduce_and_clip(model.forward_backward(share(batch, rank, 2, 1), OBJECTIVE))
            model.update(sgd)
        return {n: p.full_tensor().detach().clone() for n, p in module.named_parameters()}


def test_frozen_weights_that_a_forward_writes_are_waited_for() -> None:
    """Against the same ranks without delays."""
    punctual, late = (run_ranks(2, train_momentum_encoder, is_late) for is_late in (False, True))
    for rank in range(2):
        for name, weight in punctual[0].items():
            assert torch.equal(late[rank][name], weight), (rank, name)


def offload_sharded(rank: int) -> list[bool]:
    a_plan = plan(2, 1, offload="optimizer", **SHARDED)
    with open_mesh(a_plan.layout, device="cpu", collectives="shared") as mesh:
        module = decoder(tied=True, dtype=torch.float32)
        model = parallelize(module, a_plan, mesh)
        updated = [
            p for group in build_optimizer(model, ADAM).param_groups for p in group["params"]
        ]
        shards = {p.to_local().data_ptr() for p in module.parameters() if isinstance(p, DTensor)}
        return [p.to_local().data_ptr() in shards for p in updated if isinstance(p, DTensor)]


def test_offloaded_shards_in_shared_memory_are_no_second_copy() -> None:
    for are_there in run_ranks(2, offload_sharded):
        assert are_there
        assert all(are_there)
