"""What a verification says of itself before any row: what is judged, as what, and what is not.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.units import plural
from phalanx.job.schema import Job
from phalanx.plan.cluster import detect_cluster
from phalanx.plan.plan import Plan
from phalanx.verify.cases import (
    DEFINITIONS,
    ONE_MICROBATCH_SUFFIX,
    PLAIN,
    TRAINER_ROW_PREFIX,
    Case,
    is_judged_in_float64_only,
)
from phalanx.verify.number_types import COMPUTE_OF_NARROW_DTYPE, FP8

if TYPE_CHECKING:
    from phalanx.verify.choose import Selection

ROUNDED_OTHERWISE = "compression and compilers round otherwise than one process does"
RANKS_OF_THREE_AXES = 8
FP8_LAYOUTS = ", and fp8 is for layouts without tp and pp"


def describe_layouts_left_out(
    dtype: str, layout_names: Iterable[str], cases: Sequence[Case]
) -> list[str]:
    """A line about the layouts that are not judged in a narrow type; none for none."""
    judged = {case.name for case in cases}
    missing = [
        name for name in layout_names if name not in judged and not is_judged_in_float64_only(name)
    ]
    if not missing:
        return []
    return [
        f"not judged in {COMPUTE_OF_NARROW_DTYPE[dtype]}: {', '.join(missing)}: {ROUNDED_OTHERWISE}"
        f"{FP8_LAYOUTS if dtype == FP8 else ''}"
    ]


def describe_judged_work(selection: Selection, plans: Sequence[Plan], num_ranks: int) -> str:
    """The model, ranks, steps and samples that are judged."""
    plan = plans[0]
    ranks = plural(num_ranks, f"{selection.device} rank")
    return (
        f"judged  {selection.model_name}, {plan.num_params:,} parameters, on {ranks}:"
        f" {plural(selection.num_steps, 'step')} of"
        f" {selection.job.train.global_batch_size} samples in"
        f" {_describe_microbatch_counts(plans)}"
    )


def describe_asked_layout(case: Case) -> str:
    """The job's own layout, as it was planned."""
    assert case.plan is not None
    layout, zero_stage = case.plan.layout, case.plan.chosen.zero_stage
    sharding = f", ZeRO-{zero_stage}" if zero_stage else ""
    return f"asked   {layout}{sharding}"


def describe_parts_without_a_row(
    job: Job,
    layout_names: Iterable[str],
    *,
    asked_seq_len: int,
    device: str,
    lacks_three_axes: bool = False,
) -> str:
    """The parts of training that no row of these names looks at, on ranks of `device`.
    `asked_seq_len`: of the job as it was, which may have longer sequences than `job`, the judged
    one. `lacks_three_axes`: these are all layouts of ranks that are too few for three axes."""
    names = set(layout_names)
    parts = ["which samples the data gives"]
    parts.append("forwards outside of training and evaluation (phalanx generate, call_then)")
    if device == "cpu" and _trains_on_gpus(job):
        parts.append("what GPUs compute and send otherwise than CPUs do (--device=cuda)")
    if job.train.deterministic is True:
        parts.append("that a run has the same bits when it is repeated (train.deterministic)")
    if lacks_three_axes:
        parts.append(f"three axes at a time (--ranks {RANKS_OF_THREE_AXES})")
    if asked_seq_len > job.data.seq_len:
        parts.append(f"tokens beyond the first {job.data.seq_len} of a sequence (--max-seq-len)")
    if not any(name.endswith(ONE_MICROBATCH_SUFFIX) for name in names):
        parts.append(f"steps of one microbatch (rows *{ONE_MICROBATCH_SUFFIX})")
    if not any(name.startswith(TRAINER_ROW_PREFIX) for name in names):
        parts.append(
            "the optimizer's definition, learning rates, and the trainer's skips, saves and resumes"
            f" (rows {TRAINER_ROW_PREFIX}*)"
        )
    if not job.model.is_foreign and PLAIN not in names:
        parts.append(f"the model's own arithmetic, which the reference shares (row {PLAIN})")
    if DEFINITIONS not in names:
        parts.append(
            "defaults, targets and positions that are made of tokens, how large weights are drawn,"
            f" sums in narrow types (row {DEFINITIONS})"
        )
    return f"not judged: {'; '.join(parts)}"


def _trains_on_gpus(job: Job) -> bool:
    """True where ranks of the job are to compute on GPUs: those that it names or describes, or else
    this machine's."""
    section = job.cluster
    if section.device != "auto" or section.has_described_machine:
        return section.device != "cpu"
    try:
        return detect_cluster().device == "cuda"
    except EnvironmentProblem:
        # There is a driver, though it does not say which GPUs it has.
        return True


def _describe_microbatch_counts(plans: Sequence[Plan]) -> str:
    in_pipelines = {plan.num_microbatches for plan in plans if plan.pipeline is not None}
    elsewhere = {plan.num_microbatches for plan in plans if plan.pipeline is None}
    parts = []
    if elsewhere:
        parts.append(f"{_join_numbers_with_or(elsewhere)} microbatches")
    if in_pipelines:
        parts.append(
            f"{_join_numbers_with_or(in_pipelines)} {'in pipelines' if parts else 'microbatches'}"
        )
    return ", ".join(parts)


def _join_numbers_with_or(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
