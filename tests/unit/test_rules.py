"""Sharding rules as data: what they say, what they refuse, and that the parts of all ranks make
the whole."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import ExitCode, LayoutError
from phalanx.core.shard_rules import shard_rules
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.job.param_holder import ParamHolder
from phalanx.job.schema import Job
from phalanx.job.shapes.measured import MeasuredModule
from phalanx.job.shapes.stored import parse_stored_shape
from phalanx.mesh.linear import iterate_parameter_holders
from phalanx.mesh.logical import Box, LogicalShard, TensorParallelCut, apply_cut_to_shard
from phalanx.nn.models.decoder import build
from phalanx.parallel.tensor.sharder import _build_boxes_of_slices
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.plan.rule_checks import (
    combine_and_check_rules,
    describe_few_cut_matrices,
    describe_unsharded_matrices,
)
from phalanx.plan.rules import (
    ShardingRule,
    find_matching_rule,
    list_legal_tp_degrees,
    parse_sharding_rules,
)

HOLDERS = (
    ParamHolder("embed", "embedding", 251 * 16, 251, 16),
    ParamHolder("layers.0.attn.qkv", "linear", 48 * 16, 48, 16),
    ParamHolder("layers.0.attn.out", "linear", 16 * 24, 16, 24),
    ParamHolder("layers.0.mixer.in_proj", "linear", 64 * 16, 64, 16),
    ParamHolder("layers.0.conv", "Conv2d", 9 * 16 * 16),
    ParamHolder("layers.0.mha", "attention", 4 * 16 * 16),
    ParamHolder("layers.0.norm", "LayerNorm", 32),
)
NAMES = ("", "layers", "layers.0", "layers.0.attn", *(holder.name for holder in HOLDERS))
SHAPE = MeasuredModule(
    "mine:build", 1, 8_000, 8_000, 2_000, 2_000, module_names=NAMES, holders=HOLDERS
)
FUSED = {"layers.*.attn.qkv": "column heads=4+2/4+2/4", "layers.*.attn.out": "row heads=4"}


def one(text: str) -> ShardingRule:
    return parse_sharding_rules({"a.*.b": text})[0]


@pytest.mark.parametrize(
    ("rules", "tp", "words"),
    [
        (
            {"layers.*.attn.qvk": "column"},
            2,
            ('"layers.*.attn.qvk"', 'did you mean "layers.*.attn.qkv"?'),
        ),
        (
            {"layers.*.attn.qkv": "colum"},
            2,
            ("'colum' is no kind of rule", 'did you mean "column"?'),
        ),
        ({"layers.*.attn.qkv": ""}, 2, ("it is empty", "one of column")),
        (
            {"layers.*.attn.qkv": "column head=4"},
            2,
            ("'head=4' says nothing of a column", "heads, parts, gather"),
        ),
        (
            {"layers.*.attn.qkv": "column heads=four"},
            2,
            ("its numbers cannot be read", "heads=8+2/8+2/8"),
        ),
        (
            {"layers.*.attn": "region divide=n/0"},
            2,
            ("its numbers cannot be read", "divide=num_heads,size/2"),
        ),
        (
            {"layers.*.attn.qkv": "column heads=4"},
            3,
            ("tp 3 does not divide the 4 heads", "nearest: 2 or 4"),
        ),
        ({"layers.*.attn.qkv": "column heads=5"}, 5, ("48 features", "5 heads")),
        (FUSED, 3, ("tp 3 does not divide the 4 heads", "nearest: 2 or 4")),
        ({"layers.*.attn.out": "row parts=2"}, 2, ("'parts=2' says nothing of a row", "heads")),
        ({"layers.*.mha": "column"}, 2, ("nn.MultiheadAttention", "it stays whole on every rank")),
        (
            {"layers.*.conv": "row"},
            2,
            ("layers.0.conv is a Conv2d", "row cuts linear layers", "stays whole"),
        ),
        (
            {"layers.*.norm": "vocab"},
            2,
            ("is a LayerNorm", "vocab cuts embeddings and linear layers"),
        ),
        (
            {"layers.*.mixer.in_proj": "column"},
            2,
            ('"layers.*.mixer.in_proj" = "column"', "no row takes them", '"row"'),
        ),
        ({"layers.*.attn": "region"}, 2, ("mine:build has no sharding rules", "--suggest-rules")),
        ({}, 2, ("mine:build has no sharding rules", "parallel.tp=1")),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    rules: dict[str, str], tp: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(LayoutError) as caught:
        combine_and_check_rules(rules, SHAPE, tp)
    line = str(caught.value)
    assert "\n" not in line
    assert all(word in line for word in words), line
    assert caught.value.exit_code is ExitCode.JOB


@pytest.mark.parametrize(
    "rules",
    [
        {"layers.*.mixer.in_proj": "column gather"},
        {"layers.*.mixer.in_proj": "column", "layers.*.attn.out": "row"},  # the row may be anywhere
        {
            "layers.*.mixer.in_proj": "column",
            "layers.*.attn": "region summed",
        },  # what is made of parts is added up
        {"embed": "vocab"},
    ],
)
def test_columns_whose_features_may_be_taken_are_left_to_the_ranks(rules: dict[str, str]) -> None:
    assert len(combine_and_check_rules(rules, SHAPE, 2)) == len(rules)


def test_what_no_rule_covers_is_named_with_its_size() -> None:
    rules = combine_and_check_rules(FUSED, SHAPE, 2)
    line = describe_unsharded_matrices(rules, SHAPE)
    assert line.startswith(
        "tp: no rule covers `embed`, 4.02 K parameters, `layers.*.conv`, 2.30 K parameters, "
    )
    assert line.endswith("they stay whole on every rank")
    assert "norm" not in line  # nobody would cut it
    every = FUSED | dict.fromkeys(
        ("embed", "layers.*.mixer.in_proj", "layers.*.conv", "layers.*.mha"), "replicate"
    )
    assert describe_unsharded_matrices(combine_and_check_rules(every, SHAPE, 2), SHAPE) == ""


def test_how_few_matrices_are_cut_is_counted() -> None:
    rules = combine_and_check_rules({"layers.*.attn.out": "row heads=4"}, SHAPE, 2)
    assert describe_few_cut_matrices(rules, SHAPE) == "1 of 6 matrices cut"
    every = dict.fromkeys(("embed", "layers.*.mixer.in_proj", "layers.*.conv"), "replicate")
    rules = combine_and_check_rules(every | {"layers.*.attn.out": "row heads=4"}, SHAPE, 2)
    assert describe_few_cut_matrices(rules, SHAPE) == "1 of 6 matrices cut"
    whole = replace(SHAPE, holders=tuple(h for h in HOLDERS if "attn" in h.name))
    rules = parse_sharding_rules(FUSED)
    assert describe_few_cut_matrices(rules, whole) == ""


def test_rules_of_the_module_stand_behind_those_of_the_job() -> None:
    shape = replace(SHAPE, shard_rules=tuple(FUSED.items()))
    assert (
        find_matching_rule(combine_and_check_rules({}, shape, 2), "layers.0.attn.out")
        == parse_sharding_rules(FUSED)[1]
    )
    own = {"layers.0.attn.qkv": "replicate"}
    found = find_matching_rule(combine_and_check_rules(own, shape, 2), "layers.0.attn.qkv")
    assert found is not None
    assert found.kind == "replicate"
    assert parse_stored_shape(shape.to_json()) == shape


def test_a_decorator_leaves_what_it_decorates() -> None:
    @shard_rules({"a": "column", "b": "row"})
    class Mine:
        """Mine."""

    @shard_rules({"b": "replicate", "c": "row"})
    def build(size: int) -> Mine:
        return Mine()

    assert Mine.__doc__ == "Mine."
    assert build.__name__ == "build"
    assert Mine().shard_rules == {"a": "column", "b": "row"}  # type: ignore[attr-defined]
    assert build(1).shard_rules == {"b": "row", "c": "row", "a": "column"}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "value", "tp", "share"),
    [
        ("n", 8, 4, 2),
        ("n", 2, 4, 1),
        ("n", 6, 4, None),
        ("n/2", 16, 4, 8),
        ("n/2", 16, 2, 8),
        ("n/3", 16, 3, None),
    ],
)
def test_a_count_is_divided_by_what_it_counts(
    count: str, value: int, tp: int, share: int | None
) -> None:
    assert one(f"region divide={count}").divide[0].divide_by_tp(value, tp) == share


# All ranks together

PARTS = st.sampled_from(
    [
        "",
        "parts=2",
        "parts=3",
        "heads=4",
        "heads=8",
        "heads=4+2/4+2/4",
        "heads=8+2/8+2/8",
        "heads=6",
    ]
)


def _fsdp_rows(shape: tuple[int, ...], rank: int, size: int) -> tuple[Box, ...]:
    """As FSDP cuts a local tensor: rows in chunks of the ceiling, the last ranks have less, or
    nothing."""
    chunk = -(-shape[0] // size)
    start, stop = min(shape[0], rank * chunk), min(shape[0], (rank + 1) * chunk)
    if start == stop:
        return ()
    zeros = (0,) * len(shape)
    return (Box((start, *zeros[1:]), zeros, (stop - start, *shape[1:])),)


@settings(max_examples=200, deadline=None)
@given(
    text=PARTS,
    unit=st.integers(1, 9),
    other=st.integers(1, 5),
    dim=st.integers(0, 1),
    tp=st.integers(1, 8),
    fsdp=st.integers(1, 5),
)
def test_what_ranks_hold_makes_the_whole(
    text: str, unit: int, other: int, dim: int, tp: int, fsdp: int
) -> None:
    """Every element as often as is said, and nowhere else; through the chunks of FSDP, too."""
    rule = one(f"column {text}")
    total = unit * (sum(part.heads for part in rule.parts) or len(rule.parts))
    shape = (total, other) if dim == 0 else (other, total)
    try:
        cuts = [
            _build_boxes_of_slices(shape, dim, rule.list_rank_slices(total, tp, rank, name="w"))
            for rank in range(tp)
        ]
    except LayoutError:
        heads = max((max(part.heads, part.queries) for part in rule.parts), default=0)
        keys = min((part.heads for part in rule.parts), default=0)
        assert tp not in list_legal_tp_degrees(heads, keys) if heads else unit < tp
        return
    held: Counter[tuple[int, ...]] = Counter()
    claimed: dict[tuple[int, ...], int] = {}
    numbers: dict[tuple[int, ...], list[int]] = {}
    for cut, shard in itertools.product(cuts, range(fsdp)):
        assert cut.global_shape == shape
        local = _local_shape(cut)
        storage = _fsdp_rows(local, shard, fsdp)
        found = apply_cut_to_shard(cut, LogicalShard("w", local, "float32", storage, None))  # type: ignore[arg-type]
        assert found.global_shape == shape
        stored: Counter[tuple[int, ...]] = Counter()
        for box in found.boxes:
            stored.update(_elements(box.local_offset, box.size))
            for element in _elements(box.global_offset, box.size):
                held[element] += 1
                claimed[element] = box.num_replicas
                numbers.setdefault(element, []).append(box.replica)
        mine = set(
            itertools.chain.from_iterable(_elements(b.local_offset, b.size) for b in storage)
        )
        assert set(stored) == mine  # all of its storage, each element once
        assert set(stored.values()) <= {1}
    assert set(held) == set(itertools.product(*map(range, shape)))
    assert held == Counter(claimed)
    assert all(
        sorted(copies) == list(range(claimed[element])) for element, copies in numbers.items()
    )


def _local_shape(cut: TensorParallelCut) -> tuple[int, ...]:
    ends = [
        tuple(o + n for o, n in zip(box.local_offset, box.size, strict=True)) for box in cut.boxes
    ]
    return tuple(max(end) for end in zip(*ends, strict=True))


def _elements(offset: tuple[int, ...], size: tuple[int, ...]) -> Any:
    return itertools.product(*(range(o, o + n) for o, n in zip(offset, size, strict=True)))


# A built-in model, whose own rules the job's stand before

PLANNED = "parallel.ranks=2", "parallel.tp=2"
WHOLE_FFN = {f"blocks.*.ffn{part}": "replicate" for part in ("", ".gate", ".up", ".down")}


WHOLE_ATTENTION = {
    f"blocks.*.attention{part}": "replicate" for part in ("", ".q", ".k", ".v", ".o")
}
QK_NORM = "model.qk_norm=true", "parallel.sequence_parallel=false"
LATENT = ("model.preset=small-latent",)


def planned(rules: dict[str, str], *overrides: str) -> list[str]:
    job = load_job(None, [*PLANNED, *overrides])
    body = job.to_json()
    body["parallel"]["rules"] = rules
    return list(
        make_plan(
            Job.model_validate_json(json.dumps(body)), cluster=Cluster("cpu", 2, 2**34)
        ).reasons
    )


@pytest.mark.parametrize(
    ("rules", "overrides", "words"),
    [
        ({"foo.bar": "column"}, (), "no module of the model is named so"),
        ({"blocks.*.attention.q": "column heads=3"}, (), "128 features, which are not 3 heads"),
        ({"blocks.*.attention.q": "column heads=2"}, (), ""),
        ({"embed": "row"}, (), "embed is an embedding, and row cuts linear layers"),
        ({"norm": "column"}, (), "norm is a RMSNorm"),
        (
            {"blocks.*.attention.q": "replicate"},
            (),
            "blocks.0.attention.q would not be cut as what it works with is",
        ),
        ({"blocks.*.attention.o": "column"}, (), "would not be cut as what it works with is"),
        ({"blocks.*.ffn.up": "column gather"}, (), "would not be cut as what it works with is"),
        ({**WHOLE_FFN, "blocks.*.ffn": "region"}, (), "is a region, and nothing of it is cut"),
        (WHOLE_FFN, (), ""),
        ({"embed": "replicate"}, (), "embed needs vocab or sequence, where the sequence is cut"),
        ({"head": "replicate"}, (), "no module of the model is named so"),
        (
            {"head": "replicate"},
            ("model.tie_embeddings=false",),
            "head needs vocab, where the sequence is cut",
        ),
        (
            {"head": "replicate"},
            ("model.tie_embeddings=false", "parallel.sequence_parallel=false"),
            "",
        ),
        ({"head": "column"}, ("model.tie_embeddings=false",), "a head is cut by tokens"),
        (
            WHOLE_ATTENTION,
            QK_NORM,
            "blocks.0.attention.q_norm sees all of blocks.0.attention on each rank, and its grad",
        ),
        ({**WHOLE_ATTENTION, "blocks.*.attention.?_norm": "replicate"}, QK_NORM, ""),
        (
            {"blocks.*.attention.q_norm": "replicate"},
            QK_NORM,
            "sees a part of blocks.0.attention .* not added up",
        ),
        (
            {"blocks.*.attention.kv_up": "replicate"},
            LATENT,
            "blocks.0.attention.kv_up would not be cut as what it wo",
        ),
        (
            {"blocks.*.attention.kv_down": "column gather"},
            LATENT,
            "kv_down sees a part of blocks.0.attention on each",
        ),
        (
            {"blocks.*.attention.q_down": "replicate"},
            LATENT,
            "q_down sees a part of blocks.0.attention .* not added up",
        ),
        ({"blocks.*.attention.q_up": "column heads=2"}, LATENT, ""),
    ],
)
def test_rules_for_a_built_in_model(
    rules: dict[str, str], overrides: tuple[str, ...], words: str
) -> None:
    if words:
        with pytest.raises(LayoutError, match=words) as caught:
            planned(rules, *overrides)
        assert caught.value.exit_code is ExitCode.JOB
        assert "\n" not in str(caught.value)
        return
    assert any(
        "memory is predicted for the model's own sharding rules" in line
        for line in planned(rules, *overrides)
    )


def test_module_names_are_those_of_the_model() -> None:
    for overrides in (
        [],
        ["model.tie_embeddings=false", "model.positions=learned", "model.qk_norm=true"],
        LATENT,
    ):
        shape = build_model_shape(load_job(None, overrides), 257)
        with torch.device("meta"):
            module = build(shape)
        assert set(shape.module_names) == {name for name, _ in module.named_modules()}
        assert set(iterate_parameter_holders(module)) == set(shape.holders)
