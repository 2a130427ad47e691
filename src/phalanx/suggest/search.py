"""Builds a job's module, finds a batch and a type in which its forward runs, and proposes rules
for it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.nn.probe import summarize_error
from phalanx.parallel.call.bind_batch import build_forward_arguments, describe_batch
from phalanx.plan.plan import Plan
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.one_process.plain_loss import Batch
from phalanx.suggest.made_up_inputs import make_random_batches
from phalanx.suggest.propose import propose_rules
from phalanx.suggest.suggestion import Suggestion
from phalanx.verify.batches import cast_steps_to_dtype

NUM_TRIED_ROWS = 2
SHORTER_LENGTHS = (32, 8)


def suggest_rules(job: Job, plan: Plan, batch: Batch, *, is_made_up: bool = False) -> Suggestion:
    """Propose rules by a forward in float64, or in float32 where the module does not have that.

    A batch that `is_made_up` is token ids, or images; a module that takes neither is fed by its
    first layer. Raises LayoutError for a module whose forward runs with none of these batches.
    """
    batches = [batch]
    if is_made_up:
        # Its table of positions may be shorter than the job's sequences.
        batches += [_cut_sequences(batch, length) for length in SHORTER_LENGTHS]
        batches += make_random_batches(_build_noisy_module(job, plan, "float32"))
    failure = ""
    for number, candidate in enumerate(batches):
        for dtype in ("float64", "float32"):
            module = _build_noisy_module(job, plan, dtype)
            first_rows = _take_first_rows(candidate, dtype)
            try:
                args, kwargs = build_forward_arguments(module, first_rows)
                module(*args, **kwargs)
            except LayoutError:
                if number == 0:
                    raise
                continue
            except Exception as error:
                # Of the batch that was given, not of one that was made up to fit.
                if number == 0:
                    failure = summarize_error(error)
                continue
            suggestion = propose_rules(module, first_rows)
            if number <= len(SHORTER_LENGTHS):
                return suggestion
            return replace(suggestion, fed_with=describe_batch(first_rows))
    raise _build_failed_forward_error(job, batch, failure, is_made_up)


def _cut_sequences(batch: Batch, length: int) -> Batch:
    return {
        key: tensor[:, :length] if tensor.dim() == 2 else tensor for key, tensor in batch.items()
    }


def _build_failed_forward_error(
    job: Job, batch: Batch, failure: str, is_made_up: bool
) -> LayoutError:
    shapes = describe_batch({key: tensor[:NUM_TRIED_ROWS] for key, tensor in batch.items()})
    if is_made_up:
        return LayoutError(
            f"{job.model.kind} cannot be tried with {shapes}, which are made up",
            why=failure,
            fix=(
                'give its dataset, data.source = "package.module:factory": its samples are what the'
                " forward takes"
            ),
        )
    return LayoutError(
        f"{job.model.kind} cannot be tried with {shapes}",
        why=failure,
        fix="the forward must run with a batch of the dataset, in evaluation mode on a CPU",
    )


def _take_first_rows(batch: Batch, dtype: str) -> Batch:
    """The first rows of a batch, with its floating-point tensors in `dtype`."""
    first_rows = {key: tensor[:NUM_TRIED_ROWS] for key, tensor in batch.items()}
    return cast_steps_to_dtype([[first_rows]], getattr(torch, dtype))[0][0]


def _build_noisy_module(job: Job, plan: Plan, dtype: str) -> nn.Module:
    module, _ = build_original_module(job, plan, dtype, materialize=True)
    _add_noise_to_parameters(module)
    return module.eval()


@torch.no_grad()
def _add_noise_to_parameters(module: nn.Module) -> None:
    """Add noise to each parameter: weights that begin as zeros would hide which layer feeds
    which."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        # Drawn in float32 for any type: the module is the same in both.
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.02 * noise.to(parameter.dtype))
