"""What a rank says to others: each collective with its count, bytes, group and caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from phalanx.mesh.mesh import Mesh
from phalanx.plan.layout import AXES
from phalanx.verify.dry_run.callers import OperationCaller

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
ALL_TO_ALL, BROADCAST, REDUCE = "all_to_all", "broadcast", "reduce"
SEND, RECEIVE, BARRIER = "send", "receive", "barrier"

# By the name of torch's operator: the kind, and which argument has the bytes that count. Of an
# all-gather those are its output's, of a reduce-scatter its input's: the whole message.
_OPERATORS: dict[str, tuple[str, int]] = {
    "c10d::allreduce_": (ALL_REDUCE, 0),
    "c10d::allreduce_coalesced_": (ALL_REDUCE, 0),
    "c10d::allgather_": (ALL_GATHER, 0),
    "c10d::_allgather_base_": (ALL_GATHER, 0),
    "c10d::allgather_coalesced_": (ALL_GATHER, 0),
    "c10d::allgather_into_tensor_coalesced_": (ALL_GATHER, 0),
    "c10d::reduce_scatter_": (REDUCE_SCATTER, 1),
    "c10d::_reduce_scatter_base_": (REDUCE_SCATTER, 1),
    "c10d::reduce_scatter_tensor_coalesced_": (REDUCE_SCATTER, 1),
    "c10d::alltoall_": (ALL_TO_ALL, 1),
    "c10d::alltoall_base_": (ALL_TO_ALL, 1),
    "c10d::broadcast_": (BROADCAST, 0),
    "c10d::reduce_": (REDUCE, 0),
    "c10d::send": (SEND, 0),
    "c10d::recv_": (RECEIVE, 0),
    "c10d::recv_any_source_": (RECEIVE, 0),
    "c10d::barrier": (BARRIER, 0),
}
_FUNCTIONAL: dict[str, str] = {
    "all_reduce": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
    "broadcast": BROADCAST,
}


@dataclass(frozen=True)
class CollectiveCall:
    """One call. `axis` names the axes of the layout along which the ranks of the group differ.

    `num_bytes` is the whole message: what is reduced, all that is gathered, all that is scattered
    or sent. `sent_bytes` is what this rank sends of it by the algorithms of `parallel/traffic.py`.
    """

    kind: str
    axis: str
    group_size: int
    first_rank: int
    num_bytes: int
    sent_bytes: float
    phase: str
    purpose: str
    caller: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class CollectiveLog:
    """Calls of collectives, equal ones counted together."""

    mesh: Mesh
    counts: Counter[CollectiveCall] = field(default_factory=Counter)
    _axes: dict[tuple[int, ...], str] = field(default_factory=dict)
    _groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def note(
        self,
        func: Any,
        args: Sequence[Any],
        output: Any,
        *,
        phase: str,
        purpose: str,
        caller: OperationCaller,
    ) -> None:
        """Note the call of `func`, if it is one of torch's collectives."""
        name = func._schema.name
        if func.namespace == "c10d":
            entry = _OPERATORS.get(name)
            if entry is None:
                return
            kind, where = entry
            group = _find_group_argument(args)
            message = args[where]
        else:
            short = name.partition("::")[2].removesuffix("_out").removesuffix("_")
            kind = _FUNCTIONAL.get(short, "")
            if not kind:
                return
            group = _resolve_group_by_name(args)
            message = output if kind == ALL_GATHER else args[0]
        num_bytes = 0 if kind == BARRIER else _sum_tensor_bytes(message)
        sent = None
        if kind == ALL_TO_ALL:
            _, ranks = self._look_up_group_axes(group)
            sent = _compute_all_to_all_sent_bytes(
                args, num_bytes, ranks.index(self.mesh.rank), len(ranks)
            )
        self.add(
            kind,
            group,
            num_bytes,
            phase=phase,
            purpose=purpose,
            caller=caller.line,
            sent_bytes=sent,
        )

    def add(
        self,
        kind: str,
        group: dist.ProcessGroup,
        num_bytes: int,
        *,
        phase: str,
        purpose: str,
        caller: str,
        sent_bytes: float | None = None,
    ) -> None:
        """Add one call; without `sent_bytes` a rank sends what ring algorithms have it send."""
        axis, ranks = self._look_up_group_axes(group)
        if sent_bytes is None:
            sent_bytes = _compute_ring_sent_bytes(kind, num_bytes, len(ranks))
        self.counts[
            CollectiveCall(
                kind, axis, len(ranks), ranks[0], num_bytes, sent_bytes, phase, purpose, caller
            )
        ] += 1

    def _look_up_group_axes(self, group: dist.ProcessGroup) -> tuple[str, tuple[int, ...]]:
        if group.group_name not in self._groups:
            ranks = tuple(dist.get_process_group_ranks(group))
            self._groups[group.group_name] = self._find_axes_of_ranks(ranks), ranks
        return self._groups[group.group_name]

    def _find_axes_of_ranks(self, ranks: tuple[int, ...]) -> str:
        """The axes along which `ranks` differ; "ep" for those of an expert-parallel group, "all"
        for all ranks where more than one axis has several."""
        layout = self.mesh.layout
        if self.mesh.expert_mesh is not None:
            for axis in ("ep", "expert_shard"):
                group = self.mesh.submesh(axis).get_group()
                if len(ranks) > 1 and tuple(dist.get_process_group_ranks(group)) == ranks:
                    return axis
        coordinates = [layout.coordinates(rank) for rank in ranks]
        differing = []
        for axis in AXES:
            if len({each[axis] for each in coordinates}) > 1:
                differing.append(axis)
        if len(differing) > 1 and len(ranks) == layout.world_size:
            return "all"
        return " x ".join(differing) or "one rank"


def _find_group_argument(args: Sequence[Any]) -> dist.ProcessGroup:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
    raise AssertionError("a collective of torch without a process group")


def _resolve_group_by_name(args: Sequence[Any]) -> dist.ProcessGroup:
    names = [value for value in args if isinstance(value, str)]
    # Of an all-reduce the first text is the operation.
    return dist.distributed_c10d._resolve_process_group(names[-1])


def _sum_tensor_bytes(message: Any) -> int:
    leaves, _ = tree_flatten(message)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _compute_ring_sent_bytes(kind: str, num_bytes: int, num_ranks: int) -> float:
    """Bytes that one rank sends by the ring algorithms that `StepTraffic` counts by."""
    share_of_others = (num_ranks - 1) / num_ranks
    shares = {
        ALL_REDUCE: 2 * share_of_others,
        ALL_GATHER: share_of_others,
        REDUCE_SCATTER: share_of_others,
        SEND: 1.0,
    }
    # Over gloo an all-gather is a broadcast of each rank's row, a reduce-scatter a reduction.
    shares |= {BROADCAST: share_of_others, REDUCE: share_of_others}
    return num_bytes * shares.get(kind, 0.0)


def _compute_all_to_all_sent_bytes(
    args: Sequence[Any], num_bytes: int, rank: int, num_ranks: int
) -> float:
    """Bytes of an all-to-all that leave this rank: all but its own part."""
    lists = [value for value in args if isinstance(value, list) and len(value) == num_ranks]
    # torch's arguments are (output, input, group, output sizes, input sizes).
    if len(lists) < 2 or not all(isinstance(size, int) for size in lists[-1]):
        return num_bytes * (num_ranks - 1) / num_ranks
    sizes = lists[-1]
    if not sum(sizes):
        return 0.0
    return num_bytes * (sum(sizes) - sizes[rank]) / sum(sizes)


def sum_sent_bytes_by_axis(counts: Mapping[CollectiveCall, int]) -> dict[str, float]:
    """Bytes that the rank sends, by axis."""
    total: dict[str, float] = {}
    for collective, count in counts.items():
        total[collective.axis] = total.get(collective.axis, 0.0) + count * collective.sent_bytes
    return total
