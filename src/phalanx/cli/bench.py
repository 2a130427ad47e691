"""Measure this machine for plans, how a job scales, or how fast it trains beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli._options import JobArguments, JsonOption

EXAMPLE = "Example: phalanx bench all"
EXAMPLE_OF_COMMAND = {
    "all": "Example: phalanx bench all --directory runs",
    "gemm": "Example: phalanx bench gemm --device cpu",
    "comm": "Example: phalanx bench comm --ranks 4",
    "storage": "Example: phalanx bench storage --directory /mnt/checkpoints",
    "scaling": "Example: phalanx bench scaling JOB.toml --ranks 1,2,4",
    "train": "Example: phalanx bench train --layouts ddp,zero3 --with all",
}

Quick = Annotated[
    bool, typer.Option("--quick", help="A few seconds, few sizes: to see that it works.")
]
Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="What is measured; auto: a GPU.")
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, max=64, metavar="N", help="The most ranks at once."),
]
Directory = Annotated[
    Path,
    typer.Option(
        "--directory", metavar="DIR", help="Where checkpoints go: written to for a while."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the profile there, for no plan to find."),
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--seconds",
        min=1,
        metavar="S",
        help="Measure ranks for about S seconds; default 34 for products, 20 for collectives.",
    ),
]
Collectives = Annotated[
    str,
    typer.Option(
        "--collectives",
        metavar="HOW",
        help="auto, as training does; or gloo, for jobs with parallel.collectives=gloo.",
    ),
]
RUNS_DIRECTORY = Path("runs")


def all_command(
    quick: Quick = False,
    device: Device = "auto",
    ranks: Ranks = None,
    directory: Directory = RUNS_DIRECTORY,
    seconds: Seconds = None,
    out: Out = None,
    as_json: JsonOption = False,
) -> int:
    """Measure products, kernels, collectives and storage, in about 90 seconds.

    What was measured is written to ~/.cache/phalanx/profiles, where plans for this machine find it.
    """
    from phalanx.bench.drive import BenchRequest
    from phalanx.cli._bench import run_and_print_bench

    sections = ("storage", "gemm", "comm")
    request = BenchRequest(sections, device, ranks, directory, quick, seconds)
    return run_and_print_bench(request, out, as_json=as_json)


def gemm_command(
    quick: Quick = False,
    device: Device = "auto",
    ranks: Ranks = None,
    seconds: Seconds = None,
    out: Out = None,
    as_json: JsonOption = False,
) -> int:
    """Measure what one rank computes: products, copies, attention, norms, loss, optimizer.

    By one rank alone, and by several at once, which slow each other down.
    """
    from phalanx.bench.drive import BenchRequest
    from phalanx.cli._bench import run_and_print_bench

    request = BenchRequest(("gemm",), device, ranks, RUNS_DIRECTORY, quick, seconds)
    return run_and_print_bench(request, out, as_json=as_json)


def comm_command(
    quick: Quick = False,
    device: Device = "auto",
    ranks: Ranks = None,
    collectives: Collectives = "auto",
    seconds: Seconds = None,
    out: Out = None,
    as_json: JsonOption = False,
) -> int:
    """Measure collectives between the ranks of this machine, and products beside them.

    Latency and bandwidth of all-reduce, all-gather, reduce-scatter, all-to-all and send. Those
    through gloo stand beside the usual ones in the profile, for plans of jobs that ask for gloo.
    """
    from phalanx.bench.drive import BenchRequest
    from phalanx.cli._bench import run_and_print_bench

    request = BenchRequest(("comm",), device, ranks, RUNS_DIRECTORY, quick, seconds, collectives)
    return run_and_print_bench(request, out, as_json=as_json)


def storage_command(
    quick: Quick = False,
    directory: Directory = RUNS_DIRECTORY,
    out: Out = None,
    as_json: JsonOption = False,
) -> int:
    """Measure writing, syncing and reading files where checkpoints go."""
    from phalanx.bench.drive import BenchRequest
    from phalanx.cli._bench import run_and_print_bench

    request = BenchRequest(("storage",), "auto", None, directory, quick)
    return run_and_print_bench(request, out, as_json=as_json)


def scaling_command(
    arguments: JobArguments = None,
    ranks: Annotated[
        str, typer.Option("--ranks", metavar="N,N,...", help="Numbers of ranks to compare.")
    ] = "1,2",
    steps: Annotated[
        int, typer.Option("--steps", min=8, max=10_000, metavar="K", help="Steps of each run.")
    ] = 20,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=100, metavar="N", help="Runs of each, in turn.")
    ] = 2,
    strong: Annotated[
        bool, typer.Option("--strong", help="Keep the batch of a step, not that of a rank.")
    ] = False,
    as_json: JsonOption = False,
) -> int:
    """Train a job on 1, 2, 4 ... ranks, and say how well it scales and what eats the rest.

    Nothing is kept of the runs.
    """
    from phalanx.cli._bench_scaling import run_and_print_scaling

    return run_and_print_scaling(
        arguments or (),
        ranks,
        num_steps=steps,
        repeats=repeats,
        is_strong=strong,
        as_json=as_json,
    )


def train_command(
    arguments: JobArguments = None,
    layouts: Annotated[
        str,
        typer.Option(
            "--layouts",
            metavar="NAME,...",
            help="Of phalanx: ddp, zero1 to zero3, tp, cp, ep, pp, job or none; NAME/gloo too.",
        ),
    ] = "",
    libraries: Annotated[
        str,
        typer.Option("--with", metavar="NAME,...|all|none", help="Libraries to compare with."),
    ] = "all",
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=2, max=64, metavar="N", help="Ranks of each contender."),
    ] = None,
    turns: Annotated[
        int, typer.Option("--turns", min=2, max=1000, metavar="N", help="Turns of each contender.")
    ] = 12,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, max=1000, metavar="K", help="Steps of a turn; default 1.5 s of them."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="Where rows go; default runs/bench-train-TIME.jsonl."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Train a job beside torch's own loops and other libraries, in turn, on this machine's CPUs.

    Shares are of the speed of ranks that never talk. Without a job file: a small decoder.
    """
    from phalanx.cli._bench_train import BenchTrainOptions, run_and_print_bench_train

    options = BenchTrainOptions(layouts, libraries, ranks, turns, steps, out)
    return run_and_print_bench_train(arguments or (), options, as_json=as_json)


COMMANDS = {
    "all": all_command,
    "gemm": gemm_command,
    "comm": comm_command,
    "storage": storage_command,
    "scaling": scaling_command,
    "train": train_command,
}
