"""Tiny configurations of Hugging Face models, by name: what `save_pretrained` would write, of
small widths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WIDTHS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TEXT = "the quick brown fox jumps over the lazy dog and naps\n" * 40
PLAIN = {key: value for key, value in WIDTHS.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ZOO: dict[str, dict[str, Any]] = {
    "llama": {**WIDTHS},
    "qwen2": {**WIDTHS},
    "qwen3": {**WIDTHS, "head_dim": 8},
    "mistral": {**WIDTHS, "sliding_window": 8},
    "gemma": {**WIDTHS, "head_dim": 8},
    "gemma2": {**WIDTHS, "head_dim": 8, "sliding_window": 8},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "phi": {**PLAIN},
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    | {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10},
    # What nobody promises
    "gemma3_text": {**WIDTHS, "head_dim": 8, "sliding_window": 8, "num_hidden_layers": 6},
    "mixtral": {**WIDTHS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**WIDTHS, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**WIDTHS, **EXPERTS, "head_dim": 8},
    "minimax": {**WIDTHS, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    # Its head takes no `use_cache`, and passes it on.
    "granitemoeshared": {**WIDTHS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {**WIDTHS},
    "olmo2": {**WIDTHS},
    "cohere": {**WIDTHS},
    "starcoder2": {**WIDTHS},
    "gpt_neox": {**PLAIN},
    "opt": {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {
        "vocab_size": 96,
        "hidden_size": 32,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "falcon": {**PLAIN},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bert": {**PLAIN},
    "t5": {"vocab_size": 96, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8},
}


def write_config(directory: Path, name: str, **more: Any) -> Path:
    """`directory`/config.json of the model `name`; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps({"model_type": name.split("-")[0], **ZOO[name], **more}))
    return path


def write_tokenizer(
    directory: Path, num_merges: int = 20, end: str = "<|endoftext|>", **more: Any
) -> Path:
    """A byte-level BPE of `TEXT` with `end` as a special token, and a tokenizer_config.json of
    `more`."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257 + num_merges,
        special_tokens=[end],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if more:
        (directory / "tokenizer_config.json").write_text(json.dumps(more))
    return directory / "tokenizer.json"
