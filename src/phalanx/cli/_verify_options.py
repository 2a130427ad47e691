"""The options of `phalanx verify`: what each is for, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phalanx.verify.row import NUM_STEPS

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="A preset, or package.module:factory, instead."),
]
RunOption = Annotated[
    Path | None,
    typer.Option("--job", metavar="RUN", help="The job of this run, at the layout that it had."),
]
LayoutsOption = Annotated[
    str,
    typer.Option(
        "--layouts",
        metavar="asked|all|NAMES",
        help="The job's own, a list that covers each axis and pairs of them, or some.",
    ),
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=1, metavar="N", help="How many ranks.")
]
ShrinkOption = Annotated[
    bool | None,
    typer.Option(
        "--shrink/--no-shrink",
        help="Built-in models at two blocks and small widths; default with --layouts all.",
        show_default=False,
    ),
]
StepsOption = Annotated[
    int, typer.Option("--steps", min=1, max=100, metavar="K", help="Optimizer steps.")
]
TypesOption = Annotated[
    str,
    typer.Option(
        "--types",
        metavar="NAMES",
        help="Of float64, float32, bf16, fp16, fp8; else the first two and the job's own.",
    ),
]
MaxSeqLenOption = Annotated[
    int | None,
    typer.Option(
        "--max-seq-len",
        min=1,
        metavar="N",
        help="Tokens of longer sequences that are judged; 64, of a run as many as this machine"
        " holds, and computes in about ten minutes.",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        help="Where layouts compute: cuda needs a GPU for each rank.",
    ),
]
ResumeOption = Annotated[
    bool, typer.Option(help="Take over the rows that the same command had before it was stopped.")
]
RowsAsJsonOption = Annotated[bool, typer.Option("--json", help="One JSON object per row.")]


@dataclass(frozen=True)
class VerifyOptions:
    """The options of one `phalanx verify`, with what holds where one is not given."""

    model: str | None = None
    run: Path | None = None
    layouts: str = "asked"
    ranks: int | None = None
    shrink: bool | None = None
    steps: int = NUM_STEPS
    types: str = ""
    max_seq_len: int | None = None
    device: str = "cpu"
    resume: bool = True
    as_json: bool = False

    @property
    def judges_own_job(self) -> bool:
        """True where the job of the arguments is judged at its own layout."""
        return self.layouts == "asked" and self.model is None and self.run is None
