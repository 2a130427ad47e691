"""The gathered input of column-parallel layers, of which the forward keeps this rank's part alone.

With sequence parallelism a region gathers its input, and its column-parallel layers need all of it
again for the gradients of their weights. Kept, it takes as much as without sequence parallelism;
here the backward gathers it once more, for all layers of the region (Korthikanti et al. 2022).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from phalanx.mesh.tensor_group import TensorParallelGroup


@dataclass
class GatheredInput:
    """The input of one region in one forward, which its layers share.

    `num_tokens`: T of that forward, which a rank's part of a padded sequence does not say.
    """

    group: TensorParallelGroup
    num_tokens: int
    _num_readers: int = 0
    _tokens: torch.Tensor | None = None

    def add_reader(self) -> None:
        """Count a layer whose backward will ask for the input."""
        self._num_readers += 1

    def gather_for_reader(self, part: torch.Tensor) -> torch.Tensor:
        """All tokens [B, T, D] from this rank's part [B, T / ranks, D]. The first reader gathers
        them, and the last one lets them go."""
        if self._tokens is None:
            self._tokens = self.group.all_gather_tokens(part, self.num_tokens)
        tokens = self._tokens
        # Below 0: a graph that is run again, whose layers each gather for themselves.
        self._num_readers -= 1
        if self._num_readers <= 0:
            self._tokens = None
        return tokens


@dataclass
class RegionInput:
    """What enters one region: set where it is entered, read by the layers inside.

    `is_kept`: the region is recomputed in the backward, which gathers its input anyway.
    """

    group: TensorParallelGroup
    is_kept: bool = False
    _entered: weakref.ref[torch.Tensor] | None = None
    _part: torch.Tensor | None = None
    _shared: GatheredInput | None = None
    _casts: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def enter(self, part: torch.Tensor) -> torch.Tensor:
        """`group.enter(part)`, remembered until `forget` if the backward is to gather it again."""
        entered = self.group.enter(part)
        self.forget()
        if not self.is_kept and torch.is_grad_enabled():
            # Weak: what a region drops before it ends is freed then.
            self._entered, self._part = weakref.ref(entered), part
            self._shared = GatheredInput(self.group, self.group.num_tokens)
        return entered

    def find_part_of(
        self, x: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, GatheredInput] | None:
        """(this rank's part of `x` in `dtype`, what gathers it again) if `x` is the very tensor
        that entered; else None."""
        if self._shared is None or self._entered is None or self._entered() is not x:
            return None
        assert self._part is not None
        if dtype not in self._casts:
            self._casts[dtype] = self._part.detach().to(dtype)
        return self._casts[dtype], self._shared

    def forget(self) -> None:
        """Let go of the last forward's input."""
        self._entered = self._part = self._shared = None
        self._casts = {}
