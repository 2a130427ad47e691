"""A build gives the same bytes however it is done, goes on after a kill, and leaves nothing
half-written."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import phalanx.data.build_folder as module
from commands import write_text
from phalanx.core.errors import DataError, PhalanxError, ResourceError, RunLockedError
from phalanx.data.build import BuildProgress, build_dataset
from phalanx.data.build_folder import BUILD_STATE_FOLDER
from phalanx.data.dataset import (
    Dataset,
    add_manifest_checksum,
    is_dataset,
    open_dataset,
    verify_dataset,
)
from phalanx.data.shard_writer import ShardWriter
from phalanx.data.shards import PAYLOAD_OFFSET
from phalanx.data.spans import choose_default_shard_bytes
from phalanx.data.tokenizer import load_tokenizer
from phalanx.data.train_tokenizer import train_tokenizer

SMALL = 16_384  # bytes of a shard


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, JSONL and Parquet: small files, and one of each kind that is larger than a shard."""
    folder = write_text(tmp_path_factory.mktemp("corpus") / "texts")
    text = "".join(path.read_text() for path in sorted(folder.iterdir()))
    (folder / "large.txt").write_text(text)
    lines = [line for line in text.splitlines() if line.strip()]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    table = pa.table({"text": [*lines, None]})
    pa.parquet.write_table(table, folder / "rows.parquet", row_group_size=100)
    return folder


@pytest.fixture(scope="module")
def bpe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_tokenizer([str(corpus / "large.txt")], path, vocab_size=600)
    return str(path)


def build(source: Path | str, out: Path, **options: Any) -> Dataset:
    return build_dataset(
        [str(source)], out, shard_bytes=options.pop("shard_bytes", SMALL), **options
    )


def bytes_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def all_tokens(dataset: Dataset) -> list[int]:
    return [token for shard in dataset.shards for token in shard.tokens.tolist()]


# Sameness


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_any_number_of_workers_writes_the_same_bytes(
    corpus: Path, bpe: str, tmp_path: Path, tokenizer: str
) -> None:
    name = bpe if tokenizer == "bpe" else "bytes"
    one = build(corpus, tmp_path / "one", tokenizer=name)
    assert len(one.shards) > 10
    build(corpus, tmp_path / "three", tokenizer=name, num_workers=3)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "three")
    assert not list(tmp_path.glob("*/.*"))  # no state, no partial file


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_file_of_many_shards_has_the_tokens_of_the_whole(
    corpus: Path, bpe: str, tmp_path: Path, tokenizer: str
) -> None:
    encoder = load_tokenizer(bpe if tokenizer == "bpe" else "bytes")
    dataset = build(
        corpus / "large.txt", tmp_path / "out", tokenizer=bpe if tokenizer == "bpe" else "bytes"
    )
    assert len(dataset.shards) > 2
    assert all_tokens(dataset) == [
        *encoder.encode((corpus / "large.txt").read_text()),
        encoder.end_of_document,
    ]
    assert dataset.num_documents == 1
    assert [shard.facts.continues for shard in dataset.shards] == [
        False,
        *[True] * (len(dataset.shards) - 1),
    ]
    assert {int(key) for shard in dataset.shards for key in shard.keys} == {
        int(dataset.shards[0].keys[0])
    }


def test_shards_of_any_size_hold_the_same_documents(corpus: Path, tmp_path: Path) -> None:
    whole = build(corpus, tmp_path / "whole", shard_bytes=1 << 30)
    parts = build(corpus, tmp_path / "parts", shard_bytes=3000)
    assert len(whole.shards) == 1 < len(parts.shards)
    assert all_tokens(whole) == all_tokens(parts)
    assert whole.num_documents == parts.num_documents
    assert whole.manifest.num_skipped_rows == parts.manifest.num_skipped_rows == 1


def test_a_dataset_says_what_it_is_and_opens_again(corpus: Path, bpe: str, tmp_path: Path) -> None:
    dataset = build(corpus, tmp_path / "out", tokenizer=bpe)
    again = open_dataset(tmp_path / "out")
    assert again.digest == dataset.digest
    assert again.manifest == dataset.manifest
    assert again.dtype == "<u2"
    assert again.vocab_size == 600
    tokenizer = again.load_tokenizer()
    assert tokenizer is not None
    assert tokenizer.digest == again.tokenizer.digest == load_tokenizer(bpe).digest
    first = again.shards[0]
    text = (corpus / "abc.py").read_text()
    assert tokenizer.decode(first.tokens[: int(first.ends[0]) - 1]) == text
    assert list(verify_dataset(tmp_path / "out")) == []


def test_a_finished_dataset_is_not_built_again(corpus: Path, tmp_path: Path) -> None:
    build(corpus, tmp_path / "out")
    before = (tmp_path / "out" / "dataset.json").stat().st_mtime_ns
    told: list[BuildProgress] = []
    build(corpus, tmp_path / "out", progress=told.append)
    assert told == []
    assert (tmp_path / "out" / "dataset.json").stat().st_mtime_ns == before
    with pytest.raises(DataError, match=r"another dataset is there \(other shard_bytes\)"):
        build(corpus, tmp_path / "out", shard_bytes=SMALL + 1)
    with pytest.raises(DataError, match=r"another dataset is there .*inputs"):
        build(corpus / "large.txt", tmp_path / "out")


def rewrite(path: Path, old: bytes, new: bytes, *, keep_times: bool = True) -> None:
    """Another content of the same size; with the old modification time, as `cp -p` and archives
    give one."""
    times = path.stat()
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    if keep_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def write_table(path: Path, *texts: str) -> None:
    table = pa.table({"other": ["x" * 50] * len(texts), "text": list(texts)})
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, compression="none", write_statistics=False)
    else:
        pa.feather.write_feather(table, str(path), "uncompressed")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet", "a.feather"])
@pytest.mark.parametrize("keep_times", [True, False])
def test_a_file_that_changed_and_kept_its_size_is_noticed(
    tmp_path: Path, name: str, keep_times: bool
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "b.txt").write_text("nobody touches this")
    path = folder / name
    if name.endswith(("parquet", "feather")):
        write_table(path, "some text", "before")
    elif name.endswith("gz"):
        path.write_bytes(gzip.compress(b'{"text": "before"}\n', 0))
    else:
        path.write_text('{"text": "before"}\n')
    build(folder, out)
    rewrite(path, b"before", b"behind", keep_times=keep_times)
    with pytest.raises(
        DataError, match=rf"another dataset is there \({path} had another content when it was built"
    ):
        build(folder, out)
    rewrite(path, b"behind", b"before")
    build(folder, out)


def test_a_file_that_was_only_touched_or_copied_is_the_same(corpus: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(corpus, folder)
    digest = build(folder, out).digest
    shutil.rmtree(folder)
    shutil.copytree(corpus, folder, copy_function=shutil.copy)  # new times
    assert build(folder, out).digest == digest
    shutil.rmtree(out)
    assert (
        build(folder, out).digest == digest
    )  # dataset.json does not tell when its inputs were written


@pytest.mark.parametrize(("old", "new"), [(b"def", b"fed"), (b"def", b"def")])
def test_a_file_that_changes_after_it_was_read(
    corpus: Path, tmp_path: Path, old: bytes, new: bytes
) -> None:
    """Another content is refused at the end, once; another time alone is no matter."""
    folder, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(corpus, folder)

    def change(progress: BuildProgress) -> None:
        if progress.num_shards_done == progress.num_shards:
            rewrite(folder / "large.txt", old, new)

    if old != new:
        with pytest.raises(DataError, match=r"large\.txt: the file changed after it was read"):
            build(folder, out, progress=change)
    build(folder, out, progress=None if old != new else change)
    build(folder, tmp_path / "straight")
    assert bytes_of(out) == bytes_of(tmp_path / "straight")


def test_progress_ends_with_everything_done(corpus: Path, tmp_path: Path) -> None:
    told: list[BuildProgress] = []
    dataset = build(corpus, tmp_path / "out", progress=told.append)
    assert told[0].num_shards_done == 0
    last = told[-1]
    assert last.num_shards_done == last.num_shards == len(dataset.shards)
    assert (
        last.counts.read_bytes
        == last.total_bytes
        == sum(path.stat().st_size for path in corpus.iterdir())
    )
    assert last.counts.num_tokens == dataset.num_tokens
    assert last.counts.num_documents == dataset.num_documents


@pytest.mark.parametrize("total_bytes", [0, 1, 10**6, 10**9, 3 * 10**10, 10**12, 7 * 10**14])
def test_shards_are_many_enough_to_share_and_few_enough_to_map(total_bytes: int) -> None:
    size = choose_default_shard_bytes(total_bytes)
    assert size == choose_default_shard_bytes(
        total_bytes + total_bytes // 1000
    )  # a little more keeps its shards
    assert total_bytes / size <= 1024
    assert (
        size <= 4 * 2**20
        or total_bytes / size >= 64
        or size == 64 * 2**20
        or total_bytes / size > 512
    )


# Text that spells a special token


def test_text_about_the_end_of_a_document_does_not_end_there(
    corpus: Path, bpe: str, tmp_path: Path
) -> None:
    """Reference: the document, decoded, and the ends that were put behind documents."""
    text = "A text ends with <|endoftext|> in GPT-2.\n<|endoftext|><|endoftext|>"
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 3)
    dataset = build(tmp_path / "rows.jsonl", tmp_path / "out", tokenizer=bpe)
    tokens, encoder = all_tokens(dataset), load_tokenizer(bpe)
    assert tokens.count(encoder.end_of_document or 0) == dataset.num_documents == 3
    assert encoder.decode(tokens) == f"{text}\n" * 3
    assert dataset.manifest.num_ends_in_text == 0


def test_a_tokenizer_that_cannot_tell_its_end_from_text_is_found_out(tmp_path: Path) -> None:
    """Unigram models hold "</s>" as a piece of text like any other."""
    import tokenizers

    unigram = tokenizers.Tokenizer(
        tokenizers.models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -1.0)], 0, False)
    )
    unigram.add_special_tokens(["</s>"])
    unigram.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("aa</s>a</s>")
    dataset = build(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path))
    assert dataset.manifest.num_ends_in_text == 2


# Interruptions


def interrupted(corpus: Path, out: Path, after: int, **options: Any) -> None:
    """A build that ends in the middle of shard number `after`."""

    def stop(progress: BuildProgress) -> None:
        if progress.num_shards_done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(corpus, out, progress=stop, **options)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_interrupted_build_keeps_its_shards_and_goes_on(
    corpus: Path, tmp_path: Path, num_workers: int
) -> None:
    build(corpus, tmp_path / "straight")
    out = tmp_path / "out"
    interrupted(corpus, out, 4, num_workers=num_workers)
    assert not is_dataset(out)
    kept = {path.name: path.stat().st_ino for path in out.glob("shard-*.tokens")}
    assert len(kept) >= 4
    assert not list(out.glob(".*.partial"))
    with pytest.raises(DataError, match="no finished dataset"):
        open_dataset(out)
    told: list[BuildProgress] = []
    build(corpus, out, num_workers=num_workers, progress=told.append)
    assert told[0].num_shards_kept == told[0].num_shards_done == 4
    again = {path.name: path.stat().st_ino for path in out.glob("shard-*.tokens")}
    assert sum(again[name] == number for name, number in kept.items()) >= 4  # not written again
    assert bytes_of(out) == bytes_of(tmp_path / "straight")


def test_other_options_do_not_go_on_with_an_unfinished_build(
    corpus: Path, bpe: str, tmp_path: Path
) -> None:
    interrupted(corpus, tmp_path / "out", 2)
    with pytest.raises(DataError, match=r"unfinished build with other options.*tokenizer"):
        build(corpus, tmp_path / "out", tokenizer=bpe)
    build(corpus, tmp_path / "out")


def test_inputs_that_changed_meanwhile_are_read_again(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(corpus, folder)
    interrupted(folder, tmp_path / "out", 8)
    (folder / "large.txt").write_text("something else\n" + (folder / "large.txt").read_text())
    told: list[BuildProgress] = []
    dataset = build(folder, tmp_path / "out", progress=told.append)
    assert 0 < told[0].num_shards_kept < 8
    build(folder, tmp_path / "straight")
    assert all_tokens(dataset) == all_tokens(open_dataset(tmp_path / "straight"))


def test_inputs_that_changed_and_kept_size_and_time_are_read_again(
    corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(corpus, folder)
    interrupted(folder, tmp_path / "out", 8)
    rewrite(folder / "large.txt", b"import", b"export")
    build(folder, tmp_path / "out")
    build(folder, tmp_path / "straight")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


def test_a_shard_that_was_damaged_meanwhile_is_built_again(corpus: Path, tmp_path: Path) -> None:
    interrupted(corpus, tmp_path / "out", 3)
    os.truncate(tmp_path / "out" / "shard-00001.tokens", 5000)
    told: list[BuildProgress] = []
    build(corpus, tmp_path / "out", progress=told.append)
    assert told[0].num_shards_kept == 2
    assert list(verify_dataset(tmp_path / "out")) == []


def test_two_builds_of_one_place(corpus: Path, tmp_path: Path) -> None:
    shards_done: list[int] = []

    def second(progress: BuildProgress) -> None:
        with pytest.raises(RunLockedError, match="another build is writing there"):
            build(corpus, tmp_path / "out")
        shards_done.append(progress.num_shards_done)

    dataset = build(corpus, tmp_path / "out", progress=second)
    assert shards_done[0] < len(dataset.shards), (
        "the second build was refused while the first had shards to write"
    )
    build(corpus, tmp_path / "straight")
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "straight")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_build_where_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As on network file systems without flock. A disk that fails is told, and leaves no file
    open."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    num_open = len(os.listdir("/proc/self/fd"))
    if code == errno.EIO:
        with pytest.raises(OSError), module.lock_output_folder(tmp_path):
            pass
    else:
        with module.lock_output_folder(tmp_path), module.lock_output_folder(tmp_path):
            assert (tmp_path / BUILD_STATE_FOLDER / module.LOCK_FILE_NAME).exists()
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize("shard_bytes", [SMALL, 2 * SMALL])
def test_a_build_that_finishes_between_a_look_and_the_lock_is_not_overwritten(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    out = tmp_path / "out"
    lock = module._lock_state_folder

    def late(directory: Path) -> int:
        monkeypatch.setattr(module, "_lock_state_folder", lock)
        build(corpus, out)  # somebody else was quicker
        return lock(directory)

    monkeypatch.setattr(module, "_lock_state_folder", late)
    if shard_bytes == SMALL:
        told: list[BuildProgress] = []
        build(corpus, out, progress=told.append)
        assert told == []
    else:
        with pytest.raises(DataError, match=r"another dataset is there \(other shard_bytes\)"):
            build(corpus, out, shard_bytes=shard_bytes)
    assert list(verify_dataset(out)) == []


def test_an_error_takes_everything_away_if_that_is_wanted(corpus: Path, tmp_path: Path) -> None:
    for existed in (False, True):
        if existed:
            (tmp_path / "out").mkdir()
        with pytest.raises(DataError, match="no field 'nothing'"):
            build(corpus / "rows.jsonl", tmp_path / "out", column="nothing", keep_unfinished=False)
        assert (tmp_path / "out").exists() is existed
    assert os.listdir(tmp_path / "out") == []


# The place it is written to


@pytest.mark.parametrize("content", ["file", "folder"])
def test_a_place_that_holds_something_else(corpus: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    if content == "file":
        out.write_text("precious")
    else:
        out.mkdir()
        (out / "thesis.tex").write_text("precious")
    with pytest.raises(
        DataError, match="not a folder" if content == "file" else "'thesis.tex' is there"
    ):
        build(corpus, out)
    assert (out if content == "file" else out / "thesis.tex").read_text() == "precious"
    assert content == "file" or os.listdir(out) == ["thesis.tex"]


def test_a_place_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PhalanxError) as caught:
        build(corpus, tmp_path / "file" / "out")
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_full_disk_leaves_whole_shards_only(
    corpus: Path, tmp_path: Path, num_workers: int
) -> None:
    """Really full: files may grow to 40 kB and no further, here and in the workers."""
    code = """
import resource, signal, sys
from pathlib import Path
from phalanx.core.errors import PhalanxError
from phalanx.data.build import build_dataset
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    build_dataset([sys.argv[1]], Path(sys.argv[2]), shard_bytes=60_000, num_workers=int(sys.argv[3]))
except PhalanxError as error:
    print(type(error).__name__, error)
"""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", code, str(corpus), str(out), str(num_workers)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ResourceError")
    assert "writing the token shards (File too large)" in done.stdout
    assert not is_dataset(out)
    assert not list(out.glob(".*.partial"))
    for left in out.glob("*.tokens"):
        assert left.stat().st_size < 40_000
    build(corpus, out, shard_bytes=60_000)


def test_no_space_is_said_as_such(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: ShardWriter, *anything: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ShardWriter, "write_documents", full)
    with pytest.raises(ResourceError, match="no space left while writing the token shards"):
        build(corpus, tmp_path / "out", keep_unfinished=False)
    assert not (tmp_path / "out").exists()


# Inputs that change, workers that die


def test_a_file_that_grows_while_it_is_read(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(corpus, folder)

    def grow(progress: BuildProgress) -> None:
        with open(folder / "large.txt", "a") as file:
            file.write("more")

    with pytest.raises(DataError, match=r"large\.txt: the file changed while it was being read"):
        build(folder, tmp_path / "out", progress=grow)


def test_a_worker_that_is_killed_is_named(corpus: Path, tmp_path: Path) -> None:
    import psutil

    def kill(progress: BuildProgress) -> None:
        if progress.num_shards_done == 2:
            for child in psutil.Process().children():
                child.kill()

    with pytest.raises(ResourceError, match=r"a worker died while building shard-.*SIGKILL"):
        build(corpus, tmp_path / "out", num_workers=2, progress=kill)
    assert psutil.Process().children() == []
    build(corpus, tmp_path / "out")


def test_an_error_of_a_worker_is_the_error_of_the_build(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(corpus, folder)
    with open(folder / "rows.jsonl", "a") as file:
        file.write('{"text": 1}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:\d+: the field 'text' is an integer"):
        build(folder, tmp_path / "out", num_workers=2)


# Memory


@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="needs Linux's own account of memory"
)
@pytest.mark.parametrize(
    "kind",
    [
        "txt",
        pytest.param("jsonl", marks=pytest.mark.long),
        pytest.param("parquet", marks=pytest.mark.long),
    ],
)
def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, kind: str) -> None:
    """200 MB go through an interpreter that never holds 100 MB more than it had before."""
    path = tmp_path / f"large.{kind}"
    block = "".join(f"line {number} of a file that does not fit\n" for number in range(2500))
    if kind == "parquet":
        table = pa.table({"text": [block] * 2000})
        pa.parquet.write_table(
            table, path, row_group_size=50, compression="none", use_dictionary=False
        )
    else:
        with open(path, "w") as file:
            for _ in range(2000):
                file.write(block if kind == "txt" else json.dumps({"text": block}) + "\n")
    code = """
import sys
from pathlib import Path
import pyarrow.parquet
from phalanx.data.build import build_dataset

def peak_kib():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])

before = peak_kib()
build_dataset([sys.argv[1]], Path(sys.argv[2]), shard_bytes=2**40)
print(peak_kib() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert open_dataset(tmp_path / "out").source_bytes > 180e6
    assert int(done.stdout) < 100 * 1024
    shutil.rmtree(tmp_path)


# Shards that are not those of the dataset


@pytest.fixture(scope="module")
def pristine(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine") / "tokens"
    build(corpus, directory)
    return directory


@pytest.fixture
def built(pristine: Path, tmp_path: Path) -> Path:
    """A dataset to damage."""
    shutil.copytree(pristine, tmp_path / "built")
    return tmp_path / "built"


def found_wrong(directory: Path) -> str:
    """What opening says; verifying must find the same."""
    with pytest.raises(DataError) as caught:
        open_dataset(directory)
    assert "\n" not in str(caught.value)
    assert any(caught.value.what == problem.what for problem in verify_dataset(directory))
    return str(caught.value)


def test_a_shard_that_is_missing(built: Path) -> None:
    (built / "shard-00001.tokens").unlink()
    assert "shard-00001.tokens: the shard is missing" in found_wrong(built)


def test_a_shard_that_is_cut_off(built: Path) -> None:
    os.truncate(built / "shard-00001.tokens", 9000)
    assert "shard-00001.tokens: the shard is cut off (9000 bytes instead of" in found_wrong(built)


def test_a_shard_that_is_empty(built: Path) -> None:
    os.truncate(built / "shard-00001.tokens", 0)
    assert "shard-00001.tokens: the shard is empty" in found_wrong(built)


def test_a_shard_in_the_place_of_another(built: Path) -> None:
    shutil.copy(built / "shard-00002.tokens", built / "shard-00001.tokens")
    assert "shard-00001.tokens: the shard is not of this dataset (checksum" in found_wrong(built)


def test_a_shard_made_with_another_tokenizer(
    corpus: Path, built: Path, bpe: str, tmp_path: Path
) -> None:
    build(corpus, tmp_path / "other", tokenizer=bpe)
    shutil.copy(tmp_path / "other" / "shard-00001.tokens", built / "shard-00001.tokens")
    assert "made with tokenizer" in found_wrong(built)


def test_a_tokenizer_that_is_not_that_of_its_shards(corpus: Path, bpe: str, tmp_path: Path) -> None:
    dataset = build(corpus, tmp_path / "out", tokenizer=bpe)
    train_tokenizer([str(corpus)], tmp_path / "else.json", vocab_size=300)
    shutil.copy(tmp_path / "else.json", tmp_path / "out" / "tokenizer.json")
    with pytest.raises(DataError, match="the tokenizer is not the one of its shards"):
        dataset.load_tokenizer()
    (problem,) = verify_dataset(tmp_path / "out")
    assert "the tokenizer is not the one of its shards" in str(problem)


def test_token_ids_beyond_the_vocabulary(built: Path) -> None:
    with ShardWriter(
        built / "shard-00001.tokens", "<u2", 60_000, open_dataset(built).tokenizer.digest
    ) as writer:
        writer.begin_document(1)
        writer.write(np.array([5, 50_000]))
        writer.commit()
    assert "token 50000, the dataset's vocabulary has 257" in found_wrong(built)


def test_several_bad_shards_are_named_at_once(built: Path) -> None:
    (built / "shard-00001.tokens").unlink()
    os.truncate(built / "shard-00003.tokens", 10)
    with pytest.raises(DataError) as caught:
        open_dataset(built)
    line = str(caught.value)
    assert line.count("shard-0000") == 2
    assert "2 of " in line
    assert len(list(verify_dataset(built))) == 2


def test_a_flipped_bit_is_found_by_verifying(built: Path) -> None:
    path = built / "shard-00002.tokens"
    content = bytearray(path.read_bytes())
    content[PAYLOAD_OFFSET + 77] ^= 1
    path.write_bytes(content)
    open_dataset(built)  # looks at headers only
    (problem,) = verify_dataset(built)
    assert problem.where == str(path)
    assert "bytes 4096 to" in problem.what


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 2}', "null"])
def test_a_dataset_json_that_is_not_one(built: Path, content: str) -> None:
    (built / "dataset.json").write_text(content)
    with pytest.raises(DataError, match=r"dataset\.json") as caught:
        open_dataset(built)
    assert "Error" not in str(caught.value), "of Python's words none"
    assert len(list(verify_dataset(built))) == 1


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("vocab_size", "x", "vocab_size is 'x'"),
        ("source_bytes", None, "source_bytes is None"),
        ("num_not_utf8", -1, "num_not_utf8 is -1"),
        ("end_of_document", 257, "end_of_document is 257"),
        ("end_of_document", True, "end_of_document is True"),
        ("column", 3, "column is 3"),
        ("inputs", ["a"], "dataset.json cannot be used"),
        ("inputs", [{"source": 1, "num_files": 1, "num_bytes": 1}], "inputs.0.source is 1"),
        ("vocab_size", 10**15, "vocab_size 257, dataset.json says 1000000000000000"),
    ],
)
def test_a_dataset_json_with_a_value_that_cannot_be(
    built: Path, key: str, value: Any, said: str
) -> None:
    edit_manifest(built, {key: value})
    with pytest.raises(DataError) as caught:
        open_dataset(built)
    assert said in str(caught.value)


def edit_manifest(directory: Path, changed: dict[str, Any]) -> None:
    """dataset.json with other values and the checksum of those."""
    manifest = json.loads((directory / "dataset.json").read_text()) | changed
    del manifest["checksum"]
    (directory / "dataset.json").write_text(json.dumps(add_manifest_checksum(manifest)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"end_of_document": 255}, "it was changed: its checksum is"),
        ({"checksum": None}, "and it says None"),
    ],
)
def test_a_dataset_json_that_was_edited_is_refused(
    built: Path, changed: dict[str, Any], said: str
) -> None:
    """Values that could be, too: another end of a document is another dataset."""
    manifest = json.loads((built / "dataset.json").read_text()) | changed
    (built / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=said):
        open_dataset(built)
    assert [said in str(problem) for problem in verify_dataset(built)] == [True]
    del manifest["checksum"]
    (built / "dataset.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="it has no checksum"):
        open_dataset(built)


def test_a_dataset_json_that_reaches_outside(built: Path) -> None:
    shards = json.loads((built / "dataset.json").read_text())["shards"]
    edit_manifest(built, {"shards": [shards[0] | {"file": "../../secret"}, *shards[1:]]})
    with pytest.raises(DataError, match="not a usable name"):
        open_dataset(built)


def test_a_dataset_is_not_text(built: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it is a dataset already"):
        build(built, tmp_path / "again")


def test_state_of_a_build_that_died_on_its_last_step_is_taken_away(
    corpus: Path, built: Path
) -> None:
    (built / BUILD_STATE_FOLDER).mkdir()
    build(corpus, built)
    assert not (built / BUILD_STATE_FOLDER).exists()


def test_building_does_not_import_torch_or_arrow() -> None:
    code = (
        "import sys, phalanx.data.build, phalanx.data.stats; sys.exit(bool({'torch', 'pyarrow'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_reader_of_the_docs_reads_what_is_written(
    corpus: Path, bpe: str, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    dataset = build(corpus, tmp_path / "out", tokenizer=bpe, shard_bytes=1 << 30)
    (shard,) = dataset.shards
    documents, header = names["read_shard"](tmp_path / "out" / "shard-00000.tokens")
    assert header["max_token_id"] == shard.facts.max_token_id
    assert [len(document) for document in documents] == np.diff(
        shard.ends.astype(int), prepend=0
    ).tolist()
    assert np.concatenate(documents).tolist() == shard.tokens.tolist()


def test_a_dataset_of_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(90))
    )
    assert len(build(tmp_path / "rows.jsonl", tmp_path / "out", shard_bytes=18).shards) > 80
    code = """
import resource, sys
from pathlib import Path
from phalanx.data.dataset import open_dataset
resource.setrlimit(resource.RLIMIT_NOFILE, (50, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(open_dataset(Path(sys.argv[1])).num_documents)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("90\n", "")


def test_files_beside_the_user_are_not_taken_for_libraries(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('not numpy')")
    code = """
import sys
from pathlib import Path
from phalanx.data.build import build_dataset
build_dataset([sys.argv[1]], Path("out"), num_workers=2, shard_bytes=50_000)
"""
    command = [sys.executable, "-P", "-c", code, str(corpus)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(open_dataset(tmp_path / "out").shards) > 1
