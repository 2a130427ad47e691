"""The sharding rules of phalanx's own models, as their files in phalanx.nn.models write them: a
literal, which planning reads without importing torch.

A plan sees them as it sees those that a user's module brings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from phalanx.core.registry import read_module_constant
from phalanx.job.shapes.tensors import list_module_patterns

if TYPE_CHECKING:
    from phalanx.job.shapes.transformer import TransformerShape

MODELS_PACKAGE = "phalanx.nn.models"
SHARD_RULES_NAME = "SHARD_RULES"


@lru_cache(maxsize=8)
def load_own_shard_rules(shape: TransformerShape) -> tuple[tuple[str, str], ...]:
    """(pattern, rule) of the model of `shape`; none where its file has no such literal."""
    return tuple(fill_shard_rules(_read_rules_literal(shape.kind), shape).items())


@lru_cache
def _read_rules_literal(kind: str) -> Mapping[str, str]:
    templates: Any = read_module_constant(kind, MODELS_PACKAGE, SHARD_RULES_NAME, {})
    return dict(templates)


def fill_shard_rules(templates: Mapping[str, str], shape: TransformerShape) -> dict[str, str]:
    """The rules for modules that the model has, of all that a file writes for its kind, with the
    numbers of `shape` in place of their names: "column heads={num_heads}"."""
    present = list_module_patterns(shape)
    filled = {}
    for pattern, rule in templates.items():
        if pattern in present:
            filled[pattern] = rule.format_map(vars(shape))
    return filled


def build_pattern_for_all_blocks(name: str) -> str:
    """The pattern that matches a name in every block: blocks.3.ffn.up -> blocks.*.ffn.up."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)
