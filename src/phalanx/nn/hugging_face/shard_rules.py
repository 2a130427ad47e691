"""Sharding rules of a Hugging Face model, from its own `tp_plan`, or from a table where it has
none.

A plan says less than a rule: it names no heads, and trusts that what lies between a column and its
row can be cut. So a layer is cut only where everything beside it, in the same part of the model, is
known to stand it; the rest is whole.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from phalanx.mesh.linear import first_of_stack, has_gate, is_linear, is_stacked

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
EXPERTS, FUSED_COLUMN = "moe_tp_experts", "packed_colwise"
COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads")

OWN_PLANS: dict[str, dict[str, str]] = {
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


def shard_rules_of(module: Any, config: Any, *, has_plain_head: bool) -> dict[str, str]:
    """pattern -> rule; empty for a model of which nothing is known to be cuttable.

    See `plain_head` for a plain head.
    """
    rules = (
        _gpt2(config)
        if config.model_type == "gpt2"
        else _rules_from_plan(module, _plan(module, config))
    )
    return rules | _vocabulary(module, config, has_plain_head)


def _plan(module: Any, config: Any) -> dict[str, str]:
    brought = dict(getattr(module, "tp_plan", None) or {})
    return brought or OWN_PLANS.get(config.model_type, {})


def _brings_plan(module: Any, config: Any) -> bool:
    """True if a sharding plan is known: only then is the model known to return what its head puts
    out, unchanged."""
    return bool(_plan(module, config)) or config.model_type == "gpt2"


def _gpt2(config: Any) -> dict[str, str]:
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


def _rules_from_plan(module: Any, plan: dict[str, str]) -> dict[str, str]:
    """Rules of each part of which the plan covers every layer.

    All parts of one name must be alike: of a model whose attention is linear in some blocks a rule
    for the others would be for those, too.
    """
    rules_by_pattern: dict[str, list[dict[str, str]]] = defaultdict(list)
    for name, part in module.named_modules():
        pattern = _pattern(name)
        covered = {
            child: plan[f"{pattern}.{child}"]
            for child, _ in part.named_children()
            if f"{pattern}.{child}" in plan
        }
        if is_stacked(part):
            rules_by_pattern[pattern].append(_rules_of_experts(part, pattern, plan))
            continue
        rules_by_pattern[pattern].append(_rules_of_part(part, covered) if covered else {})
    rules: dict[str, str] = {}
    for pattern, part_rules in rules_by_pattern.items():
        if part_rules[0] and all(other == part_rules[0] for other in part_rules):
            rules |= {
                f"{pattern}.{child}" if child else pattern: text
                for child, text in part_rules[0].items()
            }
    return rules


def _rules_of_experts(part: nn.Module, pattern: str, plan: dict[str, str]) -> dict[str, str]:
    expected = {
        "": EXPERTS,
        f".{first_of_stack(part)}": FUSED_COLUMN if has_gate(part) else COLUMN,
        ".down_proj": ROW,
    }
    is_covered = all(plan.get(f"{pattern}{name}") == kind for name, kind in expected.items())
    return {"": "experts parts=2" if has_gate(part) else "experts"} if is_covered else {}


def _rules_of_part(part: nn.Module, covered: dict[str, str]) -> dict[str, str]:
    """Rules of the part itself ("") and its layers; empty if one of them cannot be cut, or is not
    known."""
    holding = {
        name for name, child in part.named_children() if any(True for _ in child.parameters())
    }
    kinds = set(covered.values())
    is_whole = (
        part._parameters
        or holding != set(covered)
        or not {COLUMN, ROW} <= kinds <= {COLUMN, ROW, PARTIAL}
    )
    width = getattr(part, "head_dim", None)
    if is_whole or (width is None and "mlp" not in type(part).__name__.lower()):
        return {}
    rules, heads = {"": "region"}, []
    for child, kind in covered.items():
        layer = getattr(part, child)
        if kind == PARTIAL:
            # A norm of all features at once would see a part of them.
            if width is None or any(tuple(p.shape) != (width,) for p in layer.parameters()):
                return {}
            rules[child] = "partial"
            continue
        if not is_linear(layer):
            return {}
        size = layer.out_features if kind == COLUMN else layer.in_features
        if width is not None and size % width:
            return {}
        heads_text = f" heads={size // width}" if width else ""
        heads += [size // width] if width else []
        rules[child] = ("column" if kind == COLUMN else "row") + heads_text
    counted = [
        key
        for key in COUNTS
        if isinstance(getattr(part, key, None), int) and getattr(part, key) in heads
    ]
    if counted:
        rules[""] += f" divide={','.join(counted)}"
    return rules


def _vocabulary(module: Any, config: Any, has_plain_head: bool) -> dict[str, str]:
    """The embedding and the head, tied or not.

    An embedding that does more than look up stays whole.
    """
    if module.main_input_name == "pixel_values":
        return {}
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    names = {id(part): name for name, part in module.named_modules()}
    is_plain = type(embedding) is nn.Embedding
    is_tied = (
        head is not None
        and embedding is not None
        and getattr(head, "weight", 0) is embedding.weight
    )
    is_tied = is_tied or bool(getattr(config, "tie_word_embeddings", False))
    rules = {}
    if is_plain and (head is None or not is_tied or type(head) is nn.Linear):
        rules[names[id(embedding)]] = "vocab"
    if type(head) is nn.Linear and (is_plain or not is_tied):
        changes = (
            "final_logit_softcapping",
            "logit_scale",
            "logits_scaling",
            "lm_head_multiplier",
            "mup_width_scale",
        )
        is_changed = not _brings_plan(module, config) or any(
            getattr(config, k, None) not in (None, False) for k in changes
        )
        rules[names[id(head)]] = "column gather" if is_changed and not has_plain_head else "vocab"
    return rules


def _pattern(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))
