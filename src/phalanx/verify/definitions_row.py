"""The row "definitions": parts of training that no layout runs, or that a tolerance hides, in one
process beside plain definitions of them."""

from __future__ import annotations

import time

from phalanx.job.schema import Job
from phalanx.verify.cases import DEFINITIONS
from phalanx.verify.definitions import (
    draws,
    expert_products,
    optimizers,
    samples,
    settings,
    spikes,
    sums,
)
from phalanx.verify.definitions.check import DefinitionCheck
from phalanx.verify.row import Row
from phalanx.verify.trace_facts import TOLERANCE_OF_DTYPE

ROW_DTYPE = "float64"
CHECKS = (
    DefinitionCheck(settings.DEFAULTS_JUDGED, settings.find_wrong_defaults),
    DefinitionCheck(settings.SHAPE_JUDGED, settings.find_wrong_shape_keys),
    DefinitionCheck(settings.LOSS_SCALING_JUDGED, settings.find_wrong_loss_scaling),
    DefinitionCheck(samples.WINDOWS_JUDGED, samples.find_wrong_samples),
    DefinitionCheck(samples.WEIGHTS_JUDGED, samples.find_wrong_source_weights),
    DefinitionCheck(draws.JUDGED, draws.find_wrong_draws),
    DefinitionCheck(expert_products.JUDGED, expert_products.find_wrong_products),
    DefinitionCheck(sums.JUDGED, sums.find_narrow_sums),
    DefinitionCheck(optimizers.JUDGED, optimizers.find_wrong_updates),
    DefinitionCheck(spikes.JUDGED, spikes.find_wrong_decisions),
)
NOT_JUDGED = (
    "numbers of presets, beside what was published of their models",
    "which documents are held out, and the order of samples",
    "that a run has the guard that resilience.on_loss_spike asks for",
    "rounding of weights by model.init_cast",
)
NOTE = (
    "what is computed in float32 is judged at 1e-05, sums of parts in bf16 at 3e-02; numbers that"
    " are said and decisions must be the same"
)


def compare_with_definitions(job: Job, model_name: str) -> Row:
    """The row, of the job that a person asks for: what it says is compared where it matters to a
    part, and the rest is made up."""
    began = time.monotonic()
    first = None
    for check in CHECKS:
        first = next(check.find_differences(job), None)
        if first is not None:
            break
    return Row(
        layout=DEFINITIONS,
        parallel={},
        model=model_name,
        dtype=ROW_DTYPE,
        ok=first is None,
        errors={},
        tolerance=TOLERANCE_OF_DTYPE["float32"],
        first=first,
        notes=(NOTE,),
        judged=tuple(check.judged for check in CHECKS),
        not_judged=NOT_JUDGED,
        wall_s=round(time.monotonic() - began, 3),
    )
