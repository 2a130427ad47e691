"""What a rank can still do when its part of a schedule has failed: nothing that would mix up
messages."""

from __future__ import annotations

import pytest
import torch

from models import fill, shape
from phalanx.core.errors import PhalanxError
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from pipelines import BATCH, LAYERS, OBJECTIVE, pipeline_plan, token_batches
from ranks import run_ranks


def is_under_way(model: ParallelModel) -> bool:
    return model.pipeline is not None and model.pipeline.is_under_way


def fails_at_the_end(rank: int) -> bool:
    """Of one microbatch, rank 0 does the first forward and the last backward: when that fails,
    rank 1 is done."""
    plan = pipeline_plan(2, pp=2, schedule="gpipe", micro=BATCH)
    batch = [token_batches(steps=1)[0]]

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("a backward that fails")

    with open_mesh(plan.layout, device="cpu") as mesh:
        module = Decoder(shape(num_layers=LAYERS, tied=False))  # a tie would want something of both
        fill(module)
        model = parallelize(module, plan, mesh)
        if rank == 1:
            model.forward_backward(batch, OBJECTIVE)
            return is_under_way(model)
        next(model.parameters()).register_hook(fail)
        with pytest.raises(ValueError, match="a backward that fails"):
            model.forward_backward(batch, OBJECTIVE)
        for again in (model.forward_backward, model.evaluate):
            with pytest.raises(PhalanxError, match="in the middle of a schedule"):
                again(batch, OBJECTIVE)
        return is_under_way(model)


def test_after_an_error_in_a_schedule_a_rank_sends_nothing_more() -> None:
    assert run_ranks(2, fails_at_the_end) == [True, False]
