"""Routers in one process and near-ties: what is forced, what is told, which layouts of experts
there are."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from models import CPU
from phalanx.cli._verify_table import format_verified_row
from phalanx.core.errors import ExitCode
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.models.decoder import Decoder, example_batch
from phalanx.verify.cases import list_all_layouts, plan_layout_cases
from phalanx.verify.combined_layouts import list_expert_layouts, list_three_axis_layouts
from phalanx.verify.pipelines import count_blocks_for_stages
from phalanx.verify.result import VerifyResult
from phalanx.verify.routes import ReferenceRouting, find_disputed_token, have_same_choices
from phalanx.verify.routing_differences import RoutingChange, find_misrouted_tokens
from phalanx.verify.row import Row
from phalanx.verify.verified_job import make_verified_job, shrink_job

SHAPE = DecoderShape(
    2,
    16,
    2,
    2,
    8,
    16,
    31,
    True,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_dim=8,
    num_dense_layers=0,
)
ROUTER = "blocks.1.moe.router"
KEY = f"step-0/{ROUTER}"


def routed(forced: dict[str, torch.Tensor] | None = None) -> tuple[ReferenceRouting, torch.Tensor]:
    """(choices of a step of two forwards, hidden states of both)."""
    torch.manual_seed(3)
    module = Decoder(SHAPE)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    routes = ReferenceRouting(module, forced)
    batch = example_batch(SHAPE, 4, 6, seed=0)
    with routes.recording_phase("step-0"):
        hidden = [
            module(batch["inputs"][rows], batch["positions"][rows])[0]
            for rows in (slice(0, 2), slice(2, 4))
        ]
    return routes, torch.cat(hidden).detach()


def test_choices_are_noted_row_by_row() -> None:
    routes, _ = routed()
    assert set(routes.choices) == {KEY, "step-0/blocks.0.moe.router"}
    assert routes.choices[KEY].shape == (4, 6, 2)
    assert (routes.choices[KEY].diff() > 0).all(), "in ascending order"
    assert find_disputed_token(routes.choices) is None


def test_forced_choices_are_taken_and_those_that_differ_are_told() -> None:
    usual, hidden = routed()
    again, same = routed(usual.choices)
    assert torch.equal(same, hidden)
    assert not again.reroutes
    other = {key: choice.clone() for key, choice in usual.choices.items()}
    own = set(other[KEY][3, 2].tolist())
    left, taken = min(own), min(set(range(4)) - own)
    other[KEY][3, 2] = torch.tensor(sorted(own - {left} | {taken}))
    assert not have_same_choices(other, usual.choices)
    forced, changed = routed(other)
    (found,) = forced.reroutes
    assert (found.router, found.phase, found.row, found.token) == (ROUTER, "step-0", 3, 2)
    assert (found.expert, found.instead) == (left, taken)
    assert found.margin > 0
    # Experts get other numbers of tokens, and products of other sizes may round otherwise: on some
    # CPUs other tokens of these experts differ in their last bits. A token that another expert
    # computed differs in its first digits.
    error = (changed - hidden).norm(dim=-1) / hidden.norm(dim=-1)
    assert error[3, 2] > 1e-2
    error[3, 2] = 0
    assert error.max() < 1e-5, "the last block's other tokens are as they were"
    assert torch.equal(forced.choices[KEY], other[KEY])


def test_ranks_that_disagree_are_found() -> None:
    choices = {KEY: torch.ones(2, 3, 2, dtype=torch.int64)}
    choices[KEY][1, 2] = -2
    assert find_disputed_token(choices) == (KEY, 1, 2)


@pytest.mark.parametrize(
    ("phase", "margin", "is_wrong"),
    [
        ("step-1", 9e-11, False),
        ("step-1", 2e-10, True),
        ("evaluation", math.nan, True),
    ],
)
def test_a_near_tie_has_a_bound(phase: str, margin: float, is_wrong: bool) -> None:
    found = RoutingChange(ROUTER, phase, 0, 0, 1, 2, margin)
    assert bool(find_misrouted_tokens([found], 1e-10)) is is_wrong


def test_a_flip_is_told_and_is_no_failure() -> None:
    flip = RoutingChange(ROUTER, "step-1", 4, 13, 5, 3, 2.1e-8)
    row = Row("zero3-ep2", {}, "small", "float32", True, {"loss": 1e-8}, 1e-5, flips=(flip, flip))
    result = VerifyResult((row, replace(row, flips=())), required=frozenset({"zero3-ep2"}))
    assert result.exit_code == ExitCode.OK
    assert (
        result.summary
        == "2 of 2 rows equal the reference, 1 of them routed alike, since a near-tie flipped"
    )
    head, told, _ = format_verified_row(row)
    assert head.startswith("flipped zero3-ep2")
    text = (
        f"{ROUTER} in step 2 sends token 13 of row 4 to expert 3, one process to 5: their scores"
        " are 2.1e-08 apart"
    )
    assert told.strip() == f"flip    {text}; and 1 more"
    assert row.to_json()["flips"][0]["text"] == text


def test_a_row_says_how_little_of_the_model_is_cut() -> None:
    row = Row("tp2", {}, "mine:f", "float64", True, {"loss": 0.0}, 1e-10)
    (usual,) = format_verified_row(row)
    (line,) = format_verified_row(replace(row, extent="2 of 31 matrices cut"))
    assert line.split() == [
        *usual.split()[:3],
        "2",
        "of",
        "31",
        "matrices",
        "cut",
        *usual.split()[3:],
    ]
    assert Row.from_json(row.to_json()) == row


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-moe-16b"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_layouts_of_experts_have_plans(preset: str, num_ranks: int) -> None:
    layouts = [*list_expert_layouts(num_ranks), *list_three_axis_layouts(num_ranks)]
    every = [name for name, _ in list_all_layouts(num_ranks, experts=True)]
    assert len(set(every)) == len(every)
    assert {name for name, _ in layouts} <= set(every)
    job = Job.model_validate({"model": {"preset": preset}, "data": {"seq_len": 32}})
    small, said = shrink_job(job, num_blocks=count_blocks_for_stages(keys for _, keys in layouts))
    shape = build_model_shape(small, 251)
    assert shape.num_expert_layers >= 2
    assert shape.num_experts == 8
    assert "expert_ffn_dim" in said
    for case in plan_layout_cases(
        make_verified_job(small, num_ranks), layouts, num_ranks=num_ranks, cluster=CPU, shape=None
    ):
        assert case.plan is not None, case.refused
        keys: dict[str, Any] = {"ep": 1, "tp": 1, "cp": 1, "pp": 1} | dict(case.parallel)
        assert all(
            getattr(case.plan.layout, axis) == keys[axis] for axis in ("ep", "tp", "cp", "pp")
        )
        assert case.plan.layout.world_size == num_ranks
