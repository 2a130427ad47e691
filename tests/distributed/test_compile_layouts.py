"""torch.compile of each block in each layout and with each way of recomputing: the gradients of
the eager model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from compilers import needs_cpp_compiler
from models import EVERY_LAYOUT, decoder, global_batches, plan, replace_activations, share
from phalanx.mesh.compilations import watching_compilations
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.plan import Plan
from phalanx.plan.segments import list_recompute_segments
from ranks import run_ranks

pytestmark = [  # dynamo's own
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def recomputed(a_plan: Plan, mode: str) -> Plan:
    segments = list_recompute_segments(mode, 2, 2)
    return replace_activations(
        a_plan, recompute=mode, recompute_every=2, recompute_segments=segments
    )


def compare(rank: int, num_ranks: int, cases: list[tuple[str, str, bool]]) -> dict[Any, float]:
    """Relative error of the gradients of this rank's parameters, over all of them, in two
    microbatches."""
    errors = {}
    for layout, mode, offloads in cases:
        eager = plan(num_ranks, 3, **EVERY_LAYOUT[num_ranks][layout])
        found = []
        with open_mesh(eager.layout, device="cpu") as mesh:
            compiled = replace(recomputed(eager, mode), compile=True)
            compiled = replace_activations(compiled, offload=offloads)
            for a_plan in (eager, compiled):
                # What is compiled often dynamo leaves eager, without a word.
                torch._dynamo.reset()
                begun: list[bool] = []
                model = parallelize(decoder(tied=True, dtype=torch.float32), a_plan, mesh)
                mine = share(
                    global_batches(1)[0],
                    mesh.data_parallel_rank,
                    eager.layout.data_parallel_size,
                    3,
                )
                with watching_compilations(begun.append):
                    model.forward_backward(mine, causal_cross_entropy(16))
                assert bool(begun) == a_plan.compile, (layout, mode)
                if not offloads:
                    # A forward and a backward for blocks of a kind, however many they are.
                    num_kinds = 2 if mode == "every-k" else 1
                    assert begun.count(True) <= 2 * num_kinds, (layout, mode)
                gradients = [p.grad for p in model.parameters()]
                found.append([g.to_local() if hasattr(g, "to_local") else g for g in gradients])
        off = sum((a - b).double().square().sum() for a, b in zip(*found, strict=True))
        size = sum(a.double().square().sum() for a in found[0])
        errors[layout, mode, offloads] = float(off / size) ** 0.5
    return errors


def compare_traced(
    rank: int, num_ranks: int, cases: list[tuple[str, str, bool]]
) -> dict[Any, float]:
    """`compare` with blocks that are traced and cut into a forward and a backward as ever, and not
    translated to C++: that takes ten times as long as all else."""
    compile_module = nn.Module.compile

    def trace_module(module: nn.Module) -> None:
        compile_module(module, backend="aot_eager_decomp_partition")

    nn.Module.compile = trace_module  # type: ignore[assignment, method-assign]
    return compare(rank, num_ranks, cases)


def test_a_compiled_block_that_is_recomputed_selectively() -> None:
    """One in the default suite: zero3, where gathers, recompute and compiler meet. C++ is compiled
    by a run in test_compile_cache."""
    for errors in run_ranks(2, compare_traced, 2, [("zero3", "selective", False)], deadline_s=240):
        assert max(errors.values()) < 1e-5


@pytest.mark.long
@needs_cpp_compiler
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_compiled_blocks_in_every_layout(num_ranks: int) -> None:
    cases = [(layout, "none", False) for layout in EVERY_LAYOUT[num_ranks]]
    modes = [("full", False), ("every-k", False), ("selective", True), ("none", True)]
    cases += (
        [(layout, *mode) for layout in ("ddp", "zero3") for mode in modes] if num_ranks == 2 else []
    )
    for errors in run_ranks(num_ranks, compare, num_ranks, cases, deadline_s=900):
        assert {case: error for case, error in errors.items() if not error < 1e-5} == {}
