"""A row without end (a line, a cell, what a small compressed file unfolds to) is refused where
it stands: exit 4."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from phalanx.cli import _app
from phalanx.data.cuts import MAX_ROW_BYTES

LONG = "x" * (MAX_ROW_BYTES + 1)
ROWS = b'{"text": "a"}\n{"text": "b"}\n{"text": "' + LONG.encode() + b'"}\n{"text": "c"}\n'


def write_zstd(path: Path) -> None:
    with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(path), "wb"), "zstd") as file:
        file.write(ROWS)


def write_arrow(path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b", LONG, "c"]})
    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


WRITE: dict[str, tuple[Callable[[Path], object], str]] = {
    "rows.jsonl": (lambda path: path.write_bytes(ROWS), "rows.jsonl:3: a line"),
    "rows.jsonl.gz": (
        lambda path: path.write_bytes(gzip.compress(ROWS, 1)),
        "rows.jsonl.gz:3: a line",
    ),
    "rows.jsonl.zst": (write_zstd, "rows.jsonl.zst:3: a line"),
    "rows.parquet": (
        lambda path: pyarrow.parquet.write_table(
            pyarrow.table({"text": ["a", "b", LONG, "c"]}), path
        ),
        "rows.parquet: row 2: a cell",
    ),
    "rows.arrow": (write_arrow, "rows.arrow: row 2: a cell"),
}


@pytest.mark.parametrize("name", WRITE)
def test_a_row_that_is_too_long_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    write, words = WRITE[name]
    write(tmp_path / name)
    assert (
        _app.run_command_line(
            [
                "data",
                "build",
                str(tmp_path / name),
                "--out",
                str(tmp_path / "out"),
                "--workers",
                "1",
            ]
        )
        == 4
    )
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert "64.0 MiB" in err or "64 MiB" in err


@pytest.mark.long
def test_a_row_of_the_largest_size_is_read(tmp_path: Path) -> None:
    row = json.dumps({"text": "y" * (MAX_ROW_BYTES - 20)}).encode() + b"\n"
    assert MAX_ROW_BYTES - 20 < len(row) <= MAX_ROW_BYTES
    (tmp_path / "rows.jsonl").write_bytes(row)
    assert (
        _app.run_command_line(
            [
                "data",
                "build",
                str(tmp_path / "rows.jsonl"),
                "--out",
                str(tmp_path / "out"),
                "--workers",
                "1",
            ]
        )
        == 0
    )


def test_memory_does_not_grow_with_a_line(tmp_path: Path) -> None:
    """Of 2 GB without a line's end, which take no place on the disk: less than twice what a row
    may have."""
    with open(tmp_path / "rows.jsonl", "wb") as file:
        file.truncate(2 * 10**9)
    code = (
        "import re; from phalanx.cli import _app; code = _app.run_command_line(['data', 'build',"
        f" {str(tmp_path / 'rows.jsonl')!r}, '--out', {str(tmp_path / 'o')!r}, '--workers', '1']);"
        " print(int(code), re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code_of_run, peak_kib = map(int, done.stdout.split())
    assert code_of_run == 4, done.stderr
    assert peak_kib * 1024 < 4 * MAX_ROW_BYTES + 200 * 2**20
