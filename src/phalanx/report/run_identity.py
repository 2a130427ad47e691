"""Which run it is: its name, layout, length and size, by files that may hold values of any form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.report.formats import int_or_none, is_number_of_ordinary_size
from phalanx.report.story import select_story_events


@dataclass(frozen=True)
class RunIdentity:
    """The name, layout, length and size of a run; None of what no file says."""

    name: str
    layout: dict[str, int]
    total_steps: int | None
    world_size: int | None
    device: str


def identify_run(
    run_dir: Path, job: dict[str, Any], plan: dict[str, Any], story: list[Envelope]
) -> RunIdentity:
    """By its last RunStarted, which a run has that began; else by its job and plan."""
    starts = select_story_events(story, events.RunStarted)
    if starts:
        start = starts[-1]
        return RunIdentity(
            name=start.run,
            # A file may write whole numbers as floats (`tail._has_all_tokens`).
            layout={axis: int(degree) for axis, degree in start.layout.items()},
            total_steps=int_or_none(start.total_steps),
            world_size=int_or_none(start.world_size),
            device=start.device,
        )
    return RunIdentity(
        name=_text_or_empty(_find_nested_value(job, "run", "name")) or run_dir.resolve().name,
        layout=_parse_layout_degrees(plan),
        total_steps=int_or_none(_find_nested_value(job, "train", "steps")),
        world_size=int_or_none(plan.get("world_size")),
        device=_text_or_empty(plan.get("device")),
    )


def _parse_layout_degrees(plan: dict[str, Any]) -> dict[str, int]:
    layout = plan.get("layout")
    if not isinstance(layout, dict):
        return {}
    return {
        str(axis): int(degree)
        for axis, degree in layout.items()
        if is_number_of_ordinary_size(degree)
    }


def _find_nested_value(value: Any, *keys: str) -> Any:
    """The value under `keys`, one inside the other; None where there is no such object."""
    for key in keys:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _text_or_empty(value: Any) -> str:
    if isinstance(value, str):
        return value
    return ""
