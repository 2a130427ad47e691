"""The walk-through of docs/checkpoints.md: its commands, one after the other, from a model of
transformers to one."""

from __future__ import annotations

import json
import logging
import re
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import TINY, run, write_text
from phalanx.plan.plan import Plan
from ranks import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
SMALL = [key for key in TINY if not key.startswith(("model.", "train.steps"))]


def walk() -> list[list[str]]:
    """The page's commands, without their first word."""
    block = re.search(
        r"<!-- walk: .* -->\n```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert block is not None
    commands = [shlex.split(line) for line in block[1].splitlines()]
    assert {command[0] for command in commands} == {"phalanx"}
    return [command[1:] for command in commands]


def download(rank: int, folder: Path) -> None:
    """A Qwen 3 as somebody publishes it: bfloat16, with a tokenizer."""
    import transformers
    from tokenizers import Tokenizer

    from phalanx.data.tokenizer_files import build_byte_tokenizer_json

    widths = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = transformers.Qwen3Config(
        **widths, head_dim=16, intermediate_size=48, vocab_size=300, bos_token_id=1
    )
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer.from_str(json.dumps(build_byte_tokenizer_json()))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>"
    ).save_pretrained(folder)


def opened(rank: int, place: Path) -> dict[str, Any]:
    """What transformers makes of the last step, beside our own module with the run's weights."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import transformers

    import phalanx
    from phalanx.nn.models.decoder import build

    model = transformers.AutoModelForCausalLM.from_pretrained(place / "Qwen3-tuned")
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "Qwen3-tuned")
    module = build(
        Plan.from_json(json.loads((place / "tuned" / "plan.json").read_text())).model_shape
    )
    phalanx.load_weights(module, place / "tuned")
    tokens = torch.tensor([tokenizer("def heapify(x):  # é")["input_ids"]])
    with torch.no_grad():
        wanted, outputs = model(tokens).logits, module(tokens)
    return {
        "class": type(model).__name__,
        "error": (
            (outputs.hidden_BTD @ outputs.head_VD.T - wanted).abs().max() / wanted.abs().max()
        ).item(),
        "text": tokenizer.decode(tokens[0]),
        "end": tokenizer.eos_token,
    }


@pytest.mark.long
def test_the_walk_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run_ranks(1, download, tmp_path / "Qwen3-tiny")
    write_text(tmp_path / "texts")
    said = {}
    for command in walk():
        more = SMALL if command[0] == "train" else []
        done = run(*command, *more, cwd=tmp_path)
        assert done.code == (11 if command[:2] == ["checkpoint", "diff"] else 0), (
            f"{command}: {done.err}"
        )
        said[command[1 if command[0] == "checkpoint" else 0]] = done.out
    assert "25 tensors of bfloat16, rounded to float32" in said["plan"]
    assert "imported from Qwen3-tiny" in said["train"]
    assert "Qwen3ForCausalLM" in said["export"]
    (found,) = run_ranks(1, opened, tmp_path)
    assert found["class"] == "Qwen3ForCausalLM"
    assert found["error"] < 1e-5
    assert (found["text"], found["end"]) == ("def heapify(x):  # é", "<|endoftext|>")
