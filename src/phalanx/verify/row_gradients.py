"""What each part of a batch owes to the gradients of a step, in one process, and how many times
each counts in the gradients of a layout that are off."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

import torch
from safetensors.torch import save_file

from phalanx.core.batch import IGNORE_INDEX
from phalanx.job.schema import Job
from phalanx.mesh.logical import LogicalShard
from phalanx.parallel.executor import Batch
from phalanx.plan.plan import Plan
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.batches import choose_loss_chunk_tokens
from phalanx.verify.trace import TraceTensorReader
from phalanx.verify.trace_facts import (
    BEGIN_KIND,
    Trace,
    name_buffers_set,
    name_gradients_set,
    name_weights_set,
)

# Of an error, relative to the gradient: what is less may be rounding.
MIN_ERROR_OF_DTYPE = {"float64": 1e-8, "float32": 1e-4}
# Of what a gradient is off by: so much of it parts that do not count once may leave unexplained.
MAX_UNEXPLAINED_OF_DTYPE = {"float64": 1e-4, "float32": 1e-2}
# Of a tensor so many elements, evenly spread over it, show what each part owes to it.
MAX_ELEMENTS_OF_TENSOR = 1_000
MAX_PARAMETERS = 20_000_000
# Parts whose gradients are nearly alike cannot be told apart.
MAX_CONDITION = 1e6


@dataclass
class FirstWrongGradients:
    """The gradients of the first step in which some are off on this rank, before clipping; `step`
    is counted from 0, and -1 as long as none are."""

    step: int = -1
    shards: dict[str, LogicalShard] = field(default_factory=dict)

    def keep_if_first(
        self,
        trace: Trace,
        step: int,
        shards: Mapping[str, LogicalShard],
        dots_of: Mapping[str, Sequence[float]],
    ) -> None:
        """Keep those of `shards` that are off by `dots_of`, if no step before had any."""
        if self.step >= 0:
            return
        least = MIN_ERROR_OF_DTYPE.get(trace.dtype, math.inf)
        for name, dots in dots_of.items():
            # Infinite where it is no part of the tensor.
            if least**2 * dots[3] < dots[0] < math.inf:
                self.step = step
                self.shards[name] = shards[name].like(name, shards[name].tensor.clone())


def are_gradients_sums_over_rows(plan: Plan, trace: Trace) -> bool:
    """True if what each sequence owes to gradients can be told: rounding does not hide it, they do
    not see each other, nothing is left out by design, and the model is small."""
    return (
        trace.dtype in MIN_ERROR_OF_DTYPE
        and not (trace.mixes_rows or trace.moved)
        and plan.parallel.compress == "none"
        and plan.num_params <= MAX_PARAMETERS
    )


@dataclass(frozen=True)
class BatchPart:
    """A sequence of a step, or those of its tokens whose logits a rank computes in one chunk: in
    which microbatch it is, its number there, the rank's chunk (-1 where sequences are whole), and
    its number of targets; all counted from 0."""

    microbatch: int
    row: int
    chunk: int
    num_targets: int


def write_part_gradients_or_none(
    job: Job, plan: Plan, trace: Trace, step: int, microbatches: Sequence[Batch]
) -> list[BatchPart] | None:
    """Write what each part of the batch of `step` owes to each gradient of one process, once for a
    trace, a step and the parts that ranks of `plan` have, and return the parts; None where the
    module takes no single sequence."""
    path = trace.directory / f"{_name_parts_set(plan, step)}.json"
    if not path.exists():
        try:
            parts = _write_part_gradients(job, plan, trace, step, microbatches)
        # A user's module may fail in any way: the difference then has another cause, or none.
        except Exception:
            traceback.print_exc()  # in the rank's log
            return None
        path.write_text(json.dumps([astuple(part) for part in parts]))
    return [BatchPart(*part) for part in json.loads(path.read_text())]


def _write_part_gradients(
    job: Job, plan: Plan, trace: Trace, step: int, microbatches: Sequence[Batch]
) -> list[BatchPart]:
    module = build_original_module(job, plan, trace.dtype, materialize=True)[0]
    _load_state_before_step(module, trace, step)
    masks, loss_sum, first_row = DropoutMasks(module, job.run.seed), JobLoss(job), 0
    # Routers' balance is of whole sequences, and an own objective may be, too.
    has_chunks = job.model.objective is None and plan.layout.cp == 1 and not any(trace.loads)
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name, _ in module.named_parameters()}
    parts = []
    for number, batch in enumerate(microbatches):
        num_rows = len(next(iter(batch.values())))
        for row in range(num_rows):
            sequence = {key: tensor[row : row + 1] for key, tensor in batch.items()}
            pieces = {-1: sequence}
            if has_chunks and "targets" in batch and batch["targets"].ndim == 2:
                row_of_rank = row % max(1, num_rows // plan.layout.data_parallel_size)
                pieces = _cut_by_chunks(sequence, row_of_rank, num_rows, plan)
            for chunk, piece in pieces.items():
                module.zero_grad()
                with masks.dropping_by_masks(step + 1, first_row + row, 1):
                    loss, count = loss_sum(module, piece)
                if int(count):
                    loss.backward()
                parts.append(BatchPart(number, row, chunk, int(count)))
                for name, parameter in module.named_parameters():
                    gradient = parameter.grad
                    if gradient is None:
                        gradient = torch.zeros_like(parameter)
                    gradients[name].append(gradient.flatten()[_choose_places(gradient.shape)])
        first_row += num_rows
    total = sum(part.num_targets for part in parts)
    save_file(
        {name: (torch.stack(rows) / total).contiguous() for name, rows in gradients.items()},
        trace.directory / f"{_name_parts_set(plan, step)}.safetensors",
    )
    return parts


def _cut_by_chunks(
    sequence: Batch, row_of_rank: int, num_rows: int, plan: Plan
) -> dict[int, dict[str, torch.Tensor]]:
    """Chunk of the rank that has the sequence in its row `row_of_rank` -> the sequence with the
    targets of that chunk alone, where each microbatch has `num_rows`."""
    length = sequence["targets"].shape[1]
    per_rank = max(1, num_rows // plan.layout.data_parallel_size)
    size = choose_loss_chunk_tokens(per_rank * length)
    chunks = torch.arange(row_of_rank * length, (row_of_rank + 1) * length) // size
    return {
        chunk: {
            **sequence,
            "targets": sequence["targets"].where(chunks == chunk, IGNORE_INDEX),
        }
        for chunk in chunks.unique().tolist()
    }


def fit_part_counts(
    first_wrong: FirstWrongGradients, plan: Plan, trace: Trace, step: int
) -> list[float] | None:
    """How many times each part of the batch counts in this rank's gradients of `step`, NaN for one
    that owes nothing; None where they are no sum over these, whatever each counts."""
    if first_wrong.step != step:
        return None
    actual, reference, rows = _sample_elements(first_wrong, plan, trace, step)
    usable = rows.norm(dim=0) > 1e-9 * rows.norm(dim=0).max()
    parts = rows[:, usable]
    most = MAX_UNEXPLAINED_OF_DTYPE[trace.dtype]
    off = (actual - reference).norm()
    # No part owes anything to what one process leaves frozen.
    if not parts.shape[1]:
        return None
    if not len(actual) > 2 * parts.shape[1] or not (parts.sum(1) - reference).norm() <= most * off:
        return None
    # Of one size, so that the condition says how alike they are.
    sizes = parts.norm(dim=0)
    left_vectors, values, right_vectors = torch.linalg.svd(parts / sizes, full_matrices=False)
    if not values[0] < MAX_CONDITION * values[-1]:
        return None
    counts = (right_vectors.T @ ((left_vectors.T @ actual) / values)) / sizes
    if not (parts @ counts - actual).norm() <= most * off:
        return None
    all_counts = torch.full((rows.shape[1],), math.nan, dtype=torch.float64)
    all_counts[usable] = counts
    return [float(count) for count in all_counts]


def _name_parts_set(plan: Plan, step: int) -> str:
    shares = plan.layout.data_parallel_size
    return f"parts-{step}-{shares}-{plan.num_microbatches}-{plan.layout.cp}"


@torch.no_grad()
def _load_state_before_step(module: torch.nn.Module, trace: Trace, step: int) -> None:
    """Give a module the weights and buffers with which `step` of the trace begins."""
    kind = name_weights_set(step - 1) if step else BEGIN_KIND
    with TraceTensorReader(trace, kind) as reader:
        for name, parameter in module.named_parameters():
            parameter.copy_(reader.read(name))
    kind = name_buffers_set(step - 1)
    if kind in trace.sizes:
        with TraceTensorReader(trace, kind) as reader:
            for name, buffer in module.named_buffers():
                if name in trace.sizes[kind]:
                    buffer.copy_(reader.read(name))


def _choose_places(shape: Sequence[int]) -> torch.Tensor:
    """The numbers of some elements of a tensor, evenly spread."""
    num_elements = math.prod(shape)
    # Odd, so that no even width of a matrix leaves out columns.
    stride = num_elements // MAX_ELEMENTS_OF_TENSOR | 1
    return torch.arange(0, num_elements, stride)


def _sample_elements(
    first_wrong: FirstWrongGradients, plan: Plan, trace: Trace, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(this rank's [E], the reference's [E], what each part of the batch owes to them [E, parts])
    of some of the elements that this rank holds, of each tensor that is off."""
    actual, reference, rows = [], [], []
    with (
        TraceTensorReader(trace, name_gradients_set(step)) as gradients,
        TraceTensorReader(trace, _name_parts_set(plan, step)) as parts,
    ):
        for name, shard in first_wrong.shards.items():
            gradient, owed = gradients.read(name).double(), parts.read(name).double()
            places = _choose_places(gradient.shape)
            indices = torch.stack(torch.unravel_index(places, gradient.shape or (1,)))
            for box in shard.boxes:
                local = shard.tensor[box.slices_in_local_tensor].double().cpu()
                offset = torch.tensor(box.global_offset or (0,))[:, None]
                size = torch.tensor(box.size or (1,))[:, None]
                inside = ((indices >= offset) & (indices < offset + size)).all(0)
                at = tuple((indices - offset)[:, inside])
                actual.append(local.reshape(tuple(box.size) or (1,))[at])
                reference.append(gradient.flatten()[places[inside]])
                rows.append(owed[:, inside].T)
    return torch.cat(actual), torch.cat(reference), torch.cat(rows)
