"""Shape inference: one microbatch of new shapes goes through all stages, without gradients, before
it counts.

It tells every rank the form of what stages send each other, so that a sequence of another length is
no surprise, and it looks whether the model can be cut where it is cut: what is wrong is told on
every rank alike.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import phalanx.core.errors as errors
from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.mesh.logical import full_name
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.parallel.pipeline.p2p import PipelineProcessGroups, TensorSpec

# A stage announces its output in fields of fixed number: the type as its index here, plus 1, and
# room for so many dimensions.
_SENDABLE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MAX_SENDABLE_TENSOR_DIMS = 8

Compute = Callable[[int, torch.Tensor | None], Any]
"""(stage, what arrived) -> hidden states, or of the last stage anything."""


def infer_stage_input_specs(
    module: nn.Module,
    stage_group: PipelineProcessGroups,
    rank_of_stage: tuple[int, ...],
    compute: Compute,
    group: TensorParallelGroup | None = None,
) -> dict[int, TensorSpec]:
    """The form of the input of each stage but the first. Collective over the ranks of a pipeline.

    `group` learns how many tokens there are in all from the first stage, whose embedding knows.
    Raises the same PhalanxError on all ranks if a stage refuses, or moves a buffer outside the
    blocks, of which each stage has its own.
    """
    modes = [(part, part.training) for part in module.modules()]
    # Copies: a buffer that is changed in place would be compared with itself.
    buffers_before = {name: buffer.clone() for name, buffer in _collect_persistent_buffers(module)}
    # In evaluation mode nothing is drawn and no running statistics move.
    module.eval()

    def compute_and_check(stage: int, arrived: torch.Tensor | None) -> Any:
        output = compute(stage, arrived)
        _require_unchanged_buffers(module, buffers_before)
        return output

    try:
        with torch.no_grad(), _preserving_random_generators(stage_group.device):
            return _run_stages_in_order(stage_group, rank_of_stage, compute_and_check, group)
    finally:
        for part, is_training in modes:
            part.training = is_training


def _require_unchanged_buffers(
    module: nn.Module, buffers_before: Mapping[str, torch.Tensor]
) -> None:
    for name, buffer in _collect_persistent_buffers(module):
        if name in buffers_before and _have_different_values(buffer, buffers_before[name]):
            # The user's own name, without that of the root around it.
            own_name = full_name(name).removeprefix("module.")
            raise LayoutError(
                f"a forward in evaluation moves the buffer {own_name}, and each stage of a pipeline"
                " calls it",
                fix=(
                    "move it in training alone and inside of a block, keep it out of checkpoints"
                    " (persistent=False), or do without parallel.pp"
                ),
            )


def _collect_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Without state_dict, whose hooks would free what FSDP has gathered."""
    for prefix, part in module.named_modules():
        for key, buffer in part.named_buffers(recurse=False):
            if key not in part._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer


def _have_different_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    # A NaN in both counts as equal.
    return not bool(((a == b) | ((a != a) & (b != b))).all())


def raise_first_refusal_on_all_ranks(
    stage_group: PipelineProcessGroups, refusal: PhalanxError | None
) -> None:
    """Collective over the ranks of a pipeline: raises the refusal of the first rank that has one
    on all of them."""
    refuses = torch.zeros(len(stage_group.numbers), dtype=torch.int64, device=stage_group.device)
    refuses[stage_group.rank] = int(refusal is not None)
    dist.all_reduce(refuses, group=stage_group.down)
    # All ranks have the same list, and so take part in the same broadcast, or in none.
    for rank in refuses.nonzero().flatten().tolist()[:1]:
        _broadcast_stage_output_spec(
            stage_group, rank, None, refusal if rank == stage_group.rank else None
        )


@contextmanager
def _preserving_random_generators(device: torch.device) -> Iterator[None]:
    """Whatever a user's forward draws inside, training draws as if it had not been."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _run_stages_in_order(
    stage_group: PipelineProcessGroups,
    rank_of_stage: tuple[int, ...],
    compute: Compute,
    group: TensorParallelGroup | None,
) -> dict[int, TensorSpec]:
    specs: dict[int, TensorSpec] = {}
    hidden: torch.Tensor | None = None
    for stage, owner in enumerate(rank_of_stage):
        refusal: PhalanxError | None = None
        if owner == stage_group.rank:
            try:
                hidden = compute(stage, hidden)
                _require_sendable_stage_output(
                    stage, hidden, is_last=stage + 1 == len(rank_of_stage)
                )
            except PhalanxError as error:
                refusal = error
        is_last = stage + 1 == len(rank_of_stage)
        spec = _broadcast_stage_output_spec(
            stage_group, owner, None if is_last else hidden, refusal, group if stage == 0 else None
        )
        if spec is None:
            continue
        specs[stage + 1] = spec
        target = rank_of_stage[stage + 1]
        if owner == target:
            continue
        if stage_group.rank == owner:
            assert hidden is not None
            stage_group.start_send(hidden.contiguous(), target).wait()
        elif stage_group.rank == target:
            hidden = spec.make_empty_tensor(stage_group.device)
            stage_group.start_receive(hidden, owner).wait()
        _open_gradient_connection(stage_group, owner, target)
    return specs


def _require_sendable_stage_output(stage: int, output: Any, *, is_last: bool) -> None:
    if not is_last and (
        output.dtype not in _SENDABLE_DTYPES or output.ndim > _MAX_SENDABLE_TENSOR_DIMS
    ):
        raise LayoutError(
            f"stage {stage} hands on a tensor of {output.dtype} and {output.ndim} dimensions, which"
            " stages cannot send",
            fix=(
                f"have blocks return floats of at most {_MAX_SENDABLE_TENSOR_DIMS} dimensions, or"
                " do without parallel.pp"
            ),
        )


def _open_gradient_connection(stage_group: PipelineProcessGroups, owner: int, target: int) -> None:
    """NCCL opens a way between two ranks when it is first used, and both wait for each other then.

    In a schedule a rank asks for a gradient before it has done what the gradient is of; so ways
    back are opened here, where all ranks go in step.
    """
    token = torch.zeros(1, device=stage_group.device)
    if stage_group.rank == target:
        stage_group.start_send(token, owner).wait()
    elif stage_group.rank == owner:
        stage_group.start_receive(token, target).wait()


def _broadcast_stage_output_spec(
    stage_group: PipelineProcessGroups,
    owner: int,
    hidden: torch.Tensor | None,
    refusal: PhalanxError | None = None,
    group: TensorParallelGroup | None = None,
) -> TensorSpec | None:
    """Broadcast from `owner` the form of its stage's output, None after the last one, or why it
    refuses."""
    fields = torch.zeros(
        4 + _MAX_SENDABLE_TENSOR_DIMS, dtype=torch.int64, device=stage_group.device
    )
    text = b""
    if refusal is not None:
        text = json.dumps(refusal.to_json()).encode()
        fields[0] = len(text)
    elif hidden is not None:
        fields[1], fields[2] = 1 + _SENDABLE_DTYPES.index(hidden.dtype), hidden.ndim
        fields[4 : 4 + hidden.ndim] = torch.tensor(hidden.shape)
        # Only the first stage's embedding sees how long a sequence is that tp has cut.
        fields[3] = group.num_tokens if group is not None else 0
    source = stage_group.numbers[owner]
    dist.broadcast(fields, source, group=stage_group.down)
    size, kind, num_dims, num_tokens, *shape = fields.tolist()
    if group is not None:
        group.num_tokens = num_tokens
    if size:
        data = torch.zeros(size, dtype=torch.uint8, device=stage_group.device)
        if stage_group.rank == owner:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, source, group=stage_group.down)
        raise refusal or _refusal_from_json(json.loads(data.cpu().numpy().tobytes()))
    if kind:
        return TensorSpec(tuple(shape[:num_dims]), _SENDABLE_DTYPES[kind - 1])
    return None


def _refusal_from_json(body: dict[str, Any]) -> PhalanxError:
    error: PhalanxError = getattr(errors, body["error"], PhalanxError)(
        body["what"], where=body["where"], why=body["why"], fix=body["fix"]
    )
    return error


def broadcast_float_tensor(
    stage_group: PipelineProcessGroups, owner: int, value: torch.Tensor | None
) -> torch.Tensor:
    """`value` of the rank `owner`, a tensor of floats, on every rank of the pipeline.

    Collective.
    """
    spec = _broadcast_stage_output_spec(stage_group, owner, value)
    assert spec is not None
    tensor = value.contiguous() if value is not None else spec.make_empty_tensor(stage_group.device)
    tensor = tensor.to(stage_group.device)
    dist.broadcast(tensor, stage_group.numbers[owner], group=stage_group.down)
    return tensor
