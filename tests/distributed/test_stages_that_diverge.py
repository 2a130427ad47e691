"""Weights that are no longer finite, met by a microbatch of a new length: a step to skip, not a
model to refuse."""

from __future__ import annotations

import pytest
import torch

from models import decoder_of
from phalanx.mesh.mesh import open_mesh
from phalanx.parallel.parallelize import parallelize
from pipelines import LAYERS, OBJECTIVE, own_microbatches, pipeline_plan, token_batches
from ranks import run_ranks


def reasons(rank: int, where: int) -> list[str | None]:
    """Why steps of two lengths are skipped, once a weight of block `where` is NaN.

    Two stages of four blocks.
    """
    plan, found = pipeline_plan(2, pp=2), []
    with open_mesh(plan.layout, device="cpu") as mesh:
        model = parallelize(decoder_of(LAYERS), plan, mesh)
        for seq_len, is_ill in ((6, False), (6, True), (5, True)):
            named = model.module.named_parameters()
            for parameter in (p for name, p in named if is_ill and f"blocks.{where}." in name):
                parameter.data.fill_(torch.nan)
            batch = own_microbatches(token_batches(steps=1, seq_len=seq_len)[0], plan, 0)
            found.append(
                model.reduce_and_clip(model.forward_backward(batch, OBJECTIVE)).reason_to_skip
            )
    return found


@pytest.mark.parametrize("where", [1, 5])
def test_diverged_weights_are_no_fault_of_the_model(where: int) -> None:
    assert (
        run_ranks(2, reasons, where) == [[None, "nonfinite_gradients", "nonfinite_gradients"]] * 2
    )
