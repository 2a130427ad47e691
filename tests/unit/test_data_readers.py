"""Files of every kind become documents; what is wrong in them is named by file and line, row or
column."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet
import pytest

from phalanx.core.digest import hash_to_stable_64_bits
from phalanx.core.errors import DataError, EnvironmentProblem
from phalanx.data.build import build_dataset
from phalanx.data.dataset import Dataset
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.report.dataset_page import describe_left_out_inputs

ROWS = ["first row", "", "zweite Zeile: Größe", None, "line one\nline two", "the last 🙂"]
TEXTS = [row for row in ROWS if row is not None]


def build(inputs: Iterable[Path | str], out: Path, **options: Any) -> Dataset:
    return build_dataset([str(each) for each in inputs], out, **options)


def texts_of(dataset: Dataset) -> list[str]:
    """Every document of a dataset of bytes, without its end."""
    found = []
    for shard in dataset.shards:
        for start, end in zip([0, *shard.ends[:-1].tolist()], shard.ends.tolist(), strict=True):
            assert shard.tokens[end - 1] == 256
            found.append(ByteTokenizer().decode(shard.tokens[start : end - 1]))
    return found


def refused(inputs: Iterable[Path | str], out: Path, *said: str, **options: Any) -> None:
    with pytest.raises(DataError) as caught:
        build(inputs, out, keep_unfinished=False, **options)
    line = str(caught.value)
    assert "\n" not in line
    for part in said:
        assert part in line, line
    assert not out.exists()


def write_jsonl(path: Path, rows: Iterable[Any], column: str = "text") -> Path:
    lines = "".join(
        json.dumps({"id": number, column: row}) + "\n" for number, row in enumerate(rows)
    )
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.name.endswith(".zst"):
        with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as file:
            file.write(lines.encode())
    else:
        path.write_text(lines)
    return path


def write_parquet(
    path: Path, values: Any = ROWS, column: str = "text", rows_per_group: int = 2
) -> Path:
    table = pa.table({"id": list(range(len(values))), column: values})
    pa.parquet.write_table(table, path, row_group_size=rows_per_group)
    return path


def write_arrow(path: Path, values: Any = ROWS, *, stream: bool = False) -> Path:
    table = pa.table({"id": list(range(len(values))), "text": values})
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_feather(path: Path, values: Any = ROWS) -> Path:
    pa.feather.write_feather(pa.table({"text": values}), str(path), compression="lz4", chunksize=2)
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": lambda path: write_jsonl(path, ROWS),
    "rows.ndjson": lambda path: write_jsonl(path, ROWS),
    "rows.jsonl.gz": lambda path: write_jsonl(path, ROWS),
    "rows.json.gz": lambda path: write_jsonl(path, ROWS),
    "rows.jsonl.zst": lambda path: write_jsonl(path, ROWS),
    "rows.parquet": write_parquet,
    "rows.arrow": write_arrow,
    "stream.arrow": lambda path: write_arrow(path, stream=True),
    "rows.feather": write_feather,
    "large.parquet": lambda path: write_parquet(path, pa.array(ROWS, pa.large_string())),
    "dictionary.parquet": lambda path: write_parquet(path, pa.array(ROWS).dictionary_encode()),
    "view.parquet": lambda path: write_parquet(path, pa.array(ROWS, pa.string_view())),
}


@pytest.mark.parametrize("name", list(WRITERS))
@pytest.mark.parametrize("shard_bytes", [20, 1 << 20])
def test_every_row_is_a_document(tmp_path: Path, name: str, shard_bytes: int) -> None:
    """Also where every row group, batch or line is a shard of its own; null rows are skipped and
    counted."""
    path = WRITERS[name](tmp_path / name)
    dataset = build([path], tmp_path / "out", shard_bytes=shard_bytes)
    assert texts_of(dataset) == TEXTS
    assert dataset.manifest.num_skipped_rows == 1
    assert dataset.num_documents == len(TEXTS)
    assert dataset.source_bytes == sum(len(text.encode()) for text in TEXTS)
    keys = np.concatenate([shard.keys for shard in dataset.shards]).tolist()
    assert len(set(keys)) == len(TEXTS)
    if name.endswith((".parquet", ".arrow", ".feather")):
        rows = [number for number, row in enumerate(ROWS) if row is not None]
        if not name.endswith(".parquet"):
            rows = [(number // 2 << 32) + number % 2 for number in rows]  # in batches of two
        assert keys == [hash_to_stable_64_bits("held_out", name, row) for row in rows]


def test_who_a_row_is_does_not_depend_on_shards(tmp_path: Path) -> None:
    """Its key is made of the name of its file and its own place in it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_jsonl(tmp_path / "a" / "rows.jsonl", ROWS)
    whole = build([tmp_path / "a" / "rows.jsonl"], tmp_path / "one")
    parts = build([tmp_path / "a" / "rows.jsonl"], tmp_path / "many", shard_bytes=30)
    assert len(parts.shards) > 2
    assert np.concatenate([s.keys for s in parts.shards]).tolist() == whole.shards[0].keys.tolist()
    assert (
        np.concatenate([s.tokens for s in parts.shards]).tolist() == whole.shards[0].tokens.tolist()
    )


def test_a_tree_of_everything(tmp_path: Path) -> None:
    """Folders are walked in order of name; text, rows and what is neither lie side by side."""
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "a.txt").write_text("plain text\n")
    write_jsonl(tree / "b.jsonl", ["row"])
    write_parquet(tree / "deep" / "c.parquet", ["column"])
    (tree / "d.png").write_bytes(b"\x89PNG\0\0")
    (tree / ".hidden").write_text("not this")
    (tree / "empty.md").touch()
    dataset = build([tree], tmp_path / "out")
    assert texts_of(dataset) == ["plain text\n", "row", "column"]
    assert (dataset.num_skipped_files, dataset.manifest.num_empty_files) == (1, 1)


def test_several_inputs_are_taken_in_turn(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.txt").write_text(f"of {folder}")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "same.txt").write_text("of z")
    dataset = build([tmp_path / "y", tmp_path / "x", f"{tmp_path}/[z]/same.*"], tmp_path / "out")
    assert texts_of(dataset) == ["of y", "of x", "of z"]
    assert len(set(dataset.shards[0].keys.tolist())) == 3
    assert [one["num_files"] for one in dataset.manifest.inputs] == [1, 1, 1]
    alone = build([tmp_path / "y"], tmp_path / "alone")
    assert (
        alone.shards[0].keys[0]
        == dataset.shards[0].keys[0]
        == hash_to_stable_64_bits("held_out", "same.txt")
    )


# What is in an input, and is not to be read


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """a.txt and sub/b.txt; link.txt and linked/ lead to them again."""
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "a.txt").write_text("first")
    (tree / "sub" / "b.txt").write_text("second")
    (tree / "link.txt").symlink_to("a.txt")
    (tree / "linked").symlink_to("sub")
    return tree


@pytest.mark.parametrize(
    ("inputs", "num_repeated"),
    [
        (["tree"], 1),
        (["tree/*.txt"], 1),
        (["tree", "tree"], 4),
        (["tree", "tree/**/*.txt"], 5),
        (["tree/a.txt", "tree/linked/b.txt", "tree/sub"], 1),
        (["tree/link.txt", "tree/linked", "tree"], 3),
    ],
)
def test_a_file_is_read_once_whatever_ways_lead_to_it(
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: list[str],
    num_repeated: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset = build(inputs, tmp_path / "out")
    assert texts_of(dataset) == (["first"] if inputs == ["tree/*.txt"] else ["first", "second"])
    assert dataset.manifest.num_repeated_files == num_repeated


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.*"])
def test_datasets_in_an_input_are_no_text(tree: Path, tmp_path: Path, pattern: str) -> None:
    """The one that is being built neither, however often; one that was not finished, nor one
    with its own tokenizer."""
    straight = build([tree], tmp_path / "straight")
    out = tree / "sub" / "tokens"
    build([f"{tree}{pattern}"], out)
    (out / "tokenizer.json").write_text("{}")
    again = build([f"{tree}{pattern}"], out)
    assert texts_of(again) == ["first", "second"]
    assert again.manifest.num_skipped_folders == 0
    other = build([f"{tree}{pattern}"], tmp_path / "other")
    assert other.manifest.num_skipped_folders == 1
    assert texts_of(other) == texts_of(straight)
    (out / "dataset.json").unlink()
    assert texts_of(build([f"{tree}{pattern}"], tmp_path / "third")) == texts_of(straight)
    for source in (out, f"{out}/*"):
        refused(
            [source],
            tmp_path / "fourth",
            "a dataset that was not finished",
            "token shards without dataset.json",
        )


@pytest.mark.parametrize("pattern", ["", "/**", "/**/*.*"])
def test_runs_in_an_input_are_no_text(tree: Path, tmp_path: Path, pattern: str) -> None:
    """data.source="." is the natural thing to say, and runs lie below it from the second time
    on."""
    run = tree / "runs" / "train-1"
    (run / "events").mkdir(parents=True)
    for name in ("job.json", "plan.json", "events/rank-0000.jsonl"):
        (run / name).write_text("{}")
    built = build([f"{tree}{pattern}"], tmp_path / "out")
    assert texts_of(built) == ["first", "second"]
    assert built.manifest.num_skipped_folders == 1


def test_nothing_but_a_dataset(tree: Path, tmp_path: Path) -> None:
    build([tree], tmp_path / "only" / "tokens")
    refused(
        [tmp_path / "only"],
        tmp_path / "out",
        "only: there is no text in it (a dataset or a run is all that is there)",
    )
    refused([tmp_path / "only" / "tokens" / "*"], tmp_path / "out", "it is a dataset already")


def test_what_is_no_file_is_counted(tree: Path, tmp_path: Path) -> None:
    """A broken link, a pipe, a folder that a link leads to; nobody waits for what comes out of a
    pipe."""
    straight = build([tree], tmp_path / "straight")
    assert straight.manifest.num_not_files == 1, "linked/"
    (tree / "broken.txt").symlink_to("gone.txt")
    os.mkfifo(tree / "sub" / "pipe.txt")
    for source, number in ((tree, 3), (f"{tree}/**/*.txt", 2)):
        found = build(
            [source], tmp_path / f"out-{number}"
        )  # a pattern follows linked/, and knows the pipe again
        assert (texts_of(found), found.manifest.num_not_files) == (["first", "second"], number)
        assert f"{number} entries that are no files skipped" in "; ".join(
            describe_left_out_inputs(found.manifest)
        )


@pytest.mark.parametrize("where", ["inside", "deep/inside"])
def test_a_dataset_is_not_built_inside_another(tree: Path, tmp_path: Path, where: str) -> None:
    out = tmp_path / "out"
    build([tree], out)
    refused([tree], out / where, "the folder lies inside a dataset", f"{out} is one")
    assert texts_of(build([tree], out)) == ["first", "second"]


@pytest.mark.parametrize(
    ("content", "texts", "num_as_text"),
    [
        ('{"text": "one"}\n\n{"text": "two"}\n', ["one", "two"], 0),
        ('\ufeff{"text": "one"}\n{"text": "two"}', ["one", "two"], 0),
        ('[{"text": "one"},\n{"text": "two"}]', None, 1),
        ('{"text": "one"}\n', None, 1),
        ('{\n  "text": "one"\n}\n', None, 1),
        ("1\n2\n", None, 1),
        ("[" * 100_000, None, 1),
    ],
    ids=[
        "objects",
        "byte order mark",
        "array",
        "one object",
        "one object in lines",
        "numbers",
        "deep",
    ],
)
def test_a_json_file_is_rows_where_it_has_an_object_per_line(
    content: str, texts: list[str] | None, num_as_text: int, tmp_path: Path
) -> None:
    """As .json.gz is; what is text all the same is said."""
    (tmp_path / "a.json").write_text(content)
    dataset = build([tmp_path / "a.json"], tmp_path / "out")
    assert texts_of(dataset) == (texts or [content])
    assert dataset.manifest.num_json_as_text == num_as_text
    assert (
        "1 .json file read as text" in "; ".join(describe_left_out_inputs(dataset.manifest))
    ) == bool(num_as_text)


def test_a_dataset_json_of_somebody_else_is_text(tree: Path, tmp_path: Path) -> None:
    (tree / "sub" / "dataset.json").write_text('{"title": "mine"}')
    assert texts_of(build([tree], tmp_path / "out")) == ["first", "second", '{"title": "mine"}']


def test_another_column(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["one"], "content")
    write_parquet(tmp_path / "b.parquet", ["two"], "content")
    dataset = build(
        [tmp_path / "a.jsonl", tmp_path / "b.parquet"], tmp_path / "out", column="content"
    )
    assert texts_of(dataset) == ["one", "two"]


def test_blank_lines_and_a_last_line_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\r\n\n  \n{"text": "two"}')
    dataset = build([tmp_path / "a.jsonl"], tmp_path / "out")
    assert texts_of(dataset) == ["one", "two"]
    assert dataset.manifest.num_skipped_rows == 0


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_byte_order_mark_before_the_first_row(tmp_path: Path, ending: str) -> None:
    content = b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n'
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    assert texts_of(build([path], tmp_path / "out")) == ["one", "two"]


# What is wrong with rows


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "broken', "rows.jsonl:4: not JSON"),
        ('["text"]', "rows.jsonl:4: the row is an array, not an object"),
        ('"text"', "rows.jsonl:4: the row is a string"),
        (
            '{"txt": "x", "id": 3}',
            "rows.jsonl:4: there is no field 'text' (it has: txt, id); did you mean \"txt\"?",
        ),
        ("{}", "it has none"),
        ('{"text": 12}', "rows.jsonl:4: the field 'text' is an integer, not a string"),
        ('{"text": 1.5}', "a number, not a string"),
        ('{"text": {"a": 1}}', "an object, not a string; make one text of it first"),
        ("[" * 100_000, "rows.jsonl:4: not JSON"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, line: str, said: str, ending: str
) -> None:
    good = json.dumps({"text": "fine"})
    content = f"{good}\n\n{good}\n{line}\n{good}\n".encode()
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    refused([path], tmp_path / "out", said.replace("rows.jsonl", path.name))


def test_a_bad_row_far_into_a_file_that_is_read_in_parts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [f"row {number}" for number in range(999)])
    with open(path, "a") as file:
        file.write('{"text": null, "id": 1}\n{"text": 7}\n')
    refused([path], tmp_path / "out", "rows.jsonl:1001", "an integer", shard_bytes=1000)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "stream.arrow", "rows.feather"])
def test_a_column_that_does_not_exist(tmp_path: Path, name: str) -> None:
    path = WRITERS[name](tmp_path / name)
    refused(
        [path],
        tmp_path / "out",
        name,
        "no column 'txt'",
        "text",
        'did you mean "text"?',
        column="txt",
    )


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name(tmp_path: Path, ending: str) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = tmp_path / f"twice.{ending}"
    if ending == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    refused([path], tmp_path / "out", f"{path}: 2 columns are called 'text'")


def test_a_column_of_many_is_listed_in_part(tmp_path: Path) -> None:
    pa.parquet.write_table(
        pa.table({f"c{number}": ["x"] for number in range(100)}), tmp_path / "wide.parquet"
    )
    refused(
        [tmp_path / "wide.parquet"],
        tmp_path / "out",
        "c0, c1",
        "and 80 more",
        "--column",
        column="zzz",
    )


def test_a_column_that_is_text_in_one_file_and_a_number_in_another(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["one", "two"])
    write_parquet(tmp_path / "b.parquet", [1, 2])
    write_arrow(tmp_path / "c.arrow", [[1.5], [2.5]])
    refused(
        [tmp_path],
        tmp_path / "out",
        "b.parquet",
        "'text' holds int64, not text",
        "columns of text: none",
    )
    refused([tmp_path / "c.arrow"], tmp_path / "out", "c.arrow", "list<item: double>")


def test_a_column_of_nulls_only_has_no_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", [None, None])
    refused([tmp_path / "a.parquet"], tmp_path / "out", "no text in it", "2 null rows")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.feather"])
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("once upon a time")
    refused([tmp_path / name], tmp_path / "out", name, "not a readable")
    (tmp_path / name).write_bytes(b"FEA1\0\0")
    refused([tmp_path / name], tmp_path / "out", name)


def test_a_truncated_parquet_file(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    refused([path], tmp_path / "out", "a.parquet", "not a readable Parquet file")


def test_a_damaged_page_of_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    values = [f"row {number} " * 50 for number in range(3000)]
    pa.parquet.write_table(
        pa.table({"text": values}), path, compression="zstd", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[2000:2100] = bytes(100)
    path.write_bytes(content)
    refused([path], tmp_path / "out", "a.parquet", "damaged")


@pytest.mark.parametrize("wrong", [-4, 10**6])
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (pa.string(), "<i4"),
        (pa.large_string(), "<i8"),
        (pa.dictionary(pa.int32(), pa.string()), "<i4"),  # its indices
    ],
)
def test_an_arrow_file_whose_offsets_lead_out_of_it(
    tmp_path: Path, kind: pa.DataType, number: str, wrong: int
) -> None:
    """Pyarrow follows them: it ended the process, or gave what lay in its memory as text."""
    values = pa.array([f"{row:4}" for row in range(64)]).cast(kind)
    pa.feather.write_feather(
        pa.table({"text": values}), tmp_path / "a.feather", compression="uncompressed"
    )
    step = 1 if pa.types.is_dictionary(kind) else 4
    right = np.arange(8, 12, dtype=number) * step
    damaged = right.copy()
    damaged[2] = wrong
    content = (tmp_path / "a.feather").read_bytes()
    assert content.count(right.tobytes()) == 1
    (tmp_path / "a.feather").write_bytes(content.replace(right.tobytes(), damaged.tobytes()))
    refused([tmp_path / "a.feather"], tmp_path / "out", "a.feather", "the Arrow file is damaged")


@pytest.mark.parametrize("name", ["a.parquet", "a.feather"])
def test_names_of_columns_that_are_not_utf8(tmp_path: Path, name: str) -> None:
    path = WRITERS[name.replace("a.", "rows.")](tmp_path / name)
    path.write_bytes(path.read_bytes().replace(b"text", b"\xfeext"))
    refused([path], tmp_path / "out", name, "'utf-8' codec can't decode byte 0xfe")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_damaged_compressed_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("not compressed\n")
    refused([tmp_path / name], tmp_path / "out", name)
    write_jsonl(tmp_path / name, [f"row {number}" for number in range(3000)])
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    refused([tmp_path / name], tmp_path / "out", name)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.zst"])
def test_without_arrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = WRITERS[name](tmp_path / name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem, match=r"needs pyarrow .*pip install 'phalanx\[data\]'"):
        build([path], tmp_path / "out")


# Bytes that are not UTF-8


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """As bytes they stay what they are; a tokenizer of text gets U+FFFD for them, and that is
    said."""
    (tmp_path / "latin1.txt").write_bytes("Größe\n".encode("latin-1"))
    dataset = build([tmp_path / "latin1.txt"], tmp_path / "bytes")
    assert bytes(dataset.shards[0].tokens[:-1].astype(np.uint8)) == "Größe\n".encode("latin-1")
    assert dataset.manifest.num_not_utf8 == 0


def test_rows_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "Gr\xf6\xdfe"}\n{"text": "half a \\ud83d pair"}\n'
    )
    dataset = build([tmp_path / "a.jsonl"], tmp_path / "out")
    assert texts_of(dataset) == ["Gr��e", "half a � pair"]
    assert dataset.manifest.num_not_utf8 == 2
