"""A source becomes two token files, once and whole; every unusable source is refused in one line with exit code 4."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from phalanx.core.errors import DataError, ExitCode, PhalanxError, ResourceError
from phalanx.data.corpus import Corpus, load_corpus, prepare_corpus
from phalanx.data.token_file import TokenWriter

EOD = 256


def prepare(
    source: Path | str, out_dir: Path, fraction: float = 0.0, seq_len: int = 4, vocab_size: int | None = None
) -> Corpus:
    return prepare_corpus(str(source), fraction, out_dir, seq_len=seq_len, vocab_size=vocab_size)


def tokens_of(text: bytes) -> list[int]:
    return [*text, EOD]


def everything_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.fixture
def out_dir(tmp_path: Path) -> Path:
    return tmp_path / "run" / "data"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Forty documents, one of them below a folder, one binary, one hidden, one in a hidden folder."""
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
    assert corpus.open_tokens("train").tolist() == tokens[:15]
    assert corpus.open_tokens("held_out").tolist() == tokens[15:]
    assert (corpus.tokenizer, corpus.vocab_size, corpus.dtype, corpus.source_bytes) == ("bytes", 257, "<u2", 19)
    assert not corpus.open_tokens("train").flags.writeable


def test_a_folder_is_its_text_files_in_order_each_followed_by_the_end_token(library: Path, out_dir: Path) -> None:
    corpus = prepare(library, out_dir)
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("[0-9]*.txt"))
    expected = [token for name in names for token in tokens_of((library / name).read_bytes())]
    assert corpus.open_tokens("train").tolist() == expected
    assert (corpus.splits["train"].num_documents, corpus.num_skipped_files) == (40, 1)
    assert corpus.splits["held_out"].num_tokens == 0
    assert corpus.open_tokens("held_out").size == 0


def test_documents_are_held_out_whole_disjoint_and_complete(library: Path, out_dir: Path, tmp_path: Path) -> None:
    corpus = prepare(library, out_dir, fraction=0.3)
    texts = {split: corpus.decode(corpus.open_tokens(split)).split("\n\n")[:-1] for split in ("train", "held_out")}
    assert all(texts.values())
    assert sorted(texts["train"] + texts["held_out"]) == sorted(f"document {number}" for number in range(40))
    assert corpus.splits["train"].num_documents == len(texts["train"])

    # The name decides, not where the tree lies nor what else is in it.
    moved = tmp_path / "moved"
    library.rename(moved)
    (moved / "00.txt").unlink()
    again = prepare(moved, tmp_path / "again", fraction=0.3)
    held_out = again.decode(again.open_tokens("held_out")).split("\n\n")[:-1]
    assert held_out == [text for text in texts["held_out"] if text != "document 0"]


def test_a_pattern_takes_the_files_it_matches(library: Path, out_dir: Path) -> None:
    corpus = prepare(f"{library}/**/3?.txt", out_dir)
    assert corpus.splits["train"].num_documents == 10
    assert corpus.decode(corpus.open_tokens("train")[:13]) == "document 30\n\n"


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
    corpus = prepare(folder, out_dir, fraction=0.01, seq_len=90)  # either document alone is too short
    assert (corpus.splits["train"].num_tokens, corpus.splits["held_out"].num_tokens) == (98, 2)


@pytest.mark.parametrize("dtype", ["u1", "i4", "<i8", ">u2", "u8"])
def test_npy_ids_are_taken_as_they_are(tmp_path: Path, out_dir: Path, dtype: str) -> None:
    ids = np.array([5, 0, 7, 200, 7, 7, 1, 2, 3, 4], dtype=dtype)
    np.save(tmp_path / "ids.npy", ids)
    corpus = prepare(tmp_path / "ids.npy", out_dir, fraction=0.2)
    assert corpus.open_tokens("train").tolist() == ids[:8].tolist()
    assert corpus.open_tokens("held_out").tolist() == ids[8:].tolist()
    assert (corpus.tokenizer, corpus.vocab_size, corpus.dtype) == ("none", 201, "<u2")
    with pytest.raises(DataError, match="no text"):
        corpus.decode([1])


@pytest.mark.parametrize(("largest", "dtype"), [(65_535, "<u2"), (65_536, "<u4"), (2**32 - 1, "<u4")])
def test_ids_take_two_bytes_while_they_fit(tmp_path: Path, out_dir: Path, largest: int, dtype: str) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3, 4, largest]))
    corpus = prepare(tmp_path / "ids.npy", out_dir)
    assert (corpus.dtype, corpus.vocab_size) == (dtype, largest + 1)
    assert corpus.open_tokens("train")[-1] == largest


def test_the_standard_library_is_prepared_the_same_each_time(tmp_path: Path) -> None:
    first = prepare("stdlib", tmp_path / "a", fraction=0.05, seq_len=128)
    second = prepare("stdlib", tmp_path / "b", fraction=0.05, seq_len=128)
    assert first.to_json() == second.to_json()
    total = sum(part.num_tokens for part in first.splits.values())
    documents = sum(part.num_documents for part in first.splits.values())
    assert total == first.source_bytes + documents
    assert documents > 300
    assert 0.02 < first.splits["held_out"].num_tokens / total < 0.12
    text = first.decode(first.open_tokens("train")[:100_000])
    assert "import " in text
    assert (first.open_tokens("train") == EOD).sum() == first.splits["train"].num_documents


def test_what_the_manifest_says_is_what_the_files_hold(library: Path, out_dir: Path) -> None:
    corpus = prepare(library, out_dir, fraction=0.3)
    manifest = json.loads((out_dir / "corpus.json").read_text())
    assert set(manifest["splits"]) == {"train", "held_out"}
    for split, facts in manifest["splits"].items():
        raw = (out_dir / facts["file"]).read_bytes()
        tokens = np.frombuffer(raw, manifest["dtype"])
        assert facts["xxh3"] == xxhash.xxh3_64_hexdigest(raw)
        assert facts["num_tokens"] == tokens.size
        assert facts["max_token_id"] == tokens.max() == EOD
        assert facts["num_documents"] == (tokens == EOD).sum()
        assert np.array_equal(tokens, corpus.open_tokens(split))
    assert load_corpus(out_dir) == corpus
    assert everything_below(out_dir) == {"corpus.json", "train.tokens", "held_out.tokens"}


def test_text_survives_encode_and_decode(tmp_path: Path, out_dir: Path) -> None:
    (tmp_path / "a").write_text("some text")
    corpus = prepare(tmp_path / "a", out_dir)
    assert corpus.decode(corpus.encode("Grüße, 世界")) == "Grüße, 世界"
    assert corpus.decode([104, 105, EOD, 33, 0xC3, 300]) == "hi\n!\ufffd\ufffd"


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


def test_what_is_there_is_taken_even_if_the_source_has_changed(library: Path, out_dir: Path) -> None:
    first = prepare(library, out_dir, fraction=0.3)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out_dir.iterdir()}
    (library / "00.txt").write_text("something else entirely")
    assert prepare(library, out_dir, fraction=0.3) == first
    for path in library.rglob("*.txt"):
        path.unlink()
    assert prepare(library, out_dir, fraction=0.3) == first
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out_dir.iterdir()} == before


def test_what_a_killed_process_left_is_replaced(library: Path, out_dir: Path) -> None:
    out_dir.mkdir(parents=True)
    (out_dir / "train.tokens").write_bytes(b"whole but without a manifest")
    (out_dir / ".held_out.tokens.partial").write_bytes(b"half")
    corpus = prepare(library, out_dir, fraction=0.3)
    assert load_corpus(out_dir) == corpus
    assert everything_below(out_dir) == {"corpus.json", "train.tokens", "held_out.tokens"}


@pytest.mark.parametrize("change", [{"source": "stdlib"}, {"fraction": 0.1}])
def test_another_source_does_not_replace_the_tokens_of_a_run(
    library: Path, out_dir: Path, change: dict[str, str | float]
) -> None:
    prepare(library, out_dir, fraction=0.3)
    before = (out_dir / "corpus.json").read_bytes()
    refused(lambda: prepare(**({"source": library, "out_dir": out_dir, "fraction": 0.3} | change)), "another source")
    assert (out_dir / "corpus.json").read_bytes() == before


def _truncate(out_dir: Path) -> None:
    os.truncate(out_dir / "train.tokens", 10)


def _remove(out_dir: Path) -> None:
    (out_dir / "held_out.tokens").unlink()


def _garble(out_dir: Path) -> None:
    (out_dir / "corpus.json").write_bytes(b"\xff{")


def _other_release(out_dir: Path) -> None:
    (out_dir / "corpus.json").write_text('{"format": 99}')


@pytest.mark.parametrize("damage", [_truncate, _remove, _garble, _other_release])
def test_damaged_tokens_are_refused(library: Path, out_dir: Path, damage: Callable[[Path], None]) -> None:
    prepare(library, out_dir, fraction=0.3)
    damage(out_dir)
    refused(lambda: prepare(library, out_dir, fraction=0.3), "cannot be used", "remove that folder")
    refused(lambda: load_corpus(out_dir), "cannot be used")


def test_loading_what_was_never_prepared_is_refused(out_dir: Path) -> None:
    refused(lambda: load_corpus(out_dir), "corpus.json", "No such file")


def test_tokens_that_are_there_are_checked_against_the_model_of_today(library: Path, tmp_path: Path) -> None:
    prepare(library, tmp_path / "text")
    refused(lambda: prepare(library, tmp_path / "text", seq_len=10_000), "not enough tokens", "10001 needed")
    np.save(tmp_path / "ids.npy", np.array([1, 2, 3, 9, 2, 1]))
    prepare(tmp_path / "ids.npy", tmp_path / "ids")
    refused(lambda: prepare(tmp_path / "ids.npy", tmp_path / "ids", vocab_size=9), "train.tokens: token 3", "token 9")


# Refusals


def refused(act: Callable[[], object], *said: str) -> None:
    with pytest.raises(DataError) as caught:
        act()
    line = str(caught.value)
    assert caught.value.exit_code is ExitCode.DATA == 4
    assert "\n" not in line
    for part in said:
        assert part in line, line


def refused_without_trace(source: Path | str, out_dir: Path, *said: str, **options: int | float | None) -> None:
    refused(lambda: prepare(source, out_dir, **options), *said)
    assert not out_dir.exists()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.txt", "no such file or folder"),
        ("", "no such file or folder"),
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
    ],
)
def test_a_missing_source(
    tmp_path: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("text")
    (tmp_path / "library").mkdir()
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
    assert prepare(tmp_path / "short.txt", tmp_path / "ok", seq_len=10).splits["train"].num_tokens == 11
    refused_without_trace(tmp_path / "short.txt", out_dir, "11 to train on, 12 needed", "at most 10", seq_len=11)
    refused_without_trace(tmp_path / "short.txt", out_dir, "9 to train on", seq_len=10, fraction=0.1)
    np.save(tmp_path / "one.npy", np.array([3]))
    refused_without_trace(tmp_path / "one.npy", out_dir, "0 to train on, 5 needed", fraction=0.5)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that opens and cannot be read")
def test_an_unreadable_file(tmp_path: Path, out_dir: Path) -> None:
    refused_without_trace("/proc/self/mem", out_dir, "cannot be read (Input/output error)", "/proc/self/mem")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "fine.txt").write_text("text")
    (folder / "link.txt").symlink_to("/proc/self/mem")
    refused_without_trace(folder, out_dir, "cannot be read (Input/output error)", "link.txt")


def test_a_file_that_fails_while_it_is_read(library: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import phalanx.data.token_stream as room

    def vanish(document: object) -> object:
        (library / "20.txt").unlink(missing_ok=True)
        return read(document)

    read = room.read_tokens
    monkeypatch.setattr(room, "read_tokens", vanish)
    refused_without_trace(library, out_dir, "20.txt", "cannot be read")


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
        (np.array([1, 2, -7, 3]), "index 2: token id -7 is negative"),
        (np.array([1, 2, 2**32, 3]), "index 2: token 4294967296"),
        (np.array([1, 2, 2**64 - 1], np.uint64), "index 2"),
        (np.array(["a", 1], object), "not a readable .npy file"),
    ],
)
def test_npy_that_is_not_a_list_of_ids(tmp_path: Path, out_dir: Path, array: np.ndarray, said: str) -> None:
    np.save(tmp_path / "ids.npy", array, allow_pickle=True)
    refused_without_trace(tmp_path / "ids.npy", out_dir, "ids.npy", said)


@pytest.mark.parametrize("length", [0, 5, 40, 200])
def test_a_damaged_npy(tmp_path: Path, out_dir: Path, length: int) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1000))
    os.truncate(tmp_path / "ids.npy", length)
    refused_without_trace(tmp_path / "ids.npy", out_dir, "not a readable .npy file")


def test_tokens_beyond_the_models_vocabulary(tmp_path: Path, out_dir: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"plain\n" * 400_000)  # the offset counts through chunks
    (folder / "b.txt").write_text("naïve")
    refused_without_trace(folder, out_dir, "a.txt: byte 2400000", "token 256 (the end of a document)", vocab_size=256)
    refused_without_trace(folder / "b.txt", out_dir, "b.txt: byte 2", "token 195 does not fit", vocab_size=128)
    ids = np.zeros(2_000_000, np.uint16)
    ids[1_500_000] = 50
    np.save(tmp_path / "ids.npy", ids)
    refused_without_trace(tmp_path / "ids.npy", out_dir, "index 1500000: token 50", "vocabulary of 50", vocab_size=50)
    assert prepare(tmp_path / "ids.npy", out_dir, vocab_size=51).vocab_size == 51


# The place it is written to


def _full_disk(self: TokenWriter, tokens: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_nothing(library: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenWriter, "write", _full_disk)
    with pytest.raises(ResourceError, match="no space left while writing the token files"):
        prepare(library, out_dir)
    assert not out_dir.exists()
    out_dir.mkdir()
    (out_dir / "someone.else").touch()
    with pytest.raises(ResourceError):
        prepare(library, out_dir)
    assert everything_below(out_dir) == {"someone.else"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full(library: Path, out_dir: Path) -> None:
    out_dir.mkdir(parents=True)
    (out_dir / ".train.tokens.partial").symlink_to("/dev/full")
    with pytest.raises(ResourceError, match="no space left"):
        prepare(library, out_dir)
    assert everything_below(out_dir) == set()


def test_an_interruption_leaves_nothing(library: Path, out_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TokenWriter) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenWriter, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare(library, out_dir)
    assert not out_dir.exists()


def test_a_place_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PhalanxError) as caught:
        prepare(library, tmp_path / "file" / "data")
    assert caught.value.exit_code is ExitCode.RESOURCES


def test_preparing_does_not_import_torch() -> None:
    code = "import sys, phalanx.data.corpus, phalanx.data.order, phalanx.data.ngram; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
