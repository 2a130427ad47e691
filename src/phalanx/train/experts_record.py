"""The loads of experts in a step as an event of each stage's first rank."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.job.schema import Job
from phalanx.observe.events import ExpertsLoaded
from phalanx.parallel.expert.router_load import ExpertLoad


def is_logged(step: int, job: Job) -> bool:
    """True for the first step, each observe.log_every-th and the last."""
    return step in (1, job.train.steps) or step % job.observe.log_every == 0


def build_expert_event(step: int, load: Mapping[str, ExpertLoad]) -> ExpertsLoaded:
    """The event of step `step`. `load`: by name of router, of this rank's stages, reduced over the
    ranks that hold the same stages."""
    layers = {name.removesuffix(".router"): router for name, router in load.items()}
    return ExpertsLoaded(
        step=step,
        tokens_by_expert={name: list(router.counts) for name, router in layers.items()},
        dropped={name: router.dropped for name, router in layers.items()},
    )
