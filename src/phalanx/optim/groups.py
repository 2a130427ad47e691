"""Which parameters decay: by the kind of module that holds them, not by what somebody called it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class Groups:
    """The trainable parameters.

    `kept` do not decay: embeddings, norms, biases and other vectors.
    """

    decayed: tuple[nn.Parameter, ...]
    kept: tuple[nn.Parameter, ...]
    keeps_empty: bool = False
    """Both groups are made, also of nothing: all stages of a pipeline number theirs alike."""

    def parameters(self) -> Iterable[nn.Parameter]:
        return (*self.decayed, *self.kept)

    def with_decay(self, weight_decay: float | str, *, auto: float) -> list[dict[str, Any]]:
        """Parameter groups as torch's optimizers take them; "auto" means the optimizer's own."""
        decay = auto if weight_decay == "auto" else weight_decay
        groups = [(self.decayed, decay), (self.kept, 0.0)]
        return [
            {"params": list(found), "weight_decay": decay}
            for found, decay in groups
            if found or self.keeps_empty
        ]


def decay_groups(module: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Groups:
    """`named_parameters` by whether they decay, in the order they come: those of `module`, or what
    stands for them.

    A tensor that two modules hold must decay in both.
    """
    kept = {
        id(p)
        for part in module.modules()
        for name, p in part.named_parameters(recurse=False)
        if _is_kept(part, name, p)
    }
    kept_names = {
        name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in kept
    }
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    return Groups(
        tuple(p for name, p in trainable if name not in kept_names),
        tuple(p for name, p in trainable if name in kept_names),
    )


def _is_kept(holder: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """A bare parameter that says it is an embedding (`pos_embed` of a vision transformer) is
    one."""
    return parameter.ndim < 2 or isinstance(holder, (*LOOKUPS, *NORMS)) or "embed" in name
