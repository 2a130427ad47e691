"""Groups of parameters with and without weight decay: by the type of module that holds them, not by
its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.core.deprecated import warn_renamed

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class Groups:
    """The trainable parameters, with and without weight decay.

    `undecayed` are embeddings, norms, biases and other vectors.
    """

    decayed: tuple[nn.Parameter, ...]
    undecayed: tuple[nn.Parameter, ...]
    keeps_empty: bool = False
    """`with_decay` returns both groups, also empty ones: all stages of a pipeline number theirs
    alike."""

    @property
    def kept(self) -> tuple[nn.Parameter, ...]:
        """Old name of `undecayed`."""
        warn_renamed("Groups.kept", "Groups.undecayed")
        return self.undecayed

    def parameters(self) -> Iterable[nn.Parameter]:
        return (*self.decayed, *self.undecayed)

    def with_decay(self, weight_decay: float | str, *, auto: float) -> list[dict[str, Any]]:
        """Parameter groups as torch's optimizers take them; "auto" means the optimizer's own."""
        decay = auto if weight_decay == "auto" else weight_decay
        groups = [(self.decayed, decay), (self.undecayed, 0.0)]
        return [
            {"params": list(parameters), "weight_decay": decay}
            for parameters, decay in groups
            if parameters or self.keeps_empty
        ]


def decay_groups(module: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Groups:
    """The Groups of `named_parameters`, in their order: the parameters of `module`, or shards that
    stand for them under the same names.

    A tensor that two modules hold decays only if it does in both.
    """
    undecayed_ids: set[int] = set()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if _is_undecayed(part, name, parameter):
                undecayed_ids.add(id(parameter))
    undecayed_names = {
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in undecayed_ids
    }
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    return Groups(
        tuple(p for name, p in trainable if name not in undecayed_names),
        tuple(p for name, p in trainable if name in undecayed_names),
    )


def _is_undecayed(holder: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """True for vectors, norms, lookups, and bare parameters that are embeddings by their name
    (`pos_embed` of a vision transformer)."""
    return parameter.ndim < 2 or isinstance(holder, (*LOOKUPS, *NORMS)) or "embed" in name
