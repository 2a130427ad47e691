"""Whether the loss of a batch is the sum of the losses of its rows: only then does it not matter how ranks and
microbatches share the rows. And whether user code calls collectives by itself, for which nobody waits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.job.schema import Job
from phalanx.plan.mixed_rows import MAX_PARAMS, RowFacts, has_own_code
from phalanx.plan.plan import Plan
from phalanx.verify.job_loss import JobLoss
from phalanx.verify.masks import Definition
from phalanx.verify.mixing import (
    CollectiveCalledError,
    Part,
    RefusingCollectives,
    buffers_kept,
    mixes_rows,
    mixing_part,
    num_rows_of,
)
from phalanx.verify.reference import Batch
from phalanx.verify.untouched import build_untouched

MAX_ROWS = 4
MAX_WORK = 2**34  # parameters x tokens: some seconds of a core


def check_rows(job: Job, plan: Plan, batch: Batch) -> RowFacts:
    """What the job's loss does with the rows of a batch, tried on a few of them with a module of its own.

    Buffers and random numbers of this process are as they were. Nothing is known of a loss that fails, of one that
    draws random numbers, and of a module that is too large to try: training says what is wrong with it.
    """
    batch = {key: tensor[:MAX_ROWS].detach().cpu() for key, tensor in batch.items()}
    num_rows = len(next(iter(batch.values())))
    is_too_large = plan.num_params > MAX_PARAMS or plan.num_params * num_rows * plan.seq_len > MAX_WORK
    if num_rows < 2 or not has_own_code(job) or is_too_large:
        return RowFacts()
    is_built = False
    try:
        with _random_states_kept(), torch.no_grad(), RefusingCollectives():
            loss = JobLoss(job, plan)
            module = build_untouched(job, plan, "float32", materialize=True)[0]
            for part in module.modules():
                if isinstance(part, _BatchNorm):  # whose statistics over the microbatch the plan speaks of
                    part.eval()
            is_built = True  # a factory may wait for other ranks, but not here, where it is called on one
            return RowFacts(mixes=_find(module, loss, batch, job.run.seed))
    except CollectiveCalledError as error:
        return RowFacts(collective=error.call) if is_built else RowFacts()
    except Exception:
        return RowFacts()


def _find(module: nn.Module, loss: JobLoss, batch: Batch, seed: int) -> Part:
    masks, rows = Definition(module, seed), num_rows_of(batch)
    state = torch.get_rng_state()
    with masks.of(1, 0, rows), buffers_kept(module):
        total, targets = loss(module, batch)
    if not torch.equal(state, torch.get_rng_state()):
        module.eval()
        state = torch.get_rng_state()
        with buffers_kept(module):
            total, targets = loss(module, batch)
        if not torch.equal(state, torch.get_rng_state()):
            return ""
    if not mixes_rows(module, loss, batch, masks, total.item(), int(targets)):
        return ""
    return mixing_part(module, loss, batch, masks)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """A factory may draw from any of them."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
