"""Looks at the types in which the ranks of a layout reduce gradients, where it computes in a narrow
one: the bands of such a row are wider than what a narrow reduction rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from phalanx.mesh.c10d_calls import HandlerDepth, Operator, handling_c10d_calls
from phalanx.mesh.mesh import Mesh
from phalanx.plan.plan import Plan
from phalanx.verify.number_types import is_narrow_dtype

REDUCTIONS_JUDGED = "that gradients are reduced over data parallelism in float32 or wider"
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")


@dataclass
class ReductionTypes:
    """Watches the reductions of this rank, but for those of `ignored_groups`.

    `narrow`: each kind of those in a narrow type, as (step from 0, what it is, type, number of
    ranks), in the order in which they came first.
    """

    ignored_groups: frozenset[str]
    narrow: list[tuple[int, str, str, int]] = field(default_factory=list)
    _num_updates: int = 0
    _known: set[tuple[str, str, int]] = field(default_factory=set)

    def count_update(self, *_: object) -> None:
        """After an update: the next step begins."""
        self._num_updates += 1

    def handle(self, operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
        """Look at a call, and make it."""
        if operator.words in _REDUCTIONS:
            self._look_at_reduction(operator, args)
        return proceed()

    def _look_at_reduction(self, operator: Operator, args: Sequence[Any]) -> None:
        tensors = args[operator.tensors_at]
        first = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        if not first.is_floating_point() or first.dtype.itemsize >= torch.float32.itemsize:
            return
        group = dist.ProcessGroup.unbox(args[operator.group_at])
        if group.group_name in self.ignored_groups:
            return
        kind = operator.words, str(first.dtype).removeprefix("torch."), group.size()
        if kind not in self._known:
            self._known.add(kind)
            self.narrow.append((self._num_updates, *kind))


def are_reduction_types_judged(plan: Plan, dtype: str) -> bool:
    """True for rows of a narrow type whose ranks reduce gradients, and do not compress them."""
    return (
        is_narrow_dtype(dtype)
        and plan.layout.gradient_reduction_layout.data_parallel_size > 1
        and not plan.is_layout_free
        and plan.parallel.compress == "none"
    )


@contextmanager
def watching_reduction_types(plan: Plan, mesh: Mesh, dtype: str) -> Iterator[ReductionTypes]:
    """Watch the reductions of the body, where they are judged."""
    ignored = set()
    if plan.layout.tp > 1:
        # Its ranks add up activations, in the type that these have.
        ignored.add(mesh.submesh("tp").get_group().group_name)
    types = ReductionTypes(frozenset(ignored))
    if not are_reduction_types_judged(plan, dtype):
        yield types
        return
    with handling_c10d_calls(types, HandlerDepth.WATCHES):
        yield types
