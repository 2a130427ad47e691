"""Rules of a module's two ends: embeddings that look up tokens, and heads whose output it
returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from phalanx.mesh.linear import is_linear_layer
from phalanx.nn.objective import CausalOutput
from phalanx.suggest.observed import ObservedModule
from phalanx.suggest.suggestion import NameAndReason
from phalanx.suggest.uncut_parameters import find_float_tensors

TOKENS_ENTRY = "inputs"  # of a batch
MIN_CUT_ROWS = 128  # of a table that is not that of `inputs`
MIN_CUT_HEAD_OUTPUTS = 128  # outputs: fewer are not worth a cut


@dataclass
class EmbeddingAndHeadRules:
    """`rules`: name -> (rule, why).

    `whole`: name of an embedding or head that stays whole -> why.
    """

    rules: dict[str, NameAndReason] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def find_embedding_and_head_rules(
    observed: ObservedModule, rules: Mapping[str, NameAndReason]
) -> EmbeddingAndHeadRules:
    """Rules for embeddings and heads, beside the `rules` that layers have already."""
    heads = _find_head_rules(observed, rules)
    ends = EmbeddingAndHeadRules()
    for name, looked_up in observed.flow.looked_up.items():
        refusal = _explain_uncut_embedding(observed, name, looked_up, heads)
        if refusal:
            ends.whole[name] = refusal
            continue
        entry = _find_looked_up_entry(observed, looked_up)
        words = "the tokens" if entry == TOKENS_ENTRY else entry
        ends.rules[name] = ("vocab", f"it looks up {words}")
        # Tied weights are cut alike, or not at all.
        for holder in observed.find_weight_holders(observed.parts[name].weight):
            if holder != name:
                ends.rules[holder] = heads[holder]
    ruled = {**rules, **ends.rules}
    vocab_sizes = {
        observed.parts[name].weight.shape[0] for name in observed.flow.looked_up if name in ruled
    }
    for name, rule in heads.items():
        weight = observed.parts[name].weight
        holders = [holder for holder in observed.find_weight_holders(weight) if holder != name]
        is_tied_to_whole = any(
            holder not in rules and holder not in ends.rules for holder in holders
        )
        if name in rules or name in ends.rules or is_tied_to_whole:
            continue
        # A head of the vocabulary is cut at any size.
        if weight.shape[0] >= MIN_CUT_HEAD_OUTPUTS or weight.shape[0] in vocab_sizes:
            ends.rules[name] = rule
        else:
            ends.whole[name] = f"a head of {weight.shape[0]} outputs is not worth a cut"
    return ends


def _explain_uncut_embedding(
    observed: ObservedModule,
    name: str,
    looked_up: torch.Tensor,
    heads: Mapping[str, NameAndReason],
) -> str:
    """Why an embedding stays whole; "" if its vocabulary can be cut."""
    part = observed.parts[name]
    entry = _find_looked_up_entry(observed, looked_up)
    if not entry:
        return "it does not look up the tokens of the batch"
    # Kinds of tokens, say.
    if entry != TOKENS_ENTRY and part.weight.shape[0] < MIN_CUT_ROWS:
        return f"a table of {part.weight.shape[0]} rows is not worth a cut"
    # max_norm changes rows in place, the two others what the gradient is.
    has_options = part.max_norm or part.sparse or part.scale_grad_by_freq
    if name in observed.flow.called_often or has_options:
        return "it is called more than once, or has an option that parts do not have"
    other_holders = [
        holder for holder in observed.find_weight_holders(part.weight) if holder != name
    ]
    if any(holder not in heads for holder in other_holders):
        return f"its weight is also that of {other_holders[0]}, which is no head"
    return ""


def _find_looked_up_entry(observed: ObservedModule, looked_up: torch.Tensor) -> str:
    """The entry of the batch that an embedding was called with; "" if there is none. A module may
    call its tokens by another name: `input_ids`."""
    batch = observed.batch
    names = [TOKENS_ENTRY] if TOKENS_ENTRY in batch else sorted(set(batch) - {"targets", "labels"})
    for name in names:
        ids = batch[name]
        is_equal = looked_up.shape == ids.shape and bool((looked_up == ids).all())
        if is_equal and not ids.is_floating_point():
            return name
    return ""


def _find_head_rules(
    observed: ObservedModule, rules: Mapping[str, NameAndReason]
) -> dict[str, NameAndReason]:
    """The rules of linear layers whose output the module returns."""
    flow, result = observed.flow, observed.flow.result
    if isinstance(result, CausalOutput):
        return _find_objective_head_rules(observed, result)
    consumed: set[str] = set()
    for layer_input in flow.inputs.values():
        consumed |= flow.find_feeding_layers(layer_input)
    heads: dict[str, NameAndReason] = {}
    for name, output in flow.outputs.items():
        is_candidate = name not in rules and name not in consumed
        if not is_candidate or not isinstance(observed.parts[name], nn.Linear):
            continue
        # A head feeds no other layer: the module returns what it makes.
        if output is result:
            heads[name] = ("vocab", "the module returns its logits")
        elif any(leaf is output for leaf in find_float_tensors(result)):
            heads[name] = ("column gather", "its logits are a part of what the module returns")
    return heads


def _find_objective_head_rules(
    observed: ObservedModule, result: CausalOutput
) -> dict[str, NameAndReason]:
    """The rules of the layers that hold the head's weight, which the objective multiplies by."""
    heads: dict[str, NameAndReason] = {}
    for name, part in observed.parts.items():
        if getattr(part, "weight", None) is not result.head_VD:
            continue
        is_known = is_linear_layer(part) or isinstance(part, nn.Embedding)
        if is_known or name not in observed.flow.outputs:
            heads[name] = ("vocab", "the objective multiplies by it")
    return heads
