"""What a module itself says that a pipeline's last stage holds, too: known to the plan as it is
to the stages."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.job.module_probe import _parse_shape
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.mesh.blocks import list_last_stage_module_names
from phalanx.nn.probe import describe_module_for_planner

WIDTH, VOCAB = 4, 10
BLOCK = WIDTH * WIDTH


class Own(nn.Module):
    """Its head is its embedding, by hand: no parameter of that name stands after the blocks."""

    def __init__(self, says: Any = ()) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.last_stage = says

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def probed(says: Any) -> DecoderShape:
    return parse_stored_shape(
        _parse_shape(
            "mine", json.dumps(describe_module_for_planner("test_last_stage:Own", {"says": says}))
        ).to_json()
    )


@pytest.mark.parametrize("says", ["embed", ["embed"]])
def test_a_plan_counts_it_on_both_ends(says: Any) -> None:
    found = probed(says).count_part_params()
    assert (found.before, found.blocks, found.after) == (
        VOCAB * WIDTH,
        (BLOCK, BLOCK),
        2 * WIDTH + VOCAB * WIDTH,
    )
    assert found.both == VOCAB * WIDTH
    silent = probed([]).count_part_params()
    assert (silent.after, silent.both) == (2 * WIDTH, 0)


def test_a_layer_of_that_name_says_nothing() -> None:
    for layer in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), None, (1, 2)):
        assert list_last_stage_module_names(Own(layer)) == ()
    assert list_last_stage_module_names(Own(("embed", "norm"))) == ("embed", "norm")
