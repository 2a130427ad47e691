"""Bad input is refused at the door: one line, its own exit code, nothing half-written."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from commands import (
    SLACK,
    TINY,
    Done,
    descendants,
    environment,
    events,
    finish,
    loss_curve,
    run,
    run_all,
    snapshot,
    start,
    stopped,
    wait_until,
    watching,
    weights,
    write_text,
)
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.cli import _app
from phalanx.observe.events import CheckpointFailed, CheckpointSaved, RanksStarted
from phalanx.observe.tail import read_recorded_events
from ports import free_port

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Home:
    """A user's folder, and `phalanx` run there inside this process."""

    folder: Path
    capture: pytest.CaptureFixture[str]

    def refuse(self, *arguments: str) -> Done:
        """What a command says that changes nothing on the disk."""
        before = snapshot(self.folder)
        folders = {path for path in self.folder.rglob("*") if path.is_dir()}
        code = _app.run_command_line(arguments)
        captured = self.capture.readouterr()
        assert snapshot(self.folder) == before
        assert {path for path in self.folder.rglob("*") if path.is_dir()} == folders
        assert captured.out == ""
        return Done(code, captured.out, captured.err, 0.0)


@pytest.fixture
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Home:
    write_text(tmp_path / "text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in set(os.environ) - set(environment()):  # a launcher's
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path, capsys)


TEXT = (*TINY, "data.source=text", "parallel.ranks=2", "run.dir=run")


# Data


def test_missing_data(home: Home) -> None:
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=txet")
    assert done.code == 4
    assert 'data.source txet: no such file or folder; did you mean "text"?' in done.problem


def test_data_on_another_machine(home: Home) -> None:
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=s3://bucket/text")
    assert (done.code, "copy it here first" in done.problem) == (4, True)


def test_empty_data(home: Home) -> None:
    (home.folder / "nothing").mkdir()
    (home.folder / "nothing" / "empty.txt").touch()
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=nothing")
    assert (done.code, "every file is empty" in done.problem) == (4, True)


def test_binary_data(home: Home) -> None:
    (home.folder / "blob.dat").write_bytes(bytes(range(256)) * 100)
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=blob.dat")
    assert (done.code, "the file is binary" in done.problem) == (4, True)


def test_half_a_megatron_dataset(home: Home) -> None:
    (home.folder / "blob.bin").write_bytes(bytes(range(256)) * 100)
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=blob.bin")
    assert (done.code, "blob.idx" in done.problem, "Megatron" in done.problem) == (4, True, True)


def test_data_too_short_for_one_sequence(home: Home) -> None:
    (home.folder / "short.txt").write_text("twenty characters...")
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=short.txt")
    assert done.code == 4
    assert re.search(
        r"not enough tokens for one sequence: \d+ to train on, 33 needed", done.problem
    )


def test_token_id_beyond_the_vocabulary(home: Home) -> None:
    np.save(home.folder / "ids.npy", np.arange(5000) % 300)
    done = home.refuse("train", *TINY, "run.dir=run", "data.source=ids.npy", "model.vocab_size=256")
    assert done.code == 4
    assert (
        "ids.npy: position 256: token 256 does not fit a vocabulary of 256; raise model.vocab_size"
        in done.problem
    )


def test_bytes_beyond_the_vocabulary(home: Home) -> None:
    done = home.refuse("train", *TEXT, "model.vocab_size=100")
    assert done.code == 4
    assert (
        "data.source text: the tokenizer bytes has 256 tokens, and the model 100 rows"
        in done.problem
    )
    done = home.refuse("train", *TEXT, "model.vocab_size=256")
    assert done.code == 4
    assert (
        "data.source text: token 256 does not fit a vocabulary of 256 (it is the end of a document)"
        in done.problem
    )


# Jobs


def test_ranks_that_do_not_divide_the_batch(home: Home) -> None:
    done = home.refuse("train", *TEXT, "parallel.ranks=3")
    assert done.code == 3
    assert (
        "8 sequences cannot be shared evenly by 3 ranks; nearest global_batch_size: 6 or 9"
        in done.problem
    )


def test_degrees_that_do_not_multiply_to_the_ranks(home: Home) -> None:
    done = home.refuse(
        "train", *TEXT, "parallel.ranks=4", "parallel.dp_shard=2", "parallel.dp_replicate=4"
    )
    assert done.code == 3
    assert (
        "dp_replicate 4 x dp_shard 2 makes 8 ranks, and parallel.ranks is 4; nearest:"
        in done.problem
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.kind=decodr", "model.kind: unknown model 'decodr'; did you mean \"decoder\"?"),
        (
            'observe.sinks=["tensorbord"]',
            "unknown sink 'tensorbord'; did you mean \"tensorboard\"?",
        ),
        ("optim.kind=sdg", "unknown optimizer 'sdg'; did you mean \"sgd\"?"),
        ('resilience.inject=["kil:step=1"]', 'did you mean "kill"?'),
        ("model.layers=3", 'did you mean "model.num_layers"?'),
        ("train.steps=0", "train.steps: wanted a whole number of at least 1, was given 0"),
        ("train.steps=-5", "train.steps"),
        ("train.steps=1e3", "train.steps"),
        ("optim.lr=nan", "optim.lr"),
        ("run.name=../../etc", "run.name"),
        ("data.source=", "data.source"),
        ("train.steps=99999999999999999999", "train.steps"),
    ],
)
def test_a_value_that_cannot_be(home: Home, override: str, words: str) -> None:
    done = home.refuse("train", *TEXT, override)
    assert (done.code, words in done.problem) == (3, True), done.problem
    assert "override" in done.problem


def test_all_problems_are_told_at_once_with_their_places(home: Home) -> None:
    (home.folder / "job.toml").write_text(
        '[train]\nstesp = 5\nsteps = "many"\n\n[modle]\ndim = 7\n'
    )
    done = home.refuse("train", "job.toml", "optim.lr=-1", "run.dir=run")
    assert done.code == 3
    lines = done.err.splitlines()
    assert len(lines) == 4
    assert re.match(r"phalanx: job\.toml:2:1: .*stesp.*did you mean \"steps\"\?", lines[0])
    assert re.match(r"phalanx: job\.toml:3:9: train\.steps: wanted .*\"many\"", lines[1])
    assert re.match(r"phalanx: job\.toml:5:2: .*modle.*did you mean \"model\"\?", lines[2])
    assert re.match(r"phalanx: override: optim\.lr: .*-1", lines[3])


def test_a_job_file_that_is_not_there(home: Home) -> None:
    done = home.refuse("train", "jbo.toml")
    assert (done.code, "jbo.toml" in done.problem) == (3, True)


def test_a_job_file_that_is_no_file(home: Home) -> None:
    done = home.refuse("train", "text")
    assert (done.code, "is a folder, not a job file; write data.source=text" in done.problem) == (
        2,
        True,
    )


def test_two_job_files(home: Home) -> None:
    done = home.refuse("train", "a.toml", "b.toml")
    assert (done.code, "one job file is enough" in done.problem) == (2, True)


# Models and objectives of the user's own


UNBUILDABLE = {
    "user_code_broken:build": "RuntimeError: this module does not import",
    "user_code:breaks_in_factory": "(user_code.py:47: ValueError: the factory's own mistake)",
    "user_code:no_module": "returned dict, not an nn.Module",
}
FAILING = ("user_code:breaks_in_forward", "user_code:breaks_on_real_weights")


@pytest.fixture(scope="module")
def user_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Done]]:
    """What a run with each of the users' mistaken models said, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("user")
    write_text(folder / "text")
    for name in ("user_code.py", "user_code_broken.py"):
        shutil.copy(HERE / name, folder)
    kinds = [*UNBUILDABLE, *FAILING]
    job = ["train", *(override for override in TEXT if not override.startswith("model."))]
    commands = [
        [*job, f"model.kind={kind}", f"run.dir=runs/{number}"] for number, kind in enumerate(kinds)
    ]
    good = [
        "model.kind=user_code:bigram",
        "model.objective=user_code:squared_tensor_error",
        "run.dir=runs/good",
    ]
    commands.append([*job, *good])
    masked = ["model.kind=user_code:bigram", "data.document_masks=true", "run.dir=runs/masked"]
    refused = [masked, ["model.kind=user_code:total", "run.dir=runs/total"]]
    commands += [[*job, *overrides] for overrides in refused]
    return folder, dict(
        zip([*kinds, "good", "masked", "total"], run_all(commands, folder), strict=True)
    )


@pytest.mark.parametrize("kind", UNBUILDABLE)
def test_a_model_that_cannot_be_built(user_models: tuple[Path, dict[str, Done]], kind: str) -> None:
    folder, done = user_models
    assert done[kind].code == 3
    assert UNBUILDABLE[kind] in done[kind].problem
    assert kind in done[kind].problem
    assert not (folder / "runs" / str(list(UNBUILDABLE).index(kind))).exists()


def test_documents_are_not_kept_apart_by_a_forward_that_does_not_name_them(
    user_models: tuple[Path, dict[str, Done]],
) -> None:
    folder, done = user_models
    assert done["masked"].code == 3
    assert "'user_code:bigram' cannot keep documents apart" in done["masked"].problem
    assert "train:" not in done["masked"].out  # no rank was started for it
    assert not (folder / "runs" / "masked").exists()


def test_what_the_ranks_refuse_in_the_first_step_leaves_no_run(
    user_models: tuple[Path, dict[str, Done]],
) -> None:
    """The same command can start again when it is mended."""
    folder, done = user_models
    assert done["total"].code == 3
    assert (
        "the model returned a tensor [], which the built-in objective cannot read"
        in done["total"].problem
    )
    assert "train:" in done["total"].out
    assert not (folder / "runs" / "total").exists()


def test_a_model_that_fails_in_its_forward(user_models: tuple[Path, dict[str, Done]]) -> None:
    """The user's own traceback, with their file and line and nobody else's; a crash that repeats
    is not repaired."""
    done = user_models[1]["user_code:breaks_in_forward"]
    assert done.code == 10
    lines = done.err.splitlines()
    assert lines[0].startswith(
        "deterministic failure at step 1: RuntimeError: shape '[-1, 7]' is invalid"
    )
    assert re.search(
        r" \(3 times in a row; the batch of step 1 is samples 0 to \d+\)$", lines[0]
    ), lines[0]
    assert re.match(r"rank [01] failed at step 1 in forward:", lines[1]), done.err
    assert lines[2] == "Traceback (most recent call last):"
    assert "user_code.py" in done.err
    assert "# the user's mistake" in done.err
    assert sum(line.startswith("Traceback") for line in lines) == 1, done.err
    assert "Connection closed by peer" not in done.err


def test_a_model_that_fails_before_the_first_step(
    user_models: tuple[Path, dict[str, Done]],
) -> None:
    """No restart can help: exit 1 with the traceback."""
    done = user_models[1]["user_code:breaks_on_real_weights"]
    assert done.code == 1
    lines = done.err.splitlines()
    assert re.match(r"rank [01] failed before the first step:", lines[0]), done.err
    assert lines[1] == "Traceback (most recent call last):"
    assert "user_code.py" in done.err
    assert "ValueError: only when it is for real" in done.err
    assert sum(line.startswith("Traceback") for line in lines) == 1, done.err


def test_a_model_and_an_objective_that_work(user_models: tuple[Path, dict[str, Done]]) -> None:
    folder, done = user_models
    assert done["good"].code == 0, done["good"].err
    curve = loss_curve(folder / "runs" / "good")
    assert 0.9 < curve[1] <= 1.0  # (1 - 1/257)², not log 257
    assert curve[20] < curve[1]


# Run directories


def test_a_refusal_leaves_no_folder_on_the_way(home: Home) -> None:
    """Not even the ones above the run directory."""
    done = home.refuse("train", *TEXT, "run.dir=runs/of/today", "model.vocab_size=100")
    assert done.code == 4


def test_a_run_directory_that_cannot_be_made(home: Home) -> None:
    (home.folder / "file").touch()
    done = home.refuse("train", *TEXT, "run.dir=file/run")
    assert done.code == 7
    assert "file/run" in done.problem


def test_a_run_directory_that_cannot_be_written(home: Home) -> None:
    closed = home.folder / "closed"
    closed.mkdir()
    with _mounted(closed, "ro"):
        done = home.refuse("train", *TEXT, "run.dir=closed/run")
    assert done.code == 7
    assert "not writable" in done.problem
    assert "choose another run.dir" in done.problem


def test_a_full_run_directory(home: Home) -> None:
    small = home.folder / "small"
    small.mkdir()
    with _mounted(small, "size=256k"):
        done = home.refuse("train", *TEXT, "run.dir=small/run", "model.dim=256")
        assert not list(small.iterdir())
    assert done.code == 7
    assert re.search(
        r"the run needs about .* are free; free space there or choose another run\.dir",
        done.problem,
    )


def test_no_room_for_the_data(home: Home) -> None:
    small = home.folder / "small"
    small.mkdir()
    with _mounted(small, "size=32k"):
        done = home.refuse("train", *TEXT, "run.dir=small/run")
        assert not list(small.iterdir())
    assert done.code == 7
    assert re.search(
        r"needs about [\d.]+ KiB and [\d.]+ KiB are free; free space there", done.problem
    )


def test_too_few_open_files_are_refused_by_their_number(home: Home) -> None:
    before = snapshot(home.folder)
    done = _train_with_limit(home.folder, "ulimit -n 20")
    assert done.returncode == 6, done.stderr
    assert re.search(
        r"ulimit -n is 20, and this job needs about \d+ open files in a process; raise the hard"
        r" limit \(ulimit -Hn\) to \d+ or more$",
        done.stderr.strip(),
    )
    assert snapshot(home.folder) == before


@pytest.mark.long
def test_the_limit_of_open_files_is_raised_where_it_may_be(home: Home) -> None:
    done = _train_with_limit(home.folder, "ulimit -Sn 20", "train.steps=4")
    assert done.returncode == 0, done.stderr


def _train_with_limit(
    folder: Path, limit: str, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "phalanx", "train", *TEXT, *arguments]
    return subprocess.run(
        ["sh", "-c", f'{limit}; exec "$@"', "sh", *command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60 * SLACK,
        check=False,
    )


class _mounted:
    """A tmpfs on a folder; the test is skipped where that takes rights we do not have."""

    def __init__(self, folder: Path, options: str) -> None:
        self.folder, self.options = folder, options

    def __enter__(self) -> None:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("needs root to mount a small or read-only file system")
        command = ["mount", "-t", "tmpfs", "-o", self.options, "tmpfs", str(self.folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting is not allowed here")

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


def test_checkpoints_of_two_jobs_never_share_a_directory(home: Home) -> None:
    """The first has saved nothing yet, and has another run.dir."""
    elsewhere = home.folder / "elsewhere"
    elsewhere.mkdir()
    with holding_run_lock(elsewhere):
        done = home.refuse("train", *TEXT, f"checkpoint.url=file://{elsewhere}")
    assert done.code == 9
    assert "checkpoint.url is in use by process" in done.problem
    assert "choose another checkpoint.url" in done.problem


def test_an_old_run_is_never_written_over(home: Home) -> None:
    (home.folder / "run").mkdir()
    (home.folder / "run" / "job.json").write_text("{}")
    done = home.refuse("train", *TEXT)
    assert (done.code, "use --resume run or another run.dir" in done.problem) == (2, True)


def test_nothing_to_resume(home: Home) -> None:
    done = home.refuse("train", "--resume", "nowhere")
    assert (done.code, "no run to resume is there" in done.problem) == (2, True)


# Launchers


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "RANK is 2 and WORLD_SIZE is 2",
        ),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', which is not an integer"),
    ],
)
def test_half_a_launcher(
    home: Home, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = home.refuse("train", *TEXT)
    assert (done.code, words in done.problem) == (6, True), done.problem


def start_ranks(
    folder: Path, port: int, overrides: Sequence[Sequence[str]]
) -> list[subprocess.Popen[str]]:
    """One rank for each list of overrides, as a launcher other than ours starts them."""
    return [
        start("train", *TEXT, *more, cwd=folder, env=rank_environment(rank, len(overrides), port))
        for rank, more in enumerate(overrides)
    ]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    here = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), **here)


def test_a_port_that_is_taken(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run("train", *TEXT, cwd=home.folder, env=rank_environment(0, 2, port))
    assert done.code == 6
    assert (
        f"port {port} on 127.0.0.1 cannot be listened on (address in use); choose another"
        in done.problem
    )
    assert not (home.folder / "run").exists()


def test_ranks_that_differ(home: Home) -> None:
    """The same words on every rank that speaks, with the key, both values and the rank; the same
    code on all."""
    ranks = start_ranks(home.folder, free_port(), [(), ("optim.lr=0.5",)])
    done = [finish(rank) for rank in ranks]
    assert [d.code for d in done] == [7, 7], [d.err for d in done]
    assert "the ranks differ: rank 1: " in done[0].err
    assert "optim.lr = 0.5, not 'auto'" in done[0].err
    assert "give every rank the same job" in done[0].err
    assert "Traceback" not in done[0].err + done[1].err


# One directory, two jobs


def test_a_run_directory_in_use(home: Home) -> None:
    """The second job leaves naming the holder; the first never learns of it.

    That it is named before anything slow: tests/unit/test_cli.py.
    """
    first = start("train", *TEXT, "train.steps=3000", "checkpoint.at_end=false", cwd=home.folder)
    with watching(first) as watched:
        watched.wait_for("step 10/")
        for arguments in (["train", *TEXT], ["train", "--resume", "run"]):
            with stopped():  # it has not ended meanwhile; who is stopped still holds the run
                second = run(*arguments, cwd=home.folder)
            assert second.code == 9, second.err
            assert f"in use by process {first.pid} on {socket.gethostname()}" in second.problem
        first.send_signal(signal.SIGINT)
        assert watched.finish().code == 130
    assert not (home.folder / "run" / "lock").exists()
    curve = loss_curve(home.folder / "run")
    assert list(curve) == list(range(1, len(curve) + 1))


# Checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten steps with two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    write_text(folder / "text")
    done = run("train", *TEXT, "train.steps=10", "checkpoint.every_steps=5", cwd=folder)
    assert done.code == 0, done.err
    return folder


LONG = ["manifest cut short", "manifest removed"]


@pytest.mark.parametrize(
    "damage", ["flipped bit", *(pytest.param(d, marks=pytest.mark.long) for d in LONG)]
)
def test_a_damaged_checkpoint_is_refused_whole(finished: Path, tmp_path: Path, damage: str) -> None:
    """Exit 5 naming the file; the run directory's checkpoints and facts are as before."""
    folder = tmp_path / "copy"
    shutil.copytree(finished, folder)
    checkpoint = folder / "run" / "checkpoints" / "step-10"
    victim = checkpoint / ("rank-0001.safetensors" if damage == "flipped bit" else "manifest.json")
    data = bytearray(victim.read_bytes())
    if damage == "flipped bit":
        data[-100] ^= 1
    else:
        del data[len(data) // 2 :]
    victim.write_bytes(data)
    if damage == "manifest removed":
        victim.unlink()
    before = facts(folder / "run")
    done = run("train", "--resume", "run", "train.steps=12", cwd=folder)
    assert done.code == 5, done.err
    assert len(done.err.splitlines()) == 1, done.err
    assert str(checkpoint.relative_to(folder)) in done.err
    assert victim.name in done.err
    assert "--fallback" in done.err
    assert facts(folder / "run") == before
    # A run that is done is done again from there, if what it left is damaged.
    is_done = damage == "flipped bit"
    killed = [
        'resilience.inject=["kill:rank=1,step=7,phase=backward"]',
        "resilience.max_restarts=1",
    ]
    more = killed if is_done else ["train.steps=12"]
    done = run("train", "--resume", "run", "--fallback", *more, cwd=folder)
    assert done.code == 0, done.err
    assert ("starting it again beside rank 0 (restart 1 of 1)" in done.out) == is_done
    assert "step-10 cannot be used, going back to the one before" in done.out
    assert victim.name in done.out
    assert find_checkpoint_problems(checkpoint) == []  # written again on the way
    assert weights(folder / "run", 5) == weights(finished / "run", 5)


def facts(run_dir: Path) -> dict[str, bytes]:
    """What a run is and holds, without what its attempts said."""
    kept = [
        path
        for folder in ("checkpoints", "data")
        for path in (run_dir / folder).rglob("*")
        if path.is_file()
    ]
    return {
        str(path): path.read_bytes()
        for path in (*kept, run_dir / "job.json", run_dir / "plan.json")
    }


def test_a_run_that_is_done_has_nothing_to_resume(finished: Path) -> None:
    before, names = facts(finished / "run"), set(snapshot(finished))
    done = run("train", "--resume", "run", cwd=finished)
    assert (done.code, done.err) == (0, "")
    assert "step 10 is done and saved; nothing to do" in done.out
    assert (facts(finished / "run"), set(snapshot(finished))) == (before, names)


def test_a_resumed_run_keeps_its_model(finished: Path) -> None:
    before, names = facts(finished / "run"), set(snapshot(finished))
    done = run("train", "--resume", "run", "model.dim=64", cwd=finished)
    assert done.code == 3
    assert (
        "model.dim: a resumed run keeps what it was trained with; start a new run to change it"
        in done.problem
    )
    assert (facts(finished / "run"), set(snapshot(finished))) == (before, names)


def test_a_full_disk_does_not_stop_training(home: Home) -> None:
    """A save that finds no room is an event; training goes on, the checkpoint before it stays
    whole.

    Only the save at the end has no later one: that it failed is how the run ends.
    """
    small = home.folder / "small"
    small.mkdir()
    with _mounted(small, "size=3m"):
        arguments = [
            *TEXT,
            "run.dir=small/run",
            "model.dim=64",
            "train.steps=24",
            "checkpoint.every_steps=5",
        ]
        done = run("train", *arguments, cwd=home.folder)
        run_dir = small / "run"
        assert list(loss_curve(run_dir)) == list(range(1, 25))
        # As phalanx reads them: where there is no room, the last line of an event file may be torn.
        saved = [e.event.step for e in read_recorded_events(run_dir, CheckpointSaved)]
        failed = [e.event for e in read_recorded_events(run_dir, CheckpointFailed)]
        assert saved[:1] == [5]
        assert failed, saved
        assert all("No space left on device" in event.reason for event in failed)
        assert re.search(r"checkpoint of step \d+ failed: .*No space left", done.out)
        for step in saved:
            weights(run_dir, step)
        assert sorted(os.listdir(run_dir / "checkpoints")) == sorted(
            f"step-{step}" for step in saved
        )
        assert done.code == 7
        assert re.search(r"step-24\S*: failed while .*No space left", done.err)
        assert len(done.err.splitlines()) == 1


def test_no_process_is_left_by_any_of_this(home: Home) -> None:
    """Neither by what the tests above refused, nor by a run that is stopped."""
    wait_until(lambda: not descendants())
    with watching(
        start("train", *TEXT, "train.steps=3000", "checkpoint.at_end=false", cwd=home.folder)
    ) as watched:
        watched.wait_for("step 10/")
        [envelope] = events(home.folder / "run", RanksStarted)
        assert isinstance(envelope.event, RanksStarted)
        alive = {process.pid for process in descendants()}
        assert {watched.process.pid, *envelope.event.pids} <= alive, (
            "supervisor and ranks are found while they live"
        )
        watched.process.send_signal(signal.SIGINT)
        assert watched.finish().code == 130
    wait_until(lambda: not descendants())
