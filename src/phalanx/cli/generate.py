"""Continue a text with a checkpoint of a model of text."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli._complete import complete_job, complete_run

EXAMPLE = "Example: phalanx generate runs/train-20260101-120000 --prompt='def main' --tokens=100"


def command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run (its newest checkpoint), one checkpoint, the URL of either, or a Hugging Face directory.",
            autocompletion=complete_run,
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB.toml] [KEY=VALUE]...",
            help="Keys of parallel, precision and data.tokenizer; a job file where no run says which model it is.",
            autocompletion=complete_job,
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="What to continue; several give several texts. Default: stdin."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, metavar="N", help="At most so many for each text.")] = 100,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, metavar="T", help="0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, metavar="K", help="Only among the K likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", min=0.0, max=1.0, metavar="P", help="Only among the likeliest that make up P."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="SEED", help="Another one gives another text.")] = 0,
    best: Annotated[bool, typer.Option("--best", help="What eval.keep_best kept, not the newest.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print texts and facts as JSON, at the end.")] = False,
) -> int:
    """Continue a text with a checkpoint of a model of text.

    Prompt and text go to standard output as they come, all else to standard error. A text ends where the model ends a
    document. Where there is no tokenizer, prompts and texts are token ids. Every token costs a pass over the context:
    there is no key-value cache.

    \b
    phalanx generate runs/first --prompt "def main"
    echo "In the beginning" | phalanx generate runs/first --temperature 0
    phalanx generate my-hf-model --prompt "Once" --top-p 0.9 --seed 7 --json
    """
    from phalanx.cli._generate import Request, generate

    request = Request(
        checkpoint,
        tuple(arguments or ()),
        None if prompt is None else tuple(prompt),
        tokens,
        {"temperature": temperature, "top_k": top_k, "top_p": top_p},
        seed,
        best,
        as_json,
    )
    return generate(request)
