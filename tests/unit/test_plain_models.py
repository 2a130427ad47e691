"""phalanx's decoders against the plain implementation: loss and gradients in float64."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx.verify.plain
from phalanx.job.model import build_model_shape
from phalanx.job.presets import list_preset_names
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn import attention, latent_attention, rotary
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy
from phalanx.verify.plain.decoder import compute_plain_loss, compute_updated_router_biases
from phalanx.verify.plain_settings import make_plain_decoder_settings
from phalanx.verify.verified_job import shrink_job

NUM_TOKENS, BATCH_SIZE = 36, 2
# Between 1 and 4 turns within it for one pair of a head of 8 and a base of 500000.
LLAMA3_LEN = 400
YARN_LEN = 64
# Positions are beyond either.
FIRST_POSITION = 500
RELATIVE = 1e-9


@dataclass(frozen=True)
class Decoding:
    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)


USUAL = [
    Decoding("llama3.1-8b"),
    Decoding("qwen2.5-0.5b", {"rope_scaling": "ntk", "rope_factor": 4.0}),
    Decoding("mistral-7b", {"rope_scaling": "yarn", "rope_factor": 8.0, "rope_mscale": 0.8}),
    Decoding("gemma3-1b", {"rope_scaling": "linear", "rope_factor": 8.0}),
    Decoding("gpt2"),
    Decoding("mixtral-8x7b", {"expert_capacity": 0.75, "balance_loss": 0.1}),
    Decoding("small-deepseek", {"expert_capacity": 1.0, "balance_loss": 0.1}),
    Decoding("deepseek-v2-lite"),
    Decoding("deepseek-v3", {"balance_loss": 0.1}),
]
# What no published model has together, and a job may.
LOCAL = {"sliding_window": 9, "global_every": 2, "local_rope_theta": 100.0}
MIXED = [
    Decoding("deepseek-v3", LOCAL),
    Decoding("qwen3-0.6b", {**LOCAL, "rope_scaling": "yarn", "rope_factor": 4.0}),
    Decoding("qwen3-0.6b", {"activation": "geglu", "bias": "all", "norm_plus_one": True}),
    Decoding("small-deepseek", {"norm": "layernorm", "bias": "all", "post_norms": True}),
    Decoding("small-deepseek", {"activation": "gelu", "router_normalize": False}),
    Decoding("mixtral-8x7b", {"router_scores": "sigmoid", "expert_capacity": 0.5}),
]


def _shape(case: Decoding) -> DecoderShape:
    job = Job.model_validate({"model": {"preset": case.preset}, "data": {"seq_len": NUM_TOKENS}})
    shape = build_model_shape(shrink_job(job)[0], 251)
    assert isinstance(shape, DecoderShape)
    shape = replace(shape, **case.changes)
    if shape.kv_rank:
        # Wide enough for a pair of features within YaRN's ramp.
        shape = replace(shape, head_dim=20, rope_head_dim=12)
    if shape.rope_scaling == "llama3":
        return replace(shape, rope_original_len=LLAMA3_LEN)
    if shape.rope_scaling == "yarn":
        return replace(shape, rope_original_len=YARN_LEN)
    return shape


def _build(shape: DecoderShape) -> Decoder:
    model = Decoder(shape)
    model.to(torch.float64)
    generator = torch.Generator().manual_seed(7)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor.ndim > 1:
                tensor.copy_(0.3 * noise)
            elif "norm" in name and name.endswith("weight") and not shape.norm_plus_one:
                tensor.copy_(1 + 0.1 * noise)
            else:
                tensor.copy_(0.1 * noise)
    return model


def _batch(shape: DecoderShape) -> dict[str, torch.Tensor]:
    """Two documents, the second of which begins within each sequence; targets that do not count."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(shape.vocab_size, (BATCH_SIZE, NUM_TOKENS + 1), generator=generator)
    ends = torch.tensor([[25], [21]])
    index = torch.arange(NUM_TOKENS)
    targets = tokens[:, 1:].clone()
    targets[:, ::7] = -100
    return {
        "inputs": tokens[:, :-1],
        "targets": targets,
        "positions": torch.where(index < ends, index + FIRST_POSITION, index - ends),
        "document_ids": (index >= ends).long(),
    }


def _run_both(
    shape: DecoderShape,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Decoder]:
    """Loss, number of targets, gradients and moved biases by name: of nn, of the plain one."""
    model, batch = _build(shape), _batch(shape)
    settings = make_plain_decoder_settings(shape)
    parameters = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in model.named_parameters()
    }
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    loss, count = compute_plain_loss(settings, parameters, buffers, batch)
    loss.backward()
    plain = {"loss": loss.detach(), "targets": torch.tensor(float(count), dtype=torch.float64)}
    plain |= {name: _gradient(tensor) for name, tensor in parameters.items()}
    plain |= compute_updated_router_biases(settings, parameters, buffers, batch)

    fed = {name: batch[name] for name in ("inputs", "positions", "document_ids")}
    loss_sum, num_targets = causal_cross_entropy(11)(model(**fed), batch)
    loss_sum.backward()
    found = {"loss": loss_sum.detach(), "targets": num_targets.double()}
    found |= {name: _gradient(tensor) for name, tensor in model.named_parameters()}
    model.after_step()
    found |= {name: tensor for name, tensor in model.named_buffers() if "router.bias" in name}
    return found, plain, model


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _list_different(found: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == plain.keys()
    # Some gradients are 0 but for rounding: of the keys' biases without rotary positions.
    rounding = 1e-14 * max(float(tensor.abs().max()) for tensor in plain.values())
    return [
        name
        for name, want in plain.items()
        if float((found[name] - want).abs().max()) > RELATIVE * float(want.abs().max()) + rounding
    ]


@pytest.mark.parametrize("case", USUAL, ids=lambda case: case.preset)
def test_decoders_compute_what_the_plain_ones_do(case: Decoding) -> None:
    found, plain, _ = _run_both(_shape(case))
    assert _list_different(found, plain) == []


@pytest.mark.parametrize("case", MIXED)
def test_settings_of_several_models_mix(case: Decoding) -> None:
    found, plain, _ = _run_both(_shape(case))
    assert _list_different(found, plain) == []


@pytest.mark.long
@pytest.mark.parametrize("preset", [name for name in list_preset_names() if "vit" not in name])
def test_every_preset_computes_what_the_plain_one_does(preset: str) -> None:
    found, plain, _ = _run_both(_shape(Decoding(preset)))
    assert _list_different(found, plain) == []


def test_capacity_drops_choices_and_the_balance_loss_reaches_the_router() -> None:
    shape = _shape(USUAL[5])
    with_both, _, model = _run_both(shape)
    for changed in (replace(shape, expert_capacity=0.0), replace(shape, balance_loss=0.0)):
        without, _, _ = _run_both(changed)
        name = "blocks.0.moe.router.weight"
        assert not torch.allclose(with_both[name], without[name], rtol=1e-3)
    assert model.blocks[0].has_experts


def test_a_reversed_ramp_of_llama3_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    share = rotary._compute_llama3_kept_share
    monkeypatch.setattr(rotary, "_compute_llama3_kept_share", lambda *args: 1 - share(*args))
    found, plain, _ = _run_both(_shape(Decoding("llama3.1-8b")))
    assert "loss" in _list_different(found, plain)


@pytest.mark.parametrize("index", [2, 7], ids=["heads", "latent"])
def test_a_lost_temperature_of_yarn_is_seen(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rotary, latent_attention):
        monkeypatch.setattr(module, "compute_yarn_factor", lambda shape, local=False: 1.0)
    found, plain, _ = _run_both(_shape(USUAL[index]))
    assert "loss" in _list_different(found, plain)


def test_a_window_that_holds_one_token_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mask = attention.make_attention_mask

    def one_more(num_tokens: int, window: int, *args: Any, **options: Any) -> torch.Tensor | None:
        return make_mask(num_tokens, window + bool(window), *args, **options)

    monkeypatch.setattr(attention, "make_attention_mask", one_more)
    found, plain, _ = _run_both(_shape(Decoding("mistral-7b")))
    assert "loss" in _list_different(found, plain)


def test_the_plain_implementation_imports_nothing_of_phalanx_but_itself() -> None:
    """Of others torch and numpy, whose generator draws the weights."""
    folder = Path(phalanx.verify.plain.__path__[0])
    sources = sorted(folder.glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            imported: list[str] = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, source.name
                imported = [node.module or ""]
            for name in imported:
                root = name.split(".")[0]
                is_own = name.startswith("phalanx.verify.plain.")
                is_others = root in {"torch", "numpy"} or root in sys.stdlib_module_names
                assert is_own or is_others, (source, name)
