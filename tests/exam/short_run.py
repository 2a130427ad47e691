"""`python -m exam.short_run REQUEST`: train one job for a few steps and print its losses and norms.

Run by `exam.curves`, in an environment in which phalanx has the edits of a plant. REQUEST is JSON:
what `phalanx verify` is given ("job"), the layout, its ranks, and a folder to work in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx import train_job
from phalanx.cli._arguments import build_overrides_of_model, split_job_file_and_overrides
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Data, Job
from phalanx.job.shapes.vit import VitShape
from phalanx.observe.events import StepFinished
from phalanx.observe.tail import read_recorded_events
from phalanx.verify.cases import Case
from phalanx.verify.choose import select_layout_cases
from phalanx.verify.verified_job import SHRUNK_VOCAB_SIZE

NUM_STEPS = 20
ONE_PROCESS = "one process"
# Rows of these names train in no layout of their own.
WITHOUT_LAYOUT = ("plain", "hugging-face", "definitions")
NUM_BYTES = 400_000
# The bytes, and the end of a document.
NUM_TOKENS = 257
# So that each of four ranks has three microbatches of a batch of 24.
MICRO_BATCH = 2


def main() -> None:
    request = json.loads(sys.argv[1])
    folder = Path(request["folder"])
    job = choose_job(request["job"], request["layout"], request["num_ranks"], folder)
    result = train_job(job, quiet=True)
    steps = [each.event for each in read_recorded_events(Path(result.run_dir), StepFinished)]
    rows = [[step.loss, step.grad_norm] for step in steps if isinstance(step, StepFinished)]
    print(json.dumps({"status": result.status, "steps": rows}))


def choose_job(arguments: list[str], layout: str, num_ranks: int, folder: Path) -> Job:
    """The job that `phalanx verify` would judge, in `layout`, for NUM_STEPS steps of real data."""
    words, shrink, model = [], False, None
    rest = iter(arguments)
    for word in rest:
        if word == "--shrink":
            shrink = True
        elif word == "--model":
            model = next(rest)
        else:
            words.append(word)
    job = load_job(*split_overrides(words, model))
    # One process trains what its layout has: pipelines have more blocks, others odd sequences.
    is_one_process = layout.startswith(ONE_PROCESS)
    name = layout.removeprefix(ONE_PROCESS).removeprefix(" of ") or "ddp"
    if name in WITHOUT_LAYOUT:
        name = "ddp"
    selection = select_layout_cases(job, [name], ranks=num_ranks, steps=1, shrink=shrink)
    parallel: Mapping[str, Any] = require_plan(selection.cases[0]).parallel
    if is_one_process:
        of_data = {key: value for key, value in parallel.items() if key.startswith("data.")}
        parallel = {"ranks": 1, **of_data}
    body = selection.job.to_json()
    for key, value in parallel.items():
        section, _, rest = key.rpartition(".")
        body[section or "parallel"][rest] = value
    # Text is read as bytes.
    if (body["model"]["vocab_size"] or NUM_TOKENS) < NUM_TOKENS:
        body["model"]["vocab_size"] = NUM_TOKENS
    body["train"] |= {"steps": NUM_STEPS, "sample_tokens": 0, "micro_batch_size": MICRO_BATCH}
    body["eval"]["tokens"] = 1024
    body["checkpoint"]["at_end"] = False
    body["run"]["dir"] = str(folder / "run")
    body["data"] |= choose_data(selection.job, folder)
    return Job.model_validate_json(json.dumps(body))


def choose_data(job: Job, folder: Path) -> dict[str, Any]:
    """The keys of data that a job without data of its own trains on."""
    if job.data.source != Data().source:
        return {}
    shape = None if job.model.is_foreign else build_model_shape(job, SHRUNK_VOCAB_SIZE)
    if isinstance(shape, VitShape):
        return {"source": "exam_models:pictures", "args": {"size": shape.image_size}}
    return {"source": str(write_text(folder))}


def split_overrides(words: list[str], model: str | None) -> tuple[Any, Any]:
    job_file, overrides = split_job_file_and_overrides(words)
    return job_file, build_overrides_of_model(model, overrides)


def require_plan(case: Case) -> Case:
    if case.plan is None:
        raise SystemExit(f"{case.name} is refused: {case.refused}")
    return case


def write_text(folder: Path) -> Path:
    """A file of Python's own sources, small enough to be read in no time."""
    import argparse
    import json.decoder
    import subprocess
    import typing

    modules = (argparse, subprocess, typing, json.decoder)
    text = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in modules)
    path = folder / "text.txt"
    path.write_text(text[:NUM_BYTES], encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
