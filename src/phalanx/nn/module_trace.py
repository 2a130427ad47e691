"""Traces one microbatch of a module, forward and backward, on fake tensors: what autograd keeps of
each block, what products it does, how much is alive in the backward.

What a job's plan asks of a module that it cannot read. Run in the probe's process, never in a rank.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from phalanx.core.batch import list_outermost_names, unflatten_entry
from phalanx.core.registry import import_object_of_kind
from phalanx.core.units import plural
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.module_probe import TellProgress
from phalanx.mesh.blocks import find_repeated_blocks
from phalanx.mesh.logical import full_name
from phalanx.nn.hugging_face.adapter import SHAPE_FACTS_ATTRIBUTE
from phalanx.nn.objective import (
    CausalOutput,
    Objective,
    build_logits_cross_entropy,
    causal_cross_entropy,
)
from phalanx.nn.operator_trace import (
    AFTER,
    BEFORE,
    LOSS,
    OperatorRecorder,
    TracedPartRecord,
    iterate_tensors_of_tree,
)

MAX_BATCHES = 3
"""Microbatches that are traced in one precision, at most."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


@dataclass(frozen=True)
class TracedBatch:
    """The microbatch of a trace: tokens [batch, length], images of (channels, size, size), or
    samples of a user's own: (name, shape, dtype) of each entry."""

    batch: int
    length: int
    precision: str
    image: tuple[int, int, int] | None = None
    sample: tuple[tuple[str, tuple[int, ...], str], ...] | None = None

    def describe(self) -> str:
        """The microbatch in words."""
        if self.sample is not None:
            return f"{plural(self.batch, 'sample')} in {self.precision}"
        if self.image is not None:
            return f"{plural(self.batch, 'image')} in {self.precision}"
        return f"{plural(self.batch, 'sequence')} of {self.length:,} tokens in {self.precision}"


class UntraceableModuleError(Exception):
    """The module's forward cannot be followed without numbers; says why."""


class TracedBatchTensors(dict[str, Any]):
    """A batch with its levels. A name that it lacks, joined ones apart, is told as in training."""

    def __missing__(self, key: str) -> Any:
        found: Any = self
        for name in key.split("."):
            if not isinstance(found, Mapping) or name not in found:
                raise UntraceableModuleError(
                    f"its objective reads {key!r}, and a batch has {', '.join(self)}: return it"
                    " from your dataset under that name, or set model.objective"
                )
            found = found[name]
        return found


def trace_module(module: nn.Module, batch: TracedBatch, objective: Objective) -> dict[str, Any]:
    """Trace the operations of `module`, whose parameters are fake, in one microbatch, as JSON.

    Raises UntraceableModuleError for a forward that depends on its numbers, or takes other
    arguments.
    """
    blocks = find_repeated_blocks(module)
    recorder = OperatorRecorder(_map_storages_to_weight_holders(module))
    tensors = _build_traced_tensors(batch)
    gradients_were_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    try:
        with ExitStack() as stack:
            for context in _tracking_block_parts(recorder, blocks):
                stack.enter_context(context)
            stack.enter_context(_freeing_gradients_at_once(module))
            facts = _trace_microbatch(recorder, module, batch, objective, tensors)
    except UntraceableModuleError:
        raise
    except DataDependentOutputException as error:
        raise UntraceableModuleError(
            "it reads numbers of a tensor (.item(), int(), an if), and a trace has none"
        ) from error
    except Exception as error:
        raise UntraceableModuleError(
            f"{type(error).__name__}: {_first_line_of_error(error)}"
        ) from error
    finally:
        torch.set_grad_enabled(gradients_were_on)
    sizes = {"batch": batch.batch, "length": batch.length}
    return {**sizes, **_build_parts_json(recorder, blocks), **facts}


def _first_line_of_error(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:200]


def _map_storages_to_weight_holders(module: nn.Module) -> dict[int, str]:
    """The holder of each parameter, by its storage; buffers count as weights: they are no
    activations."""
    weights: dict[int, str] = {}
    for name, part in module.named_modules():
        tensors = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        for tensor in tensors:
            weights.setdefault(tensor.untyped_storage()._cdata, full_name(name))
    return weights


def _build_traced_tensors(batch: TracedBatch) -> dict[str, Any]:
    """A batch as a job's data would give it, with its levels."""
    if batch.sample is not None:
        flat = {
            name: torch.zeros(batch.batch, *shape, dtype=getattr(torch, dtype))
            for name, shape, dtype in batch.sample
        }
        return TracedBatchTensors(
            {name: unflatten_entry(flat, name) for name in list_outermost_names(flat)}
        )
    if batch.image is not None:
        images = torch.zeros(batch.batch, *batch.image)
        labels = torch.zeros(batch.batch, dtype=torch.int64)
        return {"inputs": images, "targets": labels, "labels": labels}
    tokens = torch.zeros(batch.batch, batch.length, dtype=torch.int64)
    targets = torch.zeros(batch.batch, batch.length, dtype=torch.int64)
    return {"inputs": tokens, "targets": targets, "labels": targets}


def _choose_forward_arguments(
    module: nn.Module, batch: TracedBatch, tensors: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What of a batch goes into the forward: `inputs` first, and of samples of a user's own what
    it names, as in training (`phalanx.parallel.call.bind_batch`).

    Raises UntraceableModuleError for a forward that cannot do with that.
    """
    parameters = list(inspect.signature(module.forward).parameters.values())
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    args = [tensors["inputs"]] if "inputs" in tensors else []
    named = {}
    if batch.sample is not None:
        for name in tensors.keys() - {"inputs", "targets"}:
            if takes_any or name in names:
                named[name] = tensors[name]
    for parameter in parameters[len(args) :]:
        is_needed = parameter.default is parameter.empty and parameter.kind not in variable
        if is_needed and parameter.name not in named:
            raise UntraceableModuleError(
                f"its forward needs {parameter.name!r}, and a batch has {', '.join(tensors)}"
            )
    return args, named


def _trace_microbatch(
    recorder: OperatorRecorder,
    module: nn.Module,
    batch: TracedBatch,
    objective: Objective,
    tensors: Mapping[str, Any],
) -> dict[str, Any]:
    """Forward, loss and backward under the recorder; what the outputs say of head and loss."""
    args, named = _choose_forward_arguments(module, batch, tensors)
    facts: dict[str, Any] = {}
    autocast = torch.autocast(
        "cpu", AUTOCAST.get(batch.precision), enabled=batch.precision in AUTOCAST
    )
    with recorder, autocast:
        with torch.autograd.graph.saved_tensors_hooks(
            _recording_saved_tensors(recorder), _return_tensor_unchanged
        ):
            outputs = module(*args, **named)
            if isinstance(outputs, CausalOutput):
                # The objective multiplies by the head, a chunk at a time: its bytes are arithmetic.
                facts["head"] = [*outputs.head_VD.shape]
                roots, gradients = [outputs.hidden_BTD], [torch.empty_like(outputs.hidden_BTD)]
            else:
                recorder.part = LOSS
                loss, _ = objective(outputs, tensors)
                roots, gradients = [loss], [torch.ones_like(loss)]
        del outputs
        recorder.is_backward = True
        torch.autograd.backward(roots, gradients)
    return facts


def _recording_saved_tensors(recorder: OperatorRecorder) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        recorder.record_saved_tensor(tensor)
        return tensor

    return pack


def _return_tensor_unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _tracking_block_parts(recorder: OperatorRecorder, blocks: Sequence[nn.Module]) -> Iterator[Any]:
    """Contexts in which the recorder knows the part of the model that runs."""
    for index, block in enumerate(blocks):
        yield _tracking_part_of_block(recorder, block, index, is_last=index == len(blocks) - 1)


@contextmanager
def _tracking_part_of_block(
    recorder: OperatorRecorder, block: nn.Module, index: int, *, is_last: bool
) -> Iterator[None]:
    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.part = index
        recorder.record_block_inputs(iterate_tensors_of_tree((args, kwargs)))
        for tensor in iterate_tensors_of_tree((args, kwargs)):
            # Its gradient is there: the backward of this block is over.
            if tensor.requires_grad:
                tensor.register_hook(
                    _make_backward_part_hook(recorder, index - 1 if index else BEFORE)
                )

    def end(_: nn.Module, args: Any, outputs: Any) -> None:
        recorder.part = AFTER if is_last else f"between {index}"
        recorder.record_block_inputs(iterate_tensors_of_tree(outputs))
        for tensor in iterate_tensors_of_tree(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_make_backward_part_hook(recorder, index))

    handles = [
        block.register_forward_pre_hook(begin, with_kwargs=True),
        block.register_forward_hook(end),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _make_backward_part_hook(recorder: OperatorRecorder, part: str | int) -> Any:
    def enter(gradient: torch.Tensor) -> None:
        if recorder.is_backward:
            recorder.part = part

    return enter


@contextmanager
def _freeing_gradients_at_once(module: nn.Module) -> Iterator[None]:
    """Inside, gradients of weights go as soon as they are there, as into a bucket."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    handles = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(drop))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _build_parts_json(recorder: OperatorRecorder, blocks: Sequence[nn.Module]) -> dict[str, Any]:
    """The parts as JSON, equal blocks once: `kinds`, and which of them each block is.

    What several blocks save and none of them made is a table of all: `shared`.
    """
    shared = _find_shared_storages(recorder, len(blocks))
    shared_bytes = sum(recorder.storages[number].num_bytes for number in shared)
    counted, kept_bytes = set(shared), shared_bytes
    bodies: dict[str | int, dict[str, Any]] = {}
    for part in (BEFORE, *range(len(blocks)), AFTER, LOSS):
        record = recorder.parts[part]
        if part == AFTER:
            record = _add_work_between_blocks(recorder, record, len(blocks))
        saved = []
        for number in (*_list_storages_saved_between_blocks(recorder, part), *record.saved):
            if number not in counted:
                counted.add(number)
                saved.append(number)
        kept_bytes += sum(recorder.storages[number].num_bytes for number in saved)
        prefix = ""
        if isinstance(part, int):
            prefix = _find_block_prefix(record, blocks[part])
        bodies[part] = _build_part_json(recorder, record, saved, prefix)
        # Beside what it and the parts before it keep: gradients on their way.
        most = record.backward_bytes
        if part == LOSS:
            most = max(most, record.forward_bytes)
        bodies[part]["passing"] = max(0, most - kept_bytes)
    kinds: list[dict[str, Any]] = []
    block_kinds = []
    for index in range(len(blocks)):
        kind = _find_equal_block_kind(kinds, bodies[index])
        if kind is None:
            kinds.append(bodies[index])
            kind = bodies[index]
        # Blocks that do the same differ a little in what is alive around them.
        kind["passing"] = max(kind["passing"], bodies[index]["passing"])
        block_kinds.append(kinds.index(kind))
    return {
        "before": bodies[BEFORE],
        "shared": shared_bytes,
        "after": bodies[AFTER],
        "loss": bodies[LOSS],
        "kinds": kinds,
        "blocks": block_kinds,
    }


def _add_work_between_blocks(
    recorder: OperatorRecorder, record: TracedPartRecord, num_blocks: int
) -> TracedPartRecord:
    """`record` of what comes after the blocks, with the operations between two of them before its
    own: blocks stay equal where code between some of them does more."""
    records = [recorder.parts[f"between {index}"] for index in range(num_blocks - 1)] + [record]
    return replace(
        record,
        products=[product for each in records for product in each.products],
        attention=[call for each in records for call in each.attention],
        other_flops=sum(each.other_flops for each in records),
        activation_elements=sum(each.activation_elements for each in records),
        added_elements=sum(each.added_elements for each in records),
    )


def _list_storages_saved_between_blocks(recorder: OperatorRecorder, part: str | int) -> list[int]:
    """The tensors that were saved by code between the block before `part` and this one."""
    if not isinstance(part, int) or part == 0:
        return []
    return recorder.parts[f"between {part - 1}"].saved


def _find_equal_block_kind(
    kinds: Sequence[dict[str, Any]], body: Mapping[str, Any]
) -> dict[str, Any] | None:
    for kind in kinds:
        if all(kind[key] == body[key] for key in kind if key != "passing"):
            return kind
    return None


def _find_block_prefix(record: TracedPartRecord, block: nn.Module) -> str:
    """The block's own name and a dot, from the names of the layers that it multiplied by."""
    within = {full_name(name) for name, _ in block.named_modules() if name}
    for product in record.products:
        parts = product.holder.split(".")
        for count in range(1, len(parts)):
            if ".".join(parts[count:]) in within:
                return ".".join(parts[:count]) + "."
    return ""


def _find_shared_storages(recorder: OperatorRecorder, num_blocks: int) -> set[int]:
    """Storages that were made outside of blocks and are saved by more than one of them."""
    users: dict[int, int] = {}
    for index in range(num_blocks):
        for number in recorder.parts[index].saved:
            users[number] = users.get(number, 0) + 1
    shared = set()
    for number, count in users.items():
        if count > 1 and not isinstance(recorder.storages[number].part, int):
            shared.add(number)
    return shared


def _build_part_json(
    recorder: OperatorRecorder, record: TracedPartRecord, saved: Sequence[int], prefix: str
) -> dict[str, Any]:
    def sum_bytes_by_sources(numbers: Sequence[int]) -> list[list[Any]]:
        """Bytes by what they come from."""
        groups: dict[tuple[str, ...], int] = {}
        for number in numbers:
            facts = recorder.storages[number]
            sources = tuple(sorted(source.removeprefix(prefix) for source in facts.sources))
            groups[sources] = groups.get(sources, 0) + facts.num_bytes
        return [[list(sources), num_bytes] for sources, num_bytes in sorted(groups.items())]

    results = sorted(record.results)
    # Numbers of storages go on from block to block, and equal blocks must be equal.
    order: dict[int, int] = {}
    products = []
    for p in record.products:
        input_id = order.setdefault(p.input_number, len(order))
        sources = sorted(source.removeprefix(prefix) for source in p.input_sources)
        sizes = (p.inputs, p.outputs, p.rows, input_id, p.input_bytes, p.output_bytes)
        products.append([p.holder.removeprefix(prefix), *sizes, sources])
    return {
        "saved": sum_bytes_by_sources(saved),
        "entering": sum(recorder.storages[number].num_bytes for number in record.entering),
        "results": sum_bytes_by_sources(results),
        "results_saved": sum_bytes_by_sources([number for number in results if number in saved]),
        "products": products,
        "attention": [list(astuple(call)) for call in record.attention],
        "other_flops": record.other_flops,
        "activation_elements": record.activation_elements,
        "added_elements": record.added_elements,
    }


def trace_module_for_planner(
    module: nn.Module, kind: str, request: Mapping[str, Any], tell: TellProgress
) -> dict[str, Any]:
    """The traces that the planner asks for (phalanx.job.module_probe), of a module whose weights
    are no longer needed; or why there are none. `tell` hears of each microbatch that begins."""
    facts = getattr(module, SHAPE_FACTS_ATTRIBUTE, {})
    form = request.get("sample_form")
    if request.get("document_masks"):
        return {"why_untraced": "its masks of documents are not traced"}
    traces = []
    try:
        objective = _resolve_objective_of_request(kind, request)
        with FakeTensorMode(allow_non_fake_inputs=True), _treating_samples_as_single_sequences():
            module.to_empty(device="cpu")
            module.train()
            batches = {
                str(precision): _list_batches_to_trace(
                    facts, int(request["seq_len"]), str(precision), form
                )
                for precision in request["precisions"]
            }
            num_batches, num_done = sum(map(len, batches.values())), 0
            for precision, points in batches.items():
                bodies = []
                for point in points:
                    tell(num_done, num_batches, f"traces {point.describe()}")
                    bodies.append(trace_module(module, point, objective))
                    num_done += 1
                traces.append({"precision": precision, "points": bodies})
    except Exception as error:
        return {"why_untraced": _first_line_of_error(error)}
    return {"traces": traces, "has_own_samples": form is not None}


def _list_batches_to_trace(
    facts: Mapping[str, int],
    seq_len: int,
    precision: str,
    form: Mapping[str, Any] | None = None,
) -> list[TracedBatch]:
    """The microbatches to trace: one sample and two, and one of half the length. `form`: of the
    samples of a user's own dataset, by name."""
    if form is not None:
        sample = tuple((name, tuple(shape), dtype) for name, (shape, dtype) in form.items())
        return [TracedBatch(number, 1, precision, sample=sample) for number in (1, 2)]
    size = facts.get("image_size", 0)
    if size:
        image = (facts["num_channels"], size, size)
        return [TracedBatch(number, 1, precision, image) for number in (1, 2)]
    points = [TracedBatch(number, seq_len, precision) for number in (1, 2)]
    if seq_len > 1:
        points.append(TracedBatch(1, seq_len // 2, precision))
    return points


def _resolve_objective_of_request(kind: str, request: Mapping[str, Any]) -> Objective:
    name, chunk = request.get("objective"), int(request["loss_chunk_tokens"])
    if name is not None:
        objective: Objective = import_object_of_kind(name, "phalanx.nn.models", "objective")
        return objective
    if is_hugging_face(kind):
        return build_logits_cross_entropy(chunk)
    built_in = causal_cross_entropy(chunk)

    def read_logits(outputs: Any, batch: Mapping[str, Any]) -> Any:
        if isinstance(outputs, Mapping | tuple | list):
            raise UntraceableModuleError(
                f"it returns a {type(outputs).__name__}, which the built-in objective cannot read:"
                " return logits [..., vocab], or set model.objective"
            )
        return built_in(outputs, batch)

    return read_logits


@contextmanager
def _treating_samples_as_single_sequences() -> Iterator[None]:
    """Inside, transformers takes each sample for one sequence, as it finds it to be in training.

    It looks at the positions' numbers, which a trace has none of, and makes a mask of all pairs
    where it cannot see them.
    """
    masks = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if masks is None or original is None:
        yield
        return
    vars(masks)["find_packed_sequence_indices"] = lambda position_ids: None
    try:
        yield
    finally:
        vars(masks)["find_packed_sequence_indices"] = original
