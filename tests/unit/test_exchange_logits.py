"""Models of transformers through `import`, our module, `export` and back: the logits are theirs,
the bits return.

All of it runs in one forked process: transformers takes seconds to import.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exchange_experts import cut_shard
from test_families import (
    LATENT,
    SCALINGS,
    VOCAB,
    YARN,
    deepseek,
    gemma3,
    hf,
    randomised,
    theirs,
    tiny,
)
from torch import nn

from checkpoints import run_threads, save_shards
from phalanx.checkpoint.exchange.casts import round_float_bits_to_dtype
from phalanx.checkpoint.exchange.checkpoint_reader import CheckpointReader
from phalanx.checkpoint.exchange.hf_export import ExportDtypeRounding, export_hugging_face_directory
from phalanx.checkpoint.exchange.importing import (
    read_hugging_face_directory,
    write_checkpoint_of_imported_weights,
)
from phalanx.checkpoint.exchange.tensor_readers import open_safetensors_reader
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.reading.weights import load_weights
from phalanx.cli._app import run_command_line
from phalanx.job.load import load_job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.models import decoder, vit
from phalanx.nn.objective import causal_cross_entropy
from phalanx.plan.layout import Layout
from ranks import run_ranks
from selected import list_selected_params

FILE_BYTES = 20_000  # so that every model is in several files
TOLERANCE = 1e-5


def rope(theta: float = 10000.0) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def of_preset(name: str, preset: str, **more: Any) -> nn.Module:
    shape = tiny(preset)
    return theirs(name, shape, **{"rope_parameters": rope(shape.rope_theta), **more})


def scaled(kind: str) -> nn.Module:
    keys, parameters = SCALINGS[kind]
    shape = tiny("llama3-8b", dim=128, rope_theta=10000.0, rope_scaling=kind, **keys)
    said = {"rope_type": kind, "rope_theta": 10000.0, **parameters}
    return theirs("Llama", shape, rope_parameters=said, max_position_embeddings=256)


def gemma() -> nn.Module:
    shape = tiny("gemma-2b", head_dim=16, num_kv_heads=1)
    return theirs("Gemma", shape, rope_parameters=rope(), hidden_activation="gelu_pytorch_tanh")


def gemma3_with_windows() -> nn.Module:
    shape = tiny("gemma3-1b", head_dim=16, num_kv_heads=1, sliding_window=6, global_every=3)
    positions = {
        "sliding_attention": rope(shape.local_rope_theta),
        "full_attention": rope(shape.rope_theta),
    }
    return gemma3(shape, positions)


def gpt2(**more: Any) -> nn.Module:
    widths = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
    return randomised(
        hf().GPT2LMHeadModel(hf().GPT2Config(**widths, attn_implementation="eager", **more))
    )


def built(name: str, **more: Any) -> nn.Module:
    """Of a configuration of its own."""
    widths = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    said = {
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "attn_implementation": "eager",
        **widths,
        **more,
    }
    return randomised(getattr(hf(), f"{name}ForCausalLM")(getattr(hf(), f"{name}Config")(**said)))


def image_model() -> nn.Module:
    widths = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = hf().ViTConfig(
        **widths, image_size=24, patch_size=8, num_labels=7, attn_implementation="eager"
    )
    return randomised(hf().ViTForImageClassification(config))


def latent(name: str, preset: str, said: dict[str, Any], **changes: Any) -> nn.Module:
    """DeepSeek's blocks without experts."""
    shape = tiny(preset, **LATENT | changes, rope_factor=4.0, rope_original_len=64)
    return deepseek(name, shape, said)


def mscale(share: float) -> dict[str, float]:
    return {"mscale": share, "mscale_all_dim": share}


WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OF_DOTS = {
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
EVERY_SECOND = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: of_preset("Llama", "llama2-7b"),
    "llama with grouped queries": lambda: of_preset("Llama", "llama3-8b"),
    "llama, tied": lambda: built("Llama", tie_word_embeddings=True),
    "llama with biases": lambda: of_preset(
        "Llama", "llama3-8b", attention_bias=True, mlp_bias=True
    ),
    "llama with wide heads and GELU": lambda: built("Llama", head_dim=24, hidden_act="gelu"),
    "llama, linear": lambda: scaled("linear"),
    "llama, llama3": lambda: scaled("llama3"),
    "llama, yarn": lambda: scaled("yarn"),
    "mistral with a window": lambda: built("Mistral", sliding_window=7, rope_parameters=rope()),
    "mistral whose heads do not divide its width": lambda: built(
        "Mistral", hidden_size=30, head_dim=8, sliding_window=None
    ),
    "qwen2, tied": lambda: of_preset("Qwen2", "qwen2.5-0.5b"),
    "qwen2": lambda: of_preset("Qwen2", "qwen2.5-7b"),
    "qwen2 with windows": lambda: built("Qwen2", **WINDOWS, layer_types=EVERY_SECOND),
    "qwen3": lambda: of_preset("Qwen3", "qwen3-8b"),
    "qwen3, tied, with wide heads": lambda: built("Qwen3", head_dim=20, tie_word_embeddings=True),
    "gemma": gemma,
    "gemma 3": gemma3_with_windows,
    "gpt2": gpt2,
    "gpt2 with exact GELU, untied": lambda: gpt2(
        activation_function="gelu", tie_word_embeddings=False, n_inner=40
    ),
    "deepseek v3": lambda: latent(
        "DeepseekV3", "deepseek-v3", {"rope_type": "default"}, query_rank=14
    ),
    "deepseek v3, yarn": lambda: latent(
        "DeepseekV3", "deepseek-v3", YARN | mscale(1.0), query_rank=0
    ),
    "deepseek v2, yarn": lambda: latent(
        "DeepseekV2", "deepseek-v2-lite", YARN | mscale(0.707), value_head_dim=12
    ),
    "mixtral": lambda: built("Mixtral", num_local_experts=3, sliding_window=None),
    "mixtral, stacked": lambda: built("Mixtral", num_local_experts=3, sliding_window=7),
    "qwen3-moe": lambda: built("Qwen3Moe", **EXPERTS, norm_topk_prob=True),
    "qwen3-moe, stacked, not normalized": lambda: built(
        "Qwen3Moe", **EXPERTS, norm_topk_prob=False
    ),
    "dots1": lambda: built("Dots1", **OF_DOTS, norm_topk_prob=True, routed_scaling_factor=2.5),
    "dots1, stacked, not normalized": lambda: built(
        "Dots1", **OF_DOTS, norm_topk_prob=False, **WINDOWS
    ),
    "glm4-moe that rotates whole heads": lambda: built(
        "Glm4Moe", **OF_DOTS, rope_parameters=rope() | {"partial_rotary_factor": 1.0}
    ),
    "vit": image_model,
}


# What is special about each is in another model, too, of its family or of one with the same names.
IN_OTHERS = (
    *("llama", "llama, tied", "llama, llama3", "llama, yarn", "mistral with a window"),
    *("qwen2", "qwen3", "deepseek v3, yarn", "qwen3-moe", "dots1, stacked, not normalized"),
)
CASES = [pytest.param(name, marks=pytest.mark.long if name in IN_OTHERS else ()) for name in MODELS]


def logits(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(inputs)
    return (
        found
        if isinstance(found, torch.Tensor)
        else found.logits
        if hasattr(found, "logits")
        else found[0] @ found[1].T
    )


def journey(name: str, model: nn.Module, place: Path) -> dict[str, Any]:
    """Theirs to ours to theirs; relative errors of the logits on both halves of the way, and
    what else is asked."""
    stacked = "stacked" in name
    biases = [
        buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    for bias in biases:  # large enough to choose
        bias.copy_(0.3 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)))
    model.save_pretrained(place / "theirs", max_shard_size="20KB", save_original_format=not stacked)
    names = open_safetensors_reader(place / "theirs").tensors
    assert stacked == any(their_name.endswith(".experts.gate_up_proj") for their_name in names)
    weights = read_hugging_face_directory(place / "theirs")
    assert weights.shape is not None
    checkpoint = write_checkpoint_of_imported_weights(
        weights, place / "imported", None, file_bytes=FILE_BYTES
    )
    shape, is_vit = weights.shape, weights.shape.reads_images
    generator = torch.Generator().manual_seed(1)
    length = 60 if is_vit or shape.rope_scaling == "none" else 200
    inputs = (
        torch.randn(2, 3, 24, 24, generator=generator)
        if is_vit
        else torch.randint(VOCAB, (2, length), generator=generator)
    )
    wanted = logits(model, inputs)
    found = {
        "std": wanted.std().item(),
        "damage": [str(p) for p in find_checkpoint_problems(checkpoint)],
        "ours": 0.0,
    }
    found["num_files"] = len(list(checkpoint.glob("*.safetensors")))
    module = (vit if is_vit else decoder).build(shape)
    load_weights(module, place / "imported")
    found["ours"] = ((logits(module, inputs) - wanted).abs().max() / wanted.abs().max()).item()
    with CheckpointReader(checkpoint) as reader:
        exported = export_hugging_face_directory(
            reader, shape, place / "back", shard_bytes=FILE_BYTES
        )
    opened = getattr(hf(), exported.auto_class).from_pretrained(
        place / "back", attn_implementation="eager"
    )
    found["class"] = type(opened) is type(model)
    found["back"] = ((logits(opened, inputs) - wanted).abs().max() / wanted.abs().max()).item()
    before, after = model.state_dict(), opened.state_dict()
    found["bits"] = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    return found


OURS = DecoderShape(
    *(2, 32, 4, 2, 8, 48, VOCAB, False),
    num_experts=4,
    experts_per_token=2,
    expert_ffn_dim=24,
    balance_loss=0.01,
)
TRAINED: dict[str, tuple[str, DecoderShape]] = {
    "our mixtral": ("MixtralForCausalLM", OURS),
    "our qwen3-moe": ("Qwen3MoeForCausalLM", replace(OURS, qk_norm=True, router_normalize=False)),
    "our glm4-moe": (
        "Glm4MoeForCausalLM",
        replace(
            OURS,
            num_shared_experts=1,
            num_dense_layers=1,
            router_scores="sigmoid",
            balance_bias=0.001,
        ),
    ),
    "our dots1": (
        "Dots1ForCausalLM",
        replace(
            OURS,
            qk_norm=True,
            num_shared_experts=2,
            num_dense_layers=1,
            router_scores="sigmoid",
            router_scale=2.5,
            balance_bias=0.001,
        ),
    ),
}


def from_training(shape: DecoderShape, place: Path) -> dict[str, Any]:
    """Ours after three steps, saved as eight ranks of ep, tp and FSDP hold it, in transformers'
    hands."""
    torch.manual_seed(0)
    module = decoder.build(shape)
    randomised(module)
    for buffer in module.buffers():
        buffer.copy_(0.3 * torch.randn(buffer.shape))
    tokens = torch.randint(VOCAB, (3, 32))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(3):
        loss_sum, count = causal_cross_entropy(64)(
            module(tokens[:, :-1]), {"targets": tokens[:, 1:]}
        )
        (loss_sum / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: tensor.numpy() for name, tensor in module.state_dict().items()}

    def save(group: Any) -> Path:
        shards = {name: cut_shard(name, value, group.rank) for name, value in values.items()}
        return save_shards(place / "run", 3, shards, group)

    checkpoint = run_threads(Layout(dp_shard=8), save)[0]
    with CheckpointReader(checkpoint) as reader:
        exported = export_hugging_face_directory(
            reader, shape, place / "out", shard_bytes=FILE_BYTES
        )
    opened = hf().AutoModelForCausalLM.from_pretrained(place / "out", attn_implementation="eager")
    wanted, have = logits(module.eval(), tokens), logits(opened, tokens)
    error = ((have - wanted).abs().max() / wanted.abs().max()).item()
    return {
        "class": type(opened).__name__,
        "told": exported.architecture,
        "error": error,
        "std": wanted.std().item(),
    }


def journeys(rank: int, place: Path, names: set[str]) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {
        name: journey(name, make(), place / str(number))
        for number, (name, make) in enumerate(MODELS.items())
        if name in names
    }
    return found | {
        name: from_training(shape, place / name)
        for name, (_, shape) in TRAINED.items()
        if name in names
    }


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, dict[str, Any]]:
    pytest.importorskip("transformers.models.auto.modeling_auto")  # once, and not by each fork
    names = {name for (name,) in list_selected_params(request, "name")}
    return run_ranks(1, journeys, tmp_path_factory.mktemp("journeys"), names)[0]


@pytest.mark.parametrize("name", CASES)
def test_our_module_with_imported_weights_computes_what_theirs_does(name: str, found: Any) -> None:
    """Theirs is the reference: relative to the largest logit, in fp32."""
    assert found[name]["std"] > 0.1
    assert found[name]["damage"] == []
    assert found[name]["num_files"] > 1
    scaled = name.endswith((", linear", ", llama3", ", yarn"))  # 128 wide, or 200 positions
    assert found[name]["ours"] < (1e-4 if scaled else TOLERANCE)


def test_the_page_counts_the_models() -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    assert f" {len(MODELS)} models go from transformers to phalanx" in " ".join(page.split())


@pytest.mark.parametrize("name", CASES)
def test_what_was_exported_is_what_was_imported(name: str, found: Any) -> None:
    """from_pretrained opens it as the same class, with every tensor equal to the last bit, and the
    same logits.

    DeepSeek-V2 without experts is written as V3, which computes the same.
    """
    assert found[name]["class"] or name.startswith("deepseek v2")
    assert found[name]["bits"]
    assert found[name]["back"] < (1e-6 if found[name]["class"] else TOLERANCE)


@pytest.mark.parametrize("name", TRAINED)
def test_experts_that_we_trained_compute_the_same_in_transformers(name: str, found: Any) -> None:
    """Ours is the reference; relative to the largest logit, in fp32."""
    assert (found[name]["class"], found[name]["told"]) == (TRAINED[name][0], TRAINED[name][0])
    assert found[name]["std"] > 0.1
    assert found[name]["error"] < TOLERANCE


# Directories as they are found in the world


def old_spellings(rank: int, place: Path) -> dict[str, Any]:
    """GPT-2 as published: no prefix, buffers of masks, a head beside a tied embedding; in
    bfloat16."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from safetensors.torch import load_file, save_file

    model = gpt2().to(torch.bfloat16)
    model.save_pretrained(place / "gpt2")
    file = place / "gpt2" / "model.safetensors"
    weights = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()
    }
    weights["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    weights["lm_head.weight"] = weights["wte.weight"].clone()
    save_file(weights, file)
    found = read_hugging_face_directory(place / "gpt2")
    write_checkpoint_of_imported_weights(found, place / "imported", None)
    assert found.shape is not None
    module = decoder.build(found.shape)
    refused = ""
    try:
        load_weights(module, place / "imported")
    except Exception as error:
        refused = str(error)
    load_weights(module, place / "imported", cast=True)
    wanted, have = model.state_dict()["transformer.wte.weight"], module.state_dict()["embed.weight"]
    with CheckpointReader(place / "imported" / "checkpoints" / "step-0") as reader:
        exported = export_hugging_face_directory(
            reader,
            found.shape,
            place / "fp32",
            shard_bytes=10**9,
            rounding=ExportDtypeRounding("float32", round_float_bits_to_dtype),
        )
    opened = hf().AutoModelForCausalLM.from_pretrained(place / "fp32")
    same = all(
        torch.equal(t.float(), opened.state_dict()[name]) for name, t in model.state_dict().items()
    )
    config = json.loads((place / "fp32" / "config.json").read_text())
    told = run_command_line(
        ["checkpoint", "import", str(place / "gpt2"), "--out", str(place / "by-hand")]
    )
    return {
        "job": (told, load_job(place / "by-hand" / "model.toml").data.seq_len),
        "notes": found.notes,
        "refused": refused,
        "cast": torch.equal(wanted.float(), have),
        "exported": [exported.dtype, config["dtype"], str(opened.dtype), same],
    }


def test_a_directory_of_another_age_and_type(tmp_path: Path) -> None:
    pytest.importorskip("transformers.models.auto.modeling_auto")  # once, and not by each fork
    found = run_ranks(1, old_spellings, tmp_path)[0]
    assert found["job"] == (0, 64)  # its positions: the usual length would be refused
    assert found["notes"] == (
        "lm_head.weight is left out: the embedding is the head, config.json says",
    )
    assert "of another type" in found["refused"]
    assert "cast=True rounds them" in found["refused"]
    assert "bfloat16 [32]" in found["refused"]
    assert found["cast"]
    assert found["exported"] == ["float32", "float32", "torch.float32", True]
