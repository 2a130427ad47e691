"""`ModelCosts.work`: its FLOPs and parameters are the ones that the shape counts in other ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.job.model import build_preset_shape
from phalanx.job.presets import find_preset, list_preset_names
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.stored import BuiltInShape
from phalanx.job.work import ModelWork


def build_builtin_shape(name: str) -> BuiltInShape:
    preset = find_preset(name)
    assert preset is not None
    shape = build_preset_shape(preset)
    if isinstance(shape, DecoderShape) and not shape.vocab_size:
        return replace(shape, vocab_size=1000)
    return shape


def count_uncut_params(work: ModelWork) -> int:
    """Parameters of the blocks that are in no matrix that tensor parallelism cuts."""
    total = 0
    for block in work.blocks:
        cut = sum(matmul.num_params for matmul in block.matmuls if matmul.cut != "none")
        total += block.num_params - cut
    return total


@pytest.mark.parametrize("name", list_preset_names())
def test_flops_of_work_are_those_of_the_shape(name: str) -> None:
    shape = build_builtin_shape(name)
    work, flops = shape.work(1024), shape.flops(1024)
    parts = [flops.embedding, *flops.blocks, flops.head]
    assert work.matmul_flops == sum(part.matmul for part in parts)
    assert work.attention_flops == sum(part.attention for part in parts)


@pytest.mark.parametrize("name", list_preset_names())
def test_params_of_work_are_those_of_the_shape(name: str) -> None:
    shape = build_builtin_shape(name)
    work = shape.work(1024)
    assert work.num_params == shape.num_params
    assert work.num_tied_params == shape.tied_params
    for block, layer in zip(work.blocks, range(shape.num_layers), strict=True):
        assert block.num_params == shape.count_block(layer)
        # Matrices are nearly all of a block; the rest are norms and biases.
        in_matrices = sum(matmul.num_params for matmul in block.matmuls)
        assert 0.97 * block.num_params < in_matrices <= block.num_params


def test_experts_of_work_are_what_ep_divides() -> None:
    shape = build_builtin_shape("deepseek-v3")
    assert shape.experts is not None
    block = shape.work(4096).blocks[-1]
    assert block.num_routed_params == shape.experts.count * shape.experts.params
    assert block.num_params - block.num_routed_params == (
        shape.count_block(shape.num_layers - 1, ep=shape.experts.count) - shape.experts.params
    )


def test_blocks_that_are_equal_are_of_one_kind() -> None:
    dense = build_builtin_shape("llama3-8b").work(4096)
    assert [count for _, count in dense.block_kinds] == [32]
    routed = build_builtin_shape("deepseek-v3").work(4096)
    assert [count for _, count in routed.block_kinds] == [3, 58]
    assert hash(dense) == hash(build_builtin_shape("llama3-8b").work(4096))


def test_uncut_params_are_what_tp_leaves_whole() -> None:
    work = build_builtin_shape("llama3-8b").work(4096)
    assert sum(block.num_uncut_params for block in work.blocks) == count_uncut_params(work)
