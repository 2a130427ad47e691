"""What the [data] section asks for and cannot have is said before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.errors import JobError
from phalanx.job.load import load_job

OWN = 'source = "my.data:dataset"'
MIXTURE = '[[data.mixture]]\nsource = "a"\nweight = 3.0\n[[data.mixture]]\nsource = "b"\n'


def problems(tmp_path: Path, *lines: str) -> list[str]:
    (tmp_path / "job.toml").write_text("\n".join(lines) + "\n")
    try:
        load_job(str(tmp_path / "job.toml"), [])
    except JobError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize(
    "lines",
    [
        (MIXTURE,),
        ("[model]", "vocab_size = 99", "[data]", OWN),
        ("[model]", 'kind = "my.models:model"', "[data]", OWN, "args = {n = 3}"),
        ("[model]", 'kind = "vit"', "[data]", OWN),
        ("[data]", 'source = "text"', "document_masks = true", 'tokenizer = "t.json"'),
    ],
)
def test_what_can_be(tmp_path: Path, lines: tuple[str, ...]) -> None:
    assert problems(tmp_path, *lines) == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ("[data]", 'source = "text"', MIXTURE),
            "data.source: there is a mixture, and data.source is 'text' besides",
        ),
        (
            ("[data]", MIXTURE.replace('"b"', '"my.data:d"')),
            "data.mixture[1].source: your own dataset cannot be a part",
        ),
        (("[data]", MIXTURE.replace("3.0", "1e6")), "below one sample in 65536"),
        (
            ("[data]", "args = {n = 3}"),
            "data.args: is for your own dataset, and data.source is 'stdlib'",
        ),
        (
            ("[model]", "vocab_size = 99", "[data]", OWN, "document_masks = true"),
            "document_masks is not read",
        ),
        (("[model]", "vocab_size = 99", "[data]", OWN, 'tokenizer = "t"'), "tokenizer is not read"),
        (("[data]", OWN), "model.vocab_size must be given where data.source is your own dataset"),
        (
            ("[model]", 'kind = "vit"', "[data]", 'source = "texts"'),
            "the model reads images, and data.source 'texts' holds tokens",
        ),
    ],
)
def test_what_cannot_be(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    found = problems(tmp_path, *lines)
    assert len(found) == 1, found
    assert said in found[0]
    assert "job.toml:" in found[0]
