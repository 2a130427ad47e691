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
from phalanx.report.markup import Html, table, tag

MAX_ROWS = 300
MAX_SAMPLES = 3
MAX_NOTE = 500
MAX_TEXT = 20_000
MAX_JOB_ROWS = 400

_BAD = (
    events.RankFailed,
    events.CheckpointFailed,
    events.CheckpointUnusable,
    events.StepSkipped,
    events.SinkDropped,
    events.LoaderWorkerReplaced,
)
_ELSEWHERE = (events.TextGenerated, events.BaselineMeasured)


def render_story(facts: RunFacts) -> Html:
    story = [envelope for envelope in facts.story if not isinstance(envelope.event, _ELSEWHERE)]
    shown, num_left_out = _thin_out(story)
    if not shown:
        body: list[Html | None] = [tag("p", "Nothing has been recorded yet.", class_="note")]
    else:
        rows = [_row(envelope, facts) for envelope in shown]
        note = f"{plural(num_left_out, 'event')} in between left out; all are in RUN/events."
        body = [
            table(["time", "who", "what"], rows, css_class="top"),
            tag("p", note, class_="note") if num_left_out else None,
        ]
    return tag("section", tag("h2", "Checkpoints, faults, restarts and resumes"), body, id="events")


def _thin_out(story: list[Envelope]) -> tuple[list[Envelope], int]:
    """At most `MAX_ROWS`: checkpoints and skips are thinned first, then the middle goes."""
    if len(story) <= MAX_ROWS:
        return story, 0
    saves = (events.CheckpointSaved, events.CheckpointPostponed, events.CheckpointsRemoved)
    routine = (*saves, events.StepSkipped, events.EvalFinished)
    rare = [envelope for envelope in story if not isinstance(envelope.event, routine)]
    common = [envelope for envelope in story if isinstance(envelope.event, routine)]
    rare = rare if len(rare) <= MAX_ROWS // 2 else rare[: MAX_ROWS // 4] + rare[-MAX_ROWS // 4 :]
    room = (MAX_ROWS - len(rare)) // 2
    selected = rare + (common if len(common) <= 2 * room else common[:room] + common[-room:])
    selected_ids = set(map(id, selected))
    return [envelope for envelope in story if id(envelope) in selected_ids], len(story) - len(
        selected
    )


def _row(envelope: Envelope, facts: RunFacts) -> list[Html | str]:
    origin = "supervisor" if envelope.rank < 0 else f"rank {envelope.rank}"
    elapsed_s = facts.timeline.elapsed_s(envelope)
    after = formats.seconds(elapsed_s) if elapsed_s >= 1e-3 else "0 s"
    text = describe_event(envelope, facts.units) or _describe_plainly(envelope)
    line = (
        tag("span", text, class_="over") if isinstance(envelope.event, _BAD) else tag("span", text)
    )
    when = tag("span", f"+{after}", title=formats.timestamp(envelope.time_unix_s), class_="nowrap")
    detail = _detail(envelope)
    return [when, f"{origin}, attempt {envelope.attempt}", tag("div", line, detail)]


def _describe_plainly(envelope: Envelope) -> str:
    """Text for events that the console does not describe."""
    event = envelope.event
    if isinstance(event, events.RanksStarted):
        return (
            f"started {plural(len(event.pids), 'process', 'processes')}"
            + f" in {formats.seconds(event.start_s)}"
        )
    if isinstance(event, events.Note) and event.code == events.RESUMED:
        return f"resumed at step {event.facts.get('step')}: {event.facts.get('told')}"[:MAX_NOTE]
    if isinstance(event, events.Note):
        if event.code == "warning" and isinstance(event.facts.get("text"), str):
            return f"warning: {event.facts['text']}"[:MAX_NOTE]
        facts = ", ".join(f"{key} {_short(value)}" for key, value in event.facts.items())
        return f"note {event.code}: {facts}"[:MAX_NOTE] if facts else f"note {event.code}"
    return event.kind().replace("_", " ")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _detail(envelope: Envelope) -> Html | None:
    """The whole traceback of a failure, folded away."""
    event = envelope.event
    if isinstance(event, events.RankFailed) and "\n" in event.detail.strip():
        return tag("details", tag("summary", "Traceback"), tag("pre", event.detail[-MAX_TEXT:]))
    return None


def render_text(facts: RunFacts) -> Html:
    if not facts.samples:
        body = [tag("p", "No text was generated.", class_="note")]
    else:
        body = []
        for sample in facts.samples[-MAX_SAMPLES:]:
            body.append(tag("h3", f"After step {sample.step:,}"))
            prompt = tag("b", sample.prompt[:MAX_TEXT])
            body.append(tag("pre", prompt, sample.text[:MAX_TEXT], tabindex=0))
        body.append(tag("p", "The prompt is in bold; the rest is the model's.", class_="note"))
    return tag("section", tag("h2", "A sample of what it writes"), body, id="text")


def render_job(facts: RunFacts) -> Html:
    rows = list(_flatten_keys("", facts.job))
    if not rows:
        body = tag("p", "Not recorded: job.json is missing or cannot be read.", class_="note")
    else:
        shown = [[tag("code", key), tag("code", value)] for key, value in rows[:MAX_JOB_ROWS]]
        body = tag("details", tag("summary", f"{len(rows)} keys"), table(["key", "value"], shown))
    return tag("section", tag("h2", "The job"), body, id="job")


def _flatten_keys(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as JSON writes them."""
    if isinstance(value, dict) and depth < 8 and (value or not prefix):
        for key, item in value.items():
            yield from _flatten_keys(f"{prefix}.{key}" if prefix else str(key), item, depth + 1)
    else:
        yield prefix, _value_text(value)[:2000]


def _value_text(value: Any) -> str:
    if value is None:
        return "not set (the plan chooses)"
    return value if isinstance(value, str) else repr(value)


_FILES = (
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
    rows = [
        [
            tag("code", name),
            contents,
            "there" if name == "report.html" or (facts.run_dir / name).exists() else "absent",
        ]
        for name, contents in _FILES
    ]
    problems = [*facts.problems]
    if facts.num_unreadable:
        problems.append(
            f"{plural(facts.num_unreadable, 'line')} of the event files could not be read (torn, or"
            " written by another release) and are not counted"
        )
    return tag(
        "section",
        tag("h2", "Files"),
        tag("p", "Run directory: ", tag("code", str(facts.run_dir.resolve()))),
        table(["in the run directory", "holds", ""], rows),
        [tag("p", problem, ".", class_="note warning") for problem in problems],
        tag("p", f"Made from {plural(facts.num_events, 'event')}.", class_="note"),
        id="files",
    )
