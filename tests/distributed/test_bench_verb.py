"""`phalanx bench` on this machine: it measures, writes a profile, stops when told to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from commands import Done, descendants, environment, finish, run, start, wait_until
from phalanx.cli._app import run_command_line
from phalanx.core.errors import ExitCode
from phalanx.plan.profiles import PROFILE_SECTIONS, load_profile


def bench(tmp_path: Path, *arguments: str) -> Done:
    return run("bench", *arguments, cwd=tmp_path, env=environment(HOME=str(tmp_path / "home")))


def test_a_quick_bench_measures_all_sections_and_writes_a_profile(tmp_path: Path) -> None:
    storage = tmp_path / "new" / "checkpoints"
    done = bench(
        tmp_path, "all", "--quick", "--json", "--device=cpu", "--ranks=2", f"--directory={storage}"
    )
    assert done.code == 0, done.err
    facts = json.loads(done.out)
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
    assert profile.sections["comm"].collectives == "shared memory"
    words = ("--quick", "--device=cpu", "--ranks=2", "--collectives=gloo")
    again = bench(tmp_path, "comm", *words)
    assert again.code == 0, again.err
    assert "through gloo" in again.out
    both = load_profile(Path(facts["path"])).sections
    assert both["comm_gloo"].collectives == "gloo"
    assert both["comm"] == profile.sections["comm"]
    assert not storage.exists()
    assert not storage.parent.exists()


def test_ctrl_c_stops_it_and_nothing_is_written(tmp_path: Path) -> None:
    before = {each.pid for each in descendants()}
    process = start(
        *("bench", "comm", "--device=cpu", "--ranks=2"),
        cwd=tmp_path,
        env=environment(HOME=str(tmp_path / "home")),
    )
    # The command, the template, the server of ranks, and both ranks, which then measure.
    wait_until(lambda: len({each.pid for each in descendants()} - before) >= 5)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert "nothing was written" in done.err
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all", "--device=tpu"], "--device is auto, cpu or cuda, not 'tpu'"),
        (["gemm", "--ranks=0"], "--ranks"),
        (["comm", "--collectives=nccl"], "auto or gloo, not 'nccl'"),
        (["nothing"], "no verb"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = bench(tmp_path, *arguments)
    assert done.code == 2
    assert words in done.problem


def test_storage_that_refuses_is_exit_7_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = bench(tmp_path, "storage", "--quick", f"--directory={tmp_path}/file/x")
    assert done.code == 7
    assert done.problem


def test_autotune_runs_a_layout_and_cleans_up(tmp_path: Path) -> None:
    """One short run: predicted beside measured, a pick, and no directory left."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("All work and no play makes Jack a dull boy.\n" * 500)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    small = ["model.dim=32", "model.num_layers=1", "model.num_heads=1", "data.seq_len=32"]
    small += ["train.global_batch_size=4", "parallel.ranks=2", "data.source=text"]
    env = environment(HOME=str(tmp_path / "home"), TMPDIR=str(temporary))
    done = run("plan", "--autotune=1", "--json", *small, cwd=tmp_path, env=env)
    assert done.code == 0, done.err
    facts = json.loads(done.out)
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


def test_a_profile_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said after all of it, which was lost."""
    monkeypatch.setattr("phalanx.bench.drive.bench_machine", None)
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    for out in ("file/profile.json", "pipe"):
        words = ["bench", "gemm", "--out", str(tmp_path / out)]
        assert run_command_line(words) == ExitCode.RESOURCES
        assert capsys.readouterr().err.startswith(f"phalanx: {tmp_path / out}: failed while")
    (tmp_path / ".cache").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_command_line(["bench", "all"]) == ExitCode.RESOURCES
    assert "is not a folder" in capsys.readouterr().err


def test_a_profile_takes_the_place_of_no_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["bench", "storage", "--quick", "--directory", str(tmp_path / "measured")]
    for name in ("job.toml", "job.json"):
        job = tmp_path / name
        job.write_text("{}")
        assert run_command_line([*quick, "--out", str(job)]) == ExitCode.USAGE
        assert "is there already, and is no profile" in capsys.readouterr().err
        assert job.read_text() == "{}"
    for _ in range(2):
        assert run_command_line([*quick, "--out", str(tmp_path / "mine.json")]) == 0


def test_collectives_of_one_rank_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["bench", "comm", "--ranks", "1"]) == ExitCode.USAGE
    assert "one rank has nobody to talk to" in capsys.readouterr().err
