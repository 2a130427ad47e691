"""Text to ids and back; and where a text may be cut so that its parts have the tokens of the
whole."""

from __future__ import annotations

import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from phalanx.core.batch import BYTE_VOCAB_SIZE
from phalanx.core.errors import DataError, EnvironmentProblem
from phalanx.data import cuts
from phalanx.data.cuts import build_text_cutter
from phalanx.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, replace_surrogates

CORPUS = [
    (
        "The quick brown fox jumps over the lazy dog.\n\n  And then it sleeps,\r\nit dreams of 1234"
        " other foxes.\n"
    ),
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    "Größe, naïve, 漢字かな交じり文。\nمرحبا بالعالم\n🙂🙃\n",
] * 20

# How the tokenizers of well-known models find their words, each trained here on a few lines.
LLAMA3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bpe(pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _unigram() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # marks the beginning of every text
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["</s>"], unk_token="</s>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "gpt2": lambda: _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix-space": lambda: _bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: _bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(LLAMA3, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "nfc": lambda: _bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()),
    "wordpiece": _wordpiece,
    "unigram": _unigram,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = {}
    for name, build in KINDS.items():
        paths[name] = folder / f"{name}.json"
        build().save(str(paths[name]))
    return paths


@pytest.fixture(scope="module")
def loaded(saved: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(str(path)) for name, path in saved.items()}


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest, loaded: dict[str, Tokenizer]) -> Tokenizer:
    return loaded[request.param]


# Bytes


@given(st.text())
def test_bytes_come_back_as_they_were(text: str) -> None:
    tokenizer = ByteTokenizer()
    text = replace_surrogates(text)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, ""])[0].tolist() == tokenizer.encode(text)


def test_bytes_have_an_end_of_document_and_survive_what_is_not_text() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (BYTE_VOCAB_SIZE, 256)
    assert tokenizer.decode([72, 105, 256, 33]) == "Hi\n!"
    assert tokenizer.encode("\udcff") == [255]  # an escaped byte is that byte
    assert tokenizer.encode("\ud83d\ude00 \ud83d") == list("😀 \N{REPLACEMENT CHARACTER}".encode())


# tokenizer.json


def test_ids_are_those_of_the_library(saved: dict[str, Path]) -> None:
    for name, path in saved.items():
        ours, theirs = load_tokenizer(str(path)), tokenizers.Tokenizer.from_file(str(path))
        for text in ["", *CORPUS[:3]]:
            ids = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text) == ids, name
            assert ours.encode_batch([text, "x"])[0].tolist() == ids, name
            if name in ("gpt2", "llama3"):
                assert ours.decode(ids) == text
        assert ours.vocab_size == theirs.get_vocab_size(), name


def test_a_folder_names_its_tokenizer_and_its_end_of_document(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    content = json.loads(saved["gpt2"].read_text())
    end = len(content["model"]["vocab"])
    content["added_tokens"].append({**content["added_tokens"][0], "id": end, "content": "<my end>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(str(tmp_path)).end_of_document == 0
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<my end>"}})
    )
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.end_of_document == end
    assert tokenizer.decode([*tokenizer.encode("a"), end, *tokenizer.encode("b")]) == "a\nb"
    assert load_tokenizer(str(saved["wordpiece"])).end_of_document is None
    # What no tokenizer can have for an end is passed over.
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [5000000000, 4294967295]}')
    assert load_tokenizer(str(tmp_path)).end_of_document == 0


@pytest.mark.parametrize("name", [name for name in KINDS if name != "unigram"])
def test_text_that_spells_a_special_token_is_text(
    saved: dict[str, Path], tmp_path: Path, name: str
) -> None:
    content = json.loads(saved[name].read_text())
    end = max(content["model"]["vocab"].values()) + 1
    # Not said to be special, but it ends documents.
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": end, "content": "<end>", "special": False}
    )
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": end + 1, "content": "<word>", "special": False}
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    tokenizer = load_tokenizer(str(tmp_path))
    text = "a <end><|endoftext|> b<end>"
    for ids in (tokenizer.encode(text), tokenizer.encode_batch([text])[0].tolist()):
        assert end not in ids
        assert name == "wordpiece" or 0 not in ids  # there, 0 is what is unknown
    if name in ("gpt2", "llama3"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert end + 1 in tokenizer.encode(
        "one <word> more"
    )  # an added token that is no special one is a token of text


def test_what_a_file_says_of_length_does_not_cut_documents(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(saved["gpt2"]))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode(CORPUS[0]) == load_tokenizer(
        str(saved["gpt2"])
    ).encode(CORPUS[0])


def test_the_digest_follows_the_content_and_not_its_spacing(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    content = json.loads(saved["gpt2"].read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=3))
    assert load_tokenizer(str(tmp_path)).digest == load_tokenizer(str(saved["gpt2"])).digest
    assert len({load_tokenizer(str(path)).digest for path in saved.values()}) == len(saved)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("once upon a time", "Expecting value"),
        ("[1, 2]", "not an object"),
        ('{"hello": 1}', "not a Hugging Face tokenizer.json"),
        (
            '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "not a Hugging Face tokenizer.json",
        ),
        ("[" * 100_000, "recursion"),
        (b"\xff\xfe", "not a Hugging Face tokenizer.json"),
    ],
)
def test_a_file_that_is_not_a_tokenizer(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere.json"), str(tmp_path)):
        with pytest.raises(DataError, match="no such tokenizer"):
            load_tokenizer(name)


def test_without_the_library_the_extra_is_named(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(EnvironmentProblem, match=r"needs tokenizers .*pip install 'phalanx\[hf\]'"):
        load_tokenizer(str(saved["gpt2"]))


# Where text can be cut. Reference: the ids of the whole text.


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text)


def in_pieces(tokenizer: Tokenizer, text: str) -> list[int]:
    pieces = list(build_text_cutter(tokenizer).cut_into_pieces(text, "test"))
    assert "".join(pieces) == text
    return np.concatenate([*tokenizer.encode_batch(pieces)]).astype(int).tolist()


LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "",
                " ",
                "\t",
                "word",
                "Größe 12",
                "x = 1",
                "...",
                "\r",
                "漢字",
                "  indented",
                "end. ",
                "'s",
            ]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(lines=LINES)
def test_pieces_have_the_tokens_of_the_whole(
    loaded: dict[str, Tokenizer], lines: list[str]
) -> None:
    text = "\n".join(lines)
    for name, tokenizer in loaded.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuts, "TARGET_PIECE_CHARS", 20)
            assert in_pieces(tokenizer, text) == whole(tokenizer, text), name


@pytest.mark.parametrize(
    ("name", "can_cut"),
    [("gpt2", True), ("llama3", True), ("nfc", True), ("wordpiece", True), ("unigram", False)],
)
def test_which_tokenizers_take_their_documents_in_pieces(
    saved: dict[str, Path], name: str, can_cut: bool
) -> None:
    assert build_text_cutter(load_tokenizer(str(saved[name]))).can_cut is can_cut


def test_neighbours_agree_where_a_file_is_cut_between_them(tokenizer: Tokenizer) -> None:
    """Spans find their own beginnings: cuts are the same for all who ask, ascending, and keep
    the tokens."""
    data = ("".join(CORPUS) * 3).encode() + b"\xff\xfe bad bytes\nand more \xe6\xbc\n" * 40
    cutter, file = build_text_cutter(tokenizer), io.BytesIO(data)
    offsets = [0, 1, 777, 5_000, 5_001, 9_999, len(data) - 5, len(data)]
    found = [cutter.find_token_safe_cut_in_file(file, offset, len(data)) for offset in offsets]
    assert found == sorted(found)
    assert all(cut >= offset for cut, offset in zip(found, offsets, strict=True))
    if not cutter.can_cut:
        assert set(found[1:]) == {len(data)}
    text = data.decode("utf-8", "replace")
    parts = [data[a:b].decode("utf-8", "replace") for a, b in pairwise(found)]
    ids = [token for encoded in tokenizer.encode_batch(parts) for token in encoded.tolist()]
    assert ids == whole(tokenizer, text)


def test_a_huge_document_that_cannot_be_cut_is_refused(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "MAX_UNCUT_CHARS", 1000)
    with pytest.raises(DataError, match=r"books\.jsonl: .*in one piece.*divide it into documents"):
        list(
            build_text_cutter(load_tokenizer(str(saved["unigram"]))).cut_into_pieces(
                "a line\n" * 200, "books.jsonl"
            )
        )
