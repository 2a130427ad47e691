"""Looks at the types in which the ranks of a layout reduce gradients, where it computes in a narrow
one: the bands of such a row are wider than what a narrow reduction rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.mesh.c10d_calls import HandlerDepth, Operator, handling_c10d_calls
from phalanx.mesh.compat import list_unsharded_fsdp_gradients
from phalanx.mesh.logical import full_name
from phalanx.mesh.mesh import Mesh
from phalanx.nn.attention import Attention
from phalanx.nn.latent_attention import LatentAttention
from phalanx.parallel.model import ParallelModel
from phalanx.plan.plan import Plan
from phalanx.verify.number_types import is_narrow_dtype
from phalanx.verify.trace_facts import SUM_OVER_MICROBATCHES

REDUCTIONS_JUDGED = "that gradients are reduced over data parallelism in float32 or wider"
TABLES_JUDGED = "that blocks rotate by tables in float32 or wider"
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

    def watch_written_gradients(self, model: ParallelModel) -> None:
        """Look at the gradients that FSDP keeps for a reduction each time that deferred gradients
        of weights were written: as they are written they have the compute type."""
        context = model._context
        if isinstance(context.root, FSDPModule):
            look = functools.partial(self._look_at_kept_gradients, context.root)
            context.hooks.after_weight_grads.append(look)

    def _look_at_kept_gradients(self, root: nn.Module) -> None:
        for gradient in list_unsharded_fsdp_gradients(root):
            if gradient.dtype.itemsize < torch.float32.itemsize:
                self._note_narrow_kind(SUM_OVER_MICROBATCHES, gradient.dtype, 1)

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
        self._note_narrow_kind(operator.words, first.dtype, group.size())

    def _note_narrow_kind(self, words: str, dtype: torch.dtype, num_ranks: int) -> None:
        kind = words, str(dtype).removeprefix("torch."), num_ranks
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


def are_rotary_tables_judged(plan: Plan, dtype: str) -> bool:
    """True for rows of a narrow type, but for those that leave small parameters whole: there FSDP
    casts what comes into a block, and docs say so."""
    return is_narrow_dtype(dtype) and plan.parallel.keep_whole_below == 0


class RotaryTableTypes:
    """The types of the rotary tables that blocks get, where rows judge them.

    `narrow`: the name of each attention that got one in fewer digits than float32 has, and its
    type, in the order in which they were called first.
    """

    def __init__(self, module: nn.Module, plan: Plan, dtype: str) -> None:
        self.narrow: dict[str, str] = {}
        self.is_judged = False
        if not are_rotary_tables_judged(plan, dtype):
            return
        for name, part in module.named_modules():
            if isinstance(part, Attention | LatentAttention):
                hook = functools.partial(self._look_at_table, full_name(name))
                part.register_forward_pre_hook(hook)

    def _look_at_table(self, name: str, part: nn.Module, args: tuple[Any, ...]) -> None:
        table = args[1]
        if table is None:
            return
        self.is_judged = True
        if table.dtype.itemsize < torch.float32.itemsize:
            self.narrow.setdefault(name, str(table.dtype).removeprefix("torch."))
