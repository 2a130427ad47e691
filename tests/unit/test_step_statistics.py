"""Which buffers keep a step from being repeated."""

from __future__ import annotations

import torch

from models import fill, plan
from phalanx.mesh.mesh import open_mesh
from phalanx.nn.models.decoder import Decoder
from phalanx.parallel.parallelize import parallelize
from phalanx.train.step_statistics import StepStatistics


def test_a_table_that_the_first_forward_makes_is_no_reason_in_later_steps() -> None:
    a_plan = plan(1, 1)
    module = Decoder(a_plan.model_shape)
    fill(module)
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        statistics = StepStatistics(parallelize(module, a_plan, mesh))
        statistics.hold()
        module.register_buffer("table", torch.ones(3), persistent=False)
        reason = "a forward writes into table, a buffer that is not saved"
        assert statistics.why_not_restorable == reason
        statistics.hold()
        assert statistics.why_not_restorable == ""
        module.get_buffer("table").add_(1)
        assert statistics.why_not_restorable == reason
