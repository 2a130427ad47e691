"""powersgd: a matrix is sent as the product of two thin ones, found by a step of power iteration
(Vogels et al. 2019).

With M the mean over ranks of gradient + error, [n, m]: P = M Q is added up and made orthogonal, Q =
M^T P is added up, and M is taken to be P Q^T. Q is where the next step begins. rank (n + m) numbers
travel instead of n m; vectors, and matrices for which that is no less, travel as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.parallel.hooks._protocol import CompressionOptions, Gradient
from phalanx.parallel.wire import Wire

Q_SLOT = "q"
KEEPS_ERROR = True


class PowerSgd:
    keeps_error = KEEPS_ERROR

    def __init__(self, rank: int, seed: int) -> None:
        self._rank, self._seed = rank, seed

    def shared_slots(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Q [m, rank]: drawn by seed and name at first."""
        if not self._saves_bytes_by_low_rank(parameter):
            return {}
        generator = torch.Generator().manual_seed(
            hash_to_stable_64_bits("powersgd", self._seed, name) % 2**63
        )
        # On the CPU and in fp64: all ranks begin with the same Q, whatever their device and type.
        drawn = torch.randn(
            _view_as_matrix(parameter).shape[1],
            self._rank,
            generator=generator,
            dtype=torch.float64,
        )
        return {Q_SLOT: drawn.to(parameter)}

    def _saves_bytes_by_low_rank(self, tensor: torch.Tensor) -> bool:
        if tensor.ndim < 2:
            return False
        rows, columns = _view_as_matrix(tensor).shape
        return self._rank * (rows + columns) < rows * columns and self._rank <= min(rows, columns)

    def reduce(self, gradients: Sequence[Gradient], wire: Wire) -> list[torch.Tensor]:
        thin = [g for g in gradients if Q_SLOT in g.slots]
        ms = [_view_as_matrix(g.tensor) for g in thin]
        ps = [m @ g.slots[Q_SLOT] for m, g in zip(ms, thin, strict=True)]
        uncompressed = [g.tensor for g in gradients if Q_SLOT not in g.slots]
        _average_in_one_collective([*ps, *uncompressed], wire)
        # Each rank by itself: after the sum they have the same P, bit by bit.
        ps = [torch.linalg.qr(p).Q for p in ps]
        qs = [m.T @ p for m, p in zip(ms, ps, strict=True)]
        _average_in_one_collective(qs, wire)
        errors = {}
        for gradient, m, p, q in zip(thin, ms, ps, qs, strict=True):
            mean = p @ q.T
            errors[gradient.name] = (m - mean).view_as(gradient.tensor)
            gradient.tensor.copy_(mean.view_as(gradient.tensor))
            # A step that overflowed leaves Q as it was: a NaN in it would stay for good.
            gradient.slots[Q_SLOT].copy_(torch.where(q.isfinite().all(), q, gradient.slots[Q_SLOT]))
        return [
            errors[g.name] if g.name in errors else torch.zeros_like(g.tensor) for g in gradients
        ]


def _view_as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1)


def _average_in_one_collective(tensors: Sequence[torch.Tensor], wire: Wire) -> None:
    """Average `tensors` over the ranks, in place, in one collective."""
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    wire.sum_over_ranks(flat)
    flat /= wire.num_ranks
    for tensor, part in zip(
        tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))


def build(settings: CompressionOptions) -> PowerSgd:
    return PowerSgd(settings.rank, settings.seed)
