"""`phalanx bench` on this machine: it measures, writes a profile, stops when told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from phalanx.cli._app import run_command_line
from phalanx.core.errors import ExitCode
from phalanx.plan.profiles import PROFILE_SECTIONS, load_profile


def bench(tmp_path: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-m", "phalanx", "bench", *arguments]
    return command, dict(os.environ, HOME=str(tmp_path / "home"))


def test_a_quick_bench_measures_all_sections_and_writes_a_profile(tmp_path: Path) -> None:
    storage = tmp_path / "new" / "checkpoints"
    command, environment = bench(
        tmp_path, "all", "--quick", "--json", "--device=cpu", "--ranks=2", f"--directory={storage}"
    )
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["schema"] == "phalanx.bench/1"
    assert set(facts["sections"]) == set(PROFILE_SECTIONS)
    profile = load_profile(Path(facts["path"]))
    assert Path(facts["path"]).is_relative_to(tmp_path / "home")
    for section in profile.sections.values():
        assert section.is_quick
        assert section.rows
        for row in section.rows:
            assert 0 < row.low_s <= row.seconds <= row.high_s
    collectives = {row.kind for row in profile.sections["comm"].rows}
    # On a machine so busy that nothing else came about, one of them did.
    assert collectives & {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert not storage.exists()
    assert not storage.parent.exists()


def _wait_for_ranks(pid: int) -> None:
    """Until the command has started both of its ranks, which then measure."""
    until_s = time.monotonic() + 60
    while len(psutil.Process(pid).children(recursive=True)) < 2:
        assert time.monotonic() < until_s, "no ranks were started"
        time.sleep(0.05)


def test_ctrl_c_stops_it_and_nothing_is_written(tmp_path: Path) -> None:
    command, environment = bench(tmp_path, "comm", "--device=cpu", "--ranks=2")
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _wait_for_ranks(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"nothing was written" in errors
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all", "--device=tpu"], "--device is auto, cpu or cuda, not 'tpu'"),
        (["gemm", "--ranks=0"], "--ranks"),
        (["nothing"], "no verb"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    command, environment = bench(tmp_path, *arguments)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_storage_that_refuses_is_exit_7_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command, environment = bench(tmp_path, "storage", "--quick", f"--directory={tmp_path}/file/x")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert len(done.stderr.splitlines()) == 1


def test_autotune_runs_a_layout_and_cleans_up(tmp_path: Path) -> None:
    """One short run: predicted beside measured, a pick, and no directory left."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("All work and no play makes Jack a dull boy.\n" * 500)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    small = ["model.dim=32", "model.num_layers=1", "model.num_heads=1", "data.seq_len=32"]
    command = [sys.executable, "-m", "phalanx", "plan", "--autotune=1", "--json", *small]
    command += ["train.global_batch_size=4", "parallel.ranks=2", "data.source=text"]
    environment = dict(os.environ, HOME=str(tmp_path / "home"), TMPDIR=str(temporary))
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["schema"] == "phalanx.autotune/1"
    assert facts["winner"]["measured_s"] > 0
    assert facts["winner"]["predicted_s"] is None
    assert "uncalibrated" in facts["basis"]
    assert [path.name for path in temporary.iterdir() if "autotune" in path.name] == []
    assert not (tmp_path / "runs").exists()


def test_a_directory_for_the_profile_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.bench.drive.bench_machine", None)
    assert run_command_line(["bench", "gemm", "--out", str(tmp_path)]) == ExitCode.USAGE
    assert f"--out {tmp_path} is a directory" in capsys.readouterr().err
