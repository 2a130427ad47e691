"""`PlanPageFacts`: what the page of a plan shows, in the order it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.plan.advice.waterfall import WaterfallRow
from phalanx.plan.pipeline.simulate import Timeline


@dataclass(frozen=True)
class AnswerTile:
    """One number of the answer: its name, its value, and what to know about it."""

    name: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class LayoutRow:
    """A layout of the ranking. Numbers are NaN where they are not known."""

    family: str
    layout: str
    settings: str
    step_s: float
    peak_bytes: float
    why: str
    parts: Mapping[str, float] = field(default_factory=dict)
    is_winner: bool = False
    number: int = 0
    """Its place in the ranking, by which texts name it; 0 in no ranking."""


@dataclass(frozen=True)
class PlanPageFacts:
    """Everything that the page of a plan shows."""

    model: str
    cluster: str
    fits: bool
    verdict: str
    tiles: Sequence[AnswerTile] = ()
    layouts: Sequence[LayoutRow] = ()
    nearest: Sequence[LayoutRow] = ()
    """Layouts that fit with a change, where nothing fits as asked."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Why layouts were refused, and how many."""
    waterfall: Sequence[WaterfallRow] = ()
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes by category of the rank with the largest peak."""
    memory_phases: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same at the highest moment of each phase of a step; {}: only the peak is known."""
    stage_memory: Sequence[Mapping[str, float]] = ()
    """Bytes by category of each rank of the pipeline."""
    capacity_bytes: float = 0.0
    timeline: Timeline | None = None
    rules: Sequence[Mapping[str, Any]] = ()
    tables: Sequence[Mapping[str, Any]] = ()
    hardware: Mapping[str, str] = field(default_factory=dict)
    assumptions: Sequence[str] = ()
    constants: Sequence[tuple[str, str, str]] = ()
    """Name, value and source of every constant that the prediction rests on."""
    what_if: Mapping[str, Any] | None = None
    job_text: str = ""
    """The job file that trains with the winner."""
