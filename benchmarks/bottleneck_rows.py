"""What came of the trials of `benchmarks/bottlenecks.py`: the verdict beside the cause that was put
in, rows that are kept, and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from bottleneck_trials import Trial

KEPT = Path(__file__).parent.parent / "build" / "bottlenecks.jsonl"
TOLERANCE, MIN_TOLERANCE = 0.20, 0.05


@dataclass(frozen=True)
class ToldVerdict:
    """What `phalanx report RUN --json` has under `bottleneck`."""

    facts: Mapping[str, Any]

    @property
    def named(self) -> list[str]:
        """The kinds of the causes, the largest first."""
        return [_name_kind(cause) for cause in self.facts["causes"]]

    @property
    def rank(self) -> int | None:
        """The first rank that a cause names."""
        ranks = (cause["rank"] for cause in self.facts["causes"] if cause["rank"] is not None)
        return next(ranks, None)

    @property
    def sentence(self) -> str:
        return str(self.facts["sentence"])

    @property
    def step_seconds(self) -> float:
        """Of a step with what stands between steps: evaluations."""
        seconds = float(self.facts["mean_step_s"])
        for cause in self.facts["causes"]:
            if cause["kind"] == "evaluation":
                seconds /= 1 - cause["share"]
        return seconds

    def predict_gain(self, trial: Trial) -> tuple[float, str]:
        """The gain of the trial's setting, or of its causes together; "at most", "at least", or
        neither."""
        saved_share, is_upper_bound = 0.0, False
        for cause in self.facts["causes"]:
            if _name_kind(cause) not in trial.expected:
                continue
            for gain in cause["gains"]:
                if gain["setting"] == trial.setting:
                    return gain["speedup"], gain["limit"]
            saved_share += 1 - 1 / cause["speedup"]
            is_upper_bound |= cause["is_upper_bound"]
        return 1 / max(1 - saved_share, 0.01), "at most" if is_upper_bound else ""

    def is_right_on(self, trial: Trial) -> bool:
        """True if it names the trial's cause, and its rank."""
        if not self.named:
            return False
        if trial.name.startswith("healthy"):
            return self.named[0] in trial.expected and self.rank is None
        if len(trial.expected) > 1:
            return set(trial.expected) <= set(self.named) and self.rank == trial.rank
        is_named_first = self.named[0] == trial.expected[0]
        return is_named_first and trial.rank in (None, self.rank)


def _name_kind(cause: Mapping[str, Any]) -> str:
    """The kind; of an update that memory bounds that of any long update."""
    if cause["phase"] == "optimizer":
        return "optimizer"
    return str(cause["kind"])


@dataclass
class Row:
    """What came of a trial; `seconds_*` are the mean of a step, `predicted` and `gained` speed-ups
    (0: the verdict named another cause)."""

    name: str
    about: str
    expected: list[str]
    rank: int | None
    named: list[str]
    named_rank: int | None
    is_right: bool
    predicted: float
    is_upper_bound: bool
    gained: float
    seconds_with: float
    seconds_without: float
    sentence: str
    seed: int = 0
    is_lower_bound: bool = False

    @classmethod
    def compare(
        cls,
        trial: Trial,
        seed: int,
        verdict: ToldVerdict,
        seconds_without: float,
        first_seconds_without: float,
    ) -> Row:
        """The row of a trial, whose delays are shares of `first_seconds_without`."""
        predicted, limit = verdict.predict_gain(trial)
        return cls(
            trial.name,
            trial.describe(first_seconds_without),
            list(trial.expected),
            trial.rank,
            verdict.named,
            verdict.rank,
            verdict.is_right_on(trial),
            predicted,
            limit == "at most",
            trial.tokens_factor * verdict.step_seconds / seconds_without,
            verdict.step_seconds,
            seconds_without,
            verdict.sentence,
            seed=seed,
            is_lower_bound=limit == "at least",
        )

    @property
    def is_gain_right(self) -> bool:
        """Within a fifth of the gain, or 0.05; an upper bound must not be below it, nor a lower
        one above."""
        allowed = max(TOLERANCE * (self.gained - 1), MIN_TOLERANCE)
        if self.is_upper_bound:
            return self.predicted >= self.gained - allowed
        if self.is_lower_bound:
            return self.predicted <= self.gained + allowed
        return abs(self.predicted - self.gained) <= allowed

    @property
    def is_gain_right_on_both_sides(self) -> bool:
        """The same where bounds, too, must not be further from it."""
        allowed = max(TOLERANCE * (self.gained - 1), MIN_TOLERANCE)
        return abs(self.predicted - self.gained) <= allowed


@dataclass
class Campaign:
    """The rows of a seed so far."""

    seed: int
    rows: dict[str, Row] = field(default_factory=dict)

    @classmethod
    def load(cls, seed: int) -> Campaign:
        campaign = cls(seed)
        if KEPT.exists():
            for line in KEPT.read_text().splitlines():
                body = json.loads(line)
                if body["seed"] == seed:
                    campaign.rows[body["name"]] = Row(**body)
        return campaign

    def add(self, row: Row) -> None:
        self.rows[row.name] = row
        KEPT.parent.mkdir(exist_ok=True)
        with KEPT.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def format_page(rows: Sequence[Row], seed: int, left_out: Sequence[str]) -> str:
    """The rows as a page of docs."""
    num_right = sum(row.is_right for row in rows)
    judged = [row for row in rows if row.is_right and not row.name.startswith("healthy")]
    num_gains = sum(row.is_gain_right for row in judged)
    num_strict = sum(row.is_gain_right_on_both_sides for row in judged)
    lines = [
        "# What bounds a run: verdicts beside causes that were put in",
        "",
        "Each row is a real run of two ranks with a cause inside, drawn by a seed; `phalanx report`"
        " was told nothing but its directory. “Gained” is the step time with the cause over that"
        " without it, the mean of a run before and one after (of a larger batch: the ratio of their"
        " tokens a second); “predicted” is what the verdict says of the run with the cause alone."
        " Predicted is right within a fifth of the gain or 0.05;"
        " where it is an upper bound (≤), if it is not below by more, and where it is a lower one"
        " (≥), if it is not above by more.",
        "",
        f"Written by `python benchmarks/bottlenecks.py --seed {seed} --page docs/bottlenecks.md` on"
        f" {date.today()} (two cores, CPU).",
        "",
        f"**{num_right} of {len(rows)} named right** (cause and rank), the gain right in"
        f" {num_gains} of {len(judged)} of those that have one; in {num_strict} of {len(judged)}"
        " if bounds must not be further from it, either.",
        "",
        "| cause put in | named | rank | right | predicted | gained | gain right |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for row in rows:
        limit = "≤ " if row.is_upper_bound else "≥ " if row.is_lower_bound else ""
        is_healthy = row.name.startswith("healthy")
        gains = [f"{limit}{row.predicted:.2f}", f"{row.gained:.2f}", say(row.is_gain_right)]
        if is_healthy or not row.is_right:
            gains = ["–", f"{row.gained:.2f}", "–"]
        named_rank = "–" if row.named_rank is None else str(row.named_rank)
        cells = [row.about, ", ".join(row.named), named_rank, say(row.is_right), *gains]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *[f"Left out: {text}." for text in left_out]]
    return "\n".join(lines).rstrip() + "\n"


def say(value: bool) -> str:
    return "yes" if value else "no"
