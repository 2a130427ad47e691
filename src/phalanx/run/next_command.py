"""The line that says how one goes on: a command that works as it is when it is pasted where this
one ran."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.data.corpus import Corpus
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan

# The beginning of a text of that source.
_PROMPTS = {"stdlib": "def "}


def format_program_command() -> str:
    """The word that calls this program in a shell: `phalanx` if that is on the PATH, else the
    path or `python -m phalanx` that was typed."""
    typed = sys.argv[0]
    if Path(typed).parts[-2:] == ("phalanx", "__main__.py") and shutil.which("phalanx") is None:
        return f"{shlex.quote(sys.executable)} -m phalanx"
    is_a_path = os.path.basename(typed) == "phalanx" and os.sep in typed
    on_path = shutil.which("phalanx")
    if not is_a_path or (
        on_path is not None and os.path.realpath(on_path) == os.path.realpath(typed)
    ):
        return "phalanx"
    return shlex.quote(typed)


def format_next_command(*words: str) -> str:
    """`next    phalanx train 'my job.toml'`: the words as a shell takes them."""
    return f"next    {format_program_command()} {shlex.join(words)}"


def spell_path_as_argument(path: Path | str) -> str:
    """The path as a verb takes it: a name that begins like an option gets its folder."""
    name = str(path)
    return f"./{name}" if name.startswith("-") else name


def build_next_line_after_training(job: Job, plan: Plan, corpus: Corpus, run_dir: Path) -> str:
    """The line that says what to do with a finished run: generate, evaluate or read its page."""
    run = spell_path_as_argument(run_dir)
    if (
        corpus.is_text
        and job.model.objective is None
        and not plan.model_shape.reads_images
        and job.checkpoint.at_end
    ):
        prompt = _PROMPTS.get(corpus.source, "The ")
        return format_next_command("generate", run, "--prompt", prompt)
    if _has_held_out_samples(corpus) and job.checkpoint.at_end:
        return format_next_command("eval", run)
    return format_next_command("report", run)


def _has_held_out_samples(corpus: Corpus) -> bool:
    """True if there is a sample to evaluate, or two tokens, of which one predicts the other."""
    if corpus.user is not None:
        return corpus.user.num_held_out > 0
    return corpus.splits["held_out"].num_tokens > 1


def build_next_line_after_planning(arguments: Sequence[str]) -> str:
    """The line that says how to train what was planned."""
    return format_next_command("train", *map(spell_path_as_argument, arguments))
