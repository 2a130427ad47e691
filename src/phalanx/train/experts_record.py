"""The loads of experts in a step as an event of each stage's first rank."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.job.schema import Job
from phalanx.observe.events import ExpertsLoaded
from phalanx.parallel.expert.router_load import RouterStepLoad


def should_log_experts(step: int, job: Job) -> bool:
    """True for the first step, each observe.log_every-th and the last."""
    return step in (1, job.train.steps) or step % job.observe.log_every == 0


def build_expert_event(step: int, load: Mapping[str, RouterStepLoad]) -> ExpertsLoaded:
    """The event of step `step`. `load`: by name of router, of this rank's stages, reduced over the
    ranks that hold the same stages."""
    tokens_by_expert: dict[str, list[int]] = {}
    dropped: dict[str, int] = {}
    for name, router in load.items():
        layer = name.removesuffix(".router")
        tokens_by_expert[layer] = list(router.counts)
        dropped[layer] = router.dropped
    return ExpertsLoaded(step=step, tokens_by_expert=tokens_by_expert, dropped=dropped)
