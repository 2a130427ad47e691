"""What came to the experts in a step, as an event: each rank that speaks for a stage says what
it knows."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.job.schema import Job
from phalanx.observe.events import ExpertsLoaded
from phalanx.parallel.expert.router_load import ExpertLoad


def is_logged(step: int, job: Job) -> bool:
    """The first step, each observe.log_every-th and the last."""
    return step in (1, job.train.steps) or step % job.observe.log_every == 0


def experts_loaded(step: int, load: Mapping[str, ExpertLoad]) -> ExpertsLoaded:
    """`load`: by name of router, of this rank's stages, as reduced over the ranks that hold the
    same."""
    layers = {name.removesuffix(".router"): of for name, of in load.items()}
    return ExpertsLoaded(
        step=step,
        tokens_by_expert={name: list(of.counts) for name, of in layers.items()},
        dropped={name: of.dropped for name, of in layers.items()},
    )
