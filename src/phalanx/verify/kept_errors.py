"""What compression keeps of gradients on each rank: added to what is sent, nothing may be lost."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phalanx.mesh.logical import LogicalShard
from phalanx.parallel.model import ParallelModel


class CompressionResiduals:
    """The parts of gradients that stay behind on the ranks of a layout, step by step."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._before: dict[str, torch.Tensor] = {}

    @property
    def are_kept(self) -> bool:
        """True where the layout's compression keeps what it does not send."""
        compression = self._model.compression
        return compression is not None and bool(compression.error_feedback_gradients())

    @torch.no_grad()
    def restore_full_gradients(
        self, num_targets: int, sent: Mapping[str, LogicalShard]
    ) -> dict[str, LogicalShard]:
        """The gradients of a step: what was sent, plus the mean over ranks of what each keeps, less
        that of the step before, which was sent with this one. Collective.

        `num_targets`: of the step. What a rank keeps is not divided by them.
        """
        plan, restore_full_gradients = self._model.plan, {}
        per_target = plan.layout.data_parallel_size * plan.targets_per_rank / num_targets
        compression = self._model.compression
        unsent_by_name = {} if compression is None else compression.error_feedback_gradients()
        for name, shard in sent.items():
            # A copy: the ranks' sum is taken in place, and the layout goes on with what it keeps.
            kept_part = unsent_by_name.get(name, torch.zeros_like(shard.tensor)).clone()
            self._model.mesh.all_reduce_sum(kept_part)
            grown = kept_part - self._before.get(name, torch.zeros_like(kept_part))
            self._before[name] = kept_part
            factor = per_target / plan.layout.data_parallel_size
            restore_full_gradients[name] = shard.like(name, shard.tensor + grown * factor)
        return restore_full_gradients
