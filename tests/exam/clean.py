"""The clean side: rows of an unchanged phalanx over models, layouts and seeds, none of which may
differ."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exam.score import DIFFERS, Row
from exam.sit import MODULES, Processes, build_environment, read_rows, verify_command
from phalanx.core.errors import ExitCode
from phalanx.job.hugging_face import is_hugging_face
from phalanx.verify.cases import (
    ONE_PROCESS_ROWS,
    is_judged_in_float64_only,
    list_all_layouts,
    list_gradient_compression_layouts,
    list_layouts_for_narrow_dtypes,
)
from phalanx.verify.number_types import is_narrow_dtype, resolve_dtype_names
from phalanx.verify.trainer_cases import list_trainer_case_names

NUM_RANKS, ROWS_PER_RUN = 4, 50
MODELS = (
    "small",
    "small-mixtral",
    "gpt2",
    "small-latent",
    "llama3-8b",
    "small-deepseek",
    "gemma3-1b",
)


# Modules of a user's own: without heads to cut, with dropout and with running statistics; and a
# model of transformers, by its folder in MODULES.
OWN_MODULES = ("exam_models:WithDropout", "exam_models:WithBatchNorm", "hf:llama")
ROWS_PER_OWN_RUN, FIRST_OWN_SEED = 250, 1000
# Of the seeds every fourth has rows in a narrow type in place of float32: as many rows. No number
# of models divides by four, so that each comes to have both.
NARROW_TYPES, SEEDS_PER_NARROW_RUN = ("bf16", "fp16"), 4


@dataclass(frozen=True)
class CleanRun:
    """Some layouts of a model, judged with one seed; in `types`, or those that verify takes by
    itself."""

    model: str
    seed: int
    layouts: tuple[str, ...]
    types: str = ""

    @property
    def name(self) -> str:
        model = self.model.removeprefix("exam_models:").replace(":", "_")
        return f"clean_{model}_{self.seed}"

    @property
    def job(self) -> tuple[str, ...]:
        """The arguments of `phalanx verify` that say what is judged."""
        size = "data.seq_len=16" if self.model in OWN_MODULES else "--shrink"
        model = self.model
        if is_hugging_face(model):
            # Of this checkout: a result of the same run in another one is the same.
            model = f"hf:{MODULES / model.removeprefix('hf:') / 'config.json'}"
        return "--model", model, size, f"run.seed={self.seed}"


@dataclass(frozen=True)
class CleanScore:
    """Rows that were compared, how many layouts were refused, and what each alarm said."""

    name: str
    seed: int
    num_rows: int
    num_refused: int
    alarms: tuple[str, ...]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> CleanScore:
        return cls(**{**body, "alarms": tuple(body["alarms"])})


def plan_clean_runs(num_rows: int) -> Iterator[CleanRun]:
    """Runs of built-in models of about `num_rows` rows in all (two types a layout, one of rows that are no layout), each with a seed of its own;
    beside them one of a user's own module for each ROWS_PER_OWN_RUN rows."""
    for seed in range(-(-num_rows // ROWS_PER_RUN)):
        model = MODELS[seed % len(MODELS)]
        has_experts = model in ("small-mixtral", "small-deepseek")
        names = [name for name, _ in list_all_layouts(NUM_RANKS, experts=has_experts)]
        names += [name for name, _ in list_gradient_compression_layouts(NUM_RANKS)]
        names += [*ONE_PROCESS_ROWS]
        names += list_trainer_case_names(NUM_RANKS, experts=has_experts)
        yield _draw_run(model, seed, names)
    names = [name for name, _ in list_all_layouts(NUM_RANKS, experts=False)]
    names += [name for name, _ in list_gradient_compression_layouts(NUM_RANKS)]
    names += list_trainer_case_names(NUM_RANKS)
    for index in range(num_rows // ROWS_PER_OWN_RUN):
        yield _draw_run(OWN_MODULES[index % len(OWN_MODULES)], FIRST_OWN_SEED + index, names)


def _draw_run(model: str, seed: int, names: Sequence[str]) -> CleanRun:
    drawn = random.Random(seed).sample(names, min(len(names), ROWS_PER_RUN // 2))
    types = ""
    if seed % SEEDS_PER_NARROW_RUN == SEEDS_PER_NARROW_RUN - 1:
        types = f"float64,{NARROW_TYPES[seed // SEEDS_PER_NARROW_RUN % len(NARROW_TYPES)]}"
    return CleanRun(model, seed, tuple(sorted(drawn)), types)


def run_clean(run: CleanRun, processes: Processes) -> CleanScore:
    command = verify_command(run.job, ",".join(run.layouts), NUM_RANKS)
    if run.types:
        command += ("--types", run.types)
    with tempfile.TemporaryDirectory(prefix="exam-") as directory:
        # Ten times the rows of a plant.
        done = processes.run(command, Path(directory), build_environment(), num_timeouts=3)
    if done is None:
        return CleanScore(run.name, run.seed, 0, 0, ("it hung",))
    rows = read_rows(done.stdout)
    compared = [row for row in rows if not row["refused"]]
    alarms = [
        f"{row['layout']} {row['dtype']}: {row['crashed'] or row['first']['text']}"
        for row in compared
        if row["crashed"] or row["first"] is not None
    ]
    # Rows that never came cannot differ.
    missing = list_missing_rows(run, rows)
    if missing:
        alarms.append(f"{len(missing)} rows missing, the first {missing[0]}: {done.stderr[-300:]}")
    expected = [ExitCode.OK, ExitCode.JOB]  # a layout that is named may be refused
    if any(row["ok"] is False for row in rows):
        expected = [DIFFERS]
    if done.returncode not in expected:
        alarms.append(f"exit code {done.returncode}: {done.stderr[-300:]}")
    return CleanScore(run.name, run.seed, len(compared), len(rows) - len(compared), tuple(alarms))


def list_missing_rows(run: CleanRun, rows: Sequence[Row]) -> list[str]:
    """Each layout and type that the run asks for and that has no row, not even a refused one."""
    present = {(row["layout"], row["dtype"]) for row in rows}
    axes_of = dict(
        [
            *list_all_layouts(NUM_RANKS, experts=True),
            *list_gradient_compression_layouts(NUM_RANKS),
        ]
    )
    asked = {name: axes_of.get(name, {}) for name in run.layouts}
    missing = []
    for dtype in resolve_dtype_names(run.types, "fp32"):
        names = [
            name for name in asked if dtype == "float64" or not is_judged_in_float64_only(name)
        ]
        if is_narrow_dtype(dtype):
            names = [name for name, _ in list_layouts_for_narrow_dtypes(asked, dtype)]
        # What is refused before any type comes into play has one row, of type "".
        missing += [
            f"{name} {dtype}" for name in names if not {(name, dtype), (name, "")} & present
        ]
    return missing
