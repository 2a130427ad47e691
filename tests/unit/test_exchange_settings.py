"""Hugging Face's config.json and our shapes, both ways; names and shapes of tensors; job files
of shapes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.exchange.families import (
    find_family_of_model_type,
    list_hugging_face_families,
)
from phalanx.checkpoint.exchange.settings import (
    build_hugging_face_config,
    convert_config_to_model_shape,
    normalize_shape_for_inference,
    normalize_shape_to_canonical_form,
)
from phalanx.checkpoint.exchange.translate import replace_stacks_by_elements
from phalanx.core.errors import LayoutError
from phalanx.job.load import load_job
from phalanx.job.model import build_model_shape, build_preset_shape
from phalanx.job.presets import find_preset, list_presets
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.toml import format_model_section
from phalanx.nn.models import decoder, vit

KNOWN = [
    preset.name for preset in list_presets() if not build_preset_shape(preset).has_latent_attention
]


def shape(name: str, **changes: Any) -> DecoderShape:
    preset = find_preset(name)
    assert preset is not None
    found = replace(build_preset_shape(preset), **changes)
    return found if found.vocab_size or found.reads_images else replace(found, vocab_size=99)


@pytest.mark.parametrize("name", KNOWN)
def test_a_preset_survives_the_way_to_config_json_and_back(name: str) -> None:
    assert normalize_shape_for_inference(
        convert_config_to_model_shape(build_hugging_face_config(shape(name)))
    ) == normalize_shape_for_inference(shape(name))


@pytest.mark.parametrize("name", KNOWN)
def test_the_model_section_of_a_job_file_means_the_same_shape(name: str, tmp_path: Path) -> None:
    wanted = shape(name)
    file = tmp_path / "model.toml"
    source = 'source = "my.data:images"' if wanted.reads_images else ""
    file.write_text(f"{format_model_section(wanted)}\n[data]\n{source}\n")
    assert normalize_shape_to_canonical_form(
        build_model_shape(load_job(file), 1)
    ) == normalize_shape_to_canonical_form(wanted)


@pytest.mark.parametrize("name", KNOWN)
def test_names_and_shapes_are_those_of_the_module(name: str) -> None:
    """The module on the meta device is the reference."""
    wanted = shape(name)
    with torch.device("meta"):
        module = (vit if wanted.reads_images else decoder).build(wanted)
    assert wanted.list_tensors() == {
        name: tuple(tensor.shape) for name, tensor in module.named_parameters()
    }
    assert wanted.list_stored_tensors() == {
        name: tuple(tensor.shape) for name, tensor in module.state_dict().items()
    }


@pytest.mark.parametrize(
    "family", list_hugging_face_families(), ids=lambda family: family.model_type
)
def test_every_tensor_of_a_family_has_one_name(family: Any) -> None:
    """Both ways, for every tensor that a model of the family can have."""
    experts = {
        "num_experts": 2,
        "experts_per_token": 1,
        "expert_ffn_dim": 8,
        "num_shared_experts": 3,
    }
    experts = {key: value for key, value in experts.items() if key in family.widths.values()}
    experts |= {"num_dense_layers": 1} if "num_dense_layers" in family.widths.values() else {}
    always = {key: value for key, value in family.always.items() if key != "kind"}
    always |= {} if family.has_gated_feed_forward else {"activation": "gelu"}
    base = (
        "small-vit"
        if family.always.get("kind") == "vit"
        else "small-latent"
        if family.latent
        else "small"
    )
    wanted = shape(base, num_layers=2, **{**experts, **always})
    for name in replace_stacks_by_elements(wanted.list_stored_tensors()):
        theirs = list(
            dict.fromkeys(
                found
                for rule in family.rules
                if (found := rule.translate_to_hugging_face_name(name))
            )
        )
        assert len(theirs) == 1 or ".moe." in name, name  # experts' matrices lie alone or in stacks
        for their_name in theirs:
            assert name in [
                ours
                for rule in family.rules
                for ours in rule.translate_to_phalanx_names(their_name)
            ]


SAID = {  # what no model of transformers here computes, and a word of why
    "shared experts beside QK-norm": (
        "qwen3-30b-a3b",
        {"num_shared_experts": 2},
        "num_shared_experts",
    ),
    "a sigmoid without a bias": ("mixtral-8x7b", {"router_scores": "sigmoid"}, "router_scores"),
    "experts with limited room": ("mixtral-8x7b", {"expert_capacity": 1.25}, "expert_capacity"),
    "a scaled sum of experts": ("qwen3-30b-a3b", {"router_scale": 2.5}, "router_scale"),
    "norms after, without Gemma's": ("llama3-8b", {"post_norms": True}, "post_norms"),
    "biases and QK-norm": ("qwen3-8b", {"bias": "qkv"}, "qk_norm"),
    "learned positions in a Llama": (
        "llama3-8b",
        {"positions": "learned", "max_positions": 64},
        "positions",
    ),
    "a window in some blocks of a Llama": (
        "llama3-8b",
        {"sliding_window": 64, "global_every": 3},
        "global_every",
    ),
    "grouped queries in a GPT-2": ("gpt2", {"num_kv_heads": 4}, "num_kv_heads"),
    "latent attention with a window": ("small-latent", {"sliding_window": 64}, "sliding_window"),
    "a mean over patches": ("vit-b16", {"pooling": "mean"}, "pooling"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_transformers_cannot_say_is_refused_with_the_reason(case: str) -> None:
    name, changes, word = SAID[case]
    with pytest.raises(LayoutError, match="nearest is") as refused:
        build_hugging_face_config(shape(name, **changes))
    assert word in str(refused.value)
    assert refused.value.exit_code == 3


def test_what_has_no_effect_does_not_stand_in_the_way() -> None:
    """NTK's rule is another base, and a factor without scaling scales nothing."""
    plain = shape(
        "llama3-8b", rope_factor=4.0, global_every=3, local_rope_theta=5.0, rope_original_len=7
    )
    assert normalize_shape_to_canonical_form(plain) == shape("llama3-8b")
    ntk = shape("llama3-8b", rope_scaling="ntk", rope_factor=4.0)
    assert build_hugging_face_config(ntk)["rope_theta"] == pytest.approx(
        500000.0 * 4 ** (128 / 126)
    )


def test_experts_are_said_by_the_family_that_has_them() -> None:
    assert build_hugging_face_config(shape("mixtral-8x7b"))["architectures"] == [
        "MixtralForCausalLM"
    ]
    assert build_hugging_face_config(shape("mixtral-8x7b", qk_norm=True))["architectures"] == [
        "Qwen3MoeForCausalLM"
    ]
    loose = shape("mixtral-8x7b", router_normalize=False, qk_norm=True)
    assert build_hugging_face_config(loose)["norm_topk_prob"] is False
    assert convert_config_to_model_shape(
        build_hugging_face_config(loose)
    ) == normalize_shape_to_canonical_form(loose)
    dots = build_hugging_face_config(shape("deepseek-moe-16b", **OF_DOTS))
    assert dots["architectures"] == ["Dots1ForCausalLM"]
    assert {
        key: dots[key]
        for key in ("n_shared_experts", "first_k_dense_replace", "routed_scaling_factor")
    } == {
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    }
    assert convert_config_to_model_shape(dots) == normalize_shape_to_canonical_form(
        shape("deepseek-moe-16b", **OF_DOTS)
    )
    deepseek = shape("deepseek-moe-16b", balance_loss=0.003)  # theirs is per sequence, too
    assert build_hugging_face_config(deepseek)["aux_loss_alpha"] == 0.003
    assert convert_config_to_model_shape(
        build_hugging_face_config(deepseek)
    ) == normalize_shape_to_canonical_form(deepseek)


def test_what_evens_out_experts_in_training_does_not_stand_in_the_way() -> None:
    """Weights mean the same: a directory of another weight of the balance loss is not another
    model."""
    trained = shape("mixtral-8x7b", balance_loss=0.01)
    assert build_hugging_face_config(trained) == build_hugging_face_config(shape("mixtral-8x7b"))
    fast = shape("deepseek-moe-16b", **{**OF_DOTS, "balance_bias": 0.5})
    assert build_hugging_face_config(fast)["architectures"] == ["Dots1ForCausalLM"]


OF_DOTS = {"qk_norm": True, "router_scores": "sigmoid", "router_scale": 2.5, "balance_bias": 0.001}
EXPERTS = {
    "mixtral": build_hugging_face_config(shape("mixtral-8x7b")),
    "qwen3_moe": build_hugging_face_config(shape("qwen3-30b-a3b")),
    "dots1": build_hugging_face_config(shape("deepseek-moe-16b", **OF_DOTS)),
    "deepseek": build_hugging_face_config(shape("deepseek-moe-16b")),
}
OTHER_EXPERTS = {
    "groups of experts": ("dots1", {"n_group": 8}, "n_group = 8"),
    "some groups": ("dots1", {"topk_group": 4}, "topk_group = 4"),
    "experts in every second block": (
        "qwen3_moe",
        {"decoder_sparse_step": 2},
        "decoder_sparse_step = 2",
    ),
    "dense blocks in between": ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers = [3]"),
    "DeepSeek's every second block": ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    "another score": ("deepseek", {"scoring_func": "sigmoid"}, 'scoring_func = "sigmoid"'),
    "a gate of the shared expert": (
        "mixtral",
        {"model_type": "qwen2_moe"},
        "its shared expert has a gate",
    ),
    "experts beside latent attention": (
        "mixtral",
        {"model_type": "deepseek_v3"},
        "29 of 32 blocks have experts",
    ),
    "biases in experts": ("mixtral", {"model_type": "gpt_oss"}, "its experts have biases"),
    "more visits than experts": ("mixtral", {"num_experts_per_tok": 9}, "visits 9 of 8 experts"),
    "no expert": ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0; it must be"),
    "no block with experts": (
        "deepseek",
        {"first_k_dense_replace": 28},
        "28 of 28 blocks have no experts",
    ),
    "a word for a switch": (
        "qwen3_moe",
        {"norm_topk_prob": "yes"},
        'norm_topk_prob is "yes"; it must be true or false',
    ),
    "a scale that is none": (
        "dots1",
        {"routed_scaling_factor": math.nan},
        "routed_scaling_factor is NaN",
    ),
}


@pytest.mark.parametrize("case", OTHER_EXPERTS)
def test_experts_that_compute_something_else_are_refused(case: str) -> None:
    family, changes, words = OTHER_EXPERTS[case]
    with pytest.raises(LayoutError) as refused:
        convert_config_to_model_shape({**EXPERTS[family], **changes})
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


LLAMA = build_hugging_face_config(shape("llama2-7b"))
UNKNOWN = {
    "another type": ({"model_type": "mamba"}, "'mamba' cannot be imported"),
    "almost a type": ({"model_type": "lama"}, 'did you mean "llama"'),
    "another activation": ({"hidden_act": "relu"}, 'hidden_act = "relu"'),
    "biases in attention alone": ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
    "other bands of llama3": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 2.0,
                "high_freq_factor": 4.0,
            }
        },
        "low_freq_factor = 2.0",
    ),
    "positions by length": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        'rope_type = "dynamic"',
    ),
    "parts of heads": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "a width that is no number": (
        {"hidden_size": "wide"},
        'hidden_size is "wide"; it must be a whole',
    ),
    "more blocks than anybody has": ({"num_hidden_layers": 10**9}, "says 1,000,000,000 blocks"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be"),
    "half a width": ({"hidden_size": 32.5}, "hidden_size is 32.5; it must be"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized"),
    "no width at all": ({"hidden_size": None}, "has no hidden_size"),
}


LATENT = build_hugging_face_config(
    shape("small-latent", rope_scaling="yarn", rope_factor=4.0, rope_original_len=64)
)
YARN = LATENT["rope_scaling"]
UNKNOWN_OF_DEEPSEEK = {
    "experts": ({"first_k_dense_replace": 1}, "3 of 4 blocks have experts"),
    "a temperature of the rotated part alone": (
        {"rope_scaling": {key: value for key, value in YARN.items() if "mscale" not in key}},
        "mscale = null",
    ),
    "two temperatures": (
        {"rope_scaling": YARN | {"mscale": 0.5}},
        "mscale = 0.5 and mscale_all_dim = 1.0",
    ),
    "a temperature beside a scaling without one": (
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
        "mscale_all_dim = 1.0",
    ),
    "another order of pairs": ({"rope_interleave": False}, "rope_interleave"),
}


def test_a_rank_of_queries_that_is_null_is_none_and_one_that_is_left_out_is_the_published_one() -> (
    None
):
    assert convert_config_to_model_shape({**LATENT, "q_lora_rank": None}).query_rank == 0
    assert (
        convert_config_to_model_shape(
            {key: value for key, value in LATENT.items() if key != "q_lora_rank"}
        ).query_rank
        == 1536
    )


@pytest.mark.parametrize("case", UNKNOWN_OF_DEEPSEEK)
def test_settings_of_latent_attention_that_mean_another_computation_are_refused(case: str) -> None:
    changes, words = UNKNOWN_OF_DEEPSEEK[case]
    with pytest.raises(LayoutError, match=words):
        convert_config_to_model_shape({**LATENT, **changes})


@pytest.mark.parametrize("case", UNKNOWN)
def test_settings_that_mean_another_computation_are_refused(case: str) -> None:
    changes, words = UNKNOWN[case]
    with pytest.raises(LayoutError) as refused:
        convert_config_to_model_shape({**LLAMA, **changes})
    assert words in str(refused.value)


def test_capped_scores_are_refused_and_their_absence_is_not() -> None:
    config = build_hugging_face_config(shape("gemma3-1b"))
    assert config["attn_logit_softcapping"] is None
    with pytest.raises(LayoutError, match="attn_logit_softcapping"):
        convert_config_to_model_shape({**config, "attn_logit_softcapping": 50.0})
    with pytest.raises(LayoutError, match="query_pre_attn_scalar"):
        convert_config_to_model_shape({**config, "query_pre_attn_scalar": 168})


def test_published_configurations_of_before_and_after_transformers_5_mean_the_same() -> None:
    """What the model cards hold: absent keys have the family's defaults, positions are said in
    two ways."""
    old = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **old["rope_scaling"]}  # type: ignore[dict-item]
    assert (
        convert_config_to_model_shape(old)
        == convert_config_to_model_shape(new)
        == shape("llama3.1-8b")
    )
    # Lengths that a tool has computed.
    scaled = {**old, "max_position_embeddings": 131072.0}
    scaled["rope_scaling"] = {
        **old["rope_scaling"],  # type: ignore[dict-item]
        "original_max_position_embeddings": 8192.0,
    }
    assert convert_config_to_model_shape(scaled) == shape("llama3.1-8b")
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    assert convert_config_to_model_shape(gpt2) == normalize_shape_to_canonical_form(shape("gpt2"))
    gemma = {
        "model_type": "gemma",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 18,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 256000,
        "hidden_act": "gelu_pytorch_tanh",
    }
    assert convert_config_to_model_shape(gemma) == normalize_shape_to_canonical_form(
        shape("gemma-2b")
    )


def test_layers_with_windows_are_read_in_every_spelling() -> None:
    qwen = build_hugging_face_config(shape("qwen2.5-0.5b"))
    first_half = {
        **qwen,
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 32,
    }
    with pytest.raises(LayoutError, match="layer_types"):
        convert_config_to_model_shape({**first_half, "max_window_layers": 12})
    assert (
        convert_config_to_model_shape({**first_half, "max_window_layers": 0}).num_local_layers == 24
    )
    assert (
        convert_config_to_model_shape({**first_half, "max_window_layers": 28}).num_local_layers == 0
    )
    # At once, and not after each of a million intervals was compared block by block.
    many = {**first_half, "num_hidden_layers": 1_000_000}
    with pytest.raises(LayoutError, match="layer_types names 1 blocks, and there are 1,000,000"):
        convert_config_to_model_shape({**many, "layer_types": ["sliding_attention"]})
    with pytest.raises(LayoutError, match="cannot be said"):
        convert_config_to_model_shape({**many, "max_window_layers": 3})
    gemma = {**build_hugging_face_config(shape("gemma3-1b")), "layer_types": None}
    assert convert_config_to_model_shape(gemma) == normalize_shape_to_canonical_form(
        shape("gemma3-1b")
    )
    assert convert_config_to_model_shape({**gemma, "sliding_window_pattern": 3}).global_every == 3


def test_a_switch_of_windows_is_read_of_the_families_that_have_it() -> None:
    """Only the configurations of Qwen 2 and 3 in transformers have one, and only that of Gemma 3 an
    interval."""
    off = {"use_sliding_window": False, "sliding_window": 8, "layer_types": None}
    gemma = build_hugging_face_config(shape("gemma3-1b"))
    dots = EXPERTS["dots1"] | {"max_window_layers": 0}
    for config in (gemma, dots):
        assert "use_sliding_window" not in config
        assert convert_config_to_model_shape(config | off).sliding_window == 8
    for name in ("qwen2.5-0.5b", "qwen3-0.6b"):
        qwen = build_hugging_face_config(shape(name)) | off | {"max_window_layers": 0}
        assert convert_config_to_model_shape(qwen).sliding_window == 0
        on = qwen | {"use_sliding_window": True, "sliding_window_pattern": 3}
        assert convert_config_to_model_shape(on).global_every == 0


@pytest.mark.parametrize("name", ["mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_a_window_of_null_is_none_and_an_absent_one_the_default(name: str) -> None:
    """Mistral 7B v0.2 and v0.3 say null: to transformers, too, a token attends to all before it."""
    config = {
        **build_hugging_face_config(shape(name)),
        "use_sliding_window": True,
        "layer_types": None,
    }
    assert convert_config_to_model_shape({**config, "sliding_window": None}).sliding_window == 0
    del config["sliding_window"]
    config["max_window_layers"] = 0
    assert convert_config_to_model_shape(config).sliding_window == 4096


def test_a_llama_whose_heads_do_not_divide_its_width_is_a_mistral_without_a_window() -> None:
    odd = shape("llama3-8b", dim=32, num_heads=3, num_kv_heads=1, head_dim=8)
    config = build_hugging_face_config(odd)
    assert (config["model_type"], config["sliding_window"]) == ("mistral", None)
    assert convert_config_to_model_shape(config) == normalize_shape_to_canonical_form(odd)


def test_a_gelu_is_the_tanh_to_gemma_and_itself_to_gemma_3() -> None:
    """GemmaConfig of transformers takes the one for the other, so no Gemma can say the exact one."""
    gemma = build_hugging_face_config(shape("gemma-2b")) | {"hidden_act": "gelu"}
    assert convert_config_to_model_shape(gemma).activation == "geglu_tanh"
    gemma3 = build_hugging_face_config(shape("gemma3-1b")) | {"hidden_activation": "gelu"}
    assert convert_config_to_model_shape(gemma3).activation == "geglu"
    with pytest.raises(LayoutError, match="its activation is geglu_tanh and the model's geglu"):
        build_hugging_face_config(shape("gemma-2b", activation="geglu"))
    exact = build_hugging_face_config(shape("gemma3-1b", activation="geglu"))
    assert exact["hidden_activation"] == "gelu"


def test_heads_of_a_qwen_3_are_128_wide_and_those_of_its_mixture_share_the_width() -> None:
    """Qwen3MoeConfig of transformers has no head_dim of its own, and Qwen3Config has."""
    for name, wanted in (("qwen3-0.6b", 128), ("qwen3-30b-a3b", 64)):
        config = build_hugging_face_config(shape(name))
        del config["head_dim"]
        assert convert_config_to_model_shape(config).head_dim == wanted


LINEAR = {"rope_type": "linear", "factor": 4.0}
UNSCALED = {"rope_type": "default", "rope_theta": 5e5}


def test_a_rope_scaling_beside_rope_parameters_is_the_one_that_counts() -> None:
    """As in transformers, where `rope_scaling` takes the other's place."""
    both = LLAMA | {"rope_theta": 7e3, "rope_parameters": UNSCALED}
    scaled = convert_config_to_model_shape(both | {"rope_scaling": LINEAR})
    assert (scaled.rope_scaling, scaled.rope_factor, scaled.rope_theta) == ("linear", 4.0, 7e3)
    for nothing in (None, {}):
        plain = convert_config_to_model_shape(both | {"rope_scaling": nothing})
        assert (plain.rope_scaling, plain.rope_theta) == ("none", 5e5)


def test_a_rope_scaling_of_gemma_3_is_on_top_of_full_attention() -> None:
    gemma = build_hugging_face_config(shape("gemma3-1b"))
    by_type = {"full_attention": UNSCALED, "sliding_attention": {"rope_theta": 2e4}}
    both = convert_config_to_model_shape(
        gemma | {"rope_parameters": by_type, "rope_scaling": LINEAR}
    )
    assert (both.rope_scaling, both.rope_factor, both.rope_theta) == ("linear", 4.0, 5e5)
    assert both.local_rope_theta == 2e4
    for ignored in (
        {"rope_parameters": LINEAR},
        {"rope_scaling": {"full_attention": LINEAR}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ):
        with pytest.raises(LayoutError, match="a model with windows reads"):
            convert_config_to_model_shape(gemma | ignored)


def test_an_original_length_beside_the_scaling_goes_before_the_one_in_it() -> None:
    """`standardize_rope_params` of transformers does so, but not by kinds of blocks."""
    key = "original_max_position_embeddings"
    scaling = {"rope_type": "yarn", "factor": 4.0, key: 2048}
    beside = {key: 1024, "rope_scaling": scaling}
    assert convert_config_to_model_shape(LLAMA | beside).rope_original_len == 1024
    assert convert_config_to_model_shape(LLAMA | beside | {key: None}).rope_original_len == 2048
    gemma = build_hugging_face_config(shape("gemma3-1b"))
    assert convert_config_to_model_shape(gemma | beside).rope_original_len == 2048
    with pytest.raises(LayoutError, match=f"^{key} is"):
        convert_config_to_model_shape(LLAMA | beside | {key: "long"})


NO_NUMBERS = (math.nan, math.inf, -math.inf, -1, "8", True, [1], {"a": 1}, 10**30)


@pytest.mark.parametrize("name", KNOWN)
def test_every_number_that_is_read_is_refused_by_its_name_where_it_is_none(name: str) -> None:
    config = build_hugging_face_config(shape(name), max_positions=64)
    family = find_family_of_model_type(config["model_type"])
    numbers = [key for key, value in config.items() if type(value) in (int, float)]
    for key in set(numbers) - set(family.written) - set(family.required):
        for value in NO_NUMBERS:
            with pytest.raises(LayoutError) as raised:
                convert_config_to_model_shape(config | {key: value})
            said = str(raised.value)
            assert re.search(f"{key} (is|=) {re.escape(json.dumps(value))}[;,]", said), said


def test_settings_of_a_scaling_are_named_with_their_table() -> None:
    scaling = {"rope_type": "yarn", "factor": math.nan}
    config = build_hugging_face_config(shape("llama3-8b")) | {"rope_scaling": scaling}
    with pytest.raises(LayoutError, match=r"rope_scaling.factor is NaN; it must be a finite"):
        convert_config_to_model_shape(config)
