"""The facts of a run that a report shows: one value, reduced from its files, without any HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpoint.best import BestStepRecord
from phalanx.core.units import format_bytes
from phalanx.observe import events
from phalanx.observe.events import Envelope
from phalanx.observe.time_groups import TIME_GROUPS
from phalanx.observe.units import MetricUnits
from phalanx.report.block_norm_facts import BlockNormFacts
from phalanx.report.bottleneck.cause import BottleneckVerdict
from phalanx.report.caller_facts import CallerFacts
from phalanx.report.drift import Drift
from phalanx.report.expert_facts import ExpertFacts
from phalanx.report.invariant_facts import InvariantFacts
from phalanx.report.ledger import RankLedger
from phalanx.report.raw_events import RawEvents
from phalanx.report.reliability import Reliability
from phalanx.report.self_time import SelfTimeMap
from phalanx.report.timeline import RunTimeline

MAX_SHOWN_WARNINGS = 10
"""Of a run, at the head of its page."""
MAX_USUAL_SKIPPED_SHARE = 0.05
"""Of a run's steps: a few overflow in fp16, or meet a batch that nothing can be learnt from."""

_TEXT_OF_SKIP_REASON = {
    "no_targets": "had no targets",
    "nonfinite_gradients": "had non-finite gradients",
    "overflow": "overflowed in fp16",
    "loss_spike": "had a loss far above those before",
}

NOUN_OF_BYTES_SENT_OVER_AXIS = {
    "tp": "activations",
    "cp": "keys and values",
    "ep": "rows of experts",
    "pp": "hidden states",
}
"""By axis: what ranks send each other over it; and the gradients of that."""


def describe_sent_bytes(sent_bytes: float, plain_bytes: float) -> str:
    """Bytes of one step as text, with their share of fp32 if it differs; "" if nothing was sent."""
    if not sent_bytes > 0:
        return ""
    text = f"{format_bytes(sent_bytes)} a step"
    if 0 < plain_bytes != sent_bytes:
        text += f", {100 * sent_bytes / plain_bytes:.3g} % of what fp32 sends"
    return text


def describe_skipped_steps(
    steps: Collection[int], skipped: Iterable[events.StepSkipped]
) -> str | None:
    """A sentence about a run that applied none of its steps, or left out more than
    MAX_USUAL_SKIPPED_SHARE of them; None of any other."""
    reasons = {int(event.step): event.reason for event in skipped}
    num_skipped = len(reasons.keys() & set(steps))
    if num_skipped <= MAX_USUAL_SKIPPED_SHARE * len(steps):
        return None
    counts = Counter(reasons[step] for step in sorted(reasons.keys() & set(steps)))
    texts = {
        reason: _TEXT_OF_SKIP_REASON.get(reason, f"had the reason {reason!r}") for reason in counts
    }
    if num_skipped < len(steps):
        causes = [f"{count:,} {texts[reason]}" for reason, count in counts.most_common()]
        verb = "was" if num_skipped == 1 else "were"
        return f"{num_skipped:,} of {len(steps):,} steps {verb} not applied: {', '.join(causes)}"
    subject = f"each of the {len(steps):,} steps"
    if len(steps) == 1:
        subject = "the only step"
    why = "was skipped"
    if len(counts) == 1:
        (why,) = texts.values()
    return f"no step was applied, the weights are those it began with: {subject} {why}"


def _compute_upper_median(values: Sequence[float]) -> float:
    """The (upper) median; 0 without values."""
    if not values:
        return 0.0
    return sorted(values)[len(values) // 2]


@dataclass
class StepColumns:
    """The steps that made the model, as columns of equal length, ascending by step."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    rss_bytes: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    sent_by_axis: dict[str, list[float]] = field(
        default_factory=lambda: {axis: [] for axis in NOUN_OF_BYTES_SENT_OVER_AXIS}
    )
    groups_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in TIME_GROUPS}
    )

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class RankPhaseSeconds:
    """One rank's seconds by phase, over every step it ran, steps done again included."""

    rank: int
    num_steps: int
    mean_groups_s: dict[str, float]
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True)
class RunAttempt:
    """One life of the ranks. `first_step` is None if it never finished one.

    `is_restart`: it was started after a crash; a later one that is none is a resume, by a person.
    `is_by_launcher`: another launcher than phalanx did that, torchrun say, which says nothing.
    """

    number: int
    first_step: int | None
    started: events.RunStarted | None
    is_restart: bool = False
    is_by_launcher: bool = False


@dataclass(frozen=True)
class WallTimeBreakdown:
    """Every second of the run in one of a few parts, which sum to `wall_s`."""

    @property
    def good_s(self) -> float:
        """Seconds of steps that stand and were applied, without their waiting for data, saving and
        evaluating."""
        good_s = self.parts_s.get("training steps", 0.0)
        return good_s + self.parts_s.get("waiting for other stages", 0.0)

    wall_s: float
    parts_s: dict[str, float]


@dataclass(frozen=True)
class RunFacts:
    """A run as its files tell it.

    Numbers that were never measured are NaN, texts empty, lists short.
    """

    run_dir: Path
    name: str
    status: str
    is_finished: bool
    total_steps: int | None
    layout: dict[str, int]
    world_size: int | None
    device: str
    lead_rank: int
    steps: StepColumns
    last_step: int
    num_redone: int
    num_rolled_back: int
    num_restarts: int
    num_resumes: int
    skipped: list[events.StepSkipped]
    attempts: list[RunAttempt]
    ranks: list[RankPhaseSeconds]
    newest_ranks: list[RankPhaseSeconds]
    """The same over the newest steps of the last attempt with enough of them, without its first
    ones."""
    evals: list[events.EvalFinished]
    baselines: list[events.BaselineMeasured]
    memory: dict[int, events.MemoryMeasured]
    samples: list[events.TextGenerated]
    pipelines: list[events.PipelineMeasured]
    """By step; empty without a pipeline, or before one was measured."""
    experts: ExpertFacts
    """Empty for a model without experts."""
    block_norms: BlockNormFacts
    """Empty where none were measured, or the run is of an earlier release."""
    callers: list[CallerFacts]
    """Collectives by who called them; empty before a rank's attempt has ended."""
    invariants: list[InvariantFacts]
    """Empty where nothing was checked, or the run is of an earlier release."""
    bottleneck: BottleneckVerdict | None
    """What bounds the newest steps; None where no step was recorded."""
    story: list[Envelope]
    ledger: WallTimeBreakdown
    rank_ledgers: list[RankLedger]
    """Where the seconds of each rank went; empty for runs of earlier releases."""
    reliability: Reliability
    wall_s: float
    tokens_per_s: float
    timeline: RunTimeline
    """When in the life of the run something was said."""
    started_unix_s: float
    """What the wall clock showed then, to be read by people; as `last_unix_s`."""
    last_unix_s: float
    num_events: int
    num_unreadable: int
    reading_gaps: list[str]
    plan: dict[str, Any]
    job: dict[str, Any]
    problems: list[str]
    kept_best: BestStepRecord | None
    """The checkpoint that RUN/best.json names."""
    units: MetricUnits
    drifts: list[Drift]
    """What grew over the newest attempt: step time, memory."""
    warnings: list[str]
    """What was said before the first step or along the way that a person should know."""
    self_times: SelfTimeMap | None = None
    """None of one rank alone, or where no step was recorded."""
    raw: RawEvents = field(default_factory=RawEvents)
    """Lines of the event files; read only for a page."""

    def list_gaps(self) -> list[str]:
        """A line about each file and event of the run that could not be read or is not there."""
        return [*self.problems, *self.reading_gaps]

    @property
    def final_loss(self) -> tuple[int, float] | None:
        """The last applied step and its loss: a step without targets has a loss of 0 that says
        nothing. None where no step was applied."""
        skipped = {int(event.step) for event in self.skipped}
        rows = zip(reversed(self.steps.step), reversed(self.steps.loss), strict=True)
        return next(((step, loss) for step, loss in rows if step not in skipped), None)

    @property
    def describe_sent_gradients(self) -> str:
        """ "12.3 MiB a step, 25 % of what fp32 sends": what the lead rank sent of gradients;
        empty if nothing."""
        # Of the last attempt that began: a resumed run may have another layout.
        plain_bytes = 0.0
        for attempt in self.attempts:
            if attempt.started is not None:
                plain_bytes = attempt.started.plain_bytes
        return describe_sent_bytes(_compute_upper_median(self.steps.sent_bytes), plain_bytes)

    def describe_sent_over(self, axis: str) -> str:
        """Bytes that the lead rank sent over `axis` (a key of NOUN_OF_BYTES_SENT_OVER_AXIS), as
        "12.3 MiB a step"; empty if none or unknown."""
        return describe_sent_bytes(_compute_upper_median(self.steps.sent_by_axis[axis]), 0)

    @property
    def find_best_evaluation(self) -> events.EvalFinished | None:
        """The evaluation that the last one names; of older runs the first with the lowest loss
        over as many targets."""
        named = [event for event in self.evals if event.step == self.evals[-1].best_step]
        if named and self.evals[-1].judged_by != "loss":
            return named[0]
        comparable = []
        for event in self.evals:
            # A loss over other targets is no better or worse.
            if math.isfinite(event.loss) and event.num_targets == self.evals[-1].num_targets:
                comparable.append(event)
        return min(comparable, key=lambda event: (event.loss, event.step), default=None)
