"""`--suggest-rules` looks at any module with inputs that it takes, and says plainly why there
are no rules."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import CPU
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.plan.planner import make_plan
from phalanx.run.one_process.rows_probe import read_or_make_up_batch
from phalanx.suggest.search import suggest_rules
from phalanx.suggest.suggestion import Suggestion
from phalanx.verify.verified_job import SHRUNK_VOCAB_SIZE

SHAPE = MeasuredModule("x", 0, 200, 200, 200, 0)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
        )
        self.out = nn.Conv2d(5, 1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.cat((self.up(self.down(inputs).relu()), inputs), 1))
        return found


class StemLast(nn.Module):
    """Its forward begins with the layer that it has last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.stem = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.stem(inputs)
        for block in self.blocks:
            found = found + block(found).relu()
        return found


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(inputs)
        return found


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.only(inputs)
        return found


class Nothing(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * 2.0


class Pair(nn.Module):
    """Two inputs by name, a dict out; weights that are not contiguous, others that are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 32), nn.Linear(32, 8)
        self.wide.weight = nn.Parameter(torch.randn(8, 32).t())
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
        made = self.narrow(F.gelu(self.wide(inputs))) + other
        return {"made": made * self.turn, "count": 3, "nothing": None}


class Whole(nn.Module):
    """Takes a batch as a whole, which no forward is called with."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["inputs"]


class Ids(nn.Module):
    """As BERT: calls its tokens by another name, and has a short table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(SHRUNK_VOCAB_SIZE, 8)
        self.kinds = nn.Embedding(2, 8)
        self.places = nn.Embedding(40, 8)

    def forward(
        self, input_ids: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        places = self.places(torch.arange(input_ids.shape[1]))
        found: torch.Tensor = self.words(input_ids) + self.kinds(kinds) + places
        return found


class Attention(nn.Module):
    """Takes sequences of features, which is not what its first layer alone tells."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch, length, width = inputs.shape
        found: torch.Tensor = self.project(inputs)
        return found.reshape(batch * length, width)


class Samples:
    def __init__(self, **shapes: list[int]) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = np.random.default_rng(index)
        return {
            key: noise.normal(size=shape).astype(np.float32) for key, shape in self.shapes.items()
        }


def build(name: str) -> nn.Module:
    module: nn.Module = globals()[name]()
    return module


def samples(split: str, **shapes: list[int]) -> Samples:
    return Samples(**shapes)


def suggestion(name: str, *, seq_len: int = 4, **shapes: list[int]) -> Suggestion:
    body: dict[str, Any] = {
        "model": {"kind": f"{__name__}:build", "args": {"name": name}},
        "data": {"seq_len": seq_len}
        | ({"source": f"{__name__}:samples", "args": shapes} if shapes else {}),
        "parallel": {"ranks": 1},
    }
    job = Job.model_validate(body)
    plan = make_plan(job, cluster=CPU, shape=SHAPE, vocab_size=SHRUNK_VOCAB_SIZE)
    return suggest_rules(job, plan, read_or_make_up_batch(job, plan), is_made_up=not shapes)


@pytest.mark.parametrize("shapes", [{"inputs": [1, 8, 8]}, {}])
def test_convolutions_have_no_rules_and_that_is_said(shapes: dict[str, list[int]]) -> None:
    found = suggestion("UNet", **shapes)
    assert (found.rules, found.whole) == ({}, {})
    assert "its parameters are those of Conv2d, ConvTranspose2d" in found.why_none
    assert found.fed_with == ("" if shapes else "inputs float64 [2, 1, 32, 32]")


def test_a_module_is_fed_by_the_layer_that_fits_wherever_it_stands() -> None:
    found = suggestion("StemLast")
    assert "its parameters are those of Conv2d" in found.why_none
    assert found.fed_with == "inputs float64 [2, 3, 32, 32]"


def test_modules_with_little_in_them() -> None:
    assert suggestion("Embedding").rules == {"table": ("vocab", "it looks up the tokens")}
    for shapes in ({"inputs": [8]}, {}):
        found = suggestion("OneLinear", **shapes)
        assert (found.rules, found.why_none) == ({}, "")
        assert list(found.whole) == ["only"]
    assert suggestion("Nothing", inputs=[8]).why_none == "the module has no parameters"
    assert suggestion("Attention").fed_with == "inputs float64 [2, 8, 8]"


def test_inputs_by_name_and_weights_of_any_kind() -> None:
    found = suggestion("Pair", inputs=[8], other=[8])
    assert {pattern: rule for pattern, (rule, _) in found.rules.items()} == {
        "wide": "column",
        "narrow": "row",
    }


def test_tokens_of_another_name_are_looked_up_and_small_tables_stay_whole() -> None:
    """ "It does not look up the tokens of the batch", said of BERT's own table."""
    body = {"model": {"kind": f"{__name__}:build", "args": {"name": "Ids"}}}
    job = Job.model_validate(body | {"parallel": {"ranks": 1}})
    plan = make_plan(job, cluster=CPU, shape=SHAPE, vocab_size=SHRUNK_VOCAB_SIZE)
    batch = {
        "input_ids": torch.arange(24).reshape(2, 12) + 3,
        "token_type_ids": torch.tensor([[0] * 6 + [1] * 6] * 2),
        "labels": torch.zeros(2, dtype=torch.int64),
    }
    found = suggest_rules(job, plan, batch)
    assert found.rules == {"words": ("vocab", "it looks up input_ids")}
    assert found.whole["kinds"] == "a table of 2 rows is not worth a cut"
    assert "does not look up" in found.whole["places"]


def test_made_up_sequences_are_as_short_as_a_table_of_positions_asks() -> None:
    """The job's 128 tokens are more than the 40 places of the module."""
    assert suggestion("Ids", seq_len=128).rules == {"words": ("vocab", "it looks up the tokens")}


@pytest.mark.parametrize(
    ("name", "shapes", "words"),
    [
        ("Pair", {}, ["needs other"]),
        (
            "UNet",
            {"inputs": [3, 8, 8]},
            ["cannot be tried with inputs float32 [2, 3, 8, 8]", "RuntimeError"],
        ),
        ("Whole", {"x": [8]}, ["names nothing of a batch with x"]),
    ],
)
def test_what_cannot_be_tried_is_one_line(
    name: str, shapes: dict[str, list[int]], words: list[str]
) -> None:
    with pytest.raises(LayoutError) as refused:
        suggestion(name, **shapes)
    message = str(refused.value)
    assert [word for word in words if word not in message] == [], message
    assert not re.search(r"Traceback|\n", message)
