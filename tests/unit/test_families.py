"""Decoder and vision transformer against Hugging Face transformers: logits of tiny random
models, and counts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape
from phalanx.job.presets import find_preset
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.vit import VitShape
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.models.vit import VisionTransformer

VOCAB, LENGTH = 61, 24


def hf() -> Any:
    """transformers, imported by the tests that run and not by collecting them."""
    return pytest.importorskip("transformers")


def tiny(preset: str, **changes: Any) -> DecoderShape:
    """The preset with small widths: all else is the published model's."""
    published = find_preset(preset)
    assert published is not None
    keys = {"dim": 32, "num_layers": 3, "num_heads": 4, "ffn_dim": 48}
    keys |= {"vocab_size": VOCAB} if published.kind == "decoder" else {}
    keys |= {"num_kv_heads": 2} if "num_kv_heads" in published.values else {}
    return shape_with(
        preset, *(f"model.{key}={value}" for key, value in {**keys, **changes}.items())
    )


def shape_with(preset: str, *keys: str) -> DecoderShape:
    """Of a job with any dataset: nothing reads it."""
    return build_model_shape(
        load_job(None, [f"model.preset={preset}", "data.source=my.data:images", *keys]), VOCAB
    )


def theirs(name: str, shape: DecoderShape, **more: Any) -> nn.Module:
    """The model of transformers with this shape, and random weights that bend every
    nonlinearity."""
    config = getattr(hf(), f"{name}Config")(
        hidden_size=shape.dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn_dim,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="eager",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return randomised(getattr(hf(), f"{name}ForCausalLM")(config))


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.2 * noise + (1.0 if parameter.ndim == 1 else 0.0))
    return model.eval()


LLAMA_NAMES = {
    "model.embed_tokens.": "embed.",
    "model.layers.": "blocks.",
    "model.norm.": "norm.",
    "lm_head.": "head.",
    "self_attn.": "attention.",
    "q_proj.": "q.",
    "k_proj.": "k.",
    "v_proj.": "v.",
    "o_proj.": "o.",
    "input_layernorm.": "attention_norm.",
    "mlp.": "ffn.",
    "gate_proj.": "gate.",
    "up_proj.": "up.",
    "down_proj.": "down.",
    "post_attention_layernorm.": "ffn_norm.",
}
GEMMA3_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm.": "attention_post_norm.",
    "pre_feedforward_layernorm.": "ffn_norm.",
    "post_feedforward_layernorm.": "ffn_post_norm.",
}


def ours(shape: DecoderShape, model: nn.Module, names: dict[str, str]) -> Decoder:
    weights = renamed(model.state_dict(), names)
    if shape.tie_embeddings:
        del weights["head.weight"]
    decoder = Decoder(shape)
    decoder.load_state_dict(weights)  # strict: every tensor of theirs has its place in ours
    return decoder


def renamed(weights: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Each name with all of `names` replaced, in their order."""
    return {
        functools.reduce(lambda name, pair: name.replace(*pair), names.items(), old): w
        for old, w in weights.items()
    }


GPT2_NAMES = {
    "transformer.": "",
    "wte.": "embed.",
    "wpe.": "embed_positions.",
    "ln_f.": "norm.",
    "h.": "blocks.",
    "ln_1.": "attention_norm.",
    "ln_2.": "ffn_norm.",
    "attn.c_proj.": "attention.o.",
    "mlp.c_fc.": "ffn.up.",
    "mlp.c_proj.": "ffn.down.",
}


def gpt2_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """GPT-2 keeps q, k and v in one matrix, and matrices transposed."""
    weights = renamed(model.state_dict(), GPT2_NAMES)
    del weights["lm_head.weight"]
    for name in [name for name in weights if name.startswith("blocks.")]:
        weight = weights.pop(name).t()
        fused = "attn.c_attn." in name
        names = (
            [name.replace("attn.c_attn.", f"attention.{letter}.") for letter in "qkv"]
            if fused
            else [name]
        )
        weights |= dict(zip(names, weight.chunk(len(names)), strict=True))
    return weights


def assert_same(
    model: nn.Module, decoder: Decoder, length: int = LENGTH, tolerance: float = 1e-5
) -> None:
    tokens = torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens, attention_mask=torch.ones_like(tokens)).logits
        hidden, head, *_ = decoder(tokens)
        found = hidden @ head.T
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()


def test_gpt2() -> None:
    shape = tiny("gpt2")
    config = hf().GPT2Config(
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_inner=48,
        vocab_size=VOCAB,
        n_positions=1024,
        attn_implementation="eager",
    )
    model = randomised(hf().GPT2LMHeadModel(config))
    decoder = Decoder(shape)
    decoder.load_state_dict(gpt2_weights(model))
    assert_same(model, decoder)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        *(
            ("llama2-7b", "Llama"),
            ("llama3-8b", "Llama"),
            ("qwen2.5-0.5b", "Qwen2"),
            ("qwen2.5-7b", "Qwen2"),
        ),
        *(("qwen3-0.6b", "Qwen3"), ("qwen3-8b", "Qwen3")),
    ],
)
def test_llamas_and_qwens(preset: str, name: str) -> None:
    shape = tiny(preset)
    model = theirs(
        name, shape, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}
    )
    assert_same(model, ours(shape, model, LLAMA_NAMES))


def test_mistral_with_a_window_shorter_than_the_sequence() -> None:
    shape = tiny("mistral-7b", sliding_window=7)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    model = theirs("Mistral", shape, sliding_window=7, rope_parameters=rope)
    assert_same(model, ours(shape, model, LLAMA_NAMES))
    wide = theirs("Mistral", shape, sliding_window=LENGTH, rope_parameters=rope)
    with pytest.raises(AssertionError):  # the window matters
        assert_same(wide, ours(shape, wide, LLAMA_NAMES))


def test_gemma() -> None:
    shape = tiny("gemma-2b", head_dim=16, num_kv_heads=1)
    rope = {"rope_type": "default", "rope_theta": shape.rope_theta}
    model = theirs("Gemma", shape, rope_parameters=rope, hidden_activation="gelu_pytorch_tanh")
    assert_same(model, ours(shape, model, LLAMA_NAMES))


def test_gemma3_with_local_and_global_blocks() -> None:
    shape = tiny("gemma3-1b", head_dim=16, num_kv_heads=1, sliding_window=6, global_every=3)
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": shape.local_rope_theta},
        "full_attention": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
    model = gemma3(shape, rope)
    assert_same(model, ours(shape, model, GEMMA3_NAMES))


def gemma3(shape: DecoderShape, rope: dict[str, Any]) -> nn.Module:
    config = hf().Gemma3TextConfig(
        hidden_size=shape.dim,
        num_hidden_layers=3,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn_dim,
        vocab_size=VOCAB,
        sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters=rope,
        query_pre_attn_scalar=shape.head_dim,
        attn_implementation="eager",
    )
    return randomised(hf().Gemma3ForCausalLM(config))


SCALINGS = {
    "linear": ({"rope_factor": 4.0}, {"factor": 4.0}),
    "llama3": (
        {"rope_factor": 8.0, "rope_original_len": 16},
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "yarn": (
        {"rope_factor": 4.0, "rope_original_len": 64},
        {"factor": 4.0, "original_max_position_embeddings": 64},
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_rotary_positions(scaling: str) -> None:
    keys, parameters = SCALINGS[scaling]
    shape = tiny("llama3-8b", dim=128, rope_theta=10000.0, rope_scaling=scaling, **keys)
    rope = {"rope_type": scaling, "rope_theta": 10000.0, **parameters}
    model = theirs("Llama", shape, rope_parameters=rope, max_position_embeddings=256)
    assert_same(model, ours(shape, model, LLAMA_NAMES), length=200, tolerance=1e-4)
    plain = theirs("Llama", shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    with pytest.raises(AssertionError):  # the scaling matters
        assert_same(plain, ours(shape, plain, LLAMA_NAMES), length=200, tolerance=1e-4)


def test_ntk_scaling_is_the_dynamic_one_at_one_length() -> None:
    """Theirs depends on the length: with factor f at n times the original length it takes f n -
    (f - 1), here 4."""
    shape = tiny("llama3-8b", dim=128, rope_theta=10000.0, rope_scaling="ntk", rope_factor=4.0)
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 3.0,
        "original_max_position_embeddings": 100,
    }
    model = theirs("Llama", shape, rope_parameters=rope, max_position_embeddings=100)
    assert_same(model, ours(shape, model, LLAMA_NAMES), length=200, tolerance=1e-4)


DEEPSEEK_NAMES = LLAMA_NAMES | {
    "q_a_proj.": "q_down.",
    "q_a_layernorm.": "q_norm.",
    "q_b_proj.": "q_up.",
    "kv_a_proj_with_mqa.": "kv_down.",
    "kv_a_layernorm.": "kv_norm.",
    "kv_b_proj.": "kv_up.",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {"num_experts": 0, "head_dim": 12, "kv_rank": 10, "rope_head_dim": 4, "value_head_dim": 6}


def deepseek(name: str, shape: DecoderShape, rope: dict[str, Any]) -> nn.Module:
    """Dense blocks alone. Its `head_dim` is the rotated part."""
    ranks = {
        "q_lora_rank": shape.query_rank or None,
        "kv_lora_rank": shape.kv_rank,
        "v_head_dim": shape.value_head_dim,
    }
    widths = {
        "qk_rope_head_dim": shape.rope_head_dim,
        "qk_nope_head_dim": shape.head_dim - shape.rope_head_dim,
    }
    dense = {"first_k_dense_replace": shape.num_layers, "max_position_embeddings": 256}
    rope = {"rope_theta": shape.rope_theta, **rope}
    return theirs(
        name,
        replace(shape, head_dim=shape.rope_head_dim),
        rope_parameters=rope,
        **ranks,
        **widths,
        **dense,
    )


@pytest.mark.parametrize(
    ("preset", "name", "changes"),
    [
        ("deepseek-v3", "DeepseekV3", {"query_rank": 14}),
        ("deepseek-v2-lite", "DeepseekV2", {}),
        ("deepseek-v3", "DeepseekV3", {"query_rank": 14, "norm_eps": 1e-3}),
        ("deepseek-v2-lite", "DeepseekV2", {"value_head_dim": 12}),
    ],
)
def test_deepseeks_latent_attention(preset: str, name: str, changes: dict[str, Any]) -> None:
    """As published, with YaRN: its temperature is on all of queries and keys."""
    shape = tiny(preset, **LATENT | changes, rope_factor=4.0, rope_original_len=64)
    mscale = {"mscale": shape.rope_mscale, "mscale_all_dim": shape.rope_mscale}
    model = deepseek(name, shape, YARN | mscale)
    assert_same(model, ours(shape, model, DEEPSEEK_NAMES), length=200, tolerance=1e-4)
    cold = deepseek(name, shape, YARN | {"mscale": 1e-9, "mscale_all_dim": 1e-9})
    with pytest.raises(AssertionError):  # the temperature matters
        assert_same(cold, ours(shape, cold, DEEPSEEK_NAMES), length=200, tolerance=1e-4)


def test_deepseeks_latent_attention_without_scaling() -> None:
    shape = tiny("deepseek-v3", **LATENT, query_rank=14, rope_scaling="none")
    model = deepseek("DeepseekV3", shape, {"rope_type": "default"})
    assert_same(model, ours(shape, model, DEEPSEEK_NAMES))
    whole = replace(shape, value_head_dim=12)
    with pytest.raises(RuntimeError):  # the width of values is theirs
        ours(whole, model, DEEPSEEK_NAMES)


VIT_NAMES = {
    "vit.embeddings.cls_token": "embed_class",
    "vit.embeddings.position_embeddings": "embed_positions",
    "vit.embeddings.patch_embeddings.projection.": "patch.",
    "vit.layers.": "blocks.",
    "vit.layernorm.": "norm.",
    "classifier.": "head.",
    "q_proj.": "q.",
    "k_proj.": "k.",
    "v_proj.": "v.",
    "o_proj.": "o.",
    "layernorm_before.": "attention_norm.",
    "layernorm_after.": "ffn_norm.",
    "mlp.fc1.": "ffn.up.",
    "mlp.fc2.": "ffn.down.",
}


def test_vision_transformer() -> None:
    shape = tiny("vit-b16", image_size=24, patch_size=8, num_classes=7)
    config = hf().ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=24,
        patch_size=8,
        layer_norm_eps=shape.norm_eps,
        num_labels=7,
        attn_implementation="eager",
    )
    model = randomised(hf().ViTForImageClassification(config))
    module = VisionTransformer(shape)
    weights = renamed(model.state_dict(), VIT_NAMES)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    module.load_state_dict({name: weight.reshape(shapes[name]) for name, weight in weights.items()})
    images = torch.randn(3, 3, 24, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted, found = model(images).logits, module(images)
    assert wanted.std() > 0.1
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def config_of(shape: DecoderShape, name: str) -> Any:
    """The configuration of transformers that says what the shape says."""
    values = {
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn_dim,
    }
    if isinstance(shape, VitShape):
        values |= {
            "image_size": shape.image_size,
            "patch_size": shape.patch_size,
            "num_labels": shape.num_classes,
        }
        return getattr(hf(), f"{name}Config")(**values)
    values |= {"vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tie_embeddings}
    if name == "GPT2":
        values = {"n_embd": shape.dim, "n_layer": shape.num_layers, "n_head": shape.num_heads}
    if shape.num_experts:
        values |= {"num_local_experts": shape.num_experts, "num_experts": shape.num_experts}
        values |= {
            "n_routed_experts": shape.num_experts,
            "n_shared_experts": shape.num_shared_experts,
        }
        values |= {
            "moe_intermediate_size": shape.expert_ffn_dim,
            "first_k_dense_replace": shape.num_dense_layers,
        }
    if shape.kv_rank:
        values |= {"q_lora_rank": shape.query_rank or None, "kv_lora_rank": shape.kv_rank}
        values |= {"qk_rope_head_dim": shape.rope_head_dim, "v_head_dim": shape.value_head_dim}
        values |= {
            "qk_nope_head_dim": shape.head_dim - shape.rope_head_dim,
            "head_dim": shape.rope_head_dim,
        }
    if name == "Mixtral":
        del values["head_dim"]
    return getattr(hf(), f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**values)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        *(
            ("gpt2-xl", "GPT2"),
            ("llama3-405b", "Llama"),
            ("mistral-7b", "Mistral"),
            ("mixtral-8x22b", "Mixtral"),
        ),
        *(
            ("qwen2.5-3b", "Qwen2"),
            ("qwen2.5-14b", "Qwen2"),
            ("qwen3-4b", "Qwen3"),
            ("qwen3-235b-a22b", "Qwen3Moe"),
        ),
        *(("gemma-7b", "Gemma"), ("gemma3-1b", "Gemma3"), ("vit-h14", "ViT")),
        *(("deepseek-v2-lite", "DeepseekV2"), ("deepseek-v3", "DeepseekV3")),
    ],
)
def test_parameters_are_those_that_transformers_counts(preset: str, name: str) -> None:
    """With the preset's widths, theirs is built without memory; ours is arithmetic."""
    published = shape_with(preset)
    kind = (
        "ForImageClassification"
        if name == "ViT"
        else "LMHeadModel"
        if name == "GPT2"
        else "ForCausalLM"
    )
    with torch.device("meta"):
        model = getattr(hf(), name + kind)(config_of(published, name))
    assert sum(parameter.numel() for parameter in model.parameters()) == published.num_params
