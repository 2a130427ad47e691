"""Sharding rules of a Hugging Face model, from its own `tp_plan`, or from a table where it has
none.

A plan says less than a rule: it names no heads, and trusts that what lies between a column and its
row can be cut. So a layer is cut only where everything beside it, in the same part of the model, is
known to stand it; the rest is whole.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from torch import nn

from phalanx.mesh.linear import (
    get_first_expert_parameter_name,
    has_gated_transformers_experts,
    is_linear_layer,
    is_transformers_experts,
)

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
EXPERTS, FUSED_COLUMN = "moe_tp_experts", "packed_colwise"
HEAD_COUNT_ATTRIBUTES = ("num_heads", "num_attention_heads", "num_key_value_heads")
# Settings of models that cap or scale their logits.
LOGIT_CHANGING_SETTINGS = (
    *("final_logit_softcapping", "logit_scale", "logits_scaling"),
    *("lm_head_multiplier", "mup_width_scale"),
)

SHARD_RULES_OF_MODEL_TYPE: dict[str, dict[str, str]] = {
    "vit": {
        "vit.layers.*.attention.q_proj": COLUMN,
        "vit.layers.*.attention.k_proj": COLUMN,
        "vit.layers.*.attention.v_proj": COLUMN,
        "vit.layers.*.attention.o_proj": ROW,
        "vit.layers.*.mlp.fc1": COLUMN,
        "vit.layers.*.mlp.fc2": ROW,
    }
}
"""Of models that bring none."""


def build_hugging_face_shard_rules(
    module: Any, config: Any, *, has_plain_head: bool
) -> dict[str, str]:
    """pattern -> rule; empty for a model of which nothing is known to be cuttable.

    See `plain_head` for a plain head.
    """
    if config.model_type == "gpt2":
        rules = _build_gpt2_rules(config)
    else:
        rules = _build_rules_from_tp_plan(module, _find_transformers_tp_plan(module, config))
    return rules | _build_vocabulary_rules(module, config, has_plain_head)


def _find_transformers_tp_plan(module: Any, config: Any) -> dict[str, str]:
    brought = dict(getattr(module, "tp_plan", None) or {})
    return brought or SHARD_RULES_OF_MODEL_TYPE.get(config.model_type, {})


def _has_transformers_tp_plan(module: Any, config: Any) -> bool:
    """True if a sharding plan is known: only then is the model known to return what its head puts
    out, unchanged."""
    return bool(_find_transformers_tp_plan(module, config)) or config.model_type == "gpt2"


def _build_gpt2_rules(config: Any) -> dict[str, str]:
    """Fused queries, keys and values in a Conv1D."""
    if getattr(config, "add_cross_attention", False):
        return {}
    heads = config.num_attention_heads
    return {
        "transformer.h.*.attn": "region divide=num_heads,split_size",
        "transformer.h.*.attn.c_attn": f"column heads={heads}+{heads}+{heads}",
        "transformer.h.*.attn.c_proj": f"row heads={heads}",
        "transformer.h.*.mlp": "region",
        "transformer.h.*.mlp.c_fc": "column",
        "transformer.h.*.mlp.c_proj": "row",
    }


def _build_rules_from_tp_plan(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """Rules of each part of which the plan covers every layer.

    All parts of one name must be alike: of a model whose attention is linear in some blocks a rule
    for the others would be for those, too.
    """
    rules_by_pattern: dict[str, list[dict[str, str]]] = defaultdict(list)
    for name, part in module.named_modules():
        pattern = _replace_numbers_by_stars(name)
        if is_transformers_experts(part):
            rules_by_pattern[pattern].append(_build_expert_rules(part, pattern, plan))
        else:
            rules_by_pattern[pattern].append(_build_rules_of_part(part, pattern, plan))
    rules: dict[str, str] = {}
    for pattern, part_rules in rules_by_pattern.items():
        first = part_rules[0]
        if part_rules.count(first) < len(part_rules):
            continue
        for child, text in first.items():
            # "" is the part itself.
            rules[f"{pattern}.{child}".removesuffix(".")] = text
    return rules


def _build_expert_rules(part: nn.Module, pattern: str, plan: dict[str, str]) -> dict[str, str]:
    rule, first_kind = "experts", COLUMN
    if has_gated_transformers_experts(part):
        rule, first_kind = "experts parts=2", FUSED_COLUMN
    expected = {
        "": EXPERTS,
        f".{get_first_expert_parameter_name(part)}": first_kind,
        ".down_proj": ROW,
    }
    for name, kind in expected.items():
        if plan.get(f"{pattern}{name}") != kind:
            return {}
    return {"": rule}


def _build_rules_of_part(part: nn.Module, pattern: str, plan: dict[str, str]) -> dict[str, str]:
    """Rules of the part itself ("") and its layers; empty if one of them cannot be cut, or is not
    known."""
    kinds: dict[str, str] = {}
    for child, layer in part.named_children():
        if f"{pattern}.{child}" in plan:
            kinds[child] = plan[f"{pattern}.{child}"]
        elif any(True for _ in layer.parameters()):
            return {}
    # Nothing is known of a parameter that is the part's own, and of no layer in it.
    if part._parameters or not _are_cuts_column_and_row(kinds):
        return {}
    width = getattr(part, "head_dim", None)
    # Without heads, only of a feed-forward it is known that any feature may go to any rank.
    if width is None and "mlp" not in type(part).__name__.lower():
        return {}
    rules = {"": "region"}
    head_counts = set()
    for child, kind in kinds.items():
        layer = getattr(part, child)
        if not any(True for _ in layer.parameters()):
            return {}
        rule = _build_rule_of_layer(layer, kind, width)
        if rule is None:
            return {}
        rules[child] = rule.text
        if rule.num_heads:
            head_counts.add(rule.num_heads)
    counts = [
        key for key in HEAD_COUNT_ATTRIBUTES if _is_head_count_attribute(part, key, head_counts)
    ]
    if counts:
        rules[""] += f" divide={','.join(counts)}"
    return rules


def _are_cuts_column_and_row(kinds: dict[str, str]) -> bool:
    """True if there are cuts by output and by input, which belong together, and none of another
    kind than these and norms."""
    return {COLUMN, ROW} <= set(kinds.values()) <= {COLUMN, ROW, PARTIAL}


class _LayerRule(NamedTuple):
    text: str
    num_heads: int = 0


def _build_rule_of_layer(layer: Any, kind: str, width: int | None) -> _LayerRule | None:
    """The rule of a layer of `kind`, in a part whose heads are `width` wide; None if it cannot be
    cut."""
    if kind == PARTIAL:
        # A norm of all features at once would see a part of them.
        if width is None or any(tuple(weight.shape) != (width,) for weight in layer.parameters()):
            return None
        return _LayerRule("partial")
    if not is_linear_layer(layer):
        return None
    rule, size = "row", layer.in_features
    if kind == COLUMN:
        rule, size = "column", layer.out_features
    if width is None:
        return _LayerRule(rule)
    if size % width:
        return None
    return _LayerRule(f"{rule} heads={size // width}", size // width)


def _is_head_count_attribute(part: nn.Module, key: str, head_counts: set[int]) -> bool:
    """True for an attribute by which a forward counts heads, and which must be that of a rank."""
    count = getattr(part, key, None)
    return isinstance(count, int) and count in head_counts


def _build_vocabulary_rules(module: Any, config: Any, has_plain_head: bool) -> dict[str, str]:
    """The embedding and the head, tied or not.

    An embedding that does more than look up stays whole.
    """
    if module.main_input_name == "pixel_values":
        return {}
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {id(part): name for name, part in module.named_modules()}
    is_plain, is_tied = (
        type(embedding) is nn.Embedding,
        _are_head_and_embedding_tied(embedding, head, config),
    )
    rules = {}
    if is_plain and (head is None or not is_tied or type(head) is nn.Linear):
        rules[names[id(embedding)]] = "vocab"
    if type(head) is nn.Linear and (is_plain or not is_tied):
        rules[names[id(head)]] = "vocab"
        if not has_plain_head and _may_model_change_logits(module, config):
            rules[names[id(head)]] = "column gather"
    return rules


def _are_head_and_embedding_tied(embedding: Any, head: Any, config: Any) -> bool:
    is_one_tensor = (
        head is not None
        and embedding is not None
        and getattr(head, "weight", 0) is embedding.weight
    )
    return is_one_tensor or bool(getattr(config, "tie_word_embeddings", False))


def _may_model_change_logits(module: Any, config: Any) -> bool:
    """True unless the model is known to return what its head puts out."""
    if not _has_transformers_tp_plan(module, config):
        return True
    return any(getattr(config, key, None) not in (None, False) for key in LOGIT_CHANGING_SETTINGS)


def _replace_numbers_by_stars(name: str) -> str:
    """The name with a star for each number: blocks that are alike have one."""
    words = name.split(".")
    for position, word in enumerate(words):
        if word.isdigit():
            words[position] = "*"
    return ".".join(words)
