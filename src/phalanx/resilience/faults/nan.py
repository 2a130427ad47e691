"""An activation is NaN in one step on one rank, whenever that is computed: a bad batch, or an
overflow."""

from __future__ import annotations

from typing import Any

from phalanx.resilience.expectation import Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.tensors import fill_first_element, find_first_leaf_module

EXPECTATION = Expectation(
    verdict="not finite",
    detected_s=None,
    detected_steps=1,
    trained_again_s=None,
    may_lose_steps=False,
    # The step is skipped: its update is missing.
    is_bit_equal=False,
    phases=("forward",),
)


def inject(site: FaultSite) -> None:
    """Write NaN into one element of what the model's first module gives in this step."""
    assert site.trainer is not None, "the fault nan strikes a rank that trains"
    phases = site.trainer.phases
    module, struck_step = find_first_leaf_module(site.trainer.state.model.module), phases.step

    def poison(module: Any, inputs: Any, output: Any) -> None:
        # Also when the step is computed once more: the batch is bad, not the processor.
        if phases.step != struck_step:
            handle.remove()
        else:
            fill_first_element(output, float("nan"))

    handle = module.register_forward_hook(poison)
