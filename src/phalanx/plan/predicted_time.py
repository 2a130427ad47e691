"""The predicted seconds of a step of a plan: from what `phalanx bench` measured of this machine, or
from the data sheet of its GPUs."""

from __future__ import annotations

from phalanx.core.errors import LayoutError
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.plan import Plan
from phalanx.plan.search.step_times import build_machine_rates, estimate_planned_step
from phalanx.plan.timing.step_time import StepTime


def predict_step_time(job: Job, plan: Plan, shape: ModelCosts, cluster: Cluster) -> StepTime | None:
    """Seconds of one step of `plan` by term; None where the model's work, or the devices' speed, is
    not known.

    What was measured of this machine comes before what its data sheet says.
    """
    if not cluster.is_described:
        measured = _estimate_step_from_profile(plan, cluster)
        if measured is not None:
            return measured
    machine = build_machine_rates(cluster)
    if machine is None:
        return None
    return estimate_planned_step(job, plan, shape, machine)


def _estimate_step_from_profile(plan: Plan, cluster: Cluster) -> StepTime | None:
    # Here: a search for a described cluster, which is to answer at once, has no profile to read.
    from phalanx.plan.calibrated.step import estimate_step_from_profile
    from phalanx.plan.profiles import find_profile_of_cluster

    profile = find_profile_of_cluster(cluster)
    if profile is None:
        return None
    try:
        return estimate_step_from_profile(plan, profile)
    except LayoutError:
        return None  # a section that the plan needs was not measured
