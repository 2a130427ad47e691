"""Says what a job's loss does with the rows of a batch, for plan and train.

Run as `python -m phalanx.run.one_process.rows_probe JSON`.

The process stands for rank 0 of two, so that code which asks for ranks before it calls a collective
is seen to.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.errors import LayoutError
from phalanx.core.parent import kill_this_process_with_parent
from phalanx.core.registry import import_object_of_kind
from phalanx.data.user_dataset import UserSamples, open_user_dataset
from phalanx.job.module_probe import print_answer
from phalanx.job.schema import Job
from phalanx.job.user_dataset import is_own_dataset
from phalanx.nn.build import MODELS_PACKAGE
from phalanx.plan.mixed_rows import BatchRowMixing
from phalanx.plan.plan import Plan
from phalanx.run.one_process.check_rows import COMPARED_ROW_COUNTS, find_how_loss_treats_rows
from phalanx.run.one_process.plain_loss import Batch
from phalanx.run.one_process.synthetic_batches import make_synthetic_batch

# Of these the rows are chosen that have a like.
MAX_SAMPLES = 2 * COMPARED_ROW_COUNTS[-1]
# More than the few are read as long as this.
READ_TIMEOUT_S = 5.0


def probe_row_mixing(request: dict[str, Any]) -> dict[str, Any]:
    """`request`: job and plan. Raises what the dataset raises."""
    job = Job.model_validate_json(json.dumps(request["job"]))
    plan = Plan.from_json(request["plan"])
    try:
        if job.model.objective is not None:
            import_object_of_kind(job.model.objective, MODELS_PACKAGE, "objective")
    except LayoutError as error:
        return asdict(BatchRowMixing(unknown=str(error)))
    batch = read_or_make_up_batch(job, plan)
    # A loss may ask for its rank: the fake group of torch answers, and sends nothing.
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return asdict(find_how_loss_treats_rows(job, plan, batch))


def read_or_make_up_batch(job: Job, plan: Plan) -> Batch:
    """Some samples of the job's own dataset, else made up for what the model reads."""
    if is_own_dataset(job.data.source) and not job.data.mixture:
        dataset = open_user_dataset(job.data.source, job.data.args, "train")
        return _read_samples_within_time(UserSamples(dataset, job.data.source, job.run.seed))
    if not plan.vocab_size:
        plan = replace(plan, vocab_size=job.model.vocab_size or BYTE_VOCAB_SIZE)
    return make_synthetic_batch(
        plan,
        COMPARED_ROW_COUNTS[-1],
        torch.Generator().manual_seed(job.run.seed),
        documents=job.data.document_masks,
    )


def _read_samples_within_time(samples: UserSamples) -> Batch:
    until = time.monotonic() + READ_TIMEOUT_S
    parts = [samples.take(np.arange(COMPARED_ROW_COUNTS[0]))]
    while len(parts) <= MAX_SAMPLES - COMPARED_ROW_COUNTS[0] and time.monotonic() < until:
        # One at a time: a dataset may be slow, and the few are enough.
        parts.append(samples.take(np.array([COMPARED_ROW_COUNTS[0] + len(parts) - 1])))
    return {
        key: torch.from_numpy(np.concatenate([part[key] for part in parts])) for key in parts[0]
    }


if __name__ == "__main__":
    kill_this_process_with_parent()
    # Last, as in ranks: nothing in the user's folder stands for a library that torch imports late.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    print_answer(probe_row_mixing(json.loads(sys.argv[1])))
