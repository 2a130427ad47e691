"""How initial weights are drawn, whole and in parts, beside their definition: layouts of a small
model have no part as large as those that are drawn in threads or in several pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from phalanx.core.block_sizes import BlockSizes, shrink_block_sizes, use_block_sizes
from phalanx.job.schema import Job
from phalanx.mesh.logical import Box, LogicalShard
from phalanx.nn.init import InitRule, initialize_shards
from phalanx.verify.definitions.check import make_difference
from phalanx.verify.plain.draws import PlainNormals
from phalanx.verify.row import Difference

JUDGED = "each element of initial weights by its seed, name and place, of large and small parts"
STD, TOLERANCE = 0.02, 1e-6
NUM_THREADS = 2


@dataclass(frozen=True)
class _Part:
    """A block of a tensor of `shape`; `seed` of the job and `name` of the parameter."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    seed: int = 0
    name: str = "blocks.0.q.weight"
    is_small: bool = False
    """With chunks so small that there are several."""


def find_wrong_draws(job: Job) -> Iterator[Difference]:
    """The first part of initial weights that is another one than by definition."""
    with _using_threads(NUM_THREADS):
        for part in _list_parts():
            with use_block_sizes(shrink_block_sizes() if part.is_small else BlockSizes()):
                values = _draw(part)
            error = float((values - _draw_by_definition(part)).abs().max())
            if not error <= TOLERANCE:
                end = tuple(map(sum, zip(part.offset, part.size, strict=True)))
                cause = (
                    f"elements {part.offset} to {end} of {part.shape}, seed {part.seed}, are no"
                    " function of seed, name and place in the whole tensor, or another one"
                )
                yield make_difference("initial weights of", part.name, error, cause)
                return


def _list_parts() -> Iterator[_Part]:
    # More elements than are drawn at once, and a number that no chunk divides.
    yield _Part((1031, 1021), (0, 0), (1031, 1021))
    yield _Part((515, 3000), (0, 501), (515, 2047))
    for is_small in (False, True):
        yield _Part((70, 60), (0, 0), (70, 60), seed=7, is_small=is_small)
        yield _Part((70, 60), (33, 0), (37, 60), name="embed.weight", is_small=is_small)
        yield _Part((70, 60), (0, 31), (70, 29), is_small=is_small)
        yield _Part((3, 60, 41), (0, 29, 0), (3, 31, 41), is_small=is_small)
        yield _Part((3, 60, 41), (1, 30, 3), (2, 29, 37), seed=1, is_small=is_small)
    yield _Part((9,), (4,), (5,))


def _draw(part: _Part) -> torch.Tensor:
    box = Box(part.offset, (0,) * len(part.size), part.size)
    values = torch.full(part.size, math.nan)
    shard = LogicalShard(part.name, part.shape, "float32", (box,), values)
    initialize_shards({part.name: shard}, [InitRule("*", std=STD)], part.seed)
    return values / STD


def _draw_by_definition(part: _Part) -> torch.Tensor:
    count = math.prod(part.shape)
    indices = torch.arange(count).view(part.shape)
    for dim, (offset, size) in enumerate(zip(part.offset, part.size, strict=True)):
        indices = indices.narrow(dim, offset, size)
    return PlainNormals(part.seed, part.name, count).take(indices)


@contextmanager
def _using_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
