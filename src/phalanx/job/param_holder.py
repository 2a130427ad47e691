"""`ParamHolder`: a module that holds parameters itself, as planning and sharding rules see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParamHolder:
    """A module that holds parameters itself.

    Of a linear layer and an embedding also their widths; else 0.

    `kind`: "linear", "grouped" (those of several experts in one), "stacked", "stacked with gates"
    (experts; `num_outputs` of their first matrices), "embedding", "attention" (a part of an
    nn.MultiheadAttention), or the name of its class.
    """

    name: str
    kind: str
    num_params: int
    num_outputs: int = 0
    num_inputs: int = 0
