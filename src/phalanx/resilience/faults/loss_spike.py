"""The loss of three steps jumps on one rank, as of bad samples: their updates are left out, the run
goes back to the checkpoint before and reads on behind them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from phalanx.observe.loss_spikes import MIN_STEPS, SPIKES_TO_ROLL_BACK
from phalanx.resilience.expectation import SAMPLES_LEFT_OUT, Expectation
from phalanx.resilience.fault import FaultSite

EXPECTATION = Expectation(
    verdict="loss spike",
    detected_s=None,
    # The steps from the first to the last spike are done again, too.
    detected_steps=SPIKES_TO_ROLL_BACK,
    # The loss is that of all ranks.
    names_rank=False,
    # Other samples are trained on.
    is_bit_equal=False,
    phases=("data",),
    overrides=("resilience.on_loss_spike=rollback", "observe.samples=true"),
    warm_up_steps=MIN_STEPS,
    settling_steps=SPIKES_TO_ROLL_BACK - 1,
    says=r"going back to a checkpoint not after step \d+",
    samples=SAMPLES_LEFT_OUT,
)
FACTOR = 50.0


def inject(site: FaultSite) -> None:
    """Make the loss of all ranks 50 times as large in this step and the two after it, by what this
    rank adds to it. Of a pipeline only a rank with the last stage adds something."""
    trainer = site.trainer
    assert trainer is not None, "the fault loss_spike strikes a rank that trains"
    exact, phases = trainer.data.objective, trainer.phases
    struck_steps = range(phases.step, phases.step + SPIKES_TO_ROLL_BACK)

    @functools.wraps(exact, assigned=())
    def spiky(outputs: Any, batch: Any) -> Any:
        loss, num_targets = exact(outputs, batch)
        if phases.step in struck_steps:
            loss = loss * (FACTOR * trainer.mesh.world_size)
        return loss, num_targets

    # Ranks that go back begin with the data of a new trainer.
    trainer.data = dataclasses.replace(trainer.data, objective=spiky)
