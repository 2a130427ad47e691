"""Turns of contenders as medians, shares of the speed of ranks that never talk, and losses held
beside each other. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.bench.training.contenders import Contender
from phalanx.bench.training.payload import RankTurn, Turn

# How far the loss of a step may be from the reference's, of itself: rounding, which at a small
# learning rate hardly grows.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-3}


@dataclass(frozen=True)
class TurnRow:
    """A turn of a contender: what its ranks took, and what else the machine did meanwhile.

    `section`: contenders of a section took turns with each other; `number` counts its turns, of
    which 0 only warmed up. `others_share`: of all cores, what other programs used.
    """

    contender: str
    section: int
    number: int
    turn: Turn
    ranks: tuple[RankTurn, ...]
    others_share: float
    load: float

    @property
    def seconds(self) -> float:
        """Seconds of the steps that count, of the slowest rank."""
        return max(sum(rank.step_s[self.turn.num_warm :]) for rank in self.ranks)

    @property
    def step_s(self) -> float:
        return self.seconds / (self.turn.num_steps - self.turn.num_warm)

    @property
    def losses(self) -> dict[int, float]:
        """Step -> its loss, in the mean over ranks."""
        columns = zip(*(rank.losses for rank in self.ranks), strict=True)
        return {
            self.turn.first_step + index: statistics.fmean(losses)
            for index, losses in enumerate(columns)
        }

    @property
    def peak_bytes(self) -> int:
        return max(rank.peak_bytes for rank in self.ranks)

    def to_json(self) -> dict[str, Any]:
        return {
            "contender": self.contender,
            "section": self.section,
            "turn": self.number,
            "first_step": self.turn.first_step,
            "num_warm": self.turn.num_warm,
            "ranks": [rank.to_json() for rank in self.ranks],
            "others_share": round(self.others_share, 4),
            "load": self.load,
        }


@dataclass(frozen=True)
class LossDifference:
    """The first step whose loss is not the reference's within rounding."""

    step: int
    loss: float
    reference_loss: float

    @property
    def relative(self) -> float:
        return abs(self.loss / self.reference_loss - 1)


@dataclass(frozen=True)
class Standing:
    """How a contender came out.

    Speeds and shares are None where it failed (`why_not`) or its losses are others than the
    reference's (`difference`): then they would say nothing.

    `share`: of the speed of ranks that never talk, the median over turns; `share_low` and
    `share_high` hold the middle half of them.
    """

    contender: Contender
    version: str
    num_turns: int = 0
    step_s: float | None = None
    tokens_per_s: float | None = None
    share: float | None = None
    share_low: float | None = None
    share_high: float | None = None
    peak_bytes: int | None = None
    worst_loss_off: float | None = None
    difference: LossDifference | None = None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        difference = None
        if self.difference is not None:
            difference = {
                "step": self.difference.step,
                "loss": self.difference.loss,
                "reference_loss": self.difference.reference_loss,
            }
        return {
            "contender": self.contender.name,
            "library": self.contender.distribution,
            "version": self.version or None,
            "num_turns": self.num_turns,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "share": self.share,
            "share_low": self.share_low,
            "share_high": self.share_high,
            "peak_bytes": self.peak_bytes,
            "worst_loss_off": self.worst_loss_off,
            "difference": difference,
            "why_not": self.why_not or None,
        }


def summarize_contender(
    contender: Contender,
    rows: Sequence[TurnRow],
    *,
    tokens_per_step: int,
    precision: str,
    why_not: str = "",
) -> Standing:
    """The standing of `contender` among `rows`, which are all contenders' turns."""
    contender_rows = [row for row in rows if row.contender == contender.name]
    counted = [row for row in contender_rows if row.number > 0]
    version = contender.find_version()
    if why_not or not counted:
        return Standing(contender, version, why_not=why_not or "it had no turn")
    reference = find_reference_losses(rows)
    losses = collect_losses(contender_rows)
    if contender.is_alone:
        # What each copy learns from its own share is its own; the first step's loss is not.
        first = min(losses)
        losses = {first: losses[first]}
    difference = find_loss_difference(losses, reference, LOSS_TOLERANCES[precision])
    worst = max(
        (abs(loss / reference[step] - 1) for step, loss in losses.items() if step in reference),
        default=None,
    )
    if difference is not None:
        return Standing(
            contender, version, len(counted), worst_loss_off=worst, difference=difference
        )
    alone = {
        (row.section, row.number): row.step_s for row in rows if row.contender == rows[0].contender
    }
    shares = [
        alone[row.section, row.number] / row.step_s
        for row in counted
        if (row.section, row.number) in alone
    ]
    step_s = statistics.median(row.step_s for row in counted)
    low, high = compute_middle_half(shares)
    return Standing(
        contender,
        version,
        len(counted),
        step_s,
        tokens_per_step / step_s,
        statistics.median(shares),
        low,
        high,
        # The mark only rises. When the last one was read all contenders were there: what ranks
        # share with the process that they were forked from was divided among all.
        contender_rows[-1].peak_bytes or None,
        worst,
    )


def find_reference_losses(rows: Sequence[TurnRow]) -> dict[int, float]:
    """Step -> loss of the contender that the others are held beside: the first that talks; of the
    first that never does where there is no other."""
    names = list(dict.fromkeys(row.contender for row in rows))
    reference = names[min(1, len(names) - 1)]
    return collect_losses([row for row in rows if row.contender == reference])


def collect_losses(rows: Sequence[TurnRow]) -> dict[int, float]:
    """Step -> loss over all of `rows`; of a step that was taken again the first."""
    losses: dict[int, float] = {}
    for row in rows:
        losses = row.losses | losses
    return losses


def find_loss_difference(
    losses: Mapping[int, float], reference: Mapping[int, float], tolerance: float
) -> LossDifference | None:
    """The first step of both whose losses are further apart than `tolerance` of the reference's, or
    not finite; None if there is none."""
    for step in sorted(losses.keys() & reference.keys()):
        difference = LossDifference(step, losses[step], reference[step])
        if not math.isfinite(losses[step]) or not difference.relative <= tolerance:
            return difference
    return None


def compute_middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles of `values`; of less than four the extremes."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
