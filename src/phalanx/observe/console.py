"""What a person sees while a run trains: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO, cast

from phalanx.core.printable import printable
from phalanx.core.terminal import unwrap_stream
from phalanx.core.units import format_bytes, format_count, format_seconds
from phalanx.observe import events
from phalanx.observe.activity import CurrentActivity
from phalanx.observe.events import Envelope, EvalFinished, StepFinished
from phalanx.observe.screen import QuietStream, open_safe_console
from phalanx.observe.units import TEXT_METRIC_UNITS, MetricUnits
from phalanx.observe.words import describe_event, describe_repeated_save_failure

NUM_AVERAGED_STEPS = 20
# Of each attempt: they allocate, compile and fill caches, and say nothing of those that follow.
NUM_WARMUP_STEPS = 2
CONSOLE_REDRAW_INTERVAL_S = 0.1
_VARYING_NUMBER_PATTERN = re.compile(
    r"[0-9a-fA-F]*[0-9][0-9a-fA-F]*"
)  # steps, ranks, ids of requests

# The supervisor itself says why ranks start again, and a run's last lines show what came out.
EVENT_CLASSES_NOT_PRINTED = (
    events.RankFailed,
    events.RestartScheduled,
    events.TextGenerated,
    events.BaselineMeasured,
    events.RunFinished,
)


class Console(Protocol):
    """Shows envelopes. A stream that breaks (a closed pipe) silences it; training goes on."""

    def write(self, envelope: Envelope) -> None: ...

    def say(self, line: str) -> None:
        """Print one line of somebody else's (a rank's own output) without tearing the bar."""
        ...

    def tick(self) -> None:
        """Time has passed: redraw if there is anything to redraw."""
        ...

    def close(self) -> None: ...


def open_console(
    stream: TextIO | None,
    *,
    total_steps: int,
    log_every: int,
    units: MetricUnits = TEXT_METRIC_UNITS,
    is_terminal: bool | None = None,
) -> Console:
    """A live bar if `stream` is a terminal, else one line each `log_every` steps; None shows
    nothing.

    rich is imported only for the bar.
    """
    if is_terminal is None:
        is_terminal = stream is not None and stream.isatty()
    quiet = QuietStream(stream)
    if stream is None or not is_terminal:
        return PlainConsole(quiet, RunProgress(total_steps, units), log_every)
    # The bar's own movements of the cursor must reach the terminal; the screen filters the texts
    # that it draws.
    screen = open_safe_console(cast(TextIO, QuietStream(unwrap_stream(stream))), soft_wrap=True)
    if screen.is_dumb_terminal:
        return PlainConsole(quiet, RunProgress(total_steps, units), log_every)
    return LiveConsole(screen, RunProgress(total_steps, units))


@dataclass
class RunProgress:
    """The run's progress and speed, which both consoles show; `total_steps` 0: nobody knows."""

    total_steps: int
    units: MetricUnits = TEXT_METRIC_UNITS
    last: StepFinished | None = None
    last_eval: EvalFinished | None = None
    attempt: int = 0
    num_restarts: int = 0
    num_skipped: int = 0
    is_first_of_attempt: bool = False
    activity: CurrentActivity = field(default_factory=CurrentActivity)
    _failure: str = ""  # why the last save failed, without its numbers; empty once one is there
    _num_of_attempt: int = 0  # steps that were seen
    _recent: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=NUM_AVERAGED_STEPS)
    )
    _memory_bytes: dict[int, float] = field(default_factory=dict)
    _experts: dict[int, events.ExpertsLoaded] = field(
        default_factory=dict
    )  # the last of each rank that tells

    def take_event(self, envelope: Envelope) -> bool:
        """Account for an envelope; True if it was a step of rank 0, the one that is shown."""
        event = envelope.event
        self.activity.take_event(event, envelope.rank)
        if isinstance(event, events.RestartScheduled):
            self.num_restarts += 1
        elif isinstance(event, events.RunStarted) and event.total_steps > 0:
            # Whoever watches may not have known it, or the run was continued with more steps.
            self.total_steps = int(event.total_steps)
        elif isinstance(event, events.StepSkipped) and envelope.rank == 0:
            self.num_skipped += 1
        elif isinstance(event, EvalFinished):
            self.last_eval = event
        elif isinstance(event, events.ExpertsLoaded):
            self._experts[envelope.rank] = event
        if not isinstance(event, StepFinished):
            return False
        # Of every rank, before rank 0 is picked: the largest is shown.
        self._memory_bytes[envelope.rank] = event.peak_bytes or event.rss_bytes
        if envelope.rank != 0:
            return False
        self.is_first_of_attempt = self.last is None or envelope.attempt != self.attempt
        if self.is_first_of_attempt:
            self._recent.clear()  # the pace of processes that are gone says nothing about these
            self._num_of_attempt = 0
        self._num_of_attempt += 1
        self.last, self.attempt = event, envelope.attempt
        is_steady = self._num_of_attempt > NUM_WARMUP_STEPS
        if is_steady and math.isfinite(event.step_s) and math.isfinite(event.tokens_per_s):
            # Tokens and seconds, not rates: a mean of rates would count short steps too much.
            self._recent.append((event.tokens_per_s * event.step_s, event.step_s))
        return True

    def words(self, envelope: Envelope) -> str | None:
        """The line for an event that is told here, or None.

        A save that fails as the one before did is told briefly.
        """
        event = envelope.event
        if isinstance(event, events.CheckpointSaved):
            self._failure = ""
        elif isinstance(event, events.CheckpointFailed):
            subject = "the best" if event.path == "best.json" else "a save"
            before, self._failure = (
                self._failure,
                f"{subject}: {_VARYING_NUMBER_PATTERN.sub('N', event.reason)}",
            )
            if before == self._failure:
                return describe_repeated_save_failure(event)
        if isinstance(envelope.event, EVENT_CLASSES_NOT_PRINTED):
            return None
        return describe_event(envelope, self.units)

    @property
    def last_step(self) -> int:
        if self.last is None:
            return 0
        return int(self.last.step)

    @property
    def seconds_per_step(self) -> float:
        if not self._recent:
            return math.nan
        return sum(seconds for _, seconds in self._recent) / len(self._recent)

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(seconds for _, seconds in self._recent)
        if not seconds > 0:
            return math.nan
        return sum(tokens for tokens, _ in self._recent) / seconds

    @property
    def eta_s(self) -> float:
        return self.seconds_per_step * max(self.total_steps - self.last_step, 0)

    @property
    def memory_bytes(self) -> float:
        """The largest rank's; of those whose events arrive here."""
        return max(self._memory_bytes.values(), default=math.nan)

    def describe_step(self) -> list[str]:
        """The step's numbers as words, most wanted first."""
        if self.last is None:
            return []
        return [
            f"loss {self.last.loss:.4f}",
            f"lr {self.last.learning_rate:.1e}",
            f"norm {self.last.grad_norm:.2f}",
            *self._describe_speed(),
            *self._describe_expert_load(),
        ]

    def _describe_speed(self) -> list[str]:
        if self.last is not None and not self._recent:
            return [f"{format_seconds(self.last.step_s)} for this step, warming up"]
        return [
            f"{_format_rate_per_s(self.tokens_per_s)} {self.units.short_rate_unit}",
            f"{format_seconds(self.seconds_per_step)}/step",
        ]

    def describe_eta(self) -> str:
        """ "eta 3.3 s"; before there is a pace to go by, or where nobody knows how many steps there
        are, that it is not known."""
        if not self.total_steps:
            return "eta not known"
        if self._recent:
            return f"eta {_format_eta_seconds(self.eta_s)}"
        if self.last_step < self.total_steps:
            return "eta not known yet"
        return f"eta {_format_eta_seconds(0.0)}"

    def name_step(self) -> str:
        """ "step  12/500"; "step 12" where nobody knows how many there are."""
        if not self.total_steps:
            return f"step {self.last_step}"
        return f"step {self.last_step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _describe_expert_load(self) -> list[str]:
        """ "experts 1.42x": the busiest expert of any layer against the mean of its layer.

        Of the last step told.
        """
        if not self._experts:
            return []
        worst = max(event.worst[1] for event in self._experts.values())
        dropped = max(event.dropped_share for event in self._experts.values())
        if not dropped:
            return [f"experts {worst:.2f}x"]
        return [f"experts {worst:.2f}x dropped {100 * dropped:.1f}%"]


def _format_evaluation_for_console(event: EvalFinished) -> str:
    """ "eval 1.4200 (best 1.4000 at 300)"; of the best itself, only its loss, or the metric it is
    judged by."""
    text = f"{event.value_of(event.judged_by):.4f}"
    if event.judged_by != "loss":
        text = f"{printable(event.judged_by, 24)} {text}"
    if 0 < event.best_step != event.step:
        text += f" (best {event.best:.4f} at {event.best_step})"
    return f"eval {text}"


def _format_rate_per_s(per_s: float) -> str:
    if not math.isfinite(per_s):
        return "?"
    return format_count(per_s).replace(" ", "").replace("K", "k")


def _format_eta_seconds(seconds: float) -> str:
    if seconds == 0:
        return "0 s"
    return format_seconds(seconds)


def _format_memory_bytes(num_bytes: float) -> str:
    if not math.isfinite(num_bytes):
        return "?"
    return format_bytes(num_bytes).replace(".0 ", " ")


class PlainConsole:
    """Lines for log files and pipes: no control characters, nothing redrawn."""

    def __init__(self, stream: QuietStream, pace: RunProgress, log_every: int) -> None:
        self._stream = stream
        self._pace = pace
        self._log_every = log_every
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        if self._pace.take_event(envelope):
            if self._is_step_line_due():
                self.say(self._build_step_line())
        elif (
            not isinstance(envelope.event, EVENT_CLASSES_NOT_PRINTED)
            and (line := self._pace.words(envelope)) is not None
        ):
            self.say(line)

    def _is_step_line_due(self) -> bool:
        """Each `log_every` steps, and at the first and last of them: a person waits for a sign
        of life."""
        pace = self._pace
        return (
            pace.is_first_of_attempt
            or pace.last_step % self._log_every == 0
            or pace.last_step == pace.total_steps
        )

    def _build_step_line(self) -> str:
        pace = self._pace
        parts = [" ".join(pace.name_step().split()), *pace.describe_step()]
        parts += [pace.describe_eta(), f"mem {_format_memory_bytes(pace.memory_bytes)}"]
        return "  ".join(parts)

    def say(self, line: str) -> None:
        if self._is_open:
            self._stream.write(printable(line) + "\n")
            self._stream.flush()

    def tick(self) -> None:
        if (line := self._pace.activity.build_log_line_if_due()) is not None:
            self.say(line)

    def close(self) -> None:
        self._is_open = False


class LiveConsole:
    """A bar and the step's facts at the bottom of a terminal, and a line for what is no step,
    redrawn at most ten times a second.

    Events scroll above them.
    """

    def __init__(self, screen: Any, pace: RunProgress) -> None:
        from rich.live import Live

        self._pace = pace
        self._screen = screen
        self._drawn_s = 0.0
        # No thread of rich's redraws, `tick` does; what ranks print comes through `say`.
        self._live = Live(
            console=screen, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._is_open = True

    def write(self, envelope: Envelope) -> None:
        if self._pace.take_event(envelope):
            self.tick()
        elif (
            not isinstance(envelope.event, EVENT_CLASSES_NOT_PRINTED)
            and (line := self._pace.words(envelope)) is not None
        ):
            self.say(line, style=_choose_event_style(envelope.event))

    def say(self, line: str, style: str = "") -> None:
        from rich.text import Text

        if self._is_open:
            self._screen.print(Text(printable(line), style=style))

    def tick(self) -> None:
        now = time.monotonic()
        is_something = (
            self._pace.last is not None or self._pace.activity.words or self._live.is_started
        )
        if self._is_open and is_something and now - self._drawn_s >= CONSOLE_REDRAW_INTERVAL_S:
            self._drawn_s = now
            self._draw()

    def _draw(self) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._build_live_frame(), refresh=True)

    def close(self) -> None:
        """Draw the last state, which stays on the screen, and give the cursor back."""
        self._pace.activity.clear()
        if self._is_open and (self._pace.last is not None or self._live.is_started):
            self._draw()
        self._is_open = False
        self._live.stop()

    def _build_live_frame(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        pace = self._pace
        if pace.activity.words:
            doing = [Text(pace.activity.build_live_line(), no_wrap=True, overflow="ellipsis")]
        else:
            doing = []
        if pace.last is None:
            return Group(*doing)
        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(pace.name_step(), style="bold"),
            ProgressBar(total=pace.total_steps or None, completed=pace.last_step),
            Text(pace.describe_eta()),
        )
        facts = [*pace.describe_step(), f"mem {_format_memory_bytes(pace.memory_bytes)}"]
        if pace.last_eval is not None:
            # Beside the training loss, which is the first fact.
            facts.insert(1, _format_evaluation_for_console(pace.last_eval))
        if pace.num_restarts:
            facts.append(f"restarts {pace.num_restarts}")
        if pace.num_skipped:
            facts.append(f"skipped {pace.num_skipped}")
        lines = [
            Text(line, no_wrap=True, overflow="ellipsis")
            for line in _wrap_facts_into_lines(facts, self._screen.width)
        ]
        return Group(bar, *lines, *doing)


def _wrap_facts_into_lines(facts: list[str], width: int) -> list[str]:
    """The facts on as few lines as hold them whole: the last ones are as wanted as the first."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 2 <= width:
            lines[-1] += f"  {fact}"
        else:
            lines.append(fact)
    return lines


_EVENT_CLASSES_SHOWN_YELLOW = (
    events.CheckpointPostponed,
    events.NonFiniteFound,
    events.ReplicasReplayed,
    events.StepSkipped,
    events.RestartScheduled,
    events.SinkDropped,
    events.StopRequested,
    events.LoaderWorkerReplaced,
    events.RankSlow,
    events.HangFound,
    events.StoreLost,
)


def _choose_event_style(event: events.Event) -> str:
    if isinstance(event, events.RankFailed | events.CheckpointFailed | events.CheckpointUnusable):
        return "red"
    if isinstance(event, events.Note):
        if event.code == "warning":
            return "yellow"
        return ""
    if isinstance(event, _EVENT_CLASSES_SHOWN_YELLOW):
        return "yellow"
    return ""
