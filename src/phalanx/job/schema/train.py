"""The section [train]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from phalanx.job.schema.base import Count, Positive, PositiveFloat, Section


class Train(Section):
    """The length of the run, and the size of one update."""

    steps: Positive = 500
    """Optimizer updates in all."""
    global_batch_size: Annotated[int, Field(ge=1, le=2**31)] = 16
    """Sequences per update over all ranks."""
    micro_batch_size: Positive | None = None
    """Sequences per forward-backward of one rank; default the rank's whole share."""
    recompute: Literal["none", "selective", "full", "every-k", "mixed", "sqrt", "budget"] = "none"
    """The results that are computed again in the backward instead of kept: none; all but those
    of matmuls and attention; all of a block but its input; each recompute_every-th block; these
    in full and the others selectively; segments of about the square root of the blocks; or as few
    blocks as keep to recompute_budget_gib (docs/memory.md)."""
    recompute_every: Positive | None = None
    """k of recompute = "every-k" and "mixed": the blocks k, 2k and so on are recomputed in full;
    1: all of them."""
    recompute_budget_gib: PositiveFloat | None = None
    """GiB that activations may take on a rank (recompute = "budget")."""
    offload_activations: bool = False
    """Keep activations in host memory from the forward to the backward.

    On a CPU that changes nothing but the path.
    """
    compile: bool = False
    """torch.compile each block; the code is kept for later runs (docs/compile.md)."""
    deterministic: bool | Literal["layout-free"] = False
    """Use only the algorithms of torch whose results are the same in every run: slower on GPUs.

    An operation that has none is refused. Built-in models are deterministic on CPUs without it
    (docs/precision.md). "layout-free": losses and weights have the same bits on 1, 2, 4, ...
    data-parallel ranks (docs/layout-free.md).
    """
    loss_chunk_tokens: Positive = 2048
    """Logits exist for at most this many tokens at a time."""
    sample_tokens: Count = 256
    """Tokens of text generated at the end, where the data is text (0: none)."""
