"""Staged: a rank's view of the pipeline that it is part of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.parallel.pipeline.p2p import PipelineProcessGroups
from phalanx.parallel.pipeline.stage_forward import StageForward
from phalanx.plan.pipeline.pipeline_plan import Pipeline


@dataclass
class PipelineOfRank:
    """A rank's stages and what it shares with other ranks of the pipeline.

    `holders`: name -> the ranks of the pipeline that hold a parameter, of those that several hold.
    `stages`: name -> the stages that hold it, of every parameter of this rank. `absent`: modules
    outside the blocks of which another stage holds parameters.
    """

    pipeline: Pipeline
    stage_group: PipelineProcessGroups
    stage_forward: StageForward
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()

    @property
    def stages_of_this_rank(self) -> tuple[int, ...]:
        return self.pipeline.stages_of_rank(self.stage_group.rank)

    @property
    def rank_of_last_stage(self) -> int:
        """The pipeline's rank with the last stage, which has outputs and losses."""
        return self.pipeline.rank_of_stage[-1]
