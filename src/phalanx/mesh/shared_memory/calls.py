"""What each operator of c10d asks for, as an operation of a channel.

A builder returns None for a call that shared memory does not take: a type that it cannot reduce, a
layout that is not strided, sizes and types that do not belong together, which gloo refuses in its
own words (what it would take, a builder refuses). The same call is one that it does not take on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.core.block_sizes import get_block_sizes
from phalanx.mesh.shared_memory.arena import Bytes
from phalanx.mesh.shared_memory.messages import Receive, Send
from phalanx.mesh.shared_memory.operations import Collective, Operation
from phalanx.mesh.shared_memory.reduction import DTYPES, can_reduce
from phalanx.mesh.shared_memory.tensors import view_bytes
from phalanx.mesh.shared_memory.transfers import (
    AllGather,
    AllReduceSlices,
    AllReduceWhole,
    AllToAll,
    Broadcast,
    ReduceScatter,
    ReduceToRoot,
    Transfer,
)


@dataclass(frozen=True)
class TakenCall:
    """A call as an operation. `value` is what torch's callers get of it, for futures;
    `make_result` puts it beside the Work as the operator returns them."""

    operation: Operation
    value: Any
    make_result: Callable[[Any], Any]


@dataclass(frozen=True)
class CallContext:
    """Who calls: this rank's number in the group, how many it has, and the reduction that was
    asked for (empty where it is not known). `locate` tells where a tensor lies that other ranks
    see, and None of others."""

    rank: int
    num_ranks: int
    reduce_op: str
    locate: Callable[[torch.Tensor], int | None]


Builder = Callable[[CallContext, Sequence[Any]], TakenCall | None]


@dataclass
class _Places:
    """The bytes of tensors. What does not lie in one piece is copied: before, and back at the
    end."""

    _copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def read(self, tensor: torch.Tensor) -> Bytes:
        """The bytes of a tensor that is read."""
        return view_bytes(tensor.detach().contiguous())

    def write(self, tensor: torch.Tensor, *, keeps_values: bool = False) -> Bytes:
        """The bytes of a tensor that is written, and read before where it `keeps_values`."""
        # Without the version counter, which counts what autograd must know of.
        target = tensor.data
        if target.is_contiguous():
            return view_bytes(target)
        copy = torch.empty(target.shape, dtype=target.dtype)
        if keeps_values:
            copy.copy_(target)
        self._copies.append((target, copy))
        return view_bytes(copy)

    def finish(self) -> None:
        for target, copy in self._copies:
            target.copy_(copy)


def _is_plain(*tensors: torch.Tensor) -> bool:
    return all(
        each.is_cpu and each.layout is torch.strided and not each.is_neg() and not each.is_conj()
        for each in tensors
    )


def _is_multiple(long: torch.Tensor, short: torch.Tensor, times: int) -> bool:
    """True if `long` has `times` the elements of `short`, of the same type."""
    return long.dtype == short.dtype and long.numel() == times * short.numel()


def _are_alike(rows: Sequence[torch.Tensor], tensor: torch.Tensor, num_rows: int) -> bool:
    """True for `num_rows` rows of the size and type of `tensor`."""
    return len(rows) == num_rows and all(_is_multiple(row, tensor, 1) for row in rows)


def _moved_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The type that the ranks compare: of types that are only moved it is bytes."""
    return tensor.dtype if tensor.dtype in DTYPES else torch.uint8


def _list_chunks(num_bytes: int, num_parts: int = 1) -> list[slice]:
    """Ranges of `num_bytes`, each so long that `num_parts` of them are a chunk; one at least."""
    length = max(64, get_block_sizes().shared_chunk_bytes // num_parts // 64 * 64)
    starts = range(0, num_bytes, length) or range(1)
    return [slice(start, min(num_bytes, start + length)) for start in starts]


def _as_chunks_of(num_bytes: int, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
    """`transfers`, which move a tensor of `num_bytes` by chunks. Ranks must have all of it alike:
    else a chunk of one could be taken for the whole of a shorter one."""
    for transfer in transfers:
        transfer.agreed_bytes = num_bytes
    return transfers


def _all_reduce_transfers(
    context: CallContext, values: Bytes, dtype: torch.dtype, place: int | None
) -> Sequence[Transfer]:
    rank, num_ranks, reduce_op = context.rank, context.num_ranks, context.reduce_op
    if len(values) <= get_block_sizes().shared_whole_bytes:
        return [AllReduceWhole(values, dtype, reduce_op, rank)]
    transfers: list[Transfer] = []
    for chunk in _list_chunks(len(values)):
        chunk_place = None
        if place is not None:
            chunk_place = place + chunk.start
        transfers.append(
            AllReduceSlices(values[chunk], dtype, reduce_op, rank, num_ranks, chunk_place)
        )
    return _as_chunks_of(len(values), transfers)


def _build_all_reduce(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    tensors = args[0]
    if not _is_plain(*tensors) or not all(can_reduce(t.dtype, context.reduce_op) for t in tensors):
        return None
    places = _Places()
    transfers: list[Transfer] = []
    for tensor in tensors:
        place = None
        if tensor.is_contiguous():
            place = context.locate(tensor)
        values = places.write(tensor, keeps_values=True)
        transfers += _all_reduce_transfers(context, values, tensor.dtype, place)
    operation = Collective("all_reduce", places.finish, transfers=transfers)
    return TakenCall(operation, tensors, lambda work: (tensors, work))


def _build_all_reduce_coalesced(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    call = _build_all_reduce(context, args)
    if call is None:
        return None
    return TakenCall(call.operation, call.value, lambda work: work)


def _all_gather_transfers(
    rows: Sequence[Bytes], values: Bytes, dtype: torch.dtype, rank: int
) -> Sequence[Transfer]:
    transfers = [
        AllGather([row[chunk] for row in rows], values[chunk], dtype, rank)
        for chunk in _list_chunks(len(values))
    ]
    return _as_chunks_of(len(values), transfers)


def _build_all_gather(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    outputs, inputs = args[0], args[1]
    if not all(_is_plain(source, *rows) for source, rows in zip(inputs, outputs, strict=True)):
        return None
    for source, rows in zip(inputs, outputs, strict=True):
        if not _are_alike(rows, source, context.num_ranks):
            return None
    places = _Places()
    transfers: list[Transfer] = []
    for source, rows in zip(inputs, outputs, strict=True):
        transfers += _all_gather_transfers(
            [places.write(row) for row in rows],
            places.read(source),
            _moved_dtype(source),
            context.rank,
        )
    operation = Collective("all_gather", places.finish, transfers=transfers)
    return TakenCall(operation, outputs, lambda work: (outputs, work))


def _gather_into(
    context: CallContext, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Collective | None:
    """All-gather of each input, with the rows of its output one after another."""
    places = _Places()
    transfers: list[Transfer] = []
    for output, source in zip(outputs, inputs, strict=True):
        if not _is_plain(output, source) or not _is_multiple(output, source, context.num_ranks):
            return None
        rows, dtype = _split_evenly(places.write(output), context.num_ranks), _moved_dtype(source)
        transfers += _all_gather_transfers(rows, places.read(source), dtype, context.rank)
    return Collective("all_gather", places.finish, transfers=transfers)


def _reduce_scatter_transfers(
    result: Bytes, rows: Sequence[Bytes], dtype: torch.dtype, reduce_op: str, rank: int
) -> Sequence[Transfer]:
    transfers = [
        ReduceScatter(result[chunk], [row[chunk] for row in rows], dtype, reduce_op, rank)
        for chunk in _list_chunks(len(result), len(rows))
    ]
    return _as_chunks_of(len(result) * len(rows), transfers)


def _scatter_into(
    context: CallContext, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Collective | None:
    """Reduce-scatter of each input, with its rows one after another."""
    places = _Places()
    transfers: list[Transfer] = []
    for output, source in zip(outputs, inputs, strict=True):
        if not _is_plain(output, source) or not _is_multiple(source, output, context.num_ranks):
            return None
        if not can_reduce(source.dtype, context.reduce_op):
            return None
        transfers += _reduce_scatter_transfers(
            places.write(output),
            _split_evenly(places.read(source), context.num_ranks),
            source.dtype,
            context.reduce_op,
            context.rank,
        )
    return Collective("reduce_scatter", places.finish, transfers=transfers)


_CollectiveOfTensors = Callable[
    [CallContext, Sequence[torch.Tensor], Sequence[torch.Tensor]], Collective | None
]


def _build_of_one_tensor(collect: _CollectiveOfTensors) -> Builder:
    """Of an operator that takes an output and an input, and returns the output with its Work."""

    def build(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
        output, source = args[0], args[1]
        operation = collect(context, [output], [source])
        if operation is None:
            return None
        return TakenCall(operation, output, lambda work: (output, work))

    return build


def _build_of_tensors(collect: _CollectiveOfTensors) -> Builder:
    """Of an operator that takes lists of outputs and inputs, and returns a Work."""

    def build(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
        outputs, inputs = args[0], args[1]
        operation = collect(context, outputs, inputs)
        if operation is None:
            return None
        return TakenCall(operation, outputs, lambda work: work)

    return build


def _build_reduce_scatter(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    outputs, inputs = args[0], args[1]
    places = _Places()
    transfers: list[Transfer] = []
    for output, rows in zip(outputs, inputs, strict=True):
        if not _is_plain(output, *rows) or not can_reduce(output.dtype, context.reduce_op):
            return None
        if not _are_alike(rows, output, context.num_ranks):
            return None
        transfers += _reduce_scatter_transfers(
            places.write(output),
            [places.read(row) for row in rows],
            output.dtype,
            context.reduce_op,
            context.rank,
        )
    operation = Collective("reduce_scatter", places.finish, transfers=transfers)
    return TakenCall(operation, outputs, lambda work: (outputs, work))


def _build_broadcast(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    tensors, root = args[0], args[2]
    if not _is_plain(*tensors):
        return None
    places = _Places()
    transfers: list[Transfer] = []
    for tensor in tensors:
        values = places.write(tensor, keeps_values=True)
        chunks = [
            Broadcast(values[chunk], _moved_dtype(tensor), context.rank, root)
            for chunk in _list_chunks(len(values))
        ]
        transfers += _as_chunks_of(len(values), chunks)
    operation = Collective("broadcast", places.finish, transfers=transfers)
    return TakenCall(operation, tensors, lambda work: (tensors, work))


def _build_reduce(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    tensors, root = args[0], args[3]
    if not _is_plain(*tensors) or not all(can_reduce(t.dtype, context.reduce_op) for t in tensors):
        return None
    places = _Places()
    transfers: list[Transfer] = []
    for tensor in tensors:
        values = places.write(tensor, keeps_values=True)
        chunks = [
            ReduceToRoot(values[chunk], tensor.dtype, context.reduce_op, context.rank, root)
            for chunk in _list_chunks(len(values))
        ]
        transfers += _as_chunks_of(len(values), chunks)
    operation = Collective("reduce", places.finish, transfers=transfers)
    return TakenCall(operation, tensors, lambda work: work)


def _build_all_to_all(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    outputs, inputs = args[0], args[1]
    if not _is_plain(*outputs, *inputs):
        return None
    if not len(outputs) == len(inputs) == context.num_ranks:
        return None
    if any(each.dtype != inputs[0].dtype for each in (*outputs, *inputs)):
        return None
    places = _Places()
    transfer = AllToAll(
        [places.write(each) for each in outputs],
        [places.read(each) for each in inputs],
        _moved_dtype(inputs[0]),
        context.rank,
    )
    operation = Collective("all_to_all", places.finish, transfers=[transfer])
    return TakenCall(operation, outputs, lambda work: (outputs, work))


def _build_all_to_all_base(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    output, source, output_rows, input_rows = args[0], args[1], args[3], args[4]
    if not _is_plain(output, source):
        return None
    _require_parts(context, output, source, [*output_rows, *input_rows])
    if output_rows or input_rows:
        if not _can_split(output, output_rows, context.num_ranks):
            return None
        if not _can_split(source, input_rows, context.num_ranks):
            return None
    elif output.numel() != source.numel():
        return None
    places = _Places()
    transfer = AllToAll(
        _split_by_rows(places.write(output), output, output_rows, context.num_ranks),
        _split_by_rows(places.read(source), source, input_rows, context.num_ranks),
        _moved_dtype(source),
        context.rank,
    )
    operation = Collective("all_to_all", places.finish, transfers=[transfer])
    return TakenCall(operation, output, lambda work: work)


def _build_barrier(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    if not args[0].is_cpu:
        return None
    operation = Collective("barrier", transfers=[Transfer()])
    return TakenCall(operation, None, lambda work: work)


def _build_send(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    tensor, target, tag = args[0][0], args[2], args[3]
    if not _is_plain(tensor):
        return None
    values = _Places().read(tensor)
    send = Send("send", target=target, tag=max(0, tag), values=values)
    return TakenCall(send, None, lambda work: work)


def _build_receive(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    return _receive_from(args[0][0], args[2], args[3])


def _build_receive_of_any(context: CallContext, args: Sequence[Any]) -> TakenCall | None:
    return _receive_from(args[0][0], None, args[2])


def _receive_from(tensor: torch.Tensor, source: int | None, tag: int) -> TakenCall | None:
    if not _is_plain(tensor):
        return None
    places = _Places()
    # A message may be shorter than the tensor.
    values = places.write(tensor, keeps_values=True)
    receive = Receive("recv", places.finish, source=source, tag=max(0, tag), values=values)
    return TakenCall(receive, [tensor], lambda work: work)


def _split_evenly(values: Bytes, num_parts: int) -> list[Bytes]:
    length = len(values) // num_parts
    return [values[part * length : (part + 1) * length] for part in range(num_parts)]


def _require_parts(
    context: CallContext, output: torch.Tensor, source: torch.Tensor, num_rows: Sequence[int]
) -> None:
    """Raise ValueError where gloo would move bytes that are not there: it believes the output's
    type, the sign of a split, and that a tensor without splits divides."""
    if output.dtype != source.dtype:
        raise ValueError(f"all_to_all of {source.dtype} into {output.dtype}")
    if min(num_rows, default=0) < 0:
        raise ValueError(f"all_to_all of {min(num_rows)} rows")
    if not num_rows and source.numel() % context.num_ranks:
        raise ValueError(
            f"all_to_all of {source.numel()} elements, which do not divide by {context.num_ranks}"
        )


def _can_split(tensor: torch.Tensor, num_rows: Sequence[int], num_parts: int) -> bool:
    """True if the first dimension is what `num_rows` add up to, or divides where none are given."""
    if tensor.ndim == 0:
        return False
    if not num_rows:
        return tensor.shape[0] % num_parts == 0
    return len(num_rows) == num_parts and sum(num_rows) == tensor.shape[0]


def _split_by_rows(
    values: Bytes, tensor: torch.Tensor, num_rows: Sequence[int], num_parts: int
) -> list[Bytes]:
    """Parts of `num_rows` of the first dimension each; equal ones where none are given."""
    if not num_rows:
        return _split_evenly(values, num_parts)
    row_bytes = 0
    if tensor.shape[0]:
        row_bytes = tensor.nbytes // tensor.shape[0]
    parts, start = [], 0
    for count in num_rows:
        parts.append(values[start : start + count * row_bytes])
        start += count * row_bytes
    return parts


BUILDERS: dict[str, Builder] = {
    "allreduce_": _build_all_reduce,
    "allreduce_coalesced_": _build_all_reduce_coalesced,
    "allgather_": _build_all_gather,
    "_allgather_base_": _build_of_one_tensor(_gather_into),
    "allgather_into_tensor_coalesced_": _build_of_tensors(_gather_into),
    "_reduce_scatter_base_": _build_of_one_tensor(_scatter_into),
    "reduce_scatter_": _build_reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _build_of_tensors(_scatter_into),
    "broadcast_": _build_broadcast,
    "reduce_": _build_reduce,
    "alltoall_": _build_all_to_all,
    "alltoall_base_": _build_all_to_all_base,
    "barrier": _build_barrier,
    "send": _build_send,
    "recv_": _build_receive,
    "recv_any_source_": _build_receive_of_any,
}
