"""What the process that evaluates or generates sends its ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.core.typed_json import JsonRecord
from phalanx.data.tokens import Split
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan


@dataclass(frozen=True)
class SamplingOptions:
    """Rule by which a token is drawn: among the `top_k` likeliest, or the likeliest that make up
    `top_p`."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class ModelPayload(JsonRecord):
    """A trained model and how ranks share it.

    `checkpoint` is a path or URL, empty for weights that come with the job's own module; `casts`
    takes floating-point numbers of another type as they come. `run_dir` is where the ranks write.
    """

    job: Job
    plan: Plan
    run_dir: Path
    checkpoint: str
    step: int
    casts: bool


@dataclass(frozen=True)
class EvaluatePayload(JsonRecord):
    """The `split` of the corpus in `data_dir` is evaluated."""

    model: ModelPayload
    data_dir: Path
    split: Split


@dataclass(frozen=True)
class GeneratePayload(JsonRecord):
    """Each of `prompts` (token ids) is continued by `num_tokens` tokens, or up to the token `end`.

    `num_choices`: ids from it on are never chosen; None for all.
    """

    model: ModelPayload
    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int
    context: int
    seed: int
    end: int | None
    sampling: SamplingOptions
    num_choices: int | None
