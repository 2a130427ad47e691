"""Which rank was wrong where replicas came to differ and no majority tells it: the steps are done
again after going back, and what each rank computes is compared with what it computed then."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.phases import WORLD_AXIS
from phalanx.core.roll_back import UnequalSteps
from phalanx.parallel.model import ParallelModel

MIN_LOSS_CHANGE = 2.0**-20
"""A loss that changes by less of itself names nobody: sixteen times float32's rounding. A smaller
error may reach all ranks through the gradients before a loss shows it, and then a healthy rank may
be the first (benchmarks/replica_replay.py)."""


class OwnLosses:
    """The losses of this rank's own samples in its last `num_steps` steps, where they are."""

    def __init__(self, num_steps: int) -> None:
        self._losses: deque[tuple[int, torch.Tensor]] = deque(maxlen=num_steps)

    def add(self, step: int, loss_sum: torch.Tensor) -> None:
        self._losses.append((step, loss_sum.detach().clone()))

    def list_after_step(self, step: int) -> list[tuple[int, float]]:
        """(step, loss) of the steps after `step`, as far as they are held. Waits for the device."""
        return [(each, float(loss)) for each, loss in self._losses if each > step]


def digest_rank_weights(digests: NDArray[np.int64]) -> list[str]:
    """By rank one digest of all its blocks, of weights and of the optimizer's state. `digests`:
    [ranks, blocks]."""
    return [f"{hash_to_stable_64_bits(*row):016x}" for row in digests.tolist()]


def gather_unequal_steps(
    model: ParallelModel,
    losses: OwnLosses,
    after_step: int,
    checked: tuple[int, list[str]] | None,
) -> UnequalSteps:
    """What all ranks computed in the steps after `after_step` up to the check that found replicas
    unequal. `checked`: on rank 0 that step and the ranks' digests of it. Collective."""
    own = {"losses": losses.list_after_step(after_step), "checked": checked}
    with model.phases("collective", "all_gather losses of ranks", axis=WORLD_AXIS):
        by_rank = model.mesh.gather_json(own)
    last_step, digests = by_rank[0]["checked"]
    return UnequalSteps(
        first_step=after_step + 1,
        last_step=last_step,
        losses=tuple(
            tuple(loss for step, loss in each["losses"] if step <= last_step) for each in by_rank
        ),
        digests=tuple(digests),
    )


def find_wrong_rank(
    before: UnequalSteps,
    again: UnequalSteps,
    *,
    losses_tell: bool,
    min_loss_change: float = MIN_LOSS_CHANGE,
) -> tuple[int, str]:
    """(rank, why) of the rank that computed something else `before`, while the others computed what
    they do `again`; rank -1 where that does not tell.

    Weights and the optimizer's state tell if the error reached no gradient: then one rank alone
    held other bits. Else it reached all ranks, through the reduction of a step, and it is the first
    step in which a loss changed that tells: the samples of one rank met other weights, and those of
    the others did not.
    `losses_tell`: each rank computes the loss of its own samples with the weights that it holds.
    """
    odd = _list_places_that_differ(before.digests, again.digests)
    if len(odd) == 1:
        return odd[0], (
            f"after step {before.last_step} its weights or its optimizer's state are others than"
            " then, and those of the other ranks are the same"
        )
    if not odd:
        return -1, f"no rank's weights or state after step {before.last_step} are others than then"
    if not losses_tell:
        return -1, "the error reached the weights of several ranks"
    num_steps = before.last_step - before.first_step + 1
    if any(len(losses) != num_steps for losses in (*before.losses, *again.losses)):
        return -1, "not all steps since the replicas were equal have been done again"
    for index in range(num_steps):
        then, now = ([losses[index] for losses in each.losses] for each in (before, again))
        odd = _list_places_that_differ(then, now)
        if not odd:
            continue
        step = before.first_step + index
        if len(odd) > 1:
            return -1, f"in step {step} the losses of {len(odd)} ranks are others than then"
        rank = odd[0]
        if abs(then[rank] - now[rank]) <= min_loss_change * abs(now[rank]):
            return -1, f"in step {step} the loss of rank {rank} differs by no more than rounding"
        return rank, (
            f"in step {step} the loss of its samples is another than then, and those of the other"
            " ranks are the same"
        )
    return -1, "no loss is another than then"


def _list_places_that_differ(
    before: Sequence[str | float], again: Sequence[str | float]
) -> list[int]:
    return [
        place
        for place, (then, now) in enumerate(zip(before, again, strict=True))
        if then != now and not (_is_nan(then) and _is_nan(now))
    ]


def _is_nan(value: str | float) -> bool:
    return isinstance(value, float) and math.isnan(value)
