"""`--since` of `phalanx logs`: a duration, a time, or a step."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from pathlib import Path

from phalanx.core.errors import UsageError

_DURATION_PATTERN = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS_OF_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME_OF_DAY_PATTERN = re.compile(r"\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?")
# datetime's last year is 9999.
_MAX_DURATION_S = 1e10


def find_log_start(run_dir: Path, since: str | None) -> float | None:
    """The wall-clock time (Unix seconds) of `since`; None without one. Raises UsageError."""
    if since is None:
        return None
    text = since.strip()
    if text.startswith("step:"):
        return _find_start_of_step(run_dir, text.removeprefix("step:"), since)
    match = _DURATION_PATTERN.fullmatch(text)
    if match is not None:
        duration_s = float(match[1]) * _SECONDS_OF_UNIT[match[2]]
        if duration_s < _MAX_DURATION_S:
            return time.time() - duration_s
    elif _TIME_OF_DAY_PATTERN.fullmatch(text):
        hours, _, rest = text.partition(":")
        start_s = _parse_utc(f"{datetime.now(UTC):%Y-%m-%d} {hours:0>2}:{rest}", since)
        # A little after midnight 23:50 was yesterday.
        return start_s if start_s <= time.time() else start_s - _SECONDS_OF_UNIT["d"]
    elif text[:1].isdigit():
        return _parse_utc(text, since)
    raise _build_refusal(since)


def _parse_utc(text: str, since: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise _build_refusal(since) from None


def _build_refusal(since: str) -> UsageError:
    return UsageError(
        f"--since {since!r} is no time",
        fix="say 90s, 10m, 2h or 1d before now, a time in UTC (14:05, 2026-01-31T14:05:00) or"
        " step:120",
    )


def _find_start_of_step(run_dir: Path, text: str, since: str) -> float:
    """When rank 0 began a step, the first time it did: the record of the step before."""
    from phalanx.observe.events import StepFinished
    from phalanx.observe.tail import read_recorded_events

    if not text.isdecimal() or len(text) > 15:
        raise _build_refusal(since)
    step = int(text)
    if step <= 1:
        return 0.0
    newest = 0
    for envelope in read_recorded_events(run_dir, StepFinished):
        event = envelope.event
        if isinstance(event, StepFinished) and event.step >= step - 1:
            return envelope.time_unix_s
        newest = max(newest, int(getattr(event, "step", 0)))
    raise UsageError(
        f"--since {since}: rank 0 has no record that step {step:,} began",
        fix=f"its newest step on record is {newest:,}" if newest else "it has no step on record",
    )
