"""What all ranks do in the step in which corruption is found: replicas that were equal and are so
no longer, or memory that changed when nobody wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from phalanx.core.errors import NumericsError
from phalanx.core.roll_back import RollBack, RollBackRequest, UnequalSteps
from phalanx.core.units import plural

OnCorruption: TypeAlias = Literal["warn", "rollback", "stop"]

NUM_CORRUPTION_FLAGS = 4
"""Numbers of `RunInvariants.build_corruption_flags`."""
NO_MAJORITY = 1.0
"""The first of them where replicas differ and no single rank is in the minority."""


def act_on_corruption(
    flags: Sequence[float],
    step: int,
    on_corruption: OnCorruption,
    gather_unequal_steps: Callable[[int], UnequalSteps],
) -> None:
    """Do, on all ranks, what the job says if rank 0 has found that replicas differ or memory has
    changed. `flags`: the sums over ranks of `build_corruption_flags`. `gather_unequal_steps` is
    called on all ranks where the run goes back and no majority names a rank.

    Raises RollBackRequest to go back, NumericsError (exit 8) to stop.
    """
    corruption = _find_corruption(flags, step)
    if corruption is None or on_corruption == "warn":
        return
    if on_corruption == "rollback":
        if flags[0] == NO_MAJORITY and not flags[2]:
            unequal = gather_unequal_steps(corruption.not_after_step)
            corruption = replace(corruption, unequal=unequal)
        raise RollBackRequest(corruption)
    whose = f"rank {corruption.rank}: " if corruption.rank >= 0 else ""
    raise NumericsError(
        f"step {step}: {whose}{corruption.why}",
        why='resilience.on_corruption = "stop"',
        fix=(
            f"continue from a checkpoint not after step {max(corruption.not_after_step, 0)}: remove"
            " the later ones, and run again with --resume"
        ),
    )


def _find_corruption(flags: Sequence[float], step: int) -> RollBack | None:
    code, equal_step, num_changed, sum_of_ranks = flags
    if num_changed:
        return RollBack(
            kind="corruption",
            step=step,
            # What was saved of that step may have been written after it had changed.
            not_after_step=step - 2,
            why=(
                f"the state of {plural(int(num_changed), 'rank')} has changed between the updates"
                f" of steps {step - 1} and {step}"
            ),
            rank=int(sum_of_ranks) if num_changed == 1 else -1,
        )
    if not code:
        return None
    rank = int(code) - 2
    whose = "replicas hold other bits than each other"
    if rank >= 0:
        whose = "it holds other bits than the other replicas"
    return RollBack(
        kind="corruption",
        step=step,
        not_after_step=int(equal_step),
        why=f"{whose}, which were equal in step {int(equal_step)}",
        rank=max(rank, -1),
    )
