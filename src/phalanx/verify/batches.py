"""What is trained on while a layout is judged: uneven targets, masked ones, sequences without
any."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.data.corpus import load_corpus
from phalanx.data.loader import RankBatchShare, TrainBatches
from phalanx.data.samples import SampleSpec
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.run.one_process.plain_loss import Batch
from phalanx.run.one_process.synthetic_batches import make_synthetic_batch
from phalanx.verify.verified_job import NUM_MICROBATCHES, ROWS_PER_RANK

STEP_WITHOUT_TARGETS = 1
# No target of it is masked, as in pretraining: gradients then need no factor.
STEP_WITHOUT_MASKED_TARGETS = 2
# The logits of a microbatch are computed in so many chunks of tokens: a first, a middle and a last
# one. In this step the middle one has no target.
NUM_LOSS_CHUNKS = 3
STEP_WITH_CHUNKS_WITHOUT_TARGETS = 3


def make_global_microbatches(
    job: Job, plan: Plan, data_dir: Path | None, *, num_steps: int
) -> list[list[Batch]]:
    """The microbatches of each step, as all ranks together see them; the same on every rank.

    Of the data in `data_dir` where there is some (a user's own), else made up for what the model
    reads.
    """
    rows = plan.global_batch_size // NUM_MICROBATCHES
    if data_dir is not None:
        spec = SampleSpec(
            str(load_corpus(data_dir).directory),
            plan.seq_len,
            job.run.seed,
            job.data.document_masks,
        )
        data = TrainBatches(spec, RankBatchShare(plan.global_batch_size, rows), workers=0)
        try:
            return [list(data.step_microbatches(step)) for step in range(1, num_steps + 1)]
        finally:
            data.close()
    generator = torch.Generator().manual_seed(
        hash_to_stable_64_bits("verify", job.run.seed) % 2**63
    )
    documents = job.data.document_masks
    steps: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(num_steps)]
    # All of a step before the next one: each takes from the generator.
    for number, microbatches in enumerate(steps):
        for _ in range(NUM_MICROBATCHES):
            microbatches.append(
                make_synthetic_batch(
                    plan,
                    rows,
                    generator,
                    documents=documents,
                    has_masked_targets=number != STEP_WITHOUT_MASKED_TARGETS,
                )
            )
    if has_step_without_targets(job, plan, num_steps):
        steps[STEP_WITHOUT_TARGETS][1]["targets"].fill_(IGNORE_INDEX)
        for step in steps[STEP_WITH_CHUNKS_WITHOUT_TARGETS:][:1]:
            for number, batch in enumerate(step):
                _mask_middle_chunk(batch["targets"], ROWS_PER_RANK << number)
    return [list[Batch](step) for step in steps]


def choose_loss_chunk_tokens(num_tokens: int) -> int:
    """The tokens of a chunk of logits where a rank has `num_tokens`: NUM_LOSS_CHUNKS chunks take
    them all, the last of which has fewer."""
    return num_tokens // NUM_LOSS_CHUNKS + 1


def _mask_middle_chunk(targets: torch.Tensor, num_rows: int) -> None:
    """Mask the targets [rows, tokens] of the second chunk of each rank that has `num_rows` rows.

    The first chunk keeps its own: a rank may have the rows of several.
    """
    for rows in targets.split(num_rows):
        tokens = rows.view(-1)
        chunk = choose_loss_chunk_tokens(len(tokens))
        tokens[chunk : 2 * chunk] = IGNORE_INDEX


def describe_targets_of_step(microbatches: Sequence[Batch]) -> str:
    """What no usual step has, of the targets in `microbatches`; "" for a usual step."""
    masks = [batch["targets"] == IGNORE_INDEX for batch in microbatches if "targets" in batch]
    if not masks:
        return ""
    if any(bool(mask.all()) for mask in masks):
        return "a microbatch without targets"
    if not any(bool(mask.any()) for mask in masks):
        return "no target that is masked"
    tokens = masks[0][:ROWS_PER_RANK].flatten()
    chunks = tokens.split(choose_loss_chunk_tokens(len(tokens)))
    if [bool(chunk.all()) for chunk in chunks] == [False, True, False]:
        return "a chunk of logits whose targets are all masked, between two others"
    return ""


def has_step_without_targets(job: Job, plan: Plan, num_steps: int) -> bool:
    """True if a microbatch of all ranks has no target: of a user's own objective nobody knows
    whether it may."""
    is_textbook = job.model.objective is None and not plan.model_shape.reads_images
    return is_textbook and num_steps > STEP_WITHOUT_TARGETS


def resplit_steps_into_microbatches(
    steps: Sequence[Sequence[Batch]], num_microbatches: int
) -> list[list[Batch]]:
    """The same rows of each step in the same order, in that many equal microbatches."""

    def split(step: Sequence[Batch]) -> list[Batch]:
        step_tensors = {key: torch.cat([batch[key] for batch in step]) for key in step[0]}
        parts = {key: tensor.chunk(num_microbatches) for key, tensor in step_tensors.items()}
        return [
            {key: tensors[index] for key, tensors in parts.items()}
            for index in range(num_microbatches)
        ]

    return [split(step) for step in steps]


def join_steps(steps: Sequence[Sequence[Batch]], num_microbatches: int) -> list[list[Batch]]:
    """The microbatches of `steps` in fewer steps, of `num_microbatches` each; where there are not
    enough for one step, they come again."""
    microbatches = list(itertools.chain.from_iterable(steps))
    num_steps = max(1, len(microbatches) // num_microbatches)
    endless = itertools.cycle(microbatches)
    return [list(itertools.islice(endless, num_microbatches)) for _ in range(num_steps)]


def truncate_sequences(
    steps: Sequence[Sequence[Batch]], seq_len: int, num_tokens: int
) -> list[list[Batch]]:
    """The first `num_tokens` of each sequence of `seq_len`; an empty list where no tensor has
    sequences."""

    def truncate_batch(batch: Batch) -> Batch:
        return {
            key: tensor[:, :num_tokens] if is_sequence(tensor) else tensor
            for key, tensor in batch.items()
        }

    def is_sequence(tensor: torch.Tensor) -> bool:
        return tensor.ndim > 1 and tensor.shape[1] == seq_len

    if not any(is_sequence(tensor) for tensor in steps[0][0].values()):
        return []
    return [[truncate_batch(batch) for batch in step] for step in steps]


def select_rank_rows(
    steps: Sequence[Sequence[Batch]], rank: int, data_parallel_size: int
) -> list[list[Batch]]:
    """The part of one data-parallel rank: of each microbatch an equal run of rows."""

    def part(batch: Batch) -> Batch:
        rows = len(next(iter(batch.values()))) // data_parallel_size
        return {key: tensor[rank * rows : (rank + 1) * rows] for key, tensor in batch.items()}

    return [[part(batch) for batch in step] for step in steps]


def move_steps_to_device(
    steps: Sequence[Sequence[Batch]], device: torch.device
) -> list[list[Batch]]:
    """The same on `device`, where a forward then takes these very tensors."""
    return [
        [{key: tensor.to(device) for key, tensor in batch.items()} for batch in step]
        for step in steps
    ]


def cast_steps_to_dtype(steps: Sequence[Sequence[Batch]], dtype: torch.dtype) -> list[list[Batch]]:
    """Numbers in `dtype`; tokens and labels as they are."""
    return [[_cast_batch(batch, dtype) for batch in step] for step in steps]


def _cast_batch(batch: Batch, dtype: torch.dtype) -> Batch:
    cast = {}
    for key, tensor in batch.items():
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        cast[key] = tensor
    return cast
