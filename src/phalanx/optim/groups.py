"""Groups of parameters with and without weight decay: by the type of module that holds them, not by
its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.core.deprecated import warn_renamed

EMBEDDING_TYPES = (nn.Embedding, nn.EmbeddingBag)
NORM_TYPES = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class WeightDecayGroups:
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
        if weight_decay == "auto":
            weight_decay = auto
        groups = []
        for parameters, decay in ((self.decayed, weight_decay), (self.undecayed, 0.0)):
            if parameters or self.keeps_empty:
                groups.append({"params": list(parameters), "weight_decay": decay})
        return groups


def build_weight_decay_groups(
    module: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> WeightDecayGroups:
    """The Groups of `named_parameters`, in their order: the parameters of `module`, or shards that
    stand for them under the same names.

    A tensor that two modules hold decays only if it does in both.
    """
    undecayed_ids: set[int] = set()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if _is_exempt_from_decay(part, name, parameter):
                undecayed_ids.add(id(parameter))
    # By name from here on: what is trained may be shards that stand for the module's parameters.
    undecayed_names: set[str] = set()
    # With duplicates: a tied tensor may be trained under any of its names.
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in undecayed_ids:
            undecayed_names.add(name)
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        if name in undecayed_names:
            undecayed.append(parameter)
        else:
            decayed.append(parameter)
    return WeightDecayGroups(tuple(decayed), tuple(undecayed))


def _is_exempt_from_decay(holder: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """True for vectors, norms, lookups, and bare parameters that are embeddings by their name
    (`pos_embed` of a vision transformer)."""
    is_exempt_layer = isinstance(holder, (*EMBEDDING_TYPES, *NORM_TYPES))
    return parameter.ndim < 2 or is_exempt_layer or "embed" in name
