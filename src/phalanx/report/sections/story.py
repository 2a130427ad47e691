"""What happened, in order; the text the model wrote; the job; where the files are; what the page
left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phalanx.core.units import plural
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.words import describe_event
from phalanx.report import formats
from phalanx.report.facts import RunFacts
from phalanx.report.markup import Html, build_note, build_table, build_tag
from phalanx.report.sections.raw import draw_raw_link

MAX_STORY_ROWS = 300
MAX_TEXT_SAMPLES = 3
MAX_NOTE_CHARS = 500
MAX_TRACEBACK_CHARS = 20_000
MAX_JOB_ROWS = 400

_FAILURE_EVENTS = (
    events.RankFailed,
    events.HangFound,
    events.StoreLost,
    events.CheckpointFailed,
    events.CheckpointUnusable,
    events.StepSkipped,
    events.SinkDropped,
    events.LoaderWorkerReplaced,
    events.InvariantChecked,
)
_EVENTS_SHOWN_ELSEWHERE = (events.TextGenerated, events.BaselineMeasured)


def select_shown_story(facts: RunFacts) -> tuple[list[Envelope], int]:
    """The events that the page tells, and how many of the others were left out."""
    story = [
        envelope
        for envelope in facts.story
        if not isinstance(envelope.event, _EVENTS_SHOWN_ELSEWHERE)
    ]
    return _drop_frequent_events(story)


def render_story(facts: RunFacts) -> Html:
    """The section: what happened, in order."""
    shown, num_left_out = select_shown_story(facts)
    if not shown:
        body: list[Html | None] = [build_note("Nothing has been recorded yet.")]
    else:
        rows = [_render_story_row(envelope, facts) for envelope in shown]
        note = ""
        if num_left_out:
            note = f"{plural(num_left_out, 'event')} in between left out; all are in RUN/events."
        body = [build_table(["time", "who", "what"], rows, css_class="top"), build_note(note)]
    return build_tag(
        "section", build_tag("h2", "Checkpoints, faults, restarts and resumes"), body, id="events"
    )


def _drop_frequent_events(story: list[Envelope]) -> tuple[list[Envelope], int]:
    """At most `MAX_STORY_ROWS`: checkpoints and skips are thinned first, then the middle goes."""
    if len(story) <= MAX_STORY_ROWS:
        return story, 0
    saves = (events.CheckpointSaved, events.CheckpointPostponed, events.CheckpointsRemoved)
    routine = (*saves, events.StepSkipped, events.EvalFinished)
    rare: list[Envelope] = []
    common: list[Envelope] = []
    for envelope in story:
        (common if isinstance(envelope.event, routine) else rare).append(envelope)
    if len(rare) > MAX_STORY_ROWS // 2:
        rare = _keep_first_and_last(rare, MAX_STORY_ROWS // 4)
    selected = rare + _keep_first_and_last(common, (MAX_STORY_ROWS - len(rare)) // 2)
    # By identity: two equal events at one moment are two rows.
    selected_ids = set(map(id, selected))
    rows = [envelope for envelope in story if id(envelope) in selected_ids]
    return rows, len(story) - len(selected)


def _keep_first_and_last(story: list[Envelope], count: int) -> list[Envelope]:
    """All of it, or the first and the last `count`."""
    if len(story) <= 2 * count:
        return story
    return story[:count] + story[-count:]


def _render_story_row(envelope: Envelope, facts: RunFacts) -> list[Html | str]:
    origin = f"rank {envelope.rank}"
    if envelope.rank < 0:
        origin = "supervisor"
    elapsed_s = facts.timeline.elapsed_s(envelope)
    after = "0 s"
    # Microseconds between two of the first events tell nothing.
    if elapsed_s >= 1e-3:
        after = formats.format_seconds_or_missing(elapsed_s)
    text = describe_event(envelope, facts.units) or _describe_unknown_event(envelope)
    line = build_tag("span", text)
    if isinstance(envelope.event, _FAILURE_EVENTS):
        line = build_tag("span", text, class_="over")
    when = build_tag(
        "span", f"+{after}", title=formats.format_timestamp(envelope.time_unix_s), class_="nowrap"
    )
    detail = _render_traceback(envelope)
    words = build_tag("div", line, " ", draw_raw_link(facts, envelope), detail)
    return [when, f"{origin}, attempt {envelope.attempt}", words]


def _describe_unknown_event(envelope: Envelope) -> str:
    """Text for events that the console does not describe."""
    event = envelope.event
    if isinstance(event, events.RanksStarted):
        processes = plural(len(event.pids), "process", "processes")
        return f"started {processes} in {formats.format_seconds_or_missing(event.start_s)}"
    if isinstance(event, events.Note) and event.code == events.RESUMED:
        return f"resumed at step {event.facts.get('step')}: {event.facts.get('told')}"[
            :MAX_NOTE_CHARS
        ]
    if isinstance(event, events.Note):
        if event.code == "warning" and isinstance(event.facts.get("text"), str):
            return f"warning: {event.facts['text']}"[:MAX_NOTE_CHARS]
        facts = ", ".join(f"{key} {_shorten_text(value)}" for key, value in event.facts.items())
        if not facts:
            return f"note {event.code}"
        return f"note {event.code}: {facts}"[:MAX_NOTE_CHARS]
    return event.kind().replace("_", " ")


def _shorten_text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _render_traceback(envelope: Envelope) -> Html | None:
    """The whole traceback of a failure, or the stacks of a hang, folded away."""
    event = envelope.event
    if isinstance(event, events.HangFound):
        return build_tag(
            "details",
            build_tag("summary", "Stacks of all ranks"),
            build_tag("pre", event.report[:MAX_TRACEBACK_CHARS]),
        )
    if isinstance(event, events.RankFailed) and "\n" in event.detail.strip():
        # Its end, which names the exception.
        return build_tag(
            "details",
            build_tag("summary", "Traceback"),
            build_tag("pre", event.detail[-MAX_TRACEBACK_CHARS:]),
        )
    return None


def has_text_samples(facts: RunFacts) -> bool:
    return bool(facts.samples)


def render_text_samples(facts: RunFacts) -> Html | None:
    """The section; None where no text was generated: not every model writes."""
    if not has_text_samples(facts):
        return None
    body = []
    for sample in facts.samples[-MAX_TEXT_SAMPLES:]:
        body.append(build_tag("h3", f"After step {sample.step:,}"))
        prompt = build_tag("b", sample.prompt[:MAX_TRACEBACK_CHARS])
        body.append(build_tag("pre", prompt, sample.text[:MAX_TRACEBACK_CHARS], tabindex=0))
    body.append(build_tag("p", "The prompt is in bold; the rest is the model's.", class_="note"))
    return build_tag("section", build_tag("h2", "A sample of what it writes"), body, id="text")


def render_job(facts: RunFacts) -> Html:
    rows = list(_flatten_keys("", facts.job))
    if not rows:
        body = build_tag("p", "Not recorded: job.json is missing or cannot be read.", class_="note")
    else:
        shown = [
            [build_tag("code", key), build_tag("code", value)] for key, value in rows[:MAX_JOB_ROWS]
        ]
        body = build_tag(
            "details",
            build_tag("summary", f"{len(rows)} keys"),
            build_table(["key", "value"], shown),
        )
    return build_tag("section", build_tag("h2", "The job"), body, id="job")


def _flatten_keys(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as JSON writes them."""
    # job.json may hold anything: an object nested a thousand times ends as text, not as an error.
    if isinstance(value, dict) and depth < 8 and (value or not prefix):
        for key, item in value.items():
            name = str(key)
            if prefix:
                name = f"{prefix}.{key}"
            yield from _flatten_keys(name, item, depth + 1)
    else:
        yield prefix, _format_job_value(value)[:2000]


def _format_job_value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value
    return repr(value)


_LINKED_FILES = (
    ("job.json", "the resolved job"),
    ("best.json", "which checkpoint had the lowest held-out loss"),
    ("plan.json", "the plan"),
    ("events", "every event, one JSON object per line and file per rank and attempt"),
    ("logs", "what each rank printed, per attempt"),
    ("checkpoints", "layout-free checkpoints"),
    ("tensorboard", "scalars for TensorBoard"),
    ("report.html", "this page"),
)


def render_files(facts: RunFacts) -> Html:
    rows = []
    for name, contents in _LINKED_FILES:
        # The page itself is there once it is read, though not yet while it is made.
        is_there = name == "report.html" or (facts.run_dir / name).exists()
        rows.append([build_tag("code", name), contents, "there" if is_there else "absent"])
    problems = [*facts.problems]
    if facts.num_unreadable:
        problems.append(
            f"{plural(facts.num_unreadable, 'line')} of the event files could not be read (torn, or"
            " written by another release) and are not counted"
        )
    return build_tag(
        "section",
        build_tag("h2", "Files"),
        build_tag("p", "Run directory: ", build_tag("code", str(facts.run_dir.resolve()))),
        build_table(["in the run directory", "holds", ""], rows),
        [build_tag("p", problem, ".", class_="note warning") for problem in problems],
        build_tag("p", f"Made from {plural(facts.num_events, 'event')}.", class_="note"),
        id="files",
    )
