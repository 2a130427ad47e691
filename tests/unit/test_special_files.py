"""Pipes, devices, sockets, directories and endless files where a file should be: refused at
once, on one line."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from test_retention import save

import phalanx
from commands import nursery
from phalanx.checkpoint.best import read_best_step, record_best_step
from phalanx.checkpoint.ownership.run_lock import LOCK_FILE_NAME, holding_run_lock
from phalanx.cli import _app
from phalanx.core.disk import Disk, write_bytes_durably
from phalanx.core.errors import CheckpointError, ResourceError
from phalanx.core.files import (
    create_writable_run_directory,
    open_regular_file,
    open_regular_file_for_append,
    read_json,
    read_whole_regular_file,
    resolve_regular_file_path,
    write_bytes_atomically,
)
from phalanx.data.shard_writer import ShardWriter
from phalanx.launch.paths import (
    clear_black_boxes,
    redact_secrets_in_logs,
    refuse_symlinked_run_folders,
)
from phalanx.observe.sinks._metrics import read_or_store_run_id
from phalanx.run.directory import hold_run_facts_files
from phalanx.run.initial_weights import read_initial_weights

SOURCE = Path(phalanx.__file__).parent
DEADLINE_S = 60  # a hang is for ever; this is for slow machines


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("it hangs")

    # Before the clock runs: it imports torch once for all tests, a minute on a busy machine.
    nursery()
    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def put_endless(path: Path) -> None:
    """20 GB of NUL behind a link, and nothing on the disk."""
    endless = path.with_name(f"endless-{path.name}")
    with open(endless, "wb") as file:
        file.truncate(20 * 10**9)
    path.symlink_to(endless.name)


PUT: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "socket": put_socket,
    "directory": os.mkdir,
    "endless": put_endless,
    "loop": lambda path: path.symlink_to(path.name),
}


def put(kind: str, path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    PUT[kind](path)
    return path


@pytest.mark.parametrize("kind", PUT)
def test_none_is_opened(tmp_path: Path, kind: str) -> None:
    path = put(kind, tmp_path / "file")
    if kind != "endless":
        for opener in (open_regular_file, open_regular_file_for_append):
            with pytest.raises(OSError):
                opener(path)
        with pytest.raises(OSError), resolve_regular_file_path(path):
            pass
    for reader in (read_whole_regular_file, read_json):
        with pytest.raises(OSError):
            reader(path)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    """A lock or a log of a stranger's run may lead to a file of ours."""
    (tmp_path / "ours").write_text("precious")
    (tmp_path / "run").mkdir()
    for name in ("lock", "log"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "ours")
    with pytest.raises(OSError, match="it is a link"):
        open_regular_file_for_append(tmp_path / "run" / "log")
    with pytest.raises(ResourceError, match="locking"), holding_run_lock(tmp_path / "run"):
        pass
    assert (tmp_path / "ours").read_text() == "precious"


def test_a_file_that_is_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"[1]")
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == [1]
    assert read_whole_regular_file(tmp_path / "file", 3) == b"[1]"
    with pytest.raises(OSError, match="at most 2 bytes"):
        read_whole_regular_file(tmp_path / "file", 2)
    with resolve_regular_file_path(tmp_path / "link") as opened:
        assert Path(opened).read_bytes() == b"[1]"
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "deep")
    (tmp_path / "best.json").write_text("[" * 100_000)
    assert read_best_step(tmp_path) is None
    (tmp_path / "long").write_text("9" * 5000)
    with pytest.raises(ValueError, match="a whole number in it has thousands of digits"):
        read_json(tmp_path / "long")
    (tmp_path / "bytes").write_bytes(b'"\xff"')
    with pytest.raises(ValueError, match=r"not UTF-8 text \(byte 1\)"):
        read_json(tmp_path / "bytes")
    (tmp_path / "zeros").write_bytes(bytes(5))
    with pytest.raises(ValueError, match=r"not UTF-8 text$"):
        read_json(tmp_path / "zeros")


@pytest.mark.parametrize("content", ["[]", "{}", '{"checkpoint": 1}', "{"])
def test_what_a_run_starts_from_is_refused_where_it_is_damaged(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "init.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"init\.json: what the run starts from"):
        read_initial_weights(tmp_path)


# Of a run: the file, the verbs that need it with their exit code, and those that do without.
IN_A_RUN: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "checkpoints/step-20/manifest.json": (
        {
            "checkpoint verify RUN": 5,
            "checkpoint diff RUN RUN": 5,
            "checkpoint export RUN --out OUT": 5,
        },
        (
            "checkpoint ls RUN",
            "report RUN",
            "report RUN --json",
            "checkpoint prune RUN --keep-last 2",
        ),
    ),
    "checkpoints/step-20/a.safetensors": (
        {"checkpoint verify RUN": 5, "checkpoint diff RUN/checkpoints/step-10 RUN": 5},
        ("checkpoint ls RUN",),
    ),
    "checkpoints/step-20": (
        {
            "checkpoint verify RUN": 5,
            "checkpoint diff RUN RUN": 5,
            "checkpoint verify RUN/checkpoints/step-20": 5,
        },
        ("checkpoint ls RUN", "report RUN"),
    ),
    "job.json": (
        {"train --resume RUN": 3, "train --resume RUN --explain": 3, "init - --from-run RUN": 3},
        ("report RUN", "report RUN --json", "checkpoint ls RUN", "checkpoint verify RUN"),
    ),
    "plan.json": ({}, ("report RUN", "report RUN --json", "checkpoint ls RUN")),
    "best.json": ({"checkpoint prune RUN --keep-last 1": 5}, ("report RUN", "checkpoint ls RUN")),
    LOCK_FILE_NAME: (
        {"checkpoint prune RUN --keep-last 1": 7},
        ("report RUN", "checkpoint ls RUN"),
    ),
    "events/rank-00000-attempt-000.jsonl": ({}, ("report RUN", "report RUN --json")),
    "events/supervisor.jsonl": ({}, ("report RUN",)),
}


@pytest.mark.parametrize("kind", PUT)
@pytest.mark.parametrize("place", IN_A_RUN)
def test_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, kind: str
) -> None:
    run = tmp_path / "run"
    for step in (10, 20):
        save(run, step)
    record_best_step(run, step=10, loss=1.5, num_targets=100)
    (run / "events").mkdir()
    (run / "job.json").write_text("{}")
    put(kind, run / place)
    refused, indifferent = IN_A_RUN[place]
    for verb, code in {**refused, **dict.fromkeys(indifferent, 0)}.items():
        words = verb.replace("RUN", str(run)).replace("OUT", str(tmp_path / "out")).split()
        found = _app.run_command_line(words)
        _, err = capsys.readouterr()
        wanted = (
            {code, 2} if place == "job.json" else {code}
        )  # "no run is there" where its job is no file
        assert found in wanted, (verb, err)
        assert "Traceback" not in err
        assert len(err.splitlines()) <= 2, err


@pytest.mark.parametrize("plan", [None, "{", '{"layout": {"tp": -1}}'])
def test_an_export_of_a_run_that_lost_its_plan_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: str | None
) -> None:
    save(tmp_path, 20)
    (tmp_path / "job.json").write_text("{}")
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    words = ["checkpoint", "export", str(tmp_path), "--out", str(tmp_path / "out")]
    assert _app.run_command_line(words) == 5
    error = capsys.readouterr().err
    assert f"{tmp_path / 'plan.json'}: nothing says what model it is of" in error
    assert not (tmp_path / "out").exists()


def test_facts_of_a_run_that_are_no_files_are_refused_on_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    with (
        holding_run_lock(tmp_path) as lock,
        pytest.raises(ResourceError, match=r"writing the run's facts \(it is a pipe"),
        hold_run_facts_files(tmp_path, lock, {"plan.json": {}}),
    ):
        pytest.fail("it goes on")


IN_DATA = {
    "tokens.npy": 4,
    "corpus.bin": 4,
    "corpus.idx": 4,
    "rows.jsonl": 4,
    "rows.jsonl.gz": 4,
    "rows.parquet": 4,
    "rows.arrow": 4,
    "text.txt": 4,
}


@pytest.mark.parametrize("kind", PUT)
@pytest.mark.parametrize("name", IN_DATA)
def test_as_a_source_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str
) -> None:
    path = put(kind, tmp_path / "in" / name)
    (tmp_path / "other.txt").write_text("a text")
    code = _app.run_command_line(
        ["data", "build", str(path), "--out", str(tmp_path / "out"), "--workers", "1"]
    )
    _, err = capsys.readouterr()
    assert code == IN_DATA[name], err
    assert len(err.splitlines()) == 1, err
    code = _app.run_command_line(
        ["data", "tokenizer", str(path), "--vocab-size", "300", "--out", str(tmp_path / "t.json")]
    )
    _, err = capsys.readouterr()
    assert code == IN_DATA[name], err
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", PUT)
def test_in_a_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    (tmp_path / "a.txt").write_text("a text of a few words " * 50)
    out = tmp_path / "tokens"
    assert (
        _app.run_command_line(
            ["data", "build", str(tmp_path / "a.txt"), "--out", str(out), "--workers", "1"]
        )
        == 0
    )
    whole = tmp_path / "whole"
    shutil.copytree(out, whole)
    for name in ("dataset.json", *(path.name for path in whole.glob("shard-*.tokens"))):
        shutil.rmtree(out)
        shutil.copytree(whole, out)
        put(kind, out / name)
        for verb in ("verify", "stats"):
            capsys.readouterr()
            assert _app.run_command_line(["data", verb, str(out)]) == 4
            _, err = capsys.readouterr()
            assert len(err.splitlines()) == 1, err
            assert "Traceback" not in err


@pytest.mark.parametrize("kind", PUT)
def test_as_job_tokenizer_schedule_or_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    (tmp_path / "a.txt").write_text("a text")
    path = put(kind, tmp_path / "odd" / "config.json")
    schedule = [
        "parallel.pp=2",
        "parallel.ranks=2",
        f"parallel.schedule_file={path}",
        "parallel.schedule=none",
    ]
    for words, codes in (
        (["plan", str(path)], {3}),
        (
            [
                "data",
                "build",
                str(tmp_path / "a.txt"),
                "--tokenizer",
                str(path),
                "--out",
                str(tmp_path / "o"),
            ],
            {4},
        ),
        (["plan", f"model.kind=hf:{path}"], {3}),
        (["plan", f"model.kind=hf:{path.parent}"], {3}),
        (["plan", *schedule[:3]], {3}),
        (["checkpoint", "import", str(path.parent), "--out", str(tmp_path / "c")], {2, 3, 5}),
        (["checkpoint", "import", str(path), "--out", str(tmp_path / "c")], {2, 3, 5}),
    ):
        code = _app.run_command_line(words)
        _, err = capsys.readouterr()
        assert code in codes, (words, err)
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1, err


# --- no way past ----------------------------------------------------------------------------------

# Who opens a file otherwise, and why no stranger decides what that is.
OURS = {
    "core/files.py": "is the seam",
    "core/logs.py": "opens a descriptor",
    "core/black_box.py": "reads /proc",
    "core/clocks.py": "reads /proc",
    "core/process_stat.py": "reads /proc",
    "launch/rank_activity.py": "reads /proc",
    "observe/process_status.py": "reads /proc and /sys",
    "core/registry.py": "reads our own modules",
    "mesh/compiled/store.py": "opens a descriptor",
    "mesh/compiled/bundle.py": "in a folder of this process",
    "mesh/compiled/toolchain.py": "in a folder of this process",
    "job/presets/__init__.py": "reads our own presets",
    "report/page.py": "reads our own style",
    "drills/page.py": "reads our own style",
    "drills/fault_code.py": "reads our own source",
    "resilience/late_packets.py": "opens a device and writes /proc",
    "report/prometheus/rules.py": "reads our own rules",
    "report/dataset_page.py": "reads our own style",
    "report/plan_page.py": "reads our own style",
    "cli/_app.py": "reads our own docstrings",
    "job/job_file.py": "reads our own schema",
    "cli/_complete.py": "reads our own schema",
    "core/output.py": "opens /dev/null",
    "nn/hugging_face/stored_weights.py": "opens weights that find_weights_directory has looked at",
    "data/workers.py": "opens /dev/null",
    "plan/advice/decision_tables.py": "reads our own table",
    "plan/accelerators.py": "reads our own table",
    "plan/calibrated/one_core.py": "reads our own table",
    "plan/described_cluster.py": "reads our own table",
    "plan/search/economics.py": "reads our own table",
    "plan/timing/constants.py": "reads our own table",
    "checkpoint/ownership/run_lock.py": "reads /proc",
    "checkpoint/exchange/families.py": "reads our own tables",
    "verify/drive.py": "reads what our own ranks write, in a folder made for it",
    "verify/rank.py": "writes into a folder made for it",
    "verify/row_gradients.py": "reads what our own rank wrote, in a folder made for it",
    "verify/trace.py": "reads what our own ranks wrote, in a folder made for it",
    "verify/trace_facts.py": "reads what our own ranks wrote, in a folder made for it",
    "verify/trainer_reference.py": "reads what our own ranks wrote, in a folder made for it",
    "suggest/rank.py": "writes what the command reads, in a temporary folder",
    "checkpoint/exchange/import_weights.py": "writes into a temporary folder",
    "core/uncaught.py": "writes the file that a launcher made for it",
    "run/trained/generate.py": "reads what its own rank writes, in a temporary folder",
    "run/trained/rank.py": "writes what the command reads, in a temporary folder",
    "mesh/cpu_kind.py": "reads /proc",
    "core/process_memory.py": "reads /proc",
    "launch/oom_kills.py": "reads /proc and the counts of cgroups",
    "launch/stuck_links.py": "reads /proc",
    "resilience/clock_step.py": "writes in place a clock that others have mapped",
    "resilience/cpu_quota.py": "writes the limit of a cgroup that the drill has made",
    "resilience/failing_disk.py": "writes in place a file that others have mapped",
    "drills/stages.py": "writes the limit of a cgroup that it has made",
    "drills/stepped_clock.py": "writes in place a clock that others have mapped",
    "checkpoint/exchange/unpickle.py": "hands torch the file that open_regular_file opened",
    "data/token_sources.py": "maps the file that resolve_regular_file_path checked",
    "data/rows_arrow.py": "maps the file that resolve_regular_file_path checked",
}
READERS = {
    "read_text",
    "read_bytes",
    "memmap",
    "open_memmap",
    "fromfile",
    "safe_open",
    "memory_map",
    "compute_from_file",
}
WRITERS = {"write_text", "write_bytes"}
# A word of these is in each file in which `bare_reads` finds something: to parse the others takes
# seconds.
SUSPECT_WORDS = re.compile(rf"\bopen\(|\.load\(|{'|'.join(sorted(READERS | WRITERS))}")


def bare_reads(tree: ast.Module) -> Iterator[int]:
    """Lines where a file is opened by its name, without the seam."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        is_builtin_open = isinstance(node.func, ast.Name) and name == "open"
        is_load = name in ("load", "open") and ast.unparse(node.func) in (
            "np.load",
            "torch.load",
            "io.open",
        )
        of_a_file = (
            name == "memmap" and ast.unparse(node.args[0]) == "file"
        )  # which was opened by the seam
        if (is_builtin_open or is_load or name in READERS | WRITERS) and not of_a_file:
            yield node.lineno


def test_files_are_opened_by_one_seam() -> None:
    found = {
        str(path.relative_to(SOURCE)): lines
        for path in sorted(SOURCE.rglob("*.py"))
        if not path.is_relative_to(SOURCE / "bench")
        and SUSPECT_WORDS.search(text := path.read_text())
        and (lines := list(bare_reads(ast.parse(text))))
    }
    assert {name: lines for name, lines in found.items() if name not in OURS} == {}
    assert OURS.keys() - found.keys() == set(), "no longer needed"


def write_shard(path: Path) -> None:
    with ShardWriter(path, "<u2", 300, "digest") as shard:
        shard.begin_document(1)
        shard.write(np.arange(5))
        shard.commit()


# The name under which a new file is written first, and who writes it.
NEW_FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "durably": (".epoch.partial", lambda path: write_bytes_durably(Disk(), path, b"7")),
    "atomic": (f".epoch.{os.getpid()}.partial", lambda path: write_bytes_atomically(path, b"7")),
    "shard": (f".epoch.{os.getpid()}.partial", write_shard),
    "probe": (f".writable.{os.getpid()}", lambda path: create_writable_run_directory(path.parent)),
}


@pytest.mark.parametrize("left", ["fifo", "link", "file"])
@pytest.mark.parametrize("writer", NEW_FILES)
def test_what_lies_where_a_file_is_made_is_removed(writer: str, left: str, tmp_path: Path) -> None:
    """A pipe would be waited for without end, and what a link leads to is somebody else's."""
    name, write = NEW_FILES[writer]
    partial, other = tmp_path / name, tmp_path / "other"
    other.write_text("theirs")
    {"fifo": os.mkfifo, "link": lambda path: path.symlink_to(other), "file": Path.touch}[left](
        partial
    )
    write(tmp_path / "epoch")
    assert other.read_text() == "theirs"
    assert not os.path.lexists(partial)
    if writer != "probe":
        assert not (tmp_path / "epoch").is_symlink()
        assert writer == "shard" or (tmp_path / "epoch").read_bytes() == b"7"


def test_an_id_of_curves_is_not_written_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "run-id").symlink_to(tmp_path / "other")
    assert read_or_store_run_id(tmp_path / "run-id", "7") == ("7", True)
    assert read_or_store_run_id(tmp_path / "run-id", "8") == ("7", False)
    assert os.listdir(tmp_path) == ["run-id"]


@pytest.mark.parametrize("name", ["logs", "events", "blackbox", "data"])
def test_a_folder_that_a_resumed_job_writes_to_is_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other / "source-0"):
        folder.mkdir(parents=True)
    for file in ("rank-0000", "source-0/tokens"):
        (other / file).write_text("theirs")
    (run / "job.json").write_text(
        json.dumps(phalanx.load_job(None, ["data.source=nowhere"]).to_json())
    )
    (run / "checkpoints").symlink_to(other)  # which may be one
    (run / name).symlink_to(other)
    assert _app.run_command_line(["train", "--resume", str(run)]) == 7
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"phalanx: {run / name}: it is a link to {other} (a job removes and writes files there); "
    )
    assert sorted(path.name for path in run.iterdir()) == sorted(["checkpoints", "job.json", name])
    assert [(other / file).read_text() for file in ("rank-0000", "source-0/tokens")] == [
        "theirs"
    ] * 2


def test_links_that_users_make_are_none_of_our_business(tmp_path: Path) -> None:
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "disk" / "checkpoints").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk" / "checkpoints")
    (tmp_path / "run" / "data").symlink_to(tmp_path / "disk")  # of a run that has its data
    refuse_symlinked_run_folders(tmp_path / "run")


def test_a_folder_in_place_of_a_black_box_stays(tmp_path: Path) -> None:
    (tmp_path / "blackbox" / "rank-0000").mkdir(parents=True)
    (tmp_path / "blackbox" / "rank-0001").touch()
    clear_black_boxes(tmp_path)
    assert [path.name for path in (tmp_path / "blackbox").iterdir()] == ["rank-0000"]


def test_sizes_of_logs_that_no_log_has_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("x")
    (tmp_path / "logs" / ".blanked-out.json").write_text('{"a.log": Infinity}')
    redact_secrets_in_logs(tmp_path, {})
