"""What failed in a run: the class of a failure, and a line or two for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from phalanx.core.units import plural
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.failure_rate import describe_failure_rate
from phalanx.observe.words import describe_event
from phalanx.report.facts import RunFacts
from phalanx.report.run_status import describe_last_failure

_MAX_NAMED = 6
_CLASS_OF_SIGNAL = {
    "SIGKILL": "killed",
    "SIGSEGV": "segmentation fault",
    "SIGABRT": "aborted",
}
_WORDS_OF_DAMAGED_DATA = ("are not what was written", "has changed since the run began")


def list_failure_lines(facts: RunFacts) -> list[str]:
    """How often ranks started again and why, with the words of the first failure; and the goodput.
    Empty for a run in which nothing failed."""
    failures = [each for each in facts.story if isinstance(each.event, events.RankFailed)]
    went_back = [each for each in facts.story if isinstance(each.event, events.RolledBack)]
    num_cut_off = facts.reliability.num_cut_off
    if not (failures or went_back or facts.num_restarts or num_cut_off):
        return []
    parts = []
    if failures or facts.num_restarts:
        parts.append(plural(facts.num_restarts, "restart"))
    if named := _name_failures(failures):
        parts.append(named)
    if went_back:
        parts.append(f"{plural(len(went_back), 'return')} to an earlier checkpoint")
    if num_cut_off:
        parts.append(f"{plural(num_cut_off, 'command')} cut off without an end on record")
    # In the order of the run.
    kinds = events.RankFailed | events.RolledBack
    first = next((each for each in facts.story if isinstance(each.event, kinds)), None)
    words = describe_event(first) if first is not None else None
    # The line on the end of a failed run may have said it.
    if words and words != describe_last_failure(facts):
        parts.append(f"first: {words}")
    # Going back after a spike of the loss, say, is no failure.
    label = "failed" if failures or facts.num_restarts else "faults"
    return [f"{label}  {'; '.join(parts)}", *_list_goodput_lines(facts)]


def _name_failures(failures: Sequence[Envelope]) -> str:
    """ "rank 1 killed, 2 x rank 0 exception": whom and what, in the order in which they came."""
    counts: dict[str, int] = {}
    for each in failures:
        assert isinstance(each.event, events.RankFailed)
        name = classify_failure(each.event)
        if each.event.failed_rank >= 0:
            name = f"rank {each.event.failed_rank} {name}"
        counts[name] = counts.get(name, 0) + 1
    words = [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]
    if len(words) > _MAX_NAMED:
        words[_MAX_NAMED:] = [f"and {len(words) - _MAX_NAMED} more"]
    return ", ".join(words)


def _list_goodput_lines(facts: RunFacts) -> list[str]:
    reliability = facts.reliability
    if not math.isfinite(reliability.goodput):
        return []
    line = (
        f"goodput {reliability.goodput:.1%} of the run's life in steps that stand, without their"
        " waits for data and saves"
    )
    if math.isfinite(reliability.participation) and reliability.participation < 1:
        line += f"; {reliability.participation:.1%} of the ranks took part"
    if reliability.num_failures:
        line += f"; {describe_failure_rate(reliability.num_failures, reliability.alive_s)}"
        if reliability.num_cut_off:
            line += ", without what was cut off"
    return [line]


def classify_failure(event: events.RankFailed) -> str:
    """The class of a failure, from the supervisor's own words."""
    if event.cause == "lost_connection":
        return "lost connection"
    if event.failed_rank < 0 and event.cause != "exception" and not event.is_of_all_ranks:
        return "store killed" if "store" in event.detail else "server killed"
    if event.hang_kind:
        return event.hang_kind.replace("_", " ")
    if event.is_oom_kill:
        return "killed for memory"
    if event.cause == "signal":
        for name, kind in _CLASS_OF_SIGNAL.items():
            if name in event.detail:
                return kind
        return "signal"
    if event.cause == "hang":
        return "hang"
    if event.cause == "exit":
        return "left early"
    words = event.detail.lower()
    if words.startswith("the ranks differ"):
        return "ranks disagree"
    if any(phrase in words for phrase in _WORDS_OF_DAMAGED_DATA):
        return "data damaged"
    if "memory" in words:
        return "out of memory"
    return "exception"
