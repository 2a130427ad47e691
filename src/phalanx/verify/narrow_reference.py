"""The loss and the nudges of references in bfloat16 and float16: one process under autocast."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from phalanx.job.schema import Job
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.plain_loss import Batch

# Each is a reference of its own; the largest distance of them counts.
NUM_NUDGED = 3


class AutocastLoss(JobLoss):
    """The loss of a job whose forward multiplies in a narrow type, as torch.autocast does."""

    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        super().__init__(job)
        self._dtype = dtype

    def compute_outputs(self, module: nn.Module, batch: Batch) -> Any:
        with self._autocast():
            return super().compute_outputs(module, batch)

    def sum_losses_of_outputs(
        self, outputs: Any, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._autocast():
            return super().sum_losses_of_outputs(outputs, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self._dtype)


@torch.no_grad()
def perturb_weights_by_rounding(module: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Change every weight by up to one rounding to `dtype`, by chance."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in filter(torch.is_floating_point, module.parameters()):
        parameter.mul_(_draw_rounding_factors(parameter, dtype, generator))


def perturb_images_by_rounding(
    steps: Sequence[Sequence[Batch]], dtype: torch.dtype, seed: int
) -> list[list[Batch]]:
    """The same microbatches with numbers (of images) that are changed as weights are."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [_perturb_batch_by_rounding(batch, dtype, generator) for batch in step] for step in steps
    ]


def _perturb_batch_by_rounding(
    batch: Batch, dtype: torch.dtype, generator: torch.Generator
) -> Batch:
    nudged = {}
    for key, tensor in batch.items():
        if tensor.is_floating_point():
            tensor = tensor * _draw_rounding_factors(tensor, dtype, generator)
        nudged[key] = tensor
    return nudged


def _draw_rounding_factors(
    tensor: torch.Tensor, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """1 + k eps, with k in [-1, 1], for each element."""
    drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float32)
    return (1 + torch.finfo(dtype).eps * (2 * drawn - 1)).to(tensor.dtype)
