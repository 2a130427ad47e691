"""What dropout drops, said a second time: over whole tensors, in plain numbers, beside torch's own
dropout.

Bits: with arithmetic modulo 2^64, G = 0x9E3779B97F4A7C15 and mix the finaliser of SplitMix64,
element i of row r is the low (even i) or high half of mix(mix(key + (r + 1) G) + (i // 2 + 1) G),
signed; it is kept if it is at least 2^31 - round(keep x 2^32). The key is BLAKE2b-64 of "dropout",
seed, step (from 1), the module's name, and which of its draws in this forward it is (from 0),
separated by U+001F. The row is that of the step's batch.

torch's dropout stays what it is: only the filling of its noise is replaced, for whichever module is
running.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# 2^64 over the golden ratio: the increment of SplitMix64.
GOLDEN_RATIO_64 = np.uint64(0x9E3779B97F4A7C15)


def make_dropout_mask(
    key: int, keep: float, first_row: int, num_rows: int, per_row: int
) -> torch.Tensor:
    """bool [num_rows, per_row]."""
    # Arithmetic modulo 2^64: overflow of numpy's unsigned numbers is meant.
    with np.errstate(over="ignore"):
        rows = _hash_uint64_bits(
            np.uint64(key)
            + (np.arange(num_rows, dtype=np.uint64) + np.uint64(first_row + 1)) * GOLDEN_RATIO_64
        )
        numbers = np.arange(per_row, dtype=np.uint64)
        # One mix makes two elements: its low half and its high half.
        pairs = _hash_uint64_bits(
            rows[:, None] + (numbers // np.uint64(2) + np.uint64(1)) * GOLDEN_RATIO_64
        )
    halves = np.where(
        numbers % np.uint64(2) == 1, pairs >> np.uint64(32), pairs & np.uint64(2**32 - 1)
    )
    signed = halves.astype(np.uint32).view(np.int32).astype(np.int64)
    return torch.from_numpy(signed >= 2**31 - round(keep * 2**32))


def _hash_uint64_bits(values: Any) -> Any:
    # Shifts and factors of SplitMix64's finaliser.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass
class DropoutMasks:
    """The masks of a module's forwards. `dropped`: the modules that drew, in order."""

    module: nn.Module
    seed: int
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Modules whose rows are in the second dimension.
        self._second: set[str] = set()
        # Their weights begin with rows x heads, in any case.
        self._attention: set[str] = set()
        for name, part in self.module.named_modules():
            if isinstance(part, nn.RNNBase):
                self._second.add(name)
            elif isinstance(part, nn.MultiheadAttention):
                self._attention.add(name)
            elif _is_sequence_first_layer(part):
                for child, _ in part.named_children():
                    self._second.add(f"{name}.{child}".removeprefix("."))
        self._rows, self._calls, self._step = (0, 0), dict[str, int](), 0

    def begin_forward_of_rows(self, step: int, first_row: int, num_rows: int) -> None:
        """From here on a forward of these rows of the batch of `step`."""
        self._step, self._rows, self._calls = step, (first_row, num_rows), {}

    def draw_next_mask(self, name: str, keep: float, shape: torch.Size) -> torch.Tensor | None:
        """The next mask that `name` draws; None for a tensor that has no fixed number of rows
        for each of the batch."""
        rows_dim = int(name in self._second - self._attention)
        first_row, num_rows = self._rows
        if not num_rows or len(shape) <= rows_dim or shape[rows_dim] % num_rows or not all(shape):
            return None
        call = self._calls[name] = self._calls.get(name, -1) + 1
        text = "\x1f".join(str(word) for word in ("dropout", self.seed, self._step, name, call))
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        if name not in self.dropped:
            self.dropped.append(name)
        mask = make_dropout_mask(key, keep, first_row, num_rows, shape.numel() // num_rows)
        return mask.view([shape[rows_dim], *shape[:rows_dim], *shape[rows_dim + 1 :]]).movedim(
            0, rows_dim
        )

    @contextmanager
    def dropping_by_masks(self, step: int, first_row: int, num_rows: int) -> Iterator[None]:
        """Inside, a forward of the module drops what it should."""
        self.begin_forward_of_rows(step, first_row, num_rows)
        calling: list[str] = []
        hooks = []

        def leave(*_: object) -> None:
            calling.pop()

        for name, part in self.module.named_modules():
            # The operator does not say who called it: the innermost module that runs did.
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: calling.append(name)))
            hooks.append(part.register_forward_hook(leave))
        try:
            with _MaskFromBernoulliMode(self, calling):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _is_sequence_first_layer(part: nn.Module) -> bool:
    """True for a layer of torch's transformers that has batch_first=False."""
    is_layer = isinstance(part, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer)
    return is_layer and not part.self_attn.batch_first


class _MaskFromBernoulliMode(TorchDispatchMode):
    def __init__(self, definition: DropoutMasks, calling: list[str]) -> None:
        super().__init__()
        self._definition, self._calling = definition, calling

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float and not kwargs and self._calling:
            # The operator's own default is one half.
            keep = 0.5 if len(args) == 1 else args[1]
            mask = None
            # With 0 or 1 nothing is drawn that could differ.
            if 0 < keep < 1:
                mask = self._definition.draw_next_mask(self._calling[-1], keep, args[0].shape)
            if mask is not None:
                return args[0].copy_(mask)
        return func(*args, **(kwargs or {}))
