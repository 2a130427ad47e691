"""The section [data], and the sources of a mixture."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from phalanx.job.schema.base import Count, Positive, PositiveFloat, Section, Text


class Source(Section):
    """One source of a mixture."""

    source: Text
    """Text, tokens or a dataset, as data.source takes them."""
    weight: PositiveFloat = 1.0
    """Its share of the samples, relative to the other sources."""


class Data(Section):
    """The data to learn from, and how it becomes samples."""

    source: Text = "stdlib"
    """"stdlib" (the interpreter's own source text), a file, a directory, a glob of text, JSONL,
    Parquet or Arrow; token shards that `phalanx data build` wrote; a 1-D integer .npy of token ids;
    a Megatron .bin; or package.module:factory for your own map-style dataset."""
    mixture: tuple[Source, ...] = ()
    """Several sources with weights, instead of source: [[data.mixture]] tables with source and
    weight."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own dataset (source = "package.module:factory")."""
    tokenizer: Text | None = None
    """The tokenizer of text: "bytes", or a Hugging Face tokenizer.json.

    Default: that of the model's directory or weights (model.kind = "hf:DIR", model.init_from),
    else bytes. Token shards know theirs, and another is refused.
    """
    column: Text = "text"
    """The field of JSONL rows, or the column of Parquet and Arrow files, that holds the text."""
    seq_len: Positive = 128
    """Tokens of one sequence."""
    document_masks: bool = False
    """Keep the documents that are packed into one sequence from seeing each other; positions
    restart with each."""
    workers: Count | None = None
    """Processes of each rank that read ahead.

    With 0 a thread does, for tokens; your own dataset is then read in the step. Default: 1 for your
    own dataset, else 0.
    """
    worker_timeout_s: PositiveFloat = 60.0
    """A worker that is silent for this long is replaced.

    Before the start: what a sample of your dataset may take.
    """
    held_out_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of the documents kept for evaluation, chosen by document name (by position if there
    is one)."""
