"""What every optimizer of phalanx.optim.optimizers keeps, whichever it is: covered by being in
the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from checkpoints import restore_state, save_state
from models import LAYOUTS, decoder, global_batches, plan, share
from phalanx.core.registry import list_modules_of_registry
from phalanx.job.schema import Optim
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.optim.build import OPTIMIZERS_PACKAGE, build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.train.state import TrainState
from ranks import run_ranks

KINDS = list_modules_of_registry(OPTIMIZERS_PACKAGE)
OBJECTIVE = causal_cross_entropy(16)
BEFORE, AFTER = 2, 2
Tensors = dict[str, torch.Tensor]


def test_the_known_ones_are_there() -> None:
    assert set(KINDS) >= {"adamw", "sgd"}


@pytest.mark.parametrize("kind", KINDS)
def test_it_allocates_its_state_at_once_and_never_again(kind: str) -> None:
    module = decoder(tied=True, dtype=torch.float32)
    optimizer = build_optimizer(module, Optim(kind=kind))
    before = {
        p: {slot: value.data_ptr() for slot, value in optimizer.state[p].items()}
        for p in module.parameters()
    }
    assert all(before.values())
    for batch in global_batches(2):
        OBJECTIVE(module(batch["inputs"]), batch)[0].backward()
        optimizer.step()
    for parameter, slots in before.items():
        assert {
            slot: value.data_ptr() for slot, value in optimizer.state[parameter].items()
        } == slots


def state_of(kind: str, num_ranks: int, layout: str, mesh: Any) -> TrainState:
    model = parallelize(
        decoder(tied=True, dtype=torch.float64), plan(num_ranks, **LAYOUTS[num_ranks][layout]), mesh
    )
    return TrainState(model, build_optimizer(model, Optim(kind=kind, lr=0.01)), 0)


def take_steps(state: TrainState, batches: list[Tensors]) -> None:
    mesh = state.model.mesh
    for batch in batches:
        mine = share(batch, mesh.data_parallel_rank, mesh.world_size, 1)
        state.model.reduce_and_clip(state.model.forward_backward(mine, OBJECTIVE), max_norm=1.0)
        state.model.update(state.optimizer)
        state.optimizer.zero_grad()
        state.step += 1


def whole(state: TrainState) -> Tensors:
    named = state.model.module.named_parameters()
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in named
    }


def resume_everywhere(rank: int, num_ranks: int, root: Path) -> dict[Any, tuple[Tensors, Tensors]]:
    """(weights of a straight run, those of one that was saved, forgotten and restored half way),
    by kind and layout."""
    found = {}
    batches = global_batches(BEFORE + AFTER)
    for layout in LAYOUTS[num_ranks]:
        a_plan = plan(num_ranks, **LAYOUTS[num_ranks][layout])
        with open_mesh(a_plan.layout, device="cpu") as mesh:
            for kind in KINDS:
                run_dir = root / f"{kind}-{layout}-{num_ranks}"
                straight = state_of(kind, num_ranks, layout, mesh)
                take_steps(straight, batches[:BEFORE])
                saved = save_state(straight, run_dir)
                take_steps(straight, batches[BEFORE:])
                resumed = state_of(kind, num_ranks, layout, mesh)
                restore_state(resumed, saved)
                take_steps(resumed, batches[BEFORE:])
                found[kind, layout] = (whole(straight), whole(resumed))
    return found


def test_resuming_is_exact_and_layouts_agree(tmp_path: Path) -> None:
    """The last bit within a layout; to 1e-10 between layouts, against one process."""
    alone = run_ranks(1, resume_everywhere, 1, tmp_path)[0]
    two = run_ranks(2, resume_everywhere, 2, tmp_path)
    for outcome in [alone, *two]:
        for (kind, layout), (straight, resumed) in outcome.items():
            assert [
                name for name in straight if not torch.equal(straight[name], resumed[name])
            ] == [], (kind, layout)
            for name, weight in alone[kind, "one"][0].items():
                assert (straight[name] - weight).norm() <= 1e-10 * weight.norm(), (
                    kind,
                    layout,
                    name,
                )
