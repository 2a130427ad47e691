"""Which errors of a first forward are put down to a column, by what torch says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.core.phases import PhaseTimer
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.parallel.tensor.shape_errors import (
    UngatheredColumnLayer,
    explain_cut_sequence_mismatch,
    explain_shard_width_mismatch,
)
from phalanx.plan.rules import parse_sharding_rules

(RULE,) = parse_sharding_rules({"up": "column"})
COLUMN = UngatheredColumnLayer("up", RULE, full_size=64, rank_size=32, has_row=False)


def error_of(call: object) -> Exception:
    with pytest.raises(RuntimeError) as raised:
        call()  # type: ignore[operator]
    return raised.value


@pytest.mark.parametrize(
    "call",
    [
        lambda: nn.Linear(64, 8)(torch.zeros(3, 32)),
        lambda: torch.zeros(2, 64) + torch.zeros(2, 32),
        lambda: nn.LayerNorm(64)(torch.zeros(2, 32)),
    ],
)
def test_a_part_that_meets_what_is_whole_is_the_rule_s(call: object) -> None:
    assert 'sharding rule "up" = "column"' in str(
        explain_shard_width_mismatch(error_of(call), [COLUMN])
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 64.00 MiB. GPU 0 has 32.00 MiB free"),
        RuntimeError("shape '[32, 64, 4, 16]' is invalid for input of size 65536"),
        ValueError("mat1 and mat2 shapes cannot be multiplied (3x32 and 64x8)"),
    ],
)
def test_the_same_numbers_in_another_error_blame_no_rule(error: Exception) -> None:
    assert explain_shard_width_mismatch(error, [COLUMN]) is None


@pytest.mark.parametrize(
    ("call", "cuts_sequence", "is_blamed"),
    [
        (lambda: torch.zeros(2, 32, 16) + torch.zeros(63, 16), True, True),
        (lambda: torch.zeros(2, 63, 16) + torch.zeros(1, 32, 16), True, True),
        (lambda: torch.zeros(2, 32, 16) + torch.zeros(63, 16), False, False),
        # Of features, and of other numbers.
        (lambda: torch.zeros(2, 5, 32) + torch.zeros(63), True, False),
        (lambda: torch.zeros(2, 31, 16) + torch.zeros(63, 16), True, False),
    ],
)
def test_a_sequence_that_meets_a_part_of_it_is_the_declaration_s(
    call: object, cuts_sequence: bool, is_blamed: bool
) -> None:
    group = TensorParallelGroup("tp", 0, 2, PhaseTimer(), cuts_sequence=cuts_sequence)
    group.num_tokens = 63
    refusal = explain_cut_sequence_mismatch(error_of(call), module_name="Model", group=group)
    assert (refusal is not None) == is_blamed
    if refusal is not None:
        assert "is_per_token_outside_regions" in str(refusal)
        assert "32 of the 63 tokens" in str(refusal)
