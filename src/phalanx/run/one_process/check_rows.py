"""Whether the loss of a batch is the sum of the losses of its rows: only then does it not matter
how ranks and microbatches share the rows.

And whether user code calls collectives by itself, for which nobody waits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.job.schema import Job
from phalanx.plan.mixed_rows import MAX_PROBED_PARAMS, BatchRowMixing, has_user_loss_code
from phalanx.plan.plan import Plan
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.run.one_process.plain_loss import Batch
from phalanx.run.one_process.row_mixing import (
    CollectiveCalledError,
    MixingPart,
    RefuseCollectivesMode,
    count_batch_rows,
    find_part_that_mixes_rows,
    mixes_rows,
    restoring_buffers,
)

# Tried one after the other: classes with two members may need many.
COMPARED_ROW_COUNTS = (4, 32)
# Parameters x tokens: some seconds of a core.
MAX_PARAMETER_TOKENS = 2**34
# What the larger number of rows may take, as the smaller one lets expect.
MAX_CHECK_S = 5.0


def find_how_loss_treats_rows(job: Job, plan: Plan, batch: Batch) -> BatchRowMixing:
    """Find out what the job's loss does with the rows of a batch: tried on a few of them, and then
    on more.

    The module is built for this alone.

    Buffers and random numbers of this process are as they were. Nothing is known of a loss that
    fails, of one that draws random numbers, and of a module that is too large to try: training says
    what is wrong with it.
    """
    batch = {key: tensor.detach().cpu() for key, tensor in batch.items()}
    most = min(
        count_batch_rows(batch), MAX_PARAMETER_TOKENS // max(1, plan.num_params * plan.seq_len)
    )
    if (
        most < min(COMPARED_ROW_COUNTS[0], count_batch_rows(batch))
        or most < 2
        or plan.num_params > MAX_PROBED_PARAMS
        or not has_user_loss_code(job)
    ):
        return BatchRowMixing()
    is_built = False
    try:
        with _restoring_random_states(), torch.no_grad(), RefuseCollectivesMode():
            loss = JobLoss(job)
            module = build_original_module(job, plan, "float32", materialize=True)[0]
            for part in module.modules():
                if isinstance(part, _BatchNorm):
                    # It mixes rows, and the plan itself speaks of its statistics.
                    part.eval()
            # A collective of the factory before is none of the loss: here one rank alone calls it.
            is_built = True
            for num_rows in COMPARED_ROW_COUNTS:
                started = time.monotonic()
                mixes = _find_part_mixing_rows(
                    module, loss, select_rows_that_differ(batch, min(num_rows, most)), job.run.seed
                )
                if (
                    mixes
                    or (time.monotonic() - started)
                    * COMPARED_ROW_COUNTS[-1]
                    / COMPARED_ROW_COUNTS[0]
                    > MAX_CHECK_S
                ):
                    break
            return BatchRowMixing(mixes=mixes)
    except CollectiveCalledError as error:
        if not is_built:
            return BatchRowMixing()
        return BatchRowMixing(collective=error.call)
    except Exception:
        return BatchRowMixing()


def select_rows_that_differ(batch: Batch, num_rows: int) -> Batch:
    """The first rows of a batch.

    Where rows have labels, pairs of equal ones, each half of the rows with one of a pair: a loss of
    pairs is then another one for the halves.
    """
    rows_of_label: dict[int, list[int]] = {}
    for row, label in enumerate(_find_distinct_row_labels(batch)):
        rows_of_label.setdefault(label, []).append(row)
    first_rows: list[int] = []
    second_rows: list[int] = []
    for rows in rows_of_label.values():
        if len(rows) > 1 and len(first_rows) < num_rows // 2:
            first_rows.append(rows[0])
            second_rows.append(rows[1])
    # Too few pairs for two halves: the labels say nothing.
    if len(first_rows) < 2:
        return {key: tensor[:num_rows] for key, tensor in batch.items()}
    # The first half has one of each pair, the second half the other.
    chosen = first_rows + second_rows
    return {key: tensor[chosen] for key, tensor in batch.items()}


def _find_distinct_row_labels(batch: Batch) -> list[int]:
    """A whole number for each row, of the first entry that has just that; empty if none has."""
    for tensor in batch.values():
        if tensor.ndim == 1 and not tensor.is_floating_point():
            return tensor.tolist()
    return []


def _find_part_mixing_rows(module: nn.Module, loss: JobLoss, batch: Batch, seed: int) -> MixingPart:
    masks, rows = DropoutMasks(module, seed), count_batch_rows(batch)
    state = torch.get_rng_state()
    with masks.dropping_by_masks(1, 0, rows), restoring_buffers(module):
        total, targets = loss(module, batch)
    if not torch.equal(state, torch.get_rng_state()):
        # Something draws that no mask stands for: in evaluation mode it may draw nothing.
        module.eval()
        state = torch.get_rng_state()
        with restoring_buffers(module):
            total, targets = loss(module, batch)
        if not torch.equal(state, torch.get_rng_state()):
            return ""
    if not mixes_rows(module, loss, batch, masks, total.item(), int(targets)):
        return ""
    return find_part_that_mixes_rows(module, loss, batch, masks)


@contextmanager
def _restoring_random_states() -> Iterator[None]:
    """A factory may draw from any of them."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
