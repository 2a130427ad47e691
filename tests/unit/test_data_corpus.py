"""What a run trains on: built from text once, or used where it lies; all that is unusable is
refused in one line."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import phalanx.data.corpus as room
import phalanx.data.prepare
from commands import snapshot
from phalanx.core.errors import DataError, ExitCode, ResourceError
from phalanx.data.build import build_dataset
from phalanx.data.corpus import Corpus, load_corpus, verify_corpus_checksums
from phalanx.data.prepare import prepare_corpus
from phalanx.data.tokens import SPLITS, Split
from phalanx.job.schema import Data, Source

EOD = 256


def prepare(
    source: Path | str,
    out_dir: Path,
    fraction: float = 0.0,
    seq_len: int = 4,
    vocab_size: int | None = None,
    **keys: object,
) -> Corpus:
    data = Data(source=str(source), held_out_fraction=fraction, seq_len=seq_len, **keys)
    return prepare_corpus(data, out_dir, vocab_size=vocab_size)


def read(corpus: Corpus, split: Split) -> np.ndarray:
    return corpus.sequences(split)[0][:]


def text_of(corpus: Corpus, split: Split) -> str:
    return corpus.tokenizer().decode(read(corpus, split))


def tokens_of(text: bytes) -> list[int]:
    return [*text, EOD]


def everything_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    return tmp_path / "run" / "data"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty documents, one of them below a folder, one binary, one hidden, one in a hidden
    folder."""
    folder = tmp_path / "library"
    (folder / "below").mkdir(parents=True)
    (folder / ".git").mkdir()
    for number in range(39):
        (folder / f"{number:02d}.txt").write_text(f"document {number}\n")
    (folder / "below" / "39.txt").write_text("document 39\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (folder / ".hidden").write_text("hidden")
    (folder / ".git" / "config").write_text("hidden too")
    return folder


# Sources


def test_a_text_file_is_one_document_split_by_position(tmp_path: Path, out_dir: Path) -> None:
    source = tmp_path / "book.txt"
    source.write_bytes(b"0123456789abcdefghi")
    corpus = prepare(source, out_dir, fraction=0.25)
    tokens = tokens_of(b"0123456789abcdefghi")
    assert read(corpus, "train").tolist() == tokens[:15]
    assert read(corpus, "held_out").tolist() == tokens[15:]
    assert (corpus.components[0].tokenizer.kind, corpus.vocab_size, corpus.source_bytes) == (
        "bytes",
        257,
        19,
    )
    assert (corpus.components[0].split_by, corpus.components[0].held_out_keys) == ("position", ())
    assert "one document" in corpus.components[0].explain_held_out_choice
    assert not read(corpus, "train").flags.writeable


def test_a_folder_is_its_text_files_in_order_each_followed_by_the_end_token(
    library: Path, out_dir: Path
) -> None:
    corpus = prepare(library, out_dir)
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("[0-9]*.txt"))
    expected = [token for name in names for token in tokens_of((library / name).read_bytes())]
    assert read(corpus, "train").tolist() == expected
    assert (corpus.splits["train"].num_documents, corpus.num_skipped_files) == (40, 1)
    assert corpus.splits["held_out"].num_tokens == 0
    assert read(corpus, "held_out").size == 0


def test_documents_are_held_out_whole_disjoint_and_complete(
    library: Path, out_dir: Path, tmp_path: Path
) -> None:
    corpus = prepare(library, out_dir, fraction=0.3)
    texts = {split: text_of(corpus, split).split("\n\n")[:-1] for split in SPLITS}
    assert all(texts.values())
    assert sorted(texts["train"] + texts["held_out"]) == sorted(
        f"document {number}" for number in range(40)
    )
    assert corpus.splits["train"].num_documents == len(texts["train"])

    # The name decides, not where the tree lies nor what else is in it.
    moved = tmp_path / "moved"
    library.rename(moved)
    (moved / "00.txt").unlink()
    again = prepare(moved, tmp_path / "again", fraction=0.3)
    held_out = text_of(again, "held_out").split("\n\n")[:-1]
    assert held_out == [text for text in texts["held_out"] if text != "document 0"]


def test_of_few_documents_a_whole_one_is_held_out_and_stays_so(
    tmp_path: Path, out_dir: Path
) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(name * 20)
    corpus = prepare(folder, out_dir, fraction=0.01)
    (component,) = corpus.components
    assert component.split_by == "few_documents"
    assert (
        component.explain_held_out_choice == "by the fraction alone a side would have no sequence"
    )
    assert len(set(text_of(corpus, "held_out"))) == 2  # one letter, and the end of a document
    assert text_of(corpus, "train").count("\n") == corpus.splits["train"].num_documents == 2
    again = load_corpus(out_dir)
    assert again == corpus
    assert np.array_equal(read(again, "held_out"), read(corpus, "held_out"))
    assert (
        prepare(folder, tmp_path / "none", fraction=0.0).components[0].explain_held_out_choice == ""
    )


def test_a_pattern_takes_the_files_it_matches(library: Path, out_dir: Path) -> None:
    corpus = prepare(f"{library}/**/3?.txt", out_dir)
    assert corpus.splits["train"].num_documents == 10
    assert text_of(corpus, "train").startswith("document 30\n\ndocument 31\n\n")


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path, out_dir: Path) -> None:
    source = tmp_path / "a[1]*.txt"
    source.write_text("hello there")
    assert prepare(source, out_dir).splits["train"].num_tokens == 12


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS refuses names that are not UTF-8")
def test_names_that_are_not_utf8_are_read(tmp_path: Path, out_dir: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for number in range(30):
        Path(os.fsdecode(bytes(folder) + b"/\xff%d" % number)).write_text("text")
    assert prepare(folder, out_dir, fraction=0.5).splits["held_out"].num_documents > 0


def test_names_alone_never_leave_training_without_a_sequence(tmp_path: Path, out_dir: Path) -> None:
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(b"x" * 49)
    corpus = prepare(
        folder, out_dir, fraction=0.01, seq_len=90
    )  # either document alone is too short
    assert (corpus.splits["train"].num_tokens, corpus.splits["held_out"].num_tokens) == (98, 2)


@pytest.mark.parametrize("dtype", ["u1", "i4", "<i8", ">u2", "u8"])
def test_npy_ids_are_taken_as_they_are(tmp_path: Path, out_dir: Path, dtype: str) -> None:
    ids = np.array([5, 0, 7, 200, 7, 7, 1, 2, 3, 4], dtype=dtype)
    np.save(tmp_path / "ids.npy", ids)
    corpus = prepare(tmp_path / "ids.npy", out_dir, fraction=0.2)
    assert read(corpus, "train").tolist() == ids[:8].tolist()
    assert read(corpus, "held_out").tolist() == ids[8:].tolist()
    assert (corpus.components[0].tokenizer.kind, corpus.vocab_size, corpus.tokenizer()) == (
        "none",
        201,
        None,
    )
    assert not out_dir.joinpath("source-0").exists()  # it is used where it lies


def test_the_standard_library_is_prepared_the_same_each_time(tmp_path: Path) -> None:
    first = prepare("stdlib", tmp_path / "a", fraction=0.05, seq_len=128)
    second = prepare("stdlib", tmp_path / "b", fraction=0.05, seq_len=128)
    assert first.to_json() == second.to_json()
    total = sum(part.num_tokens for part in first.splits.values())
    documents = sum(part.num_documents for part in first.splits.values())
    assert total == first.source_bytes + documents
    assert documents > 300
    assert 0.02 < first.splits["held_out"].num_tokens / total < 0.12
    text = text_of(first, "train")
    assert "import " in text
    assert (read(first, "train") == EOD).sum() == first.splits["train"].num_documents


def test_the_fact_sheet_says_what_the_sequences_hold(library: Path, out_dir: Path) -> None:
    corpus = prepare(library, out_dir, fraction=0.3)
    assert load_corpus(out_dir) == corpus
    facts = json.loads((out_dir / "corpus.json").read_text())["components"][0]
    assert (facts["source"], facts["kind"], facts["path"]) == (str(library), "dataset", "source-0")
    assert set(facts["files"]) == {"dataset.json", "shard-00000.tokens"}
    for split in SPLITS:
        tokens = read(corpus, split)
        assert facts["splits"][split] == {
            "num_tokens": tokens.size,
            "num_documents": int((tokens == EOD).sum()),
        }
    assert everything_below(out_dir) == {
        "corpus.json",
        "source-0",
        *(f"source-0/{name}" for name in facts["files"]),
    }


def test_memory_does_not_grow_with_the_source(tmp_path: Path, out_dir: Path) -> None:
    source = tmp_path / "long.txt"
    with open(source, "wb") as file:
        for _ in range(50):
            file.write(b"0123456789abcde\n" * 65536)
    tracemalloc.start()
    corpus = prepare(source, out_dir, fraction=0.1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(part.num_tokens for part in corpus.splits.values()) == 50 * 2**20 + 1
    assert peak_bytes < 20 * 2**20


# Again: resumed runs and restarted attempts


def test_what_is_there_is_taken_even_if_the_source_has_changed(
    library: Path, out_dir: Path
) -> None:
    first = prepare(library, out_dir, fraction=0.3)
    before = snapshot(out_dir)
    (library / "00.txt").write_text("something else entirely")
    assert prepare(library, out_dir, fraction=0.3) == first
    for path in library.rglob("*.txt"):
        path.unlink()
    assert prepare(library, out_dir, fraction=0.3) == first
    assert snapshot(out_dir) == before


def test_what_a_killed_process_left_is_replaced(
    library: Path, out_dir: Path, tmp_path: Path
) -> None:
    reference = prepare(library, tmp_path / "reference", fraction=0.3)
    prepare(library, out_dir, fraction=0.3)
    (out_dir / "corpus.json").unlink()
    (out_dir / "source-0" / "dataset.json").unlink()
    os.truncate(out_dir / "source-0" / "shard-00000.tokens", 100)
    shutil.rmtree(out_dir / "source-0")
    assert prepare(library, out_dir, fraction=0.3).to_json() == reference.to_json()


@pytest.mark.parametrize("change", [{"source": "stdlib"}, {"fraction": 0.1}])
def test_another_source_does_not_replace_the_tokens_of_a_run(
    library: Path, out_dir: Path, change: dict[str, str | float]
) -> None:
    prepare(library, out_dir, fraction=0.3)
    before = (out_dir / "corpus.json").read_bytes()
    refused(
        lambda: prepare(**({"source": library, "out_dir": out_dir, "fraction": 0.3} | change)),
        "another job",
    )
    assert (out_dir / "corpus.json").read_bytes() == before


def _garble(out_dir: Path) -> None:
    (out_dir / "corpus.json").write_bytes(b"\xff{")


def _other_release(out_dir: Path) -> None:
    (out_dir / "corpus.json").write_text('{"format": 99}')


def _other_fields(out_dir: Path) -> None:
    (out_dir / "corpus.json").write_text(
        '{"format": 2, "wanted": {}, "components": [{"path": 3}], "user": null}'
    )


@pytest.mark.parametrize("damage", [_garble, _other_release, _other_fields])
def test_a_damaged_fact_sheet_is_refused(
    library: Path, out_dir: Path, damage: Callable[[Path], None]
) -> None:
    prepare(library, out_dir, fraction=0.3)
    damage(out_dir)
    refused(lambda: prepare(library, out_dir, fraction=0.3), "cannot be used", "remove that folder")
    refused(lambda: load_corpus(out_dir), "cannot be used")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("held_out_keys", [math.inf]),
        ("weight", math.nan),
        ("vocab_size", "257"),
        ("path", None),
        ("splits", {"train": {"num_tokens": -1, "num_documents": 1}, "held_out": None}),
        ("end_of_document", 1e300),
    ],
)
def test_a_fact_sheet_with_values_that_are_none_is_refused(
    library: Path, out_dir: Path, key: str, value: object
) -> None:
    prepare_corpus(Data(source=str(library), seq_len=8), out_dir, vocab_size=None)
    body = json.loads((out_dir / "corpus.json").read_text())
    body["components"][0][key] = value
    (out_dir / "corpus.json").write_text(json.dumps(body))
    with pytest.raises(DataError, match="prepared data cannot be used"):
        load_corpus(out_dir)


def test_loading_what_was_never_prepared_is_refused(out_dir: Path) -> None:
    refused(lambda: load_corpus(out_dir), "corpus.json", "No such file")


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [_truncate, _empty, Path.unlink])
def test_a_damaged_copy_of_the_text_is_refused_by_its_name(
    library: Path, out_dir: Path, damage: Callable[[Path], None]
) -> None:
    corpus = prepare(library, out_dir, fraction=0.3)
    damage(out_dir / "source-0" / "shard-00000.tokens")
    refused(lambda: corpus.sequences("train"), "shard-00000.tokens", "changed since the run began")
    refused(lambda: prepare(library, out_dir, fraction=0.3), "shard-00000.tokens")


# Shards, used where they lie


@pytest.fixture
def shards(library: Path, tmp_path: Path) -> Path:
    build_dataset([str(library)], tmp_path / "shards", shard_bytes=200)
    return tmp_path / "shards"


def flip_a_bit(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_shards_hold_the_same_split_as_the_text_they_were_made_of(
    library: Path, shards: Path, out_dir: Path, tmp_path: Path
) -> None:
    text, built = (
        prepare(library, tmp_path / "text", fraction=0.3),
        prepare(shards, out_dir, fraction=0.3),
    )
    assert len(built.components[0].files) > 3
    assert everything_below(out_dir) == {"corpus.json"}
    for split in SPLITS:
        assert np.array_equal(read(built, split), read(text, split))
        assert built.splits[split] == text.splits[split]
    assert verify_corpus_checksums(built) == []


def test_a_flipped_bit_is_named_by_shard_and_offset(shards: Path, out_dir: Path) -> None:
    corpus = prepare(shards, out_dir)
    flip_a_bit(shards / "shard-00001.tokens", 4096 + 20)
    refused(
        lambda: verify_corpus_checksums(corpus), "shard-00001.tokens", "bytes 4096", "tokens 0 to"
    )
    refused(
        lambda: verify_corpus_checksums(corpus, is_new=True), "shard-00001.tokens"
    )  # who wrote them is long gone


def test_shards_without_their_dataset_json_are_no_text(shards: Path, out_dir: Path) -> None:
    (shards / "dataset.json").unlink()
    (shards / "notes.txt").write_text("what else lies there is not trained on by mistake")
    refused_without_trace(shards, out_dir, "no finished dataset", "dataset.json")


def test_what_is_too_much_to_read_is_said_to_be_unverified(
    shards: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = prepare(shards, out_dir)
    flip_a_bit(shards / "shard-00001.tokens", 4096 + 20)
    monkeypatch.setattr(room, "MAX_VERIFIED_BYTES", 1000)
    (said,) = verify_corpus_checksums(corpus)
    assert "phalanx data verify" in said


def test_shards_that_were_built_again_since_the_run_began(
    library: Path, shards: Path, out_dir: Path
) -> None:
    corpus = prepare(shards, out_dir)
    shutil.rmtree(shards)
    (library / "39.txt").write_text("one more document")
    build_dataset([str(library)], shards, shard_bytes=200)
    for act in (lambda: corpus.sequences("train"), lambda: prepare(shards, out_dir)):
        refused(act, "the corpus has changed since the run began", "shards/shard-0000")


def test_token_ids_that_changed_since_the_run_began(tmp_path: Path, out_dir: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1_000))
    corpus = prepare(tmp_path / "ids.npy", out_dir)
    np.save(tmp_path / "ids.npy", np.arange(1_000)[::-1])
    corpus.sequences("train")  # the size is the same
    refused(
        lambda: verify_corpus_checksums(corpus),
        "ids.npy",
        "changed since the run began",
        "checksum",
    )
    np.save(tmp_path / "ids.npy", np.arange(900))
    refused(lambda: corpus.sequences("train"), "ids.npy", "changed since the run began", "bytes")


def test_shards_and_data_tokenizer_that_do_not_match(
    shards: Path, out_dir: Path, tmp_path: Path
) -> None:
    other = a_tokenizer(tmp_path / "other.json")
    refused_without_trace(
        shards, out_dir, "is not the one of the shards", str(shards), tokenizer=str(other)
    )


def test_bytes_are_a_tokenizer_like_another_where_the_job_names_them(
    library: Path, out_dir: Path, tmp_path: Path
) -> None:
    build_dataset(
        [str(library)], tmp_path / "words", tokenizer=str(a_tokenizer(tmp_path / "words.json"))
    )
    words = "data.tokenizer bytes is not the one of the shards"
    refused_without_trace(tmp_path / "words", out_dir, words, tokenizer="bytes")
    np.save(tmp_path / "ids.npy", np.frombuffer(b"six or more bytes", np.uint8))
    assert (
        prepare(tmp_path / "ids.npy", out_dir, tokenizer="bytes").tokenizer().decode([98, 121])
        == "by"
    )


def test_a_tokenizer_that_is_not_the_one_of_its_shards(
    library: Path, tmp_path: Path, out_dir: Path
) -> None:
    first, second = (
        a_tokenizer(tmp_path / "first.json"),
        a_tokenizer(tmp_path / "second.json", extra="zebra"),
    )
    build_dataset([str(library)], tmp_path / "shards", tokenizer=str(first))
    shutil.copy(second, tmp_path / "shards" / "tokenizer.json")
    refused_without_trace(
        tmp_path / "shards", out_dir, "tokenizer.json", "not the one of its shards"
    )


def test_a_tokenizer_that_changed_since_the_run_began(
    library: Path, tmp_path: Path, out_dir: Path
) -> None:
    build_dataset(
        [str(library)], tmp_path / "shards", tokenizer=str(a_tokenizer(tmp_path / "first.json"))
    )
    prepare(tmp_path / "shards", out_dir)
    a_tokenizer(tmp_path / "shards" / "tokenizer.json", extra="zebra")
    refused(
        lambda: prepare(tmp_path / "shards", out_dir), "tokenizer.json", "not the one of its shards"
    )


def test_token_ids_can_be_given_a_tokenizer(tmp_path: Path, out_dir: Path) -> None:
    tokenizer = a_tokenizer(tmp_path / "words.json")
    np.save(tmp_path / "ids.npy", np.array([1, 2, 1, 2, 1, 2]))
    corpus = prepare(tmp_path / "ids.npy", out_dir, tokenizer=str(tokenizer))
    assert corpus.tokenizer().decode([1, 2]) == "document 1"
    assert load_corpus(out_dir).tokenizer_digest == corpus.tokenizer().digest
    a_tokenizer(tokenizer, extra="zebra")
    refused(corpus.tokenizer, "changed since the run began", "words.json")
    np.save(tmp_path / "more.npy", np.array([1, 2, 50, 1, 1, 1]))
    refused_without_trace(
        tmp_path / "more.npy", tmp_path / "b", "token 50 does not fit", tokenizer=str(tokenizer)
    )


def a_tokenizer(path: Path, extra: str = "yak") -> Path:
    """A tokenizer.json of a few words."""
    vocabulary = {"[UNK]": 0, "document": 1, "1": 2, "2": 3, extra: 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


# Mixtures


def mixture(*sources: Path | str) -> tuple[Source, ...]:
    return tuple(
        Source(source=str(source), weight=number + 1) for number, source in enumerate(sources)
    )


def test_a_mixture_has_components_with_splits_of_their_own(
    library: Path, shards: Path, tmp_path: Path, out_dir: Path
) -> None:
    data = Data(mixture=mixture(library, shards), held_out_fraction=0.3, seq_len=4)
    corpus = prepare_corpus(data, out_dir, vocab_size=None)
    assert [(c.weight, c.kind, c.path) for c in corpus.components] == [
        (1, "dataset", "source-0"),
        (2, "dataset", str(shards)),
    ]
    alone = prepare(library, tmp_path / "alone", fraction=0.3)
    for split in SPLITS:
        assert [sequence[:].tolist() for sequence in corpus.sequences(split)] == [
            read(alone, split).tolist()
        ] * 2
        assert corpus.splits[split].num_tokens == 2 * alone.splits[split].num_tokens
    assert corpus.names == [str(library), str(shards)]
    assert load_corpus(out_dir) == corpus


def test_a_mixture_of_two_tokenizers_is_refused(
    library: Path, tmp_path: Path, out_dir: Path
) -> None:
    build_dataset(
        [str(library)], tmp_path / "words", tokenizer=str(a_tokenizer(tmp_path / "words.json"))
    )
    np.save(tmp_path / "ids.npy", np.arange(1_000))
    for other in (tmp_path / "words", tmp_path / "ids.npy"):
        data = Data(mixture=mixture(library, other), seq_len=4)
        refused(
            lambda data=data: prepare_corpus(data, out_dir, vocab_size=None),
            "one tokenizer",
            str(other),
        )
        assert not out_dir.exists()


def test_tokens_that_are_there_are_checked_against_the_model_of_today(
    library: Path, tmp_path: Path
) -> None:
    prepare(library, tmp_path / "text")
    refused(
        lambda: prepare(library, tmp_path / "text", seq_len=10_000),
        "not enough tokens",
        "10001 needed",
    )
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3, 9, 2, 1]))
    prepare(tmp_path / "ids.npy", tmp_path / "ids")
    refused(
        lambda: prepare(tmp_path / "ids.npy", tmp_path / "ids", vocab_size=9),
        "ids.npy: position 3",
        "token 9",
    )


# Refusals


def refused(act: Callable[[], object], *said: str, code: ExitCode = ExitCode.DATA) -> None:
    with pytest.raises(DataError) as caught:
        act()
    line = str(caught.value)
    assert caught.value.exit_code is code
    assert "\n" not in line
    for part in said:
        assert part in line, line


def refused_without_trace(
    source: Path | str, out_dir: Path, *said: str, **options: int | float | None
) -> None:
    refused(lambda: prepare(source, out_dir, **options), *said)
    assert not out_dir.exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.txt", "no such file or folder"),
        ("nowhere/*.txt", "no file matches"),
        ("*.npy", "no file matches"),
        ("ids.npy", "no such file or folder"),
        ("s3://bucket/text", "copy it here first"),
        ("https://host/*.txt", "copy it here first"),
        ("stdlb", 'did you mean "stdlib"?'),
        ("bok.txt", 'did you mean "book.txt"?'),
        ("libary/a.txt", 'did you mean "library"?'),
        ("bok.npy", 'did you mean "book.npy"?'),
        ("x" * 5000, "File name too long"),
        ("link.txt", "link.txt: the link leads nowhere (gone is not there)"),
    ],
)
def test_a_missing_source(
    tmp_path: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "library").mkdir()
    (tmp_path / "link.txt").symlink_to("gone")
    if source.startswith("bok"):
        (tmp_path / source.replace("bok", "book")).write_text("text")
    refused_without_trace(source, out_dir, said, "data.source")


def test_an_empty_source(tmp_path: Path, out_dir: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused_without_trace(tmp_path / "empty", out_dir, "no file in it")
    (tmp_path / "empty" / "a.txt").touch()
    refused_without_trace(tmp_path / "empty", out_dir, "every file is empty")
    refused_without_trace(tmp_path / "empty" / "a.txt", out_dir, "every file is empty")
    np.save(tmp_path / "empty.npy", np.zeros(0, np.int64))
    refused_without_trace(tmp_path / "empty.npy", out_dir, "the array is empty")


def test_a_source_of_binary_files_only(tmp_path: Path, out_dir: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_bytes(b"\0")
    refused_without_trace(folder, out_dir, "all 2 files are binary")
    refused_without_trace(folder / "a", out_dir, "the file is binary")
    refused_without_trace(f"{folder}/?", out_dir, "all 2 files are binary")


def test_too_few_tokens_for_one_sequence(tmp_path: Path, out_dir: Path) -> None:
    (tmp_path / "short.txt").write_text("0123456789")
    assert (
        prepare(tmp_path / "short.txt", tmp_path / "ok", seq_len=10).splits["train"].num_tokens
        == 11
    )
    refused_without_trace(
        tmp_path / "short.txt", out_dir, "11 to train on, 12 needed", "at most 10", seq_len=11
    )
    refused_without_trace(
        tmp_path / "short.txt", out_dir, "9 to train on", seq_len=10, fraction=0.1
    )
    np.save(tmp_path / "one.npy", np.array([3]))
    refused_without_trace(tmp_path / "one.npy", out_dir, "0 to train on, 5 needed", fraction=0.5)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/mem"), reason="needs a file that opens and cannot be read"
)
def test_an_unreadable_file(tmp_path: Path, out_dir: Path) -> None:
    """A disk that fails, not data that is damaged."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "fine.txt").write_text("text")
    (folder / "link.txt").symlink_to("/proc/self/mem")
    for source, name in (("/proc/self/mem", "/proc/self/mem"), (str(folder), "link.txt")):
        said = ("cannot be read (Input/output error)", name)
        refused(partial(prepare, source, out_dir), *said, code=ExitCode.RESOURCES)
        assert not out_dir.exists()


def test_something_that_is_not_a_regular_file(tmp_path: Path, out_dir: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused_without_trace(tmp_path / "pipe", out_dir, "not a regular file")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 4), np.int32), "2-D int32"),
        (np.zeros((), np.int32), "0-D"),
        (np.zeros(9), "1-D float64"),
        (np.zeros(9, bool), "1-D bool"),
        (np.array([1, 2, -7, 3]), "position 2: token id -7 is negative"),
        (np.array([1, 2, 2**32, 3]), "position 2: token id 4294967296 is no token"),
        (np.array([1, 2, 2**64 - 1], np.uint64), "position 2"),
        (np.array(["a", 1], object), "not a readable .npy file"),
    ],
)
def test_npy_that_is_not_a_list_of_ids(
    tmp_path: Path, out_dir: Path, array: np.ndarray, said: str
) -> None:
    np.save(tmp_path / "ids.npy", array, allow_pickle=True)
    refused_without_trace(tmp_path / "ids.npy", out_dir, "ids.npy", said)


@pytest.mark.parametrize("length", [0, 5, 40, 200])
def test_a_damaged_npy(tmp_path: Path, out_dir: Path, length: int) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1000))
    os.truncate(tmp_path / "ids.npy", length)
    refused_without_trace(tmp_path / "ids.npy", out_dir, "not a readable .npy file")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': \xf41000,), }",  # half of a bracket
        "{'descr': '<i8', 'fortran_order': False, 'shape': (True,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (999999999999999999999,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904,), }",
        "{'descr': '<i8', b'fortran_order': False, 'shape': (1000,), }",
        "{[]: '<i8', 'fortran_order': False, 'shape': (1000,), }",
    ],
)
def test_a_npy_whose_header_is_damaged(tmp_path: Path, out_dir: Path, header: str) -> None:
    line = f"{header:<117}\n".encode("latin1")
    begin = b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little")
    (tmp_path / "ids.npy").write_bytes(begin + line + bytes(8000))
    refused_without_trace(tmp_path / "ids.npy", out_dir, "ids.npy: not a readable .npy file")


def test_tokens_beyond_the_models_vocabulary(
    tmp_path: Path, library: Path, shards: Path, out_dir: Path
) -> None:
    refused_without_trace(
        library, out_dir, "token 256 does not fit", "the end of a document", vocab_size=256
    )
    refused_without_trace(
        shards, out_dir, "shard-00000.tokens: position 11", "token 256", vocab_size=256
    )
    ids = np.zeros(2_000_000, np.uint16)
    ids[1_500_000] = 50
    np.save(tmp_path / "ids.npy", ids)
    refused_without_trace(
        tmp_path / "ids.npy",
        out_dir,
        "position 1500000: token 50",
        "vocabulary of 50",
        vocab_size=50,
    )
    assert prepare(tmp_path / "ids.npy", out_dir, vocab_size=51).vocab_size == 51


def test_documents_of_an_array_cannot_be_masked(tmp_path: Path, out_dir: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100))
    refused_without_trace(
        tmp_path / "ids.npy", out_dir, "needs documents", "ids.npy", document_masks=True
    )


# The place it is written to


def test_a_place_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="preparing the data"):
        prepare(library, tmp_path / "file" / "data")


def test_a_failure_leaves_nothing(
    library: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(phalanx.data.prepare, "write_json_atomically", fail)
    with pytest.raises(ResourceError, match="no space left while writing what the data is"):
        prepare(library, out_dir)
    assert not out_dir.exists()
