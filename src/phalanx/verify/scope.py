"""What a row judged and what it did not, in words.

Torch-free.
"""

from __future__ import annotations

import math

from phalanx.core.units import plural
from phalanx.job.schema import Job
from phalanx.job.shapes.transformer import TransformerShape
from phalanx.plan.plan import Plan
from phalanx.verify.cases import MANY_MICROBATCHES, list_axes_without_one_microbatch_row
from phalanx.verify.compressed_gradients import JUDGED_BY_PLAIN, is_lossy_compression
from phalanx.verify.number_types import COMPUTE_OF_NARROW_DTYPE, is_narrow_dtype
from phalanx.verify.trace_facts import Trace, name_buffers_set, name_gradients_set
from phalanx.verify.trainer_cases import (
    has_trainer_row_of_combination,
    list_axes_without_trainer_row,
)

UNREAD_INITIAL_WEIGHTS = (
    "weights of model.init_from: every row begins with random ones; how a run takes them is judged"
    " by rows trainer-*, from a checkpoint of their own"
)


def list_unread_weights(job: Job) -> list[str]:
    """A line where the job begins with weights that no row reads; none for none."""
    return [UNREAD_INITIAL_WEIGHTS] if job.model.init_from is not None else []


def list_compared_quantities(plan: Plan, trace: Trace, optimizer: str) -> tuple[str, ...]:
    """List what the row of a layout that ran to its end compared with one process."""
    steps = plural(trace.num_steps, "step")
    num_trained = sum(
        not trace.has_no_gradient(name) for name in trace.sizes[name_gradients_set(0)]
    )
    judged = [
        f"loss, number of targets and gradient norm of {steps}",
        f"{plural(num_trained, 'gradient')} of each step, before clipping",
        f"{plural(len(trace.order), 'weight')} after each update by {optimizer}",
        "loss and number of targets of the evaluation",
        "that ranks which hold the same part hold the same bits: of gradients in each step, of"
        " weights and buffers after the last",
    ]
    if plan.num_microbatches == MANY_MICROBATCHES and plan.pipeline is None:
        judged.append(f"gradients summed over {plan.num_microbatches} microbatches")
    judged += _list_definitions_compared(trace)
    if any(step.max_norm is not None for step in trace.steps):
        judged.append("clipping")
    if trace.has_buffers:
        judged.append(f"{plural(len(trace.sizes[name_buffers_set(0)]), 'buffer')} after each step")
    if trace.dropped:
        judged.append(f"masks of {plural(len(trace.dropped), 'dropout layer')}")
    if trace.loads and trace.loads[0]:
        judged.append(f"routes and loads of {plural(len(trace.loads[0]), 'router')}")
    compress = plan.parallel.compress
    if is_lossy_compression(compress):
        judged[1] = f"{judged[1]}: what is sent and what is kept of it, together"
    if compress in JUDGED_BY_PLAIN:
        judged.append(JUDGED_BY_PLAIN[compress].judged)
        judged.append(
            "that a gradient which is infinite on one rank is seen by all, and what is kept between"
            " steps outlives it"
        )
    return tuple(judged)


def _list_definitions_compared(trace: Trace) -> list[str]:
    """List what one process computes, and what it was compared with."""
    judged = []
    if trace.initial_faults is not None:
        judged.append("mean, width and shape of the distribution of initial weights")
    if trace.arithmetic_faults is not None:
        judged.append("that routers compute scores in float32, beside their definition")
    if trace.lossy_gradients is not None:
        judged.append(
            "how far gradients in the narrow type are from a wide one, in one process: at most ten"
            " times what rounded weights change of them (or 10 %), and twice in the median"
        )
    if trace.adapter is not None and not trace.adapter.unjudged:
        judged.append(
            f"outputs and gradients of the adapted module beside {trace.adapter.architecture} of"
            " transformers, called as by its users, in evaluation mode; which modules are in"
            " training mode, and their numbers (dropout, say), beside that class as it is built"
        )
    return judged


def list_quantities_not_compared(
    plan: Plan, trace: Trace, *, device: str = "cpu"
) -> tuple[str, ...]:
    """List what such a row, of ranks on `device`, did not compare."""
    not_judged = []
    still = [name for name in trace.sizes[name_gradients_set(0)] if trace.has_no_gradient(name)]
    if still:
        examples = ", ".join(still[:3])
        not_judged.append(f"gradients of {plural(len(still), 'parameter')} without any: {examples}")
    if trace.initial_faults is None:
        not_judged.append(
            "how initial weights are distributed: they are compared with one process's, and no"
            " distribution is declared for this module"
        )
    axes = list_axes_without_trainer_row(plan.layout)
    if axes:
        not_judged.append(
            f"saves and resumes in this layout: no row of the trainer has {' or '.join(axes)}"
        )
    elif not has_trainer_row_of_combination(plan.layout, plan.parallel.zero_stage):
        not_judged.append(
            "saves and resumes in this layout: no row of the trainer has these axes together, with"
            " this ZeRO stage"
        )
    axes = list_axes_without_one_microbatch_row(plan)
    if axes and plan.num_microbatches > 1:
        not_judged.append(
            f"steps of one microbatch in this layout: no row of one has {' or '.join(axes)}"
        )
    not_judged += _list_shared_arithmetic(plan, trace)
    not_judged += _list_what_ranks_here_lack(plan, device)
    compress = plan.parallel.compress
    if is_lossy_compression(compress) and compress not in JUDGED_BY_PLAIN:
        not_judged.append("how far what is sent is from the gradient")
    too_wide = [name for name, band in trace.bands().items() if band == math.inf]
    if too_wide:
        examples = ", ".join(too_wide[:3])
        compute = COMPUTE_OF_NARROW_DTYPE[trace.rounding_dtype]
        not_judged.append(
            f"{plural(len(too_wide), 'gradient')} in {compute}, which"
            f" rounding alone changes by more than half: {examples}"
        )
    return tuple(not_judged)


def _list_shared_arithmetic(plan: Plan, trace: Trace) -> list[str]:
    """List what the reference computes by the same code as the ranks."""
    not_judged = []
    if trace.adapter is not None and trace.adapter.unjudged:
        not_judged.append(
            f"the adapter of {trace.adapter.architecture}, which transformers does not compute by"
            f" itself: {trace.adapter.unjudged}"
        )
    if is_narrow_dtype(trace.dtype) and isinstance(plan.model_shape, TransformerShape):
        compute = COMPUTE_OF_NARROW_DTYPE[trace.dtype]
        but = "" if trace.arithmetic_faults is None else " but for routers' scores"
        not_judged.append(
            f"the model's own arithmetic in {compute}{but}: the reference computes by the same"
            " phalanx.nn, and is judged by how far it is from a wide type alone"
        )
    return not_judged


def _list_what_ranks_here_lack(plan: Plan, device: str) -> list[str]:
    """List what the plan asks for and ranks on `device`, or the row, go without."""
    not_judged = []
    if plan.is_layout_free:
        not_judged.append("that bits are those of any other number of ranks, as layout-free has it")
    if device == "cpu" and (plan.parallel.has_state_on_host or plan.activations.offload):
        not_judged.append(
            "copies between the memory of a GPU and of its host: ranks on CPUs make none that can"
            " come too late"
        )
    if plan.parallel.dropout == "local":
        not_judged.append("dropout, which is switched off: each rank draws its own")
    return not_judged
