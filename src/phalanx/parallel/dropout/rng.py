"""What dropout is a function of: seed, step, row of the batch, the module's name, its call and the
place in the row.

Nothing of it depends on the layout. A tensor's rows are those of the microbatch, or a fixed number
for each of them (tokens, heads); the row's number is that of its sample in the step's global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.mesh.counter_rng import make_dropout_keep_mask

ReplayContext = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class FixedSizeInputSlice:
    """The input of a dropout layer is a slice of dimension `dim`: from `offset` on, of `size`."""

    dim: int
    offset: int
    size: int

    def offset_and_full_length(self, length: int) -> tuple[int, int]:
        """(where `length` elements begin, of how many they are)."""
        assert self.offset + length <= self.size, (self, length)
        return self.offset, self.size


@dataclass(frozen=True)
class EqualPartInputSlice:
    """The `index`-th of `count` equal parts of dimension `dim`, however long it is (a sequence,
    say)."""

    dim: int
    index: int
    count: int

    def offset_and_full_length(self, length: int) -> tuple[int, int]:
        """(where `length` elements begin, of how many they are)."""
        return self.index * length, self.count * length


@dataclass
class MicrobatchDrawCounter:
    """The forward of a microbatch: which rows of the step's batch this rank has, and how often
    each name has drawn."""

    step: int
    first_row: int
    num_rows: int
    calls: dict[str, int] = field(default_factory=dict)

    def copy(self) -> MicrobatchDrawCounter:
        return replace(self, calls=dict(self.calls))


class DropoutRng:
    """The dropout of a model on this rank.

    `parts`: name of a layer -> what part of its input this rank has.

    `left_to_torch`: name -> why what it draws is torch's own, and so depends on the layout.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.parts: dict[str, Sequence[FixedSizeInputSlice | EqualPartInputSlice]] = {}
        self.left_to_torch: dict[str, str] = {}
        self.mask_checks: list[Callable[[str], None]] = []
        """Each is called with the name of a layer before it draws, and raises where that would be
        the mask of a part as if it were the whole."""
        self.replay_hooks: list[Callable[[], ReplayContext]] = []
        """A recomputation begins inside a module: each is called in the forward, and returns the
        context that the recomputation enters to know there what the forward knew."""
        self._moment: MicrobatchDrawCounter | None = None

    @property
    def current_forward(self) -> MicrobatchDrawCounter | None:
        """The forward under way inside of `microbatch`."""
        return self._moment

    @contextmanager
    def drawing_in_microbatch(self, step: int, first_row: int, num_rows: int) -> Iterator[None]:
        """Inside, layers draw for these rows of the batch of `step`; outside of it, torch does."""
        before, self._moment = self._moment, MicrobatchDrawCounter(step, first_row, num_rows)
        try:
            yield
        finally:
            self._moment = before

    def draw_mask(
        self,
        name: str,
        keep: float,
        shape: Sequence[int],
        device: torch.device,
        *,
        rows_dim: int = 0,
    ) -> torch.Tensor | None:
        """Mask of what layer `name` keeps, in this call, of a tensor of `shape`; None if it has
        no row for each of the microbatch's."""
        moment = self._moment
        if moment is None or not has_fixed_num_rows_per_sample(shape, rows_dim, moment.num_rows):
            return None
        for check in self.mask_checks:
            check(name)
        # A module that is called twice in a forward draws two masks.
        call = moment.calls.get(name, 0)
        moment.calls[name] = call + 1
        if not all(shape):
            return torch.ones(tuple(shape), dtype=torch.bool, device=device)
        per_row = shape[rows_dim] // moment.num_rows
        offsets, global_shape = [0] * len(shape), list(shape)
        for part in self.parts.get(name, ()):
            offsets[part.dim], global_shape[part.dim] = part.offset_and_full_length(shape[part.dim])
        # `make_dropout_keep_mask` counts by rows, which it takes for dimension 0.
        order = [rows_dim, *(dim for dim in range(len(shape)) if dim != rows_dim)]
        mask = make_dropout_keep_mask(
            hash_to_stable_64_bits("dropout", self.seed, moment.step, name, call),
            keep,
            (moment.num_rows, per_row, *(shape[dim] for dim in order[1:])),
            offsets=(moment.first_row, 0, *(offsets[dim] for dim in order[1:])),
            global_sizes=(moment.num_rows, per_row, *(global_shape[dim] for dim in order[1:])),
            device=device,
        )
        return mask.view([shape[dim] for dim in order]).movedim(0, rows_dim)

    def replay_contexts(self) -> tuple[_RecordDrawStateContext, _ReplayDrawStateContext]:
        """Contexts for a forward and its recomputation: the second draws what the first drew."""
        recorded = _RecordDrawStateContext(self)
        return recorded, _ReplayDrawStateContext(self, recorded)


def has_fixed_num_rows_per_sample(shape: Sequence[int], rows_dim: int, num_rows: int) -> bool:
    """True if a tensor has a fixed number of rows for each of the microbatch's."""
    if len(shape) <= rows_dim:
        return False
    if num_rows:
        return shape[rows_dim] % num_rows == 0
    return shape[rows_dim] == 0


class _RecordDrawStateContext:
    def __init__(self, dropout_rng: DropoutRng) -> None:
        self._dropout_rng = dropout_rng
        self.at_start: MicrobatchDrawCounter | None = None
        self.contexts: list[ReplayContext] = []

    def __enter__(self) -> None:
        moment = self._dropout_rng._moment
        # A copy: the forward goes on counting its calls.
        self.at_start = moment.copy() if moment else None
        self.contexts = [hook() for hook in self._dropout_rng.replay_hooks]

    def __exit__(self, *_: object) -> None:
        pass


class _ReplayDrawStateContext:
    def __init__(self, dropout_rng: DropoutRng, recorded: _RecordDrawStateContext) -> None:
        self._dropout_rng, self._recorded = dropout_rng, recorded
        self._before: MicrobatchDrawCounter | None = None
        self._inside = ExitStack()

    def __enter__(self) -> None:
        # Copied once more below: each recomputation counts from the start of the forward.
        at_start = self._recorded.at_start
        self._before, self._dropout_rng._moment = (
            self._dropout_rng._moment,
            at_start.copy() if at_start else None,
        )
        for context in self._recorded.contexts:
            self._inside.enter_context(context())

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        self._dropout_rng._moment = self._before
