"""Hugging Face models in every kind of layout equal one process; trained, resumed elsewhere,
exported as they came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from commands import run, write_text
from hf_zoo import write_config, write_tokenizer

transformers = pytest.importorskip("transformers")
LAYOUTS = "ddp,zero3,zero3-full,tp2,pp2-1f1b"
LISTED = (
    "llama",
    "qwen2",
    "mistral",
    "gemma",
    "gemma2",
    "gpt2",
    "phi",
    "vit",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
UNLISTED = ("gemma3_text", "phi3", "olmo2", "cohere", "starcoder2", "gpt_neox")
OTHERS = ("mamba", "bloom", "falcon", "opt")


def judge(
    directory: Path, name: str, layouts: str, *more: str, ranks: int = 2
) -> dict[tuple[str, str], bool | None]:
    """(layout, dtype) -> equal, or None where it was refused."""
    kind = f"hf:{write_config(directory, name)}"
    command = (
        "verify",
        "--model",
        kind,
        "--ranks",
        str(ranks),
        "--layouts",
        layouts,
        "--steps",
        "2",
        "--json",
        *more,
    )
    done = run(*command, cwd=directory)
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert rows, done.err
    assert not any(row["crashed"] for row in rows), done.out
    return {(row["layout"], row["dtype"]): row["ok"] for row in rows}


@pytest.mark.parametrize(
    ("layouts", "types"),
    [
        ("tp2,zero3", "float64"),
        pytest.param(LAYOUTS, "float64,float32", marks=pytest.mark.long),
    ],
)
def test_a_decoder_is_equal_in_each_kind_of_layout(
    tmp_path: Path, layouts: str, types: str
) -> None:
    found = judge(tmp_path, "qwen3", layouts, "--types", types)
    assert found == {
        (layout, dtype): True for layout in layouts.split(",") for dtype in types.split(",")
    }


@pytest.mark.long
@pytest.mark.parametrize("name", LISTED)
def test_listed_models_are_equal_in_each_kind_of_layout(tmp_path: Path, name: str) -> None:
    found = judge(tmp_path, name, LAYOUTS)
    assert found == {
        (layout, dtype): True for layout in LAYOUTS.split(",") for dtype in ("float64", "float32")
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_products_of_two_axes(tmp_path: Path, name: str) -> None:
    layouts = "zero3-tp2,hsdp2x2-zero3,pp2-tp2-1f1b,pp2-zero3-interleaved"
    found = judge(tmp_path, name, layouts, 'model.args={"num_hidden_layers"=4}', ranks=4)
    assert found == {
        (layout, dtype): True for layout in layouts.split(",") for dtype in ("float64", "float32")
    }


@pytest.mark.long
@pytest.mark.parametrize("name", UNLISTED)
def test_models_that_nobody_listed_are_equal_too(tmp_path: Path, name: str) -> None:
    found = judge(tmp_path, name, LAYOUTS)
    assert all(found[layout, "float32"] for layout in LAYOUTS.split(","))
    assert False not in found.values()


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_models_without_a_plan_are_equal_or_refused(tmp_path: Path, name: str) -> None:
    found = judge(tmp_path, name, LAYOUTS)
    assert False not in found.values()
    assert all(found[layout, "float32"] for layout in ("ddp", "zero3", "zero3-full"))


@pytest.mark.long
def test_a_run_is_exported_as_the_directory_that_it_came_from(tmp_path: Path) -> None:
    """Tied weights, over two stages, by the directory's tokenizer; what was exported starts the
    next run."""
    write_config(
        tmp_path / "model",
        "llama",
        vocab_size=300,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    special = {
        "eos_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 77,
    }
    write_tokenizer(tmp_path / "model", **special)
    write_text(tmp_path / "text")
    job = (
        "data.source=text",
        "data.seq_len=32",
        "train.global_batch_size=8",
        "train.steps=3",
        "eval.tokens=0",
    )
    quiet = ("train.sample_tokens=0", "observe.sinks=[]", "parallel.ranks=2")
    kind = f"model.kind=hf:{tmp_path / 'model'}"
    done = run("train", kind, *job, *quiet, "parallel.pp=2", "run.dir=run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "text becomes the 277 tokens of" in done.out
    done = run("checkpoint", "export", "run", "--out", "out", cwd=tmp_path)
    assert done.code == 0, done.err
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True
    ).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"

    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("model", "out")
    ]
    words = "the quick brown fox<|endoftext|>"
    assert tokenizers[0](words)["input_ids"] == tokenizers[1](words)["input_ids"]
    assert [(each.eos_token, each.model_max_length, len(each)) for each in tokenizers] == [
        ("<|endoftext|>", 77, 277)
    ] * 2
    assert theirs.config.eos_token_id == 2, "what config.json says of its own tokenizer stays"

    import phalanx
    from phalanx.nn.hugging_face.adapter import build

    ours = build(f"hf:{tmp_path / 'model'}").eval()
    assert phalanx.load_weights(ours, tmp_path / "run") == 3
    tokens = torch.randint(300, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tokens).gather_logits(), theirs(tokens).logits, rtol=0, atol=0
        )
        again = build(f"hf:{tmp_path / 'out'}").eval()
        torch.testing.assert_close(
            again(tokens).gather_logits(), theirs(tokens).logits, rtol=0, atol=0
        )
    refused = run(
        "train",
        f"model.kind=hf:{tmp_path / 'model'}",
        *job,
        "data.document_masks=true",
        cwd=tmp_path,
    )
    assert refused.code == 3
    assert "cannot keep documents apart" in refused.err
