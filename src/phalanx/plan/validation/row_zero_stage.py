"""The ZeRO stage that the words of a published row mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from phalanx.plan.validation.row_values import (
    UNSTATED_PATTERN,
    UnusableRow,
    get_optional_count,
    get_text,
)

# What shards, as words that may be denied: "no ZeRO", "without distributed optimizer".
_SHARDING = r"(?:zero(?: ?(?:stage)? ?\d)?|fsdp\d?|dist\w*[ .]*optim\w*|shard\w*)"
_DENIED = re.compile(
    rf"\b(?:no|not|non|without|w o) (?:a |any |the |using )?{_SHARDING}"
    rf"|{_SHARDING} ?[=:]? ?(?:false|off|disabled|none)\b"
)
_STATED_NUMBER = re.compile(
    r"\bzero(?: ?dp)? ?(?:stage)? ?[:=]? ?([0-9])\b|\b(?:stage|z) ?([0-9])\b"
)
# The first that is found counts, so that what is said beside a plainer word comes before it: a
# distributed optimizer goes with DDP, shards of gradients with FSDP. Hyphens, underscores and
# brackets are spaces by then. torch: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, reshard_after_forward;
# Megatron-FSDP: optim, optim_grads, optim_grads_params; the paper of ZeRO: P_os, P_os+g, P_os+g+p.
STAGES_BY_WORDS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"shard grad op|reshard after forward ?=? ?(?:false|0)", (2,)),
    (r"full(?:y)? ?shard", (3,)),
    (r"optim grads params|p ?os ?\+ ?g ?\+ ?p\b|zero ?\+\+|zero infinity", (3,)),
    (r"optim grads\b|p ?os ?\+ ?g\b|zero offload|\bsharded ?(?:ddp|data parallel)", (2,)),
    (r"fsdp|hsdp|hybrid(?:ly)? shard", (3,)),
    (r"dist\w*[ .]*opt|shard\w* (?:of )?(?:the )?optim|optim\w* (?:states? )?shard|\boss\b", (1,)),
    (r"\bp ?os\b|\boptim\b", (1,)),
    # Which stage is not said.
    (r"\bzero\b", (1, 2, 3)),
    (r"ddp|\bdp\b|data ?parallel|all ?reduce|replicat|\bnone\b|\bhorovod\b", (0,)),
)


def list_possible_zero_stages(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The ZeRO stages that a row leaves possible; several where it does not say.

    Raises UnusableRow for words of which nothing is known, and for a stage that there is not.
    """
    stage = get_optional_count(row, "zero_stage")
    if stage is not None:
        if stage > 3:
            raise UnusableRow("absurd zero_stage")
        return (stage,)
    words = get_text(row, "dp_mode")
    stages = parse_zero_stages(words)
    if not stages and words and not UNSTATED_PATTERN.search(words.lower()):
        raise UnusableRow("unknown dp_mode")
    return stages or (0, 1, 3)


def parse_zero_stages(words: str) -> tuple[int, ...]:
    """The ZeRO stages that `words` may mean: one where they say it; () where they say nothing that
    is known.

    >>> parse_zero_stages("ZeRO stage 3"), parse_zero_stages("distributed data parallel")
    ((3,), (0,))
    """
    text = " ".join(re.sub(r"[-_()\[\],;/]", " ", words.lower()).split())
    if re.search(r"\bno shard\b", text):
        return (0,)
    text = _DENIED.sub("none", text)
    numbers = {int(first or second) for first, second in _STATED_NUMBER.findall(text)}
    if numbers:
        return tuple(sorted(numbers)) if max(numbers) <= 3 else ()
    for pattern, stages in STAGES_BY_WORDS:
        if re.search(pattern, text):
            return stages
    return ()
