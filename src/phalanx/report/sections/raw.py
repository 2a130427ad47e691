"""The lines of the event files behind the numbers of the page: hidden until a "why?" link leads to
them."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.report.facts import RunFacts
from phalanx.report.markup import Html, build_tag
from phalanx.report.raw_events import (
    MAX_LINES_OF_NUMBER,
    RawEvent,
    RawEvents,
    find_event_lines,
)

_KINDS_OF_KEY: dict[str, tuple[type[events.Event], ...]] = {
    "held-out": (events.EvalFinished,),
    "restarts": (
        events.RankFailed,
        events.RestartScheduled,
        events.LayoutChanged,
        events.RolledBack,
    ),
    "skips": (events.StepSkipped,),
    "wall": (events.RunStarted, events.RunFinished),
    "layout": (events.RunStarted,),
    "pipeline": (events.PipelineMeasured,),
}


def collect_raw_events(facts: RunFacts, shown: Iterable[Envelope]) -> RawEvents:
    """The lines behind the numbers at the top of the page, the slow ranks, and each of the `shown`
    events of the story."""
    story = list(shown)
    # What explains a number need not be shown in the story: the newest do.
    explaining: dict[str, list[Envelope]] = {}
    for key, kinds in _KINDS_OF_KEY.items():
        of_kinds = [each for each in facts.story if isinstance(each.event, kinds)]
        explaining[key] = of_kinds[-MAX_LINES_OF_NUMBER:]
    linked = {id(each): each for each in story}
    explaining["resumes"] = [each for each in facts.story if events.is_resume(each.event)]
    for envelopes in explaining.values():
        linked |= {id(each): each for each in envelopes}
    raw = RawEvents(by_envelope=find_event_lines(facts.run_dir, linked.values()))
    for key, envelopes in explaining.items():
        raw.add_envelopes(key, envelopes)
    if len(facts.steps) and facts.attempts:
        attempt = _find_newest_attempt(facts)
        raw.add_step("loss", facts.run_dir, facts.lead_rank, attempt, facts.steps.step[-1])
    if facts.self_times is not None:
        for slow in facts.self_times.slowest:
            key = build_key_of_slow_rank(slow.rank)
            attempt = facts.self_times.attempt
            raw.add_step(key, facts.run_dir, slow.rank, attempt, slow.worst_step)
    return raw


def build_key_of_slow_rank(rank: int) -> str:
    """The key under which the line of a slow rank's worst step is kept."""
    return f"rank-{rank}"


def _find_newest_attempt(facts: RunFacts) -> int:
    with_steps = [each.number for each in facts.attempts if each.first_step is not None]
    return max(with_steps, default=0)


def draw_why_link(facts: RunFacts, key: str, subject: str) -> Html | None:
    """A link to the event lines behind a number; None where there are none.

    `subject` names the number for those who hear the link alone.
    """
    if key not in facts.raw.by_key:
        return None
    return build_tag("a", "why?", href=f"#raw-{key}", class_="why", aria_label=f"why: {subject}")


def draw_raw_link(facts: RunFacts, envelope: Envelope) -> Html | None:
    """A link to the line of one event of the story; None where it was not found."""
    line = facts.raw.by_envelope.get(id(envelope))
    if line is None:
        return None
    return build_tag(
        "a", "raw", href=f"#{_build_line_id(line)}", class_="why", aria_label=f"raw: {line.origin}"
    )


def has_raw_events(facts: RunFacts) -> bool:
    return bool(facts.raw.by_key or facts.raw.by_envelope)


def render_raw_events(facts: RunFacts) -> Html | None:
    """The section; None where no line was found."""
    if not has_raw_events(facts):
        return None
    groups = [_render_lines(f"raw-{key}", lines) for key, lines in sorted(facts.raw.by_key.items())]
    for line in dict.fromkeys(facts.raw.by_envelope.values()):
        groups.append(_render_lines(_build_line_id(line), [line]))
    return build_tag(
        "section",
        build_tag("h2", "Raw events"),
        build_tag(
            "p",
            "The lines of the run's event files behind a number, as they stand there. Follow a"
            " “why?” or “raw” link to see them here.",
            class_="note",
        ),
        groups,
        id="raw",
    )


def _build_line_id(line: RawEvent) -> str:
    return f"raw-{line.file.partition('.')[0]}-{line.number}"


def _render_lines(name: str, lines: list[RawEvent]) -> Html:
    body = []
    for line in lines:
        body += [build_tag("h3", line.origin), build_tag("pre", line.text, tabindex=0)]
    # Shown by the style sheet where the address names it; a link moves the focus there, too.
    return build_tag("div", body, id=name, class_="rawlines", tabindex=-1)
