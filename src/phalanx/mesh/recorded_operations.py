"""Operations that were recorded while a module was built, and their replay for the values of some
tensors alone.

Replayed in the same order from the same state of the random generator they give the same bits, one
tensor after another: what is not needed any more is let go, and what a later operation overwrites
is drawn only to move the generator on, where something random is needed after it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

_RANDOM_OPERATORS = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class RecordedTensorView:
    """A recorded tensor: a strided view of the memory number `storage`. `covers`: of all of it."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    covers: bool


@dataclass(frozen=True)
class RecordedOperation:
    """One call of an operator, with a RecordedTensorView in place of each recorded tensor.

    `created` are numbers of the memory that it makes, `written` of that which it changes, `read` of
    that whose values it needs. `overwrites`: all of `written` is new.
    """

    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    outputs: tuple[RecordedTensorView, ...]
    created: frozenset[int]
    written: frozenset[int]
    read: frozenset[int]
    overwrites: bool

    @property
    def is_random(self) -> bool:
        return _RANDOM_OPERATORS in self.function.tags

    @property
    def defined(self) -> frozenset[int]:
        """The memory whose values are known from here on, whatever was before."""
        return self.created | self.written if self.overwrites else self.created


@dataclass
class RecordedOperations:
    """Operations in the order in which they were called, and the generator's state before them."""

    random_state: torch.Tensor
    operations: list[RecordedOperation] = field(default_factory=list)

    def digest(self) -> str:
        """A hash of all that decides about the values."""
        hasher = hashlib.sha256(self.random_state.numpy().tobytes())
        for operation in self.operations:
            leaves, _ = tree_flatten((operation.arguments, dict(operation.options)))
            hasher.update(f"{operation.function}{operation.outputs}".encode())
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    leaf = leaf.flatten().tolist()
                hasher.update(repr(leaf).encode())
        return hasher.hexdigest()

    def compute_tensor_values(
        self,
        view_of_tensor: Mapping[str, RecordedTensorView],
        receive: Callable[[str, torch.Tensor], None],
    ) -> None:
        """Call `receive` with the value of each of `view_of_tensor`, as soon as it is final."""
        is_live, last_use, num_before_last_draw = self._select_operations_to_replay(
            ref.storage for ref in view_of_tensor.values()
        )
        due: dict[int, list[int]] = {}
        for storage, index in last_use.items():
            due.setdefault(index, []).append(storage)
        names_of: dict[int, list[str]] = {}
        for name, ref in view_of_tensor.items():
            names_of.setdefault(ref.storage, []).append(name)
        memory: dict[int, torch.UntypedStorage] = {}
        with _using_generator_state(self.random_state), torch.no_grad():
            for index, operation in enumerate(self.operations):
                if is_live[index]:
                    _run_recorded_operation(operation, memory)
                elif operation.is_random and index < num_before_last_draw:
                    _draw_and_discard(operation)
                for storage in due.get(index, ()):
                    for name in names_of.get(storage, ()):
                        receive(name, _view_of_storage(view_of_tensor[name], memory[storage]))
                    del memory[storage]

    def _select_operations_to_replay(
        self, needed_storages: Iterator[int]
    ) -> tuple[list[bool], dict[int, int], int]:
        """Mark the operations that must run for the memory `needed_storages`, find the last
        operation that uses each memory, and count the operations before the last one that must run
        and is random: after it the generator's state decides about nothing."""
        needed = set(needed_storages)
        is_live = [False] * len(self.operations)
        last_use: dict[int, int] = {}
        num_before_last_draw = 0
        for index in range(len(self.operations) - 1, -1, -1):
            operation = self.operations[index]
            has_effect = not needed.isdisjoint(operation.created | operation.written)
            moves_generator = operation.is_random and index < num_before_last_draw
            if not has_effect and (not moves_generator or _can_draw_without_values(operation)):
                continue
            is_live[index] = True
            if operation.is_random:
                num_before_last_draw = max(num_before_last_draw, index)
            needed -= operation.defined
            needed |= operation.read
            for storage in operation.created | operation.written | operation.read:
                last_use.setdefault(storage, index)
        return is_live, last_use, num_before_last_draw


def _can_draw_without_values(operation: RecordedOperation) -> bool:
    """True if how many random numbers it draws depends on shapes alone: it can be drawn without
    what it reads."""
    return operation.overwrites or not operation.read | operation.written


def _run_recorded_operation(
    operation: RecordedOperation, memory: dict[int, torch.UntypedStorage]
) -> None:
    for storage in operation.written:
        if storage not in memory:
            # All of it is overwritten now: what it was made with was never run.
            ref = next(ref for ref in _iterate_recorded_views(operation) if ref.storage == storage)
            memory[storage] = _allocate_view(ref).untyped_storage()

    def realize(leaf: Any) -> Any:
        return (
            _view_of_storage(leaf, memory[leaf.storage])
            if isinstance(leaf, RecordedTensorView)
            else leaf
        )

    arguments = tree_map(realize, operation.arguments)
    returned = operation.function(*arguments, **tree_map(realize, dict(operation.options)))
    outputs = [leaf for leaf in tree_flatten(returned)[0] if isinstance(leaf, torch.Tensor)]
    for ref, output in zip(operation.outputs, outputs, strict=True):
        if ref.storage in memory:
            continue
        if (output.stride(), output.storage_offset()) != (ref.stride, ref.offset):
            output = _allocate_view(ref).copy_(output)
        memory[ref.storage] = output.untyped_storage()


def _draw_and_discard(operation: RecordedOperation) -> None:
    """Draw what the operation draws, and forget it."""

    def allocate(leaf: Any) -> Any:
        return _allocate_view(leaf) if isinstance(leaf, RecordedTensorView) else leaf

    arguments = tree_map(allocate, operation.arguments)
    operation.function(*arguments, **tree_map(allocate, dict(operation.options)))


def _iterate_recorded_views(operation: RecordedOperation) -> Iterator[RecordedTensorView]:
    for leaf in tree_flatten((operation.arguments, dict(operation.options)))[0]:
        if isinstance(leaf, RecordedTensorView):
            yield leaf


def _view_of_storage(ref: RecordedTensorView, storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=ref.dtype)
    return empty.set_(storage, ref.offset, ref.size, ref.stride)  # type: ignore[call-overload,no-any-return]


def _allocate_view(ref: RecordedTensorView) -> torch.Tensor:
    """A tensor of this view, in memory that begins where the view's does."""
    last = sum((size - 1) * step for size, step in zip(ref.size, ref.stride, strict=True))
    length = ref.offset + last + 1 if 0 not in ref.size else ref.offset
    return _view_of_storage(ref, torch.empty(length, dtype=ref.dtype).untyped_storage())


@contextlib.contextmanager
def _using_generator_state(state: torch.Tensor) -> Iterator[None]:
    """The random generator in this state for the body, and as it was afterwards."""
    # Not torch.random's functions, which are refused while a module is built.
    generator = torch.default_generator
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)
