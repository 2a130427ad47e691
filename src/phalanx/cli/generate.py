"""Continue a text with a checkpoint of a model of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli._complete import complete_job_argument
from phalanx.cli._options import BestOption, TrainedModelArgument

if TYPE_CHECKING:
    from phalanx.run.trained.generate import GenerationResult

EXAMPLE = "Example: phalanx generate runs/train-20260101-120000 --prompt='def main' --tokens=100"
MAX_PROMPT_BYTES = 16 << 20


GenerationArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[JOB.toml] [KEY=VALUE]...",
        help=(
            "Keys of parallel, precision and data.tokenizer; a job file where no run says which"
            " model it is."
        ),
        autocompletion=complete_job_argument,
    ),
]
PromptOption = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="What to continue; several give several texts. Default: stdin.",
    ),
]
TokensOption = Annotated[
    int, typer.Option("--tokens", min=1, metavar="N", help="At most so many for each text.")
]
TemperatureOption = Annotated[
    float,
    typer.Option("--temperature", min=0.0, metavar="T", help="0: always the likeliest token."),
]
TopKOption = Annotated[
    int | None,
    typer.Option("--top-k", min=1, metavar="K", help="Only among the K likeliest tokens."),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        metavar="P",
        help="Only among the likeliest that make up P.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", min=0, metavar="SEED", help="Another one gives another text.")
]
GenerationJsonOption = Annotated[
    bool, typer.Option("--json", help="Print texts and facts as JSON, at the end.")
]


def command(
    checkpoint: TrainedModelArgument,
    arguments: GenerationArguments = None,
    prompt: PromptOption = None,
    tokens: TokensOption = 100,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = 0,
    best: BestOption = False,
    as_json: GenerationJsonOption = False,
) -> int:
    """Continue a text with a checkpoint of a model of text.

    Prompt and text go to standard output as they come, all else to standard error. A text ends
    where the model ends a document. Where there is no tokenizer, prompts and texts are token ids.
    Every token costs a pass over the context: there is no key-value cache.

    \b
    phalanx generate runs/first --prompt "def main"
    echo "In the beginning" | phalanx generate runs/first --temperature 0
    phalanx generate my-hf-model --prompt "Once" --top-p 0.9 --seed 7 --json
    """
    from phalanx.cli._arguments import split_job_file_and_overrides
    from phalanx.cli._generate_output import GeneratedTextPrinter
    from phalanx.cli._launched import print_ended_ranks, refuse_launcher
    from phalanx.cli._output import make_errors_printable, print_line
    from phalanx.launch.server_process import start_server_ahead
    from phalanx.run.scratch import open_scratch_directory
    from phalanx.run.trained.generate import (
        GENERATION_KEYS,
        generate_texts_in_ranks,
        open_generator,
    )
    from phalanx.run.trained.launch import RanksEndedEarlyError
    from phalanx.run.trained.model import describe_ranks_of_model, open_trained_model
    from phalanx.run.trained.payloads import SamplingOptions

    try:
        with make_errors_printable(as_json), open_scratch_directory("generate") as scratch:
            refuse_launcher("generate")
            start_server_ahead("phalanx.run.trained.rank")
            job_file, overrides = split_job_file_and_overrides(arguments or [])
            model = open_trained_model(
                checkpoint,
                job_file,
                overrides,
                best=best,
                allowed_keys=GENERATION_KEYS,
                on_one_rank=True,
            )
            generator = open_generator(model)
            # Before ranks start: a prompt that cannot be used is told at once.
            texts = [
                generator.encode_prompt(text)
                for text in (_read_prompt() if prompt is None else prompt)
            ]
            if not as_json:
                print_line(
                    f"model   {model.name}, on {describe_ranks_of_model(model, generator.plan)}",
                    as_problem=True,
                )
            result = generate_texts_in_ranks(
                generator,
                texts,
                scratch,
                num_tokens=tokens,
                sampling=SamplingOptions(temperature, top_k, top_p),
                seed=seed,
                on_text=(lambda text: None)
                if as_json
                else GeneratedTextPrinter(generator).print_new_text,
            )
    except RanksEndedEarlyError as error:
        return print_ended_ranks(error, as_json=as_json)
    _print_end(result, as_json)
    return 0


def _print_end(result: GenerationResult, as_json: bool) -> None:
    """Print texts and facts as JSON; else the speed alone, after texts that were printed."""
    from phalanx.cli._generate_output import describe_generation_speed
    from phalanx.cli._json import print_json
    from phalanx.cli._output import print_line

    if as_json:
        print_json("generate", result.to_json(), indent=1)
    else:
        print_line(describe_generation_speed(result), as_problem=True)


def _read_prompt() -> list[str]:
    """The text on standard input, as the only prompt. Raises UsageError at a terminal."""
    import sys

    from phalanx.core.errors import UsageError

    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "there is no prompt", fix='give --prompt "TEXT", or the text on standard input'
        )
    # One byte more than is allowed shows that there is more.
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on standard input has more than {MAX_PROMPT_BYTES >> 20} MiB")
    return [raw.decode("utf-8", "surrogateescape").removesuffix("\n")]
