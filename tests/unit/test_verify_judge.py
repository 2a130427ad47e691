"""The judge by itself: its reference, its sums, its words."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx.run.one_process.dropout_masks as masks
import phalanx.run.one_process.plain_loss as plain_loss
import phalanx.verify.reference as reference
from models import CPU
from phalanx.cli._verify_table import (
    VerifyRowPrinter,
    describe_not_judged,
    describe_refused_rows,
)
from phalanx.core.errors import EnvironmentProblem, ExitCode, LayoutError
from phalanx.job.schema import Job
from phalanx.plan.cluster import Cluster
from phalanx.plan.layout import AXES
from phalanx.plan.pipeline.cut import StageCut
from phalanx.plan.pipeline.pipeline_plan import Pipeline
from phalanx.verify.cases import (
    MANY_MICROBATCHES,
    MANY_MICROBATCHES_SUFFIX,
    ONE_MICROBATCH_SUFFIX,
    OPTION_KEYS,
    list_all_layouts,
    plan_layout_cases,
)
from phalanx.verify.choose import select_layout_cases
from phalanx.verify.compare import TraceComparison, blocks_cover_evenly
from phalanx.verify.diagnosis import DifferenceDiagnosis
from phalanx.verify.factors import format_factor
from phalanx.verify.judged_layout import JudgedLayout
from phalanx.verify.narrow_reference import AutocastLoss
from phalanx.verify.result import VerifyResult
from phalanx.verify.routing_differences import MisroutedToken, RoutingChange
from phalanx.verify.row import Row
from phalanx.verify.trace import find_lossy_gradients
from phalanx.verify.trace_facts import (
    INITIAL_KIND,
    ArithmeticFault,
    Trace,
    TraceStep,
    name_buffers_set,
    name_gradients_set,
    name_weights_set,
)
from phalanx.verify.trainer_facts import StateObservation
from phalanx.verify.trainer_states import find_changed_modes
from phalanx.verify.verdict import LayoutComparator
from phalanx.verify.verified_job import (
    NUM_MICROBATCHES,
    make_narrow_dtype_job,
    make_verified_job,
    shrink_job,
)
from phalanx.verify.wrong_gradients import find_factor_of_rows
from phalanx.verify.wrong_tokens import SequenceView, WrongTokens


@pytest.mark.parametrize(
    "room", [reference, masks, plain_loss], ids=["reference", "masks", "plain_loss"]
)
def test_the_reference_imports_torch_alone(room: Any) -> None:
    """Else it could share a mistake with what it judges."""
    tree = ast.parse(Path(room.__file__).read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"torch", "torch.nn.functional", "torch.utils._python_dispatch", "numpy"}
    standard = {name for name in imported if name.split(".")[0] in sys.stdlib_module_names}
    assert imported - standard <= allowed


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, pytest.param(6, marks=pytest.mark.long)])
def test_all_layouts_are_of_all_ranks_and_have_plans(num_ranks: int) -> None:
    model = {"dim": 192, "num_layers": 16, "num_heads": 24, "num_kv_heads": 24}
    job = make_verified_job(Job.model_validate({"model": model}), num_ranks)
    cases = plan_layout_cases(
        job, list(list_all_layouts(num_ranks)), num_ranks=num_ranks, cluster=CPU, shape=None
    )
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.plan is not None, case.refused
        assert case.plan.world_size == num_ranks
        pp = case.plan.layout.pp
        if pp > 1:
            assert case.plan.num_microbatches >= 2 * pp
        elif case.name.endswith(MANY_MICROBATCHES_SUFFIX):
            assert case.plan.num_microbatches == MANY_MICROBATCHES
        elif case.name.endswith(ONE_MICROBATCH_SUFFIX):
            assert case.plan.num_microbatches == 1
        else:
            assert case.plan.num_microbatches == NUM_MICROBATCHES
        for key, value in case.parallel.items():
            if key in AXES:
                assert getattr(case.plan.layout, key) == value
            elif key in OPTION_KEYS:
                assert getattr(case.plan.parallel, key) == value


def test_a_degree_that_the_heads_forbid_is_refused_with_the_nearest() -> None:
    job = make_verified_job(Job.model_validate({"model": {"num_heads": 4, "num_kv_heads": 2}}), 3)
    refused = [
        case
        for case in plan_layout_cases(
            job, list(list_all_layouts(3)), num_ranks=3, cluster=CPU, shape=None
        )
        if case.refused and "pp" not in case.parallel
    ]
    assert {axis for case in refused for axis in ("tp", "cp") if axis in case.parallel} == {
        "tp",
        "cp",
    }
    for case in refused:
        wanted = (
            "nearest: 2 or 4"
            if "tp" in case.parallel
            else "nearest: 2, or parallel.cp_attention=ring"
        )
        assert wanted in case.refused
        assert "tp" in case.parallel or case.parallel["cp_attention"] == "ulysses"


def test_gradients_that_some_ranks_do_not_clip_are_named_with_the_ranks() -> None:
    steps = (TraceStep(3.0, 10, 5.0**0.5, 0.3 * 5.0**0.5),)
    factor = 1 / 0.3
    off = scale_tensors(factor)
    seen = [saw(), saw(tensors={name_gradients_set(0): off})]
    verdict = LayoutComparator(
        traced(steps=steps), seen, JudgedLayout(2), tolerance=1e-10
    ).compare()
    assert verdict.first is not None
    assert verdict.first.cause.startswith("gradients are not clipped on rank 1")


def test_sequences_of_odd_rows_are_ones_that_no_degree_divides() -> None:
    job = make_verified_job(Job(), 4)
    layouts = [pair for pair in list_all_layouts(4) if "odd-sequence" in pair[0]]
    assert [name for name, _ in layouts] == [
        "tp4-odd-sequence",
        "tp4-odd-sequence-chunks",
        "pp2-tp2-odd-sequence-1f1b",
    ]
    for case in plan_layout_cases(job, layouts, num_ranks=4, cluster=CPU, shape=None):
        assert case.plan is not None
        assert case.plan.seq_len % case.plan.layout.tp
        assert case.plan.seq_len == case.parallel["data.seq_len"]


def test_a_refused_layout_says_why() -> None:
    job = make_verified_job(Job(), 4)
    cases = plan_layout_cases(job, [("bad", {"dp_shard": 3})], num_ranks=4, cluster=CPU, shape=None)
    assert cases[0].plan is None
    assert "3" in cases[0].refused


@pytest.mark.parametrize("types", ["float32", "bf16", "float64"])
def test_what_is_judged_in_float64_alone_is_refused_without_it(types: str) -> None:
    layouts = ["one", "plain", "hugging-face"]
    chosen = select_layout_cases(Job(), layouts, ranks=1, steps=2, shrink=True, types=types)
    refused = {row.layout: row.refused for row in chosen.refused_rows}
    worked = {case.name for _, case in chosen.work}
    if types == "float64":
        assert (refused, worked) == ({}, set(layouts))
    else:
        assert set(refused) == {"plain", "hugging-face"}
        assert all("float64 alone" in reason for reason in refused.values())
        assert worked == {"one"}
    assert chosen.required == set(layouts)


def test_what_no_row_looks_at_is_said_by_rows_that_run() -> None:
    layouts = ["ddp", "plain", "trainer-ddp"]
    for types, is_judged in (("float64", True), ("float32", False)):
        chosen = select_layout_cases(Job(), layouts, ranks=2, steps=2, shrink=True, types=types)
        words = " ".join(chosen.not_judged)
        assert ("resumes" not in words, "own arithmetic" not in words) == (is_judged, is_judged)


def test_what_a_module_needs_is_kept_in_every_layout() -> None:
    job = Job.model_validate({"parallel": {"unused_parameters": "allow"}})
    chosen = select_layout_cases(job, ["ddp", "zero1", "zero3"], ranks=2, steps=2, shrink=True)
    kept = {case.plan.parallel.unused_parameters for _, case in chosen.work if case.plan}
    assert kept == {"allow"}


def test_of_longer_sequences_as_many_tokens_are_judged_as_somebody_asks_for() -> None:
    job = Job.model_validate({"data": {"seq_len": 256}})
    for asked, judged in (({}, 64), ({"max_seq_len": 128}, 128), ({"max_seq_len": 512}, 256)):
        chosen = select_layout_cases(job, ["ddp"], ranks=2, steps=2, shrink=True, **asked)
        assert chosen.job.data.seq_len == judged
        said = f"tokens beyond the first {judged} of a sequence"
        assert (said in " ".join(chosen.not_judged)) == (judged < 256)


@pytest.mark.parametrize(
    ("layouts", "shrink", "dim"),
    [("all", None, 32), ("all", False, 128), ("ddp,tp2", None, 128), ("ddp,tp2", True, 32)],
)
def test_all_layouts_are_judged_at_small_widths_unless_it_is_said_otherwise(
    layouts: str, shrink: bool | None, dim: int
) -> None:
    chosen = select_layout_cases(Job(), layouts, ranks=2, steps=2, shrink=shrink)
    assert {case.plan.model_shape.dim for _, case in chosen.work if case.plan is not None} == {dim}
    assert any("--no-shrink" in note for note in chosen.notes) == (shrink is None and dim == 32)


def test_on_gpus_layouts_are_judged_and_runs_of_the_trainer_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = Cluster("cuda", 2, 80 << 30, "a GPU", (9, 0))
    monkeypatch.setattr("phalanx.verify.choose.detect_cluster", lambda device: gpus)
    names = ["ddp", "plain", "trainer-ddp"]
    chosen = select_layout_cases(Job(), names, ranks=2, steps=2, shrink=True, device="cuda")
    assert chosen.device == "cuda"
    assert {case.name for _, case in chosen.work} == {"ddp", "plain"}
    assert [(row.layout, "CPU alone" in row.refused) for row in chosen.refused_rows] == [
        ("trainer-ddp", True)
    ]
    assert any("a GPU: layouts compute on it" in note for note in chosen.notes)
    with pytest.raises(EnvironmentProblem, match=r"3 ranks need as many GPUs.*has 2"):
        select_layout_cases(Job(), ["ddp"], ranks=3, steps=2, shrink=True, device="cuda")


@pytest.mark.parametrize(
    "preset", ["llama3-8b", "gpt2-xl", "qwen3-8b", "gemma3-1b", "mistral-7b", "vit-l16"]
)
def test_shrunk_models_keep_their_style(preset: str) -> None:
    from phalanx.job.model import build_model_shape

    job = Job.model_validate({"model": {"preset": preset}})
    small, said = shrink_job(job)
    before, after = build_model_shape(job, 256), build_model_shape(small, 256)
    assert after.num_params < 200_000 < before.num_params
    kept = (
        "kind",
        "activation",
        "norm",
        "bias",
        "qk_norm",
        "positions",
        "tie_embeddings",
        "post_norms",
    )
    small_facts, facts = after.to_json(), before.to_json()
    assert [small_facts[key] for key in kept] == [facts[key] for key in kept]
    assert (after.num_heads > after.num_kv_heads) == (before.num_heads > before.num_kv_heads)
    assert f"num_layers {before.num_layers} -> {after.num_layers}" in said


def test_a_users_own_model_is_not_shrunk() -> None:
    with pytest.raises(LayoutError, match="built-in"):
        shrink_job(Job.model_validate({"model": {"kind": "mine:build"}}))


# The sums, on a trace of two tensors made by hand

SIZES = {"a": 2.0, "b": 1.0}
WEIGHTS = name_weights_set(0)
TRACE = Trace(
    Path("."),
    "float64",
    0.1,
    (TraceStep(3.0, 10, 5.0**0.5, None),),
    ("b", "a"),
    dict.fromkeys((INITIAL_KIND, name_gradients_set(0), WEIGHTS), SIZES),
    norms={WEIGHTS: SIZES},
    evaluation=2.5,
    num_evaluated=10,
)


def saw(**changes: Any) -> dict[str, Any]:
    """What one rank of two (replicas) saw, all right unless `changes` say otherwise."""
    right = {name: (0.0, size**2, size**2, size**2) for name, size in SIZES.items()}
    seen: dict[str, Any] = {
        "losses": [3.0],
        "norms": [5.0**0.5],
        "num_targets": [10],
        "evaluation": 2.5,
        "num_evaluated": 10,
        "local_means": [[2.0, 4.5]],
        "local_targets": [[6, 4]],
        "tensors": {kind: dict(right) for kind in (INITIAL_KIND, name_gradients_set(0), WEIGHTS)},
        "digests": {},
        "loads": [{}],
        "held": {"a": "whole", "b": "whole"},
        "boxes": {"a": [[[0], [4], 1]], "b": [[[0], [1], 1]]},
        "unknown": [],
        "absent": [],
    }
    for kind, tensors in changes.pop("tensors", {}).items():
        seen["tensors"][kind] |= tensors
    return seen | changes


def scale_tensors(factor: float) -> dict[str, tuple[float, ...]]:
    """What a rank saw of tensors that are `factor` times the reference's."""
    return {
        n: (s**2 * (factor - 1) ** 2, s**2 * factor**2, s**2 * factor, s**2)
        for n, s in SIZES.items()
    }


def first_of(*seen: dict[str, Any]) -> Any:
    return LayoutComparator(TRACE, seen, JudgedLayout(len(seen)), tolerance=1e-10).compare().first


def test_equal_is_equal() -> None:
    verdict = LayoutComparator(TRACE, [saw(), saw()], JudgedLayout(2), tolerance=1e-10).compare()
    assert verdict.first is None
    assert max(verdict.errors.values()) == 0


def test_the_first_gradient_is_the_one_nearest_to_the_loss() -> None:
    """Where a backward goes wrong, all before it is wrong, too; "a" comes last in a forward."""
    off = {"a": (0.01, 4.0, 4.0, 4.0), "b": (0.01, 1.0, 1.0, 1.0)}
    first = first_of(saw(tensors={name_gradients_set(0): off}), saw())
    assert (first.what, first.name, first.rank, first.ranks) == ("gradient", "a", 0, (0,))
    assert first.error == pytest.approx(0.05)


def test_a_gradient_wrong_by_itself_is_no_backward_that_goes_wrong_before_it() -> None:
    """Of data parallelism: what the backward hands on is right where "b" has its gradient."""
    seen = saw(tensors={name_gradients_set(0): {"a": (1.0, 4.2, 3.6, 4.0)}})
    both = {"a": (1.0, 4.2, 3.6, 4.0), "b": (1.0, 1.2, 0.6, 1.0)}
    assert "not reduced, or not wholly" in first_of(seen, seen).cause
    of_all = saw(tensors={name_gradients_set(0): both})
    assert "not reduced" not in first_of(of_all, of_all).cause
    recomputed = LayoutComparator(
        TRACE, [seen, seen], JudgedLayout(2, recompute=True), tolerance=1e-10
    ).compare()
    assert recomputed.first is not None
    assert "goes wrong where it meets a" in recomputed.first.cause


def test_initial_weights_come_before_losses_and_losses_before_gradients() -> None:
    off = {"a": (1.0, 4.0, 4.0, 4.0)}
    assert first_of(saw(losses=[3.1], tensors={name_gradients_set(0): off})).what == "loss"
    assert first_of(saw(losses=[3.1], tensors={INITIAL_KIND: off})).what == "initial weight"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_is_never_equal(value: float) -> None:
    assert first_of(saw(losses=[value]), saw()).what == "loss"
    assert (
        first_of(saw(tensors={WEIGHTS: {"a": (value, value, value, 4.0)}}), saw()).what == "update"
    )
    errors = (
        LayoutComparator(TRACE, [saw(norms=[value])], JudgedLayout(1), tolerance=1e-10)
        .compare()
        .errors
    )
    assert errors["norm"] == math.inf


def test_parts_that_do_not_make_the_tensor_are_found_though_each_is_right() -> None:
    half = {
        kind: {"a": (0.0, 1.0, 1.0, 1.0)} for kind in (INITIAL_KIND, name_gradients_set(0), WEIGHTS)
    }
    first = first_of(saw(tensors=half), saw(tensors=half))
    assert "do not make the tensor" in first.cause


def test_a_tensor_that_no_rank_has_is_found() -> None:
    assert first_of(saw(absent=["a"]), saw(absent=["a"])).name == "a"
    assert (
        first_of(saw(absent=["a"]), saw()) is None
        or "do not make" in first_of(saw(absent=["a"]), saw()).cause
    )


def test_a_loss_that_was_not_reduced_is_called_so() -> None:
    mine = saw(losses=[2.0], local_means=[[2.0, 2.0]])
    other = saw(losses=[4.0], local_means=[[4.0, 4.0]])
    assert "not reduced" in first_of(mine, other).cause


def test_a_wrong_loss_names_the_first_wrong_output_and_its_ranks() -> None:
    early, late = (0, 3, "blocks.0", 0.5, 2, 7), (0, 9, "norm", 0.1, 0, 0)
    other_step = (1, 0, "embed", 0.9, 0, 0)
    seen = [
        saw(losses=[3.1], outputs=[late]),
        saw(losses=[3.1], outputs=[early, other_step]),
        saw(losses=[3.1]),
    ]
    first = first_of(*seen)
    assert (first.what, first.rank, first.ranks) == ("loss", 1, (1,))
    assert "the first output that differs is that of blocks.0, on rank 1, by 5.0e-01" in str(first)
    assert str(first).endswith("first in row 2, token 7")
    assert first_of(saw(losses=[3.1]), saw()).origin == ""


HALF_A, HALF_B, LATE = ((0,), (2,), 1), ((2,), (2,), 1), ((1,), (2,), 1)
SHARED_A = (*HALF_A[:2], 2)  # held by two ranks that differ in what else they hold


@pytest.mark.parametrize(
    ("boxes", "even"),
    [
        ([[HALF_A], [HALF_B]], True),
        ([[HALF_A, HALF_B], [HALF_B], [HALF_A]], True),
        ([[HALF_A], [LATE]], False),  # a border in the wrong place
        ([[HALF_A], [HALF_B], [HALF_A]], False),  # a replica of one part alone
        ([[((), (), 1)], [((), (), 1)]], True),  # a scalar, twice
        ([[SHARED_A, HALF_B], [SHARED_A, LATE]], False),
        (
            [[SHARED_A, ((2,), (1,), 1)], [SHARED_A, ((3,), (1,), 1)]],
            True,
        ),  # keys of two query heads in one matrix
        (
            [[SHARED_A, ((2,), (1,), 1)], [((3,), (1,), 1)]],
            False,
        ),  # it says two, and one rank has it
    ],
)
def test_parts_of_ranks_make_a_whole_or_not(boxes: Any, even: bool) -> None:
    assert blocks_cover_evenly(boxes) is even


def test_parts_that_overlap_are_found_though_they_look_alike() -> None:
    """All ones: no sum of squares tells one half from the other."""
    first = first_of(saw(boxes={"a": [[[0], [3], 1]]}), saw(boxes={"a": [[[2], [2], 1]]}))
    assert (first.what, first.name) == ("initial weight", "a")
    assert "do not make the tensor" in first.cause


def traced(**changes: Any) -> Trace:
    return dataclasses.replace(TRACE, **changes)


def test_a_gradient_that_is_rounding_has_the_scale_of_a_usual_one() -> None:
    """A bias before BatchNorm: its true gradient is zero, and each layout rounds it otherwise."""
    sizes = {"a": 2.0, "b": 1e-12}
    trace = traced(sizes=dict.fromkeys((INITIAL_KIND, name_gradients_set(0), WEIGHTS), sizes))
    assert trace.scale(name_gradients_set(0), "b") == pytest.approx(2.0 / 2**0.5)
    assert trace.scale(INITIAL_KIND, "b") == pytest.approx(1e-3 * 2.0 / 2**0.5)


def test_an_update_may_be_off_by_a_few_roundings_of_the_weight() -> None:
    """A weight of 2 that moved by 1e-9: its last digits are more than the tolerance of that."""
    moved = {"a": 1e-9, "b": 1.0}
    trace = traced(sizes={**TRACE.sizes, WEIGHTS: moved})
    for error, found in ((1e-15, False), (1e-13, True)):
        seen = saw(tensors={WEIGHTS: {"a": (error**2, 4.0, 4.0, 4.0)}})
        first = LayoutComparator(trace, [seen], JudgedLayout(1), tolerance=1e-10).compare().first
        assert (first is not None) is found


def test_a_frozen_tensor_that_an_optimizer_moves_is_found() -> None:
    sizes = {"a": 2.0, "b": 0.0}
    trace = traced(sizes={INITIAL_KIND: SIZES, name_gradients_set(0): sizes, WEIGHTS: sizes})
    seen = saw(tensors={name_gradients_set(0): {"b": (0.0, 0.0, 0.0, 0.0)}})
    seen["tensors"][WEIGHTS] = {"a": (0.0, 4.0, 4.0, 4.0), "b": (0.01, 1.0, 1.0, 1.0)}
    first = LayoutComparator(trace, [seen], JudgedLayout(1), tolerance=1e-10).compare().first
    assert first is not None
    assert (first.what, first.name, "freeze it" in first.cause) == ("update", "b", True)


def test_the_mistake_that_makes_a_wrong_update_is_told_with_its_ranks() -> None:
    def cause(*mistakes: str | None) -> str:
        """Of ranks with these mistakes; None: a rank whose update is right."""
        off = {WEIGHTS: scale_tensors(1.5)}
        seen = [
            saw()
            if mistake is None
            else saw(tensors=off, mistakes_of_updates={WEIGHTS: {"b": mistake}})
            for mistake in mistakes
        ]
        first = first_of(*seen)
        assert (first.what, first.name) == ("update", "b")
        return str(first.cause)

    assert cause("x were lost", "x were lost").endswith("another update of them: as if x were lost")
    assert cause(None, "x were lost").endswith("only on rank 1: as if x were lost")
    assert cause("x were lost", "y were 2 x").endswith(
        "on rank 0 as if x were lost; on rank 1 as if y were 2 x"
    )
    assert cause("", "").endswith("the update is 1.5 x that of one process")


def test_buffers_are_compared_after_the_weights() -> None:
    trace = traced(sizes={**TRACE.sizes, name_buffers_set(0): {"running": 3.0}})
    boxes = {"a": [[[0], [4], 1]], "b": [[[0], [1], 1]], "running": [[[0], [9], 1]]}
    seen = saw(boxes=boxes)
    for error, what in ((0.0, None), (0.09, "buffer")):
        seen["tensors"][name_buffers_set(0)] = {"running": (error, 9.0, 9.0, 9.0)}
        verdict = LayoutComparator(trace, [seen], JudgedLayout(1), tolerance=1e-10).compare()
        assert (verdict.first and verdict.first.what) == what
        assert verdict.errors["buffer"] == pytest.approx(error**0.5 / 3)


def test_replicas_with_other_bits_are_found_with_the_rank_that_is_alone() -> None:
    def digests(last: str) -> dict[str, Any]:
        return {name_gradients_set(0): {"a": [[[0], [4], "c0ffee"]], "b": [[[0], [1], last]]}}

    seen = [saw(digests=digests(last)) for last in ("00", "00", "01")]
    first = first_of(*seen)
    assert (first.what, first.name, first.ranks) == ("replica of gradient", "b", (2,))
    assert first_of(*seen[:2]) is None


def test_blocks_of_which_each_rank_has_its_own_are_no_replicas() -> None:
    halves = [
        saw(digests={name_gradients_set(0): {"a": [[[start], [2], str(start)]]}})
        for start in (0, 2)
    ]
    assert first_of(*halves) is None


def test_loads_of_experts_that_miss_a_rank_are_found() -> None:
    trace = traced(loads=({"moe.router": (4, 2, 1)},))
    for load, words in (
        ((2, 1, 1), "3 choices were counted"),
        ((4, 3, 1), "7 choices"),
        ((4, 2, 5), "5 choices are said to be dropped"),
        ((1, 4, 2), "shifted by one: each expert has the count of the one before it"),
        ((2, 1, 4), "shifted by one: each expert has the count of the one behind it"),
        ((2, 4, 1), "lie in another order"),
    ):
        verdict = LayoutComparator(
            trace,
            [saw(loads=[{"moe.router": load}])],
            JudgedLayout(1),
            tolerance=1e-10,
        ).compare()
        assert verdict.first is not None
        assert (verdict.first.what, verdict.first.name) == ("load of experts", "moe.router")
        assert words in verdict.first.cause


@pytest.mark.parametrize(("error", "found"), [(0.0, False), (1e-18, True), (math.nan, True)])
def test_buffers_that_are_all_zero_in_one_process_are_compared(error: float, found: bool) -> None:
    """The biases of a router that nothing has moved, say: there is no size that an error could
    be relative to."""
    trace = traced(sizes={**TRACE.sizes, name_buffers_set(0): {"bias": 0.0}})
    seen = saw()
    seen["held"]["bias"] = "all of it"
    seen["tensors"][name_buffers_set(0)] = {"bias": (error, error, 0.0, 0.0)}
    first = LayoutComparator(trace, [seen], JudgedLayout(1), tolerance=1e-10).compare().first
    assert (first is not None and (first.what, first.name) == ("buffer", "bias")) is found


@pytest.mark.parametrize("loss", [2.6, math.nan])
def test_an_evaluation_that_differs_is_found_on_its_rank(loss: float) -> None:
    first = first_of(saw(), saw(evaluation=loss))
    assert (first.what, first.ranks, "without gradients" in first.cause) == (
        "evaluation loss",
        (1,),
        True,
    )


def test_an_evaluation_that_counts_other_targets_is_found() -> None:
    first = first_of(saw(), saw(num_evaluated=20))
    assert (first.what, first.ranks, first.error) == ("number of evaluated targets", (1,), 1.0)
    assert "counts 20 targets, not 10" in first.cause
    assert "in step" not in str(first)


def test_a_loss_in_which_targets_weigh_alike_is_no_mean_of_means() -> None:
    """What each microbatch's loss is is wrong then, though a mean of equal shares makes it, too."""
    of_equal_shares = saw(losses=[3.25], local_targets=[[5, 5]])
    assert "mean of means" not in first_of(of_equal_shares, of_equal_shares).cause
    of_others = saw(losses=[3.25], local_targets=[[2, 8]])
    assert "mean of means" in first_of(of_others, of_others).cause


def test_a_loss_alone_that_is_rounded_to_float32_is_no_shared_factor() -> None:
    rounded = 3.0 * (1 + 6e-10)
    means = {"local_means": [[rounded]], "local_targets": [[10]]}
    seen = saw(losses=[rounded], num_outputs=1, outputs=[], **means)
    assert "the sum of those of microbatches" in first_of(seen, seen).cause
    factor = 1 + 2e-8
    of_all = saw(tensors={name_gradients_set(0): scale_tensors(factor)})
    assert "a factor that all of them share" in first_of(of_all, of_all).cause


def test_what_a_step_has_left_in_gradients_is_called_so() -> None:
    """Of a tensor whose error is a multiple of its gradient of the step before, on all ranks."""
    kind = name_gradients_set(0)
    seen = saw(
        tensors={kind: {"b": (1.0, 1.2, 0.6, 1.0)}}, left={kind: {"b": (1.0, 2.0, 4.0, 5.0)}}
    )
    assert "b by 0.5 x its gradient of the step before" in first_of(seen, seen).cause
    seen["left"][kind]["b"] = (1.0, 1.0, 4.0, 5.0)
    assert "step before" not in first_of(seen, seen).cause
    seen["left"][kind]["b"] = (1.0, 1.0, 4.0, 1e-8)
    assert "b is its gradient of the step before: a stale copy" in first_of(seen, seen).cause
    # Without a step before.
    seen["left"][kind]["b"] = (1.0, 0.0, 0.0, 0.0)
    assert "step before" not in first_of(seen, seen).cause


def test_a_weight_without_a_gradient_is_cut_off_from_the_graph() -> None:
    kind, names = name_gradients_set(0), ["x.moe.router.weight", "x.moe.experts.up"]
    trace = replace(
        TRACE, order=tuple(names), sizes={**TRACE.sizes, kind: dict.fromkeys(names, 1.0)}
    )
    seen = saw(held=dict.fromkeys(names, "whole"))
    seen["boxes"] = {name: [[[0], [4], 1]] for name in names}
    seen["tensors"][kind] = {names[0]: (0.0, 1.0, 1.0, 1.0), names[1]: (1.0, 0.0, 0.0, 1.0)}
    for ep in (1, 2):
        layout = JudgedLayout(2, ep=ep)
        first = LayoutComparator(trace, [seen, seen], layout, tolerance=1e-10).compare().first
        assert first is not None
        assert "no gradient reaches it: it is cut off from the graph" in first.cause
        assert "reduced over ranks" not in first.cause
    other = copy.deepcopy(seen)
    other["tensors"][kind][names[1]] = (0.5, 1.0, 0.75, 1.0)
    first = LayoutComparator(trace, [seen, other], JudgedLayout(2), tolerance=1e-10).compare().first
    assert first is not None
    assert "no gradient reaches" not in first.cause


def test_a_first_step_is_special_beside_none() -> None:
    usual, special = TRACE.steps[0], replace(TRACE.steps[0], special="no masked target")
    of_step = traced(steps=(usual, special, special)).describe_first_special_step
    assert list(map(of_step, range(3))) == ["", "no masked target", ""]
    assert traced(steps=(special, special)).describe_first_special_step(0) == ""


def test_what_compression_sends_otherwise_is_told_before_where_a_backward_begins() -> None:
    kind, fault = name_gradients_set(0), "fp16 sends something else"
    off = {"a": (1.0, 4.2, 3.6, 4.0), "b": (1.0, 1.2, 0.6, 1.0)}
    seen = saw(tensors={kind: off}, sent_faults=[(0, "a", 0.5, fault)])
    cause = first_of(seen, seen).cause
    assert cause.startswith(f"{fault}, or rather, as it is off by more than rounding: ranks scale")
    assert "the backward goes wrong where it begins" not in cause
    seen = saw(tensors={kind: off}, sent_faults=[(1, "a", 0.5, fault)])
    assert "the backward goes wrong where it begins" in first_of(seen, seen).cause
    # What numbers show comes before it.
    seen = saw(tensors={kind: scale_tensors(2.0)}, sent_faults=[(0, "a", 0.5, fault)])
    assert "summed over the data-parallel ranks" in first_of(seen, seen).cause


def test_only_fused_matrices_that_begin_otherwise_have_blocks_elsewhere() -> None:
    tensors = {INITIAL_KIND: {"a": (1.0, 4.0, 3.5, 4.0)}}
    assert "depend on the layout" in first_of(*[saw(tensors=tensors)] * 2).cause
    undrawn = {INITIAL_KIND: {"a": (math.nan, 4.0, 3.5, 4.0)}}
    assert first_of(*[saw(tensors=undrawn)] * 2).cause == "it is not a finite number"
    filled = saw(tensors=undrawn, is_filled_in_parts=True)
    assert "is not drawn or stored again" in first_of(filled, filled).cause
    boxes = {"a": [[[0], [2], 1], [[4], [2], 1]], "b": [[[0], [1], 1]]}
    fused = [saw(tensors=tensors, boxes=boxes) for _ in range(2)]
    assert "taken to lie elsewhere" in first_of(*fused).cause


def _explain_gradients(layout: JudgedLayout, *dots_of_a: tuple[float, ...]) -> str:
    """The cause of gradients of which "a" has these sums on each rank, and "b" is right."""
    seen = [saw(tensors={name_gradients_set(0): {"a": dots}}) for dots in dots_of_a]
    first = LayoutComparator(TRACE, seen, layout, tolerance=1e-10).compare().first
    assert first is not None
    return first.cause


def test_a_gradient_is_explained_by_what_each_rank_has_of_it() -> None:
    right, wrong = (0.0, 4.0, 4.0, 4.0), (1.0, 4.2, 3.6, 4.0)
    data, tensor = JudgedLayout(2), JudgedLayout(1, tp=2)
    assert "only rank 0 differs, and has no gradient" in _explain_gradients(
        data, (4.0, 0.0, 0.0, 4.0), right
    )
    assert "elsewhere than where" in _explain_gradients(tensor, wrong, right)
    assert "elsewhere than where" not in _explain_gradients(data, wrong, right)
    assert "in another order" in _explain_gradients(data, *[(4.0, 4.0, 2.0, 4.0)] * 2)
    # Parts that are not the same, and add up to the reference, or have it on average.
    parts = (3.0, 2.0, 1.5, 4.0), (2.0, 3.0, 2.5, 4.0)
    assert "not added up over these ranks" in _explain_gradients(data, *parts)
    assert "not added up" not in _explain_gradients(data, wrong, wrong)
    parts = (1.0, 2.0, 2.5, 4.0), (2.0, 13.0, 5.5, 4.0)
    assert "never averaged" in _explain_gradients(data, *parts)


def test_weights_of_tp_that_are_wrong_by_themselves_lack_no_sum() -> None:
    """What the backward meets after "a" agrees, so what it hands on there is right."""
    wrong = (1.0, 4.2, 3.6, 4.0)
    cause = _explain_gradients(JudgedLayout(1, tp=2), wrong, wrong)
    assert "another microbatch's" in cause
    assert "region" not in cause


def test_what_a_backward_reads_again_is_named_by_how_the_layout_keeps_it() -> None:
    wrong = (1.0, 4.2, 3.6, 4.0)
    words = {"recompute": "what is recomputed there", "offload": "what comes back there from host"}
    for asked in words:
        layout = JudgedLayout(2, **{asked: True})
        all_off = {"a": wrong, "b": (1.0, 1.2, 0.6, 1.0)}
        of_all = [saw(tensors={name_gradients_set(0): all_off})] * 2
        first = LayoutComparator(TRACE, of_all, layout, tolerance=1e-10).compare().first
        assert first is not None
        for cause in (_explain_gradients(layout, wrong, wrong), first.cause):
            assert [asked == other for other in words] == [t in cause for t in words.values()]


def test_biases_whose_weights_agree_sum_over_other_tokens() -> None:
    kind, names = name_gradients_set(0), ["x.norm.weight", "y.up.weight", "y.up.bias"]
    sizes = {**TRACE.sizes, kind: dict.fromkeys(names, 1.0)}
    trace = replace(TRACE, order=tuple(names), sizes=sizes)
    for off, words in (("y.up.bias", "all of them biases"), ("y.up.weight", "of their input")):
        seen = saw()
        seen["tensors"][kind] = dict.fromkeys(names, (0.0, 1.0, 1.0, 1.0))
        seen["tensors"][kind][off] = (0.2, 1.1, 0.95, 1.0)
        seen["held"] |= dict.fromkeys(names, "whole")
        seen["boxes"] |= {name: [[[0], [4], 1]] for name in names}
        layout = JudgedLayout(1, tp=2)
        first = LayoutComparator(trace, [seen, seen], layout, tolerance=1e-10).compare().first
        assert first is not None
        assert first.name == off
        assert words in first.cause


def test_rows_of_one_factor_are_told_with_what_it_means() -> None:
    """As of a head that is tied with an embedding: tokens that no input has are in the head's
    gradient alone."""
    kind = name_gradients_set(0)
    seen = saw(tensors={kind: {"a": (1.0, 4.2, 3.6, 4.0)}}, row_factors={kind: {"a": (5, 40, 5.0)}})
    layout = JudgedLayout(2, loss_divisor=5)
    first = LayoutComparator(TRACE, [seen, seen], layout, tolerance=1e-10).compare().first
    assert first is not None
    assert "5 of 40 rows are 5 x the reference, and the others by no one factor" in first.cause
    assert "what the backward of the loss begins with (1 / 5)" in first.cause
    other = saw(**{**seen, "row_factors": {kind: {"a": (5, 40, 7.0)}}})
    assert "rows" not in first_of(seen, other).cause


def test_rows_that_are_one_multiple_are_found_among_others() -> None:
    torch.manual_seed(0)
    reference, noise = torch.randn(2, 12, 8, dtype=torch.float64)
    actual = 3 * reference
    assert find_factor_of_rows(actual - reference, actual) is None
    actual[:7] += noise[:7]
    assert find_factor_of_rows(actual - reference, actual) == (5, 12, pytest.approx(3.0))
    actual[7:10] = reference[7:10]
    assert find_factor_of_rows(actual - reference, actual) is None


@pytest.mark.parametrize(
    ("share", "layout", "output", "words"),
    [
        ((0, 2), JudgedLayout(2, ep=2), "", "or come back to other tokens"),
        ((0, 2), JudgedLayout(2, ep=2, gathers_weights=True), "", "or come back to other tokens"),
        ((2, 0), JudgedLayout(2, ep=2), "", "(rank 0 those from 2 on)"),
        ((0, 2), JudgedLayout(2, gathers_weights=True), "blocks.0.moe", "what is gathered"),
        ((0, 2), JudgedLayout(2, cp=2), "blocks.0.moe", "first in blocks.0.moe: rows"),
        ((0, 2), JudgedLayout(2), "blocks.1.attention", "and not in the experts of blocks.0.moe"),
    ],
)
def test_a_misrouted_token_is_explained_by_the_experts_before_it(
    share: tuple[int, int], layout: JudgedLayout, output: str, words: str
) -> None:
    names = [
        f"blocks.{block}.moe.{part}" for block in "01" for part in ("router.weight", "experts.up")
    ]
    trace = replace(TRACE, order=tuple(names))
    seen = [
        saw(
            boxes={names[1]: [[[first, 0], [2, 4], 1]]},
            outputs=[(0, 3, output, 0.1, 0, 0)] if output else [],
        )
        for first in share
    ]
    reroute = RoutingChange("blocks.1.moe.router", "step-0", 0, 11, 0, 2, 0.1)
    comparator = LayoutComparator(
        trace, seen, layout, tolerance=1e-10, misrouted=MisroutedToken(reroute, (0,))
    )
    causes = [found.cause for found in comparator._compare_routing("step-0")]
    assert len(causes) == 1
    assert words in causes[0]
    assert "rank of cp attends" not in causes[0]
    # Of ranks of ep that hold all that ep leaves them nothing is gathered.
    assert ("what is gathered" in causes[0]) == (layout.gathers_weights and layout.ep == 1)


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ("v", "backward of the softmax"),
        ("q", "does not come back to it"),
        ("qk", "does not come back to it, or the backward of attention goes wrong in values alone"),
        ("-", "the backward of attention is not that of its forward"),
    ],
)
def test_keys_of_a_rank_of_cp_lack_what_others_owe_or_scores_are_wrong(
    right: str, words: str
) -> None:
    kind, names = name_gradients_set(0), [f"x.{part}.weight" for part in "qkv"]
    sizes = {**TRACE.sizes, kind: dict.fromkeys(names, 1.0)}
    trace = replace(TRACE, order=tuple(names), sizes=sizes)
    seen = saw()
    seen["tensors"][kind] = {
        name: (0.0, 1.0, 1.0, 1.0) if name[2] in right else (0.2, 1.1, 0.95, 1.0) for name in names
    }
    seen["held"] |= dict.fromkeys(names, "whole")
    seen["boxes"] |= {name: [[[0], [4], 1]] for name in names}
    layout = JudgedLayout(2, cp=2)
    first = LayoutComparator(trace, [seen, seen], layout, tolerance=1e-10).compare().first
    assert first is not None
    assert words in first.cause
    assert ("alone" in first.cause) == (right == "qk")


def test_a_stage_that_loses_its_groups_part_of_the_rate_is_found() -> None:
    """Of an optimizer of one's own: groups keep their multiples where any two differ."""
    first_stage, lost = saw(rates={"b": (1.0, 1.0)}), saw(rates={"a": (0.5, 1.0)})
    first = first_of(first_stage, lost)
    assert (first.what, first.name, first.ranks) == ("learning rate of", "a", (1,))
    assert "gives a 1 x the job's learning rate" in first.cause
    assert first_of(first_stage, saw(rates={"a": (0.5, 0.5)})) is None
    # One rate for all is the job's.
    assert first_of(lost, lost) is None


def test_few_rows_with_another_gradient_are_told() -> None:
    kind = name_gradients_set(0)
    seen = saw(
        tensors={kind: {"a": (0.1, 4.0, 3.9, 4.0)}}, wrong_rows={kind: {"a": (40, 1, 1, 63)}}
    )
    assert "1 of 40 differ and are zero" in first_of(saw(), seen).cause
    assert "row 63 the first" in first_of(saw(), seen).cause
    seen["wrong_rows"][kind]["a"] = (40, 39, 0, 63)
    assert "row" not in first_of(saw(), seen).cause


def test_an_evaluation_says_what_is_in_training_mode_or_counted_otherwise() -> None:
    first = first_of(saw(), saw(evaluation=2.6, training_in_evaluation=["blocks.1"]))
    assert "training mode in an evaluation, blocks.1 the first" in first.cause
    first = first_of(saw(), saw(evaluation=2.6, num_evaluated=20))
    assert "without gradients" in first.cause
    assert "counts 20 targets, not 10" in first.cause


def test_a_loss_of_hidden_states_that_agree_is_wrong_by_itself() -> None:
    """Where nothing was compared of them nothing is said of them."""
    assert "each token agrees" in first_of(*[saw(losses=[3.1], num_outputs=4)] * 2).cause
    assert "some rank, or of all" in first_of(*[saw(losses=[3.1])] * 2).cause
    wrong = saw(losses=[3.1], num_outputs=4, outputs=[[0, 2, "blocks.1", 0.1, 0, 0]])
    assert "some rank, or of all" in first_of(wrong, wrong).cause
    assert "some rank, or of all" in first_of(wrong, saw(losses=[3.1])).cause
    cause = first_of(wrong, saw(losses=[3.1], num_outputs=4)).cause
    assert "the forward of rank 0, and not of the others, computes something else" in cause
    for name, is_attention in (("blocks.0.attention", True), ("blocks.0.attention_norm", False)):
        wrong = saw(losses=[3.1], num_outputs=4, outputs=[[0, 2, name, 0.1, 0, 0]])
        assert ("attention in blocks" in first_of(wrong, wrong).cause) == is_attention


def test_a_loss_of_wrong_outputs_is_no_multiple_that_means_something() -> None:
    """One target of ten more or less, by chance."""
    off = {"losses": [3.0 * 10 / 9], "num_outputs": 4}
    means = {"local_means": [[3.0, 4.0]], "local_targets": [[6, 4]]}
    right = saw(**off, **means)
    assert "a number of targets that is off by one" in first_of(right, right).cause
    wrong = saw(**off, **means, outputs=[[0, 2, "norm", 0.1, 0, 0]])
    cause = first_of(wrong, wrong).cause
    assert "targets" not in cause
    assert "computes something else" in cause
    assert "no multiple" not in cause


@pytest.mark.parametrize(
    ("sizes", "mixes_rows", "words"),
    [
        ((1.0, 1.0), False, "than the running ones, which one process takes there"),
        ((1.0, 2.0), True, "than those of all rows of a microbatch, which one process takes"),
        ((1.0, 1.0), True, "than in one process"),
        ((1.0,), False, "than in one process"),
    ],
)
def test_a_normalisation_by_other_statistics_is_told_by_those_of_one_process(
    sizes: tuple[float, ...], mixes_rows: bool, words: str
) -> None:
    """Running ones stay where a normalisation is in evaluation mode."""
    buffers = {
        name_buffers_set(step): {"norm.running_mean": size} for step, size in enumerate(sizes)
    }
    trace = traced(
        steps=TRACE.steps * len(sizes), sizes={**TRACE.sizes, **buffers}, mixes_rows=mixes_rows
    )

    def cause(name: str, layout: JudgedLayout) -> str:
        wrong = saw(losses=[3.1], num_outputs=4, outputs=[[0, 2, name, 0.1, 0, 0]])
        compared = TraceComparison(trace, [wrong, wrong], 1e-10)
        return DifferenceDiagnosis(compared, layout).explain_wrong_loss(3.1, 0)

    assert f"norm normalises by other statistics {words}" in cause("norm", JudgedLayout(2))
    assert "what is gathered" in cause("norm", JudgedLayout(2, gathers_weights=True))
    assert "statistics" not in cause("embed", JudgedLayout(2))


def test_what_ranks_of_tp_do_not_have_alike_is_no_sharding_rule() -> None:
    def cause(*errors: float, **layout: Any) -> str:
        """Of ranks of tp whose output is off by this; 0: not at all."""
        seen = [
            saw(
                losses=[3.1],
                num_outputs=4,
                outputs=[[0, 2, "embed", error, 0, 0]] if error else [],
            )
            for error in errors
        ]
        coordinates = tuple({"dp_shard": 0, "tp": rank} for rank in range(len(errors)))
        judged = JudgedLayout(1, tp=len(errors), rank_coordinates=coordinates, **layout)
        first = LayoutComparator(TRACE, seen, judged, tolerance=1e-10).compare().first
        assert first is not None
        return first.cause

    some = cause(0.1, 0.2, 0.0)
    assert "it is right on rank 2 and not on rank 0, 1" in some
    assert "not reduced, or stale" in some
    assert "sharding rule" not in some
    assert "rank 0, 1, 2 have not" in cause(0.1, 0.1, 0.2)
    # All have the same, or tokens of their own.
    assert "sharding rule" in cause(0.1, 0.1, 0.1)
    assert "sharding rule" in cause(math.nan, math.nan)
    assert "sharding rule" in cause(0.1, 0.2, 0.0, shares_sequence=True)


def test_loads_that_differ_along_one_axis_name_it() -> None:
    trace = traced(loads=({"moe.router": (4, 2, 0)},))
    layout = JudgedLayout(
        2,
        tp=2,
        rank_coordinates=tuple(
            {"dp_shard": shard, "tp": rank} for shard in range(2) for rank in range(2)
        ),
    )

    def cause(*loads: tuple[int, int, int]) -> str:
        seen = [saw(loads=[{"moe.router": load}]) for load in loads]
        first = LayoutComparator(trace, seen, layout, tolerance=1e-10).compare().first
        assert first is not None
        return first.cause

    all_of_them, none, some, rest = (4, 2, 0), (0, 0, 0), (3, 1, 0), (1, 1, 0)
    found = cause(all_of_them, none, all_of_them, none)
    assert "the ranks of tp do not have the same, for all are on rank 0, 2" in found
    assert "none on rank 1, 3" in found
    assert "the ranks of dp_shard have only those of one rank" in cause(some, some, rest, rest)
    assert "the ranks of dp_shard have other counts each" in cause(some, some, none, none)
    # Of ranks that have the same, or differ in two axes, nothing is said.
    for others in ((some,) * 4, (some, none, none, none)):
        assert "the ranks of" not in cause(*others)


def first_of_stages(*seen: dict[str, Any]) -> Any:
    pipeline = Pipeline("1f1b", 2, 4, StageCut((1, 1)), (0, 1))
    layout = JudgedLayout(1, pipeline=pipeline)
    return LayoutComparator(TRACE, seen, layout, tolerance=1e-10).compare().first


def test_a_stage_that_reads_another_microbatch_is_told_by_its_tokens() -> None:
    first = saw(losses=[3.1], num_outputs=4)
    cause = first_of_stages(first, first | {"other_microbatch": [1, 0, 2]}).cause
    assert "stage 1 reads another microbatch than that of its hidden states" in cause
    assert "from row 2 on, in place of row 0, and so are targets" in cause
    # Where all hidden states agree, they are of the right microbatch.
    cause = first_of_stages(first, first).cause
    assert "the last stage reads the targets of another microbatch" in cause
    assert "goes on with hidden states" not in cause


def test_a_stage_that_keeps_masks_is_told_from_one_with_other_hidden_states() -> None:
    tokens = WrongTokens(2, has_right_input=True)
    for row, begins in enumerate([(0, 0, 0, 0), (0, 0, 2, 2), (0, 0, 0, 0)]):
        is_wrong = [(token, row == 1 and token > 1) for token in range(4)]
        tokens.add_row(row, row, SequenceView((0,) * 4, begins), is_wrong)
    seen = saw(losses=[3.1], num_outputs=4, outputs=[[0, 2, "blocks.1.attention", 0.1, 1, 2]])
    right = saw(losses=[3.1], num_outputs=4)
    cause = first_of_stages(right, seen | {"wrong_tokens": tokens.to_json()}).cause
    assert "masks or positions of the first microbatch are kept for all" in cause
    assert "goes on with hidden states" not in cause
    tokens.has_right_input = False
    cause = first_of_stages(right, seen | {"wrong_tokens": tokens.to_json()}).cause
    assert "goes on with hidden states of another microbatch" in cause


def test_what_differs_outside_of_blocks_has_no_mask() -> None:
    seen = saw(losses=[3.1], num_outputs=4, outputs=[[0, 0, "embed", 0.1, 0, 0]])
    layout = JudgedLayout(1, cp=2)
    first = LayoutComparator(TRACE, [seen, seen], layout, tolerance=1e-10).compare().first
    assert first is not None
    assert "gives them other positions" in first.cause
    assert "mask" not in first.cause


def test_what_an_overflow_leaves_in_compression_is_found_on_its_ranks() -> None:
    fault = ("a", math.inf, "what was not sent is lost")
    first = first_of(saw(overflow_faults=[fault]), saw(overflow_faults=[fault]))
    assert (first.name, first.ranks, first.cause) == ("a", (0, 1), "what was not sent is lost")


def norm_cause(found: float) -> str:
    return str(first_of(saw(norms=[found]), saw(norms=[found])).cause)


def test_causes_of_a_norm() -> None:
    assert "replicas" in norm_cause(10.0**0.5)
    assert norm_cause(9.0**0.5) == "the gradient of a is counted twice"
    assert norm_cause(1.0) == "the gradient of a is left out"
    assert norm_cause(math.nan) == "it is not a finite number"


def test_a_norm_of_some_ranks_or_with_a_part_missing_is_called_so() -> None:
    """Each of two ranks holds a part of "a", and all of "b"."""

    def seen(rank: int, norm: float) -> dict[str, Any]:
        square = (1.5, 2.5)[rank]
        right = {"a": (0.0, square, square, square), "b": (0.0, 1.0, 1.0, 1.0)}
        found = saw(tensors=dict.fromkeys(TRACE.sizes, right), norms=[norm])
        return found | {"boxes": {"a": [[[2 * rank], [2], 1]], "b": [[[0], [1], 1]]}}

    def cause(square: float) -> str:
        return str(first_of(*(seen(rank, square**0.5) for rank in range(2))).cause)

    assert cause(1.5 + 0.5) == (
        "only what rank 0 holds counts in it: gradients of the others are missing"
    )
    assert (
        cause(1.5 + 1.0)
        == "it is the norm of what rank 0 holds: the shards of the others are missing"
    )
    assert cause(4.321).endswith("gradients agree: some of them are left out of the norm")
    assert cause(6.543).endswith("gradients agree: some of them count more than once in the norm")


def test_squares_count_as_if_other_ranks_held_the_same() -> None:
    def cause(square: float, *of_ranks: tuple[float, float]) -> str:
        """Of ranks with these squares of their parts of "a" and "b"."""
        seen = []
        for rank, (of_a, of_b) in enumerate(of_ranks):
            right = {"a": (0.0, of_a, of_a, of_a), "b": (0.0, of_b, of_b, of_b)}
            found = saw(tensors=dict.fromkeys(TRACE.sizes, right), norms=[square**0.5])
            boxes = {
                name: [[[rank % 2 if of_it < 1 else 0], [1], 1]]
                for name, of_it in (("a", of_a / 4), ("b", of_b))
            }
            seen.append(found | {"boxes": boxes})
        return str(first_of(*seen).cause)

    both = ((1.9, 1.0), (2.1, 1.0))
    found = cause(3.0, *both)
    assert "all a count 0.5 x: divided by the number of ranks of dp (2)" in found
    assert "as if other ranks held the same ones, too, and each counted its share" in found
    # There are no other ranks.
    found = cause(4.25, *both)
    assert "all b count 0.25 x: divided by the number of ranks of dp (2) twice" in found
    assert "other ranks held" not in found
    halves = ((1.9, 0.4), (2.1, 0.6)) * 2
    assert "gradients of the others are missing; or those of all count 0.5 x, as if" in cause(
        2.5, *halves
    )


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (0.999, "0.999 x"),
        (1.5, "1.5 x"),
        (4.0, "4 x"),
        (1 - 2.6e-8, "0.999999974 x"),
        (1 + 1e-12, "(1 +1.0e-12) x"),
    ],
)
def test_a_factor_near_1_is_told_with_its_digits(factor: float, text: str) -> None:
    assert format_factor(factor) == text


@pytest.mark.parametrize(
    ("factor", "clips", "words"),
    [
        (2.0, False, "summed"),
        (0.5, False, "once too often"),
        (0.3, True, "clipped twice"),
        (1 / 0.3, True, "not clipped"),
        (0.0, False, "every gradient is zero"),
        (1.234, False, "the loss agrees: what their sum is multiplied with"),
        (1 - 3e-8, False, "computed in float32"),
    ],
)
def test_causes_of_a_factor(factor: float, clips: bool, words: str) -> None:
    steps = (TraceStep(3.0, 10, 5.0**0.5, 0.3 * 5.0**0.5 if clips else None),)
    off = scale_tensors(factor)
    seen = saw(tensors={name_gradients_set(0): off})
    first = (
        LayoutComparator(traced(steps=steps), [seen, seen], JudgedLayout(2), tolerance=1e-10)
        .compare()
        .first
    )
    assert first is not None
    assert words in first.cause


@pytest.mark.parametrize("clips", [True, False])
def test_a_rank_that_scales_its_gradients_is_named_alone(clips: bool) -> None:
    steps = (TraceStep(3.0, 10, 5.0**0.5, 2.0 if clips else None),)
    factor = 1.002
    off = scale_tensors(factor)
    seen = [saw(), saw(tensors={name_gradients_set(0): off})]
    verdict = LayoutComparator(
        traced(steps=steps), seen, JudgedLayout(2), tolerance=1e-10
    ).compare()
    assert verdict.first is not None
    assert "(1.002 x on rank 1)" in verdict.first.cause
    assert ("clipped by local norms" in verdict.first.cause) == clips


def test_an_error_of_the_size_of_a_narrower_type_is_called_so() -> None:
    for error, narrow in ((4e-8, "float32"), (2e-3, "bfloat16")):
        off = {
            name: (error**2 * size**2 / 2, size**2, size**2, size**2)
            for name, size in SIZES.items()
        }
        first = first_of(
            saw(tensors={name_gradients_set(0): off}), saw(tensors={name_gradients_set(0): off})
        )
        assert narrow in first.cause


def test_what_is_refused_is_told_once_for_each_reason() -> None:
    rows = [
        Row(layout, {}, "small", dtype, None, {}, 0.0, refused=reason)
        for layout, dtype, reason in (
            ("tp2", "", "heads"),
            ("tp2-chunks", "", "heads"),
            ("zero3-sqrt", "float64", "no blocks"),
            ("zero3-full", "float32", "no blocks"),
            ("zero3-sqrt", "float32", "no blocks"),
        )
    ]
    assert describe_refused_rows(rows) == [
        "refused tp2, tp2-chunks: heads",
        "refused zero3-sqrt, zero3-full (float32): no blocks",
    ]


def test_what_rows_do_not_judge_is_told_once_for_each_part() -> None:
    rows = []
    for layout, dtype in (("ddp", "float64"), ("ddp", "float32"), ("tp2", "float64")):
        parts = ("dropout", "precision.compute=fp8") if layout == "ddp" else ("masks", "dropout")
        rows.append(Row(layout, {}, "small", dtype, True, {}, 1e-5, not_judged=parts))
    rows += [replace(rows[-1], layout=f"cp{n}") for n in (2, 3, 4)]
    assert describe_not_judged(rows, ["precision.compute=fp8"]) == [
        "not judged in ddp, tp2, cp2 and 2 more: dropout",
        "not judged in tp2, cp2, cp3 and 1 more: masks",
    ]
    assert describe_not_judged(rows[:1])[1] == "not judged in ddp: precision.compute=fp8"


def test_a_row_of_json_says_all_that_nobody_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """What the terminal says once, of all rows, stands in each that was judged."""
    selection = select_layout_cases(Job(), ["ddp"], ranks=2, steps=2, shrink=None)
    assert len(selection.not_judged) > len(selection.left_out)
    printer = VerifyRowPrinter(as_json=True)
    printer.print_changes(["2 blocks in place of 8"])
    printer.print_selection(selection)
    judged = Row("ddp", {}, "small", "float64", True, {}, 1e-5, not_judged=("dropout",))
    printer.print_row(judged)
    printer.print_row(replace(judged, ok=None, not_judged=(), refused="no blocks"))
    of_judged, of_refused = map(json.loads, capsys.readouterr().out.splitlines())
    assert of_judged["not_judged"][0] == "dropout"
    assert "changed 2 blocks in place of 8" in of_judged["notes"]
    for line in selection.not_judged:
        assert line.removeprefix("not judged: ") in of_judged["not_judged"]
    assert of_refused["not_judged"] == []


def test_a_layout_that_was_named_and_refused_is_no_success() -> None:
    """One of all may be; one in float64 alone, too."""
    equal = Row("ddp", {}, "small", "float32", True, {}, 1e-5)
    refused = Row("zero3-sqrt", {}, "small", "float32", None, {}, 0.0, refused="no blocks")
    for required, code in (
        ({"zero3-sqrt"}, ExitCode.JOB),
        ({"ddp"}, ExitCode.OK),
        (set(), ExitCode.OK),
    ):
        result = VerifyResult((equal, refused), required=frozenset(required))
        assert (result.exit_code, result.is_equal) == (code, code == ExitCode.OK)
    in_one_type = replace(refused, layout="ddp", dtype="float64")
    result = VerifyResult((equal, in_one_type), required=frozenset({"ddp"}))
    assert result.exit_code == ExitCode.OK
    assert "1 layout refused" in result.summary
    assert not replace(result, stop_code=ExitCode.INTERRUPTED).is_equal


def test_the_reference_of_a_narrow_type_computes_in_it() -> None:
    """Forward and loss: a reference whose forward is wide judges a narrow layout by another type's
    numbers, within a band that is then too wide or too narrow."""
    job = make_verified_job(shrink_job(Job())[0], 1)
    (case,) = plan_layout_cases(
        make_narrow_dtype_job(job, "bfloat16"), [("one", {})], num_ranks=1, cluster=CPU, shape=None
    )
    assert case.plan is not None
    computed: list[torch.dtype] = []

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 3)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.linear(inputs[..., None].float())
            computed.append(logits.dtype)
            return logits

    batch = {"inputs": torch.zeros(2, 4), "targets": torch.zeros(2, 4, dtype=torch.int64)}
    AutocastLoss(job, torch.bfloat16)(Head(), batch)
    assert computed == [torch.bfloat16]


def test_changed_modes_name_the_first_module_and_its_ranks() -> None:
    ranks = [
        StateObservation(3, 3, 0, 0),
        StateObservation(3, 3, 0, 0, modes=("blocks.0.bn", "bn")),
    ]
    (difference,) = find_changed_modes(ranks)
    assert str(difference) == (
        "mode blocks.0.bn is off by 2.0e+00 in step 3, on rank 1 (2 modules)"
    )
    assert difference.ranks == (1,)
    assert list(find_changed_modes(ranks[:1])) == []


@pytest.mark.parametrize(
    ("lost", "names"),
    [
        ({"a": 0.01, "b": 0.012, "c": 0.008}, ()),
        # Parts that cancel: within a tenth of the gradient.
        ({"a": 0.01, "b": 0.09, "c": 0.008}, ()),
        ({"a": 0.01, "b": 0.3, "c": 0.008}, ("b",)),
        ({"a": 0.01, "b": math.nan, "c": 0.008}, ("b",)),
        # In the median: all that are off, the worst first.
        ({"a": 0.05, "b": 0.06, "c": 0.008}, ("b", "a")),
    ],
)
def test_gradients_of_a_narrow_type_that_rounding_does_not_explain_are_named(
    lost: dict[str, float], names: tuple[str, ...]
) -> None:
    faults = find_lossy_gradients(lost, dict.fromkeys(lost, 0.02))
    assert tuple(fault.name for fault in faults) == names


def test_a_narrow_type_that_is_wrong_in_one_process_differs_in_every_layout() -> None:
    trace = traced(lossy_gradients=(ArithmeticFault("a", 0.3),))
    first = LayoutComparator(trace, [saw()], JudgedLayout(1), tolerance=1e-10).compare().first
    assert first is not None
    assert (first.what, first.name, first.error) == ("narrow gradient", "a", 0.3)
