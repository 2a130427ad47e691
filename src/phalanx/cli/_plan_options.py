"""The options of `phalanx plan`: what each is for, and which go together.

The verb has modes (validate, autotune, ...) that each read some options; what a mode would not read
is refused, so that nobody takes an answer for one to another question.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated

import typer

from phalanx.core.errors import UsageError


def parse_path(text: str) -> Path:
    """The path that an option names. Raises typer.BadParameter for an empty one, which would be the
    directory that one stands in: what a variable of the shell that is not set leaves."""
    if not text:
        raise typer.BadParameter("the path is empty")
    return Path(text)


ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain",
        help="Say where each value of the job comes from; with a TERM, print its formula.",
    ),
]
AllRulesOption = Annotated[
    bool, typer.Option("--rules", help="Show every rule of thumb, also those that hold.")
]
PageOption = Annotated[
    Path | None,
    typer.Option(
        "--page", metavar="FILE", parser=parse_path, help="Write the plan as a page (HTML)."
    ),
]
ModelsOption = Annotated[bool, typer.Option("--models", help="List the presets of model.preset.")]
SuggestOption = Annotated[
    bool,
    typer.Option(
        "--suggest-rules", help="Propose sharding rules for tensor parallelism, and say why."
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="A preset, a Hugging Face directory or config.json, or package.module:factory.",
    ),
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help="Plan for GPUs of this kind: h100-sxm."),
]
InstanceOption = Annotated[
    str | None,
    typer.Option("--instance", metavar="TYPE", help="Plan for machines of this type."),
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        metavar="FILE",
        parser=parse_path,
        help="Plan for the cluster that this file describes.",
    ),
]
NodesOption = Annotated[
    int | None, typer.Option("--nodes", min=1, metavar="N", help="Machines of the cluster.")
]
GpusOption = Annotated[
    str | None,
    typer.Option("--gpus", metavar="N|A..B", help="GPUs in all; a range compares numbers of them."),
]
SeqLenOption = Annotated[
    int | None,
    typer.Option("--seq-len", min=1, metavar="N", help="Tokens of a sequence (data.seq_len)."),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, metavar="N", help="Sequences a step, over all ranks."),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        parser=parse_path,
        help="Write job.toml with the layout, plan.json and page.html there.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="With --out: replace files that are there.")
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify", help="With --suggest-rules: judge them with parallel.tp=2 (phalanx verify)."
    ),
]
RecutOption = Annotated[
    Path | None,
    typer.Option(
        "--recut",
        metavar="RUN",
        parser=parse_path,
        help="Cut a pipeline anew, by what the stages of this run took.",
    ),
]
DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Build and run the real program with fake tensors: memory and every collective.",
    ),
]
AllKindsOption = Annotated[
    bool, typer.Option("--all-kinds", help="With --dry-run: every kind of rank.")
]
NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="With --dry-run: run it again.")]
ValidateOption = Annotated[
    Path | None,
    typer.Option(
        "--validate",
        metavar="FILE",
        parser=parse_path,
        help="Predict the measured runs of this JSONL file, and say how wrong that is.",
    ),
]
AnchorsOption = Annotated[
    int,
    typer.Option(
        "--anchors",
        metavar="K",
        min=0,
        help="With --validate: K rows of each source set a scale for its others.",
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        parser=parse_path,
        help="Time and memory from what a small run measured.",
    ),
]
AutotuneOption = Annotated[
    int | None,
    typer.Option("--autotune", min=1, metavar="K", help="Run the K best layouts for a few steps."),
]

JOB_ARGUMENTS = "a job file or KEY=VALUE"
OF_JOB = frozenset({JOB_ARGUMENTS, "--model", "--seq-len", "--global-batch"})
OF_CLUSTER = frozenset({"--gpu", "--instance", "--cluster", "--nodes"})
OPTIONS_OF_MODE: Mapping[str, Collection[str]] = {
    "--models": frozenset(),
    "--validate": frozenset({"--anchors"}),
    "--suggest-rules": frozenset({JOB_ARGUMENTS, "--model", "--verify"}),
    "--from": OF_JOB,
    "--autotune": OF_JOB,
    "--dry-run": OF_JOB | OF_CLUSTER | {"--gpus", "--all-kinds", "--no-cache"},
    "--recut": OF_JOB | OF_CLUSTER,
    "--explain": OF_JOB | OF_CLUSTER | {"--gpus"},
}
"""What each mode reads beside --json. --explain is one: it prints no plan."""
OPTIONS_OF_PLAN = OF_JOB | OF_CLUSTER | {"--gpus", "--out", "--force", "--page", "--rules"}
# What is only for one other option, which then stands in the advice.
NEEDED_OPTION = {
    "--anchors": "--validate",
    "--verify": "--suggest-rules",
    "--all-kinds": "--dry-run",
    "--no-cache": "--dry-run",
    "--force": "--out",
}


def check_option_combination(options: Mapping[str, object]) -> None:
    """Raises UsageError where an option is given that the others leave without effect.

    `options`: the values by option; what is None, False, 0 or empty is not given.
    """
    given_options = [name for name, value in options.items() if value]
    for name in given_options:
        needed = NEEDED_OPTION.get(name)
        if needed is not None and needed not in given_options:
            raise UsageError(f"{name} is for {needed}", fix=f"add {needed}, or leave {name} out")
    modes = [name for name in given_options if name in OPTIONS_OF_MODE]
    if len(modes) > 1:
        raise UsageError(
            f"{modes[0]} and {modes[1]} are two questions", fix=f"ask one: leave {modes[1]} out"
        )
    allowed, mode = OPTIONS_OF_PLAN, ""
    if modes:
        mode = modes[0]
        allowed = frozenset(OPTIONS_OF_MODE[mode])
    for name in given_options:
        if name not in allowed and name != mode:
            raise UsageError(f"{name} has no effect with {mode}", fix=f"leave {name} out")
    if "--nodes" in given_options and "--gpus" in given_options:
        raise UsageError(
            "--nodes and --gpus both say how large the cluster is", fix="leave one of them out"
        )
