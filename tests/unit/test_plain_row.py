"""The row "plain" of verify: phalanx's module in one process, judged by the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models import CPU
from phalanx.core.errors import LayoutError
from phalanx.job.schema import Job
from phalanx.mesh import grouped
from phalanx.nn import attention, rotary
from phalanx.nn.models.vit import VisionTransformer
from phalanx.nn.routing import Router
from phalanx.verify import keys_to_blame
from phalanx.verify.batches import cast_steps_to_dtype, make_global_microbatches
from phalanx.verify.cases import plan_layout_cases
from phalanx.verify.keys_to_blame import name_keys_to_blame
from phalanx.verify.plain_row import compare_with_plain_implementation
from phalanx.verify.row import Row
from phalanx.verify.verified_job import make_verified_job, shrink_job


def _judge(preset: str, *, names_keys: bool = False, **model: Any) -> Row:
    data = {"seq_len": 32}
    if "vit" in preset:
        data |= {"source": "my.data:images"}
    job = Job.model_validate({"model": {"preset": preset, **model}, "data": data})
    job = make_verified_job(shrink_job(job)[0], 1)
    (case,) = plan_layout_cases(job, [("one", {})], num_ranks=1, cluster=CPU, shape=None)
    assert case.plan is not None
    steps = cast_steps_to_dtype(
        make_global_microbatches(job, case.plan, None, num_steps=2), torch.float64
    )
    row = compare_with_plain_implementation(job, case.plan, steps, "float64")
    return name_keys_to_blame(row, job, case.plan, steps, "float64") if names_keys else row


@pytest.mark.parametrize("preset", ["llama3.1-8b", "small-deepseek", "deepseek-v2-lite", "gpt2"])
def test_decoders_are_equal(preset: str) -> None:
    row = _judge(preset)
    assert row.ok, row.first
    assert ("routers' biases" in row.judged) == (preset == "small-deepseek")
    assert 0 < row.errors["gradient"] < row.tolerance


def test_a_wrong_forward_is_found_in_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    share = rotary._compute_llama3_kept_share
    monkeypatch.setattr(rotary, "_compute_llama3_kept_share", lambda *args: 1 - share(*args))
    row = _judge("llama3.1-8b", names_keys=True)
    assert not row.ok
    assert row.first is not None
    assert row.first.what == "loss"
    assert "phalanx.nn" in row.first.cause
    blamed = 'they agree with model.rope_scaling = "none" in place of "llama3": look at what'
    assert blamed in row.first.cause


def test_a_wrong_backward_is_found_nearest_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = rotary.rotate

    def half_the_gradient(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = forward(x, table)
        return y / 2 + y.detach() / 2

    monkeypatch.setattr("phalanx.nn.attention.rotate", half_the_gradient)
    row = _judge("llama3.1-8b")
    assert row.first is not None
    assert (row.first.what, row.first.step) == ("gradient", 0)
    assert row.first.name in ("blocks.1.attention.q.weight", "blocks.1.attention.k.weight")


def test_a_mask_of_all_pairs_is_judged_beside_those_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layouts and the first step have blocks of three queries."""
    make_mask = attention.make_attention_mask

    def one_more(num_tokens: int, window: int, *args: Any, **options: Any) -> torch.Tensor | None:
        return make_mask(num_tokens, window + bool(window), *args, **options)

    monkeypatch.setattr(attention, "make_attention_mask", one_more)
    row = _judge("mistral-7b")
    assert row.first is not None
    assert (row.first.what, row.first.step) == ("loss", 1)


def test_a_wrong_gradient_of_an_expert_without_tokens_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = grouped.compute_expert_weight_gradients

    def stale(a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        gradient = right(a, b, counts)
        gradient[counts == 0] = gradient[counts > 0][0]
        return gradient

    monkeypatch.setattr(grouped, "compute_expert_weight_gradients", stale)
    row = _judge("small-deepseek")
    assert row.first is not None
    assert (row.first.what, row.first.step) == ("gradient", 2)
    assert ".moe.experts." in row.first.name


def test_biases_that_move_the_wrong_way_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Router.move_bias
    monkeypatch.setattr(Router, "move_bias", lambda self, counts: move(self, -counts))
    row = _judge("small-deepseek")
    assert row.first is not None
    assert row.first.what == "buffer"
    assert row.first.name.endswith("router.bias")


def test_no_key_is_blamed_for_what_all_models_do(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = attention.Attention.forward
    monkeypatch.setattr(
        attention.Attention,
        "forward",
        lambda self, *args, **more: 1.01 * forward(self, *args, **more),
    )
    tried: list[str] = []
    do_agree = keys_to_blame._do_agree
    monkeypatch.setattr(
        keys_to_blame,
        "_do_agree",
        lambda job, *args: tried.append(str(job)) or do_agree(job, *args),
    )
    row = _judge("gpt2", names_keys=True)
    assert row.first is not None
    assert "they agree with" not in row.first.cause
    assert len(tried) >= 4
    # Of a model without experts no router is asked.
    assert not any("router_scores='" in job for job in tried)


def test_keys_are_not_named_where_they_are_many_or_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys_to_blame, "_do_agree", lambda *args: True)
    share = rotary._compute_llama3_kept_share
    monkeypatch.setattr(rotary, "_compute_llama3_kept_share", lambda *args: 1 - share(*args))
    row = _judge("llama3.1-8b", names_keys=True)
    assert row.first is not None
    assert row.first.cause.count(" in place of ") in (1, 2, 3)
    monkeypatch.setattr(keys_to_blame, "MAX_KEYS", 0)
    row = _judge("llama3.1-8b", names_keys=True)
    assert row.first is not None
    assert "they agree with" not in row.first.cause
    monkeypatch.setattr(keys_to_blame, "MAX_KEYS", 3)
    monkeypatch.setattr(keys_to_blame, "MAX_ROW_S", 0.0)
    row = _judge("llama3.1-8b", names_keys=True)
    assert row.first is not None
    assert "they agree with" not in row.first.cause


VISION: list[dict[str, Any]] = [
    {},
    {"pooling": "mean", "qk_norm": True, "bias": "none"},
    {"post_norms": True, "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2},
]


@pytest.mark.parametrize("model", VISION, ids=lambda model: " ".join(model) or "published")
def test_vision_transformers_are_equal(model: dict[str, Any]) -> None:
    row = _judge("small-vit", **model)
    assert row.ok, row.first
    assert 0 < row.errors["gradient"] < row.tolerance
    assert row.judged == ("loss", "gradients")


def test_patches_that_are_transposed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    embed = VisionTransformer._embed_patches

    def embed_transposed(self: VisionTransformer, images: torch.Tensor) -> torch.Tensor:
        return embed(self, images.transpose(2, 3))

    monkeypatch.setattr(VisionTransformer, "_embed_patches", embed_transposed)
    row = _judge("small-vit")
    assert row.first is not None
    assert row.first.what == "loss"


def test_other_models_have_no_such_row() -> None:
    with pytest.raises(LayoutError, match="own loss alone"):
        _judge("small", objective="my.losses:objective")
