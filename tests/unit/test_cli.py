"""The command line's own manners: arguments, closed pipes, old runs' summaries."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import COLD, DEADLINE_S, TINY, environment, run, write_text
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.cli import _app
from phalanx.cli._arguments import split_job_file_and_overrides
from phalanx.core.errors import (
    DataError,
    ExitCode,
    LayoutError,
    ResourceError,
    RunLockedError,
    UsageError,
)
from phalanx.job.load import load_job
from phalanx.job.schema import Job
from phalanx.launch.outcome import RunOutcome
from phalanx.observe.bus import Bus
from phalanx.observe.events import BaselineMeasured, EvalFinished, TextGenerated
from phalanx.report.end_of_run import list_end_of_run_lines
from phalanx.report.reduce import collect_run_facts
from phalanx.run.announce import format_run_announcement
from phalanx.run.directory import RunDirectory
from phalanx.run.output import RunOutput
from phalanx.run.prepare import PreparedRun, prepare_run
from phalanx.run.supervised import find_refusal_before_first_step


def test_arguments_are_a_file_and_overrides_in_any_order() -> None:
    assert split_job_file_and_overrides([]) == (None, [])
    assert split_job_file_and_overrides(["a=1", "my job.toml", "b.c=x=y"]) == (
        "my job.toml",
        ["a=1", "b.c=x=y"],
    )
    assert split_job_file_and_overrides(["./x=1/job.toml"]) == ("./x=1/job.toml", [])
    with pytest.raises(UsageError, match="one job file is enough"):
        split_job_file_and_overrides(["a.toml", "b.toml"])
    with pytest.raises(UsageError, match=r"an override is train\.steps=VALUE"):
        split_job_file_and_overrides(["train.steps"])
    with pytest.raises(UsageError, match="has its own job"):
        split_job_file_and_overrides(["a.toml"], allow_file=False)


def test_a_job_file_that_sets_nothing_is_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, full = tmp_path / "empty.toml", tmp_path / "full.toml"
    empty.write_text("# later\n\n")
    full.write_text("[train]\nsteps = 3\n")
    split_job_file_and_overrides([str(full)])
    assert capsys.readouterr() == ("", "")
    split_job_file_and_overrides([str(empty)])
    said = f"{empty} sets no key: the job has the defaults of all\n"
    assert capsys.readouterr() == ("", said)


def test_a_sample_cannot_move_the_cursor(tmp_path: Path) -> None:
    """What an untrained model says is any bytes; a terminal must not obey them."""
    bus = Bus(rank=0, run_dir=tmp_path)
    bus.emit(TextGenerated(5, "def ", "f():\n\tpass\x1b[2J\x07\r\x9b8m\nend"))
    bus.emit(EvalFinished(5, 2.0, 100, 0.1))
    bus.emit(BaselineMeasured("trigram", 1.5, 100, 0.1))
    bus.close()
    lines = "\n".join(list_end_of_run_lines(collect_run_facts(tmp_path))).split("\n")
    assert lines == [
        "loss    held out, nats per token: model 2.000  trigram 1.500   (100 tokens)",
        "        the model is 0.500 nats worse than the trigram",
        "sample  def f():",
        "            pass [2J   8m",
        "        end",
    ]


def test_a_removed_working_directory_is_one_line(tmp_path: Path) -> None:
    """A run's directory that somebody removes while a shell stands in it."""
    stands_in = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m phalanx plan --models'
    done = subprocess.run(
        ["sh", "-c", stands_in, sys.executable],
        cwd=tmp_path, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == (
        "phalanx: the directory that you stand in cannot be reached (No such file or directory);"
        " cd into one that is there\n"
    )


def test_a_pipe_that_closes_early_is_no_error() -> None:
    """`phalanx plan | head -1`."""
    ours, theirs = os.pipe()
    process = subprocess.Popen([*COLD, "plan"], stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    os.close(ours)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("arguments", [("plan", "model.dim=x"), ("plan", "--json", "model.dim=x")])
def test_a_refusal_that_nobody_can_read_has_its_exit_code(arguments: tuple[str, ...]) -> None:
    """`phalanx plan ... 2>&1 | head -0`, `2> /dev/full`: 0 would say that all is well."""
    ours, theirs = os.pipe()
    os.close(ours)
    with open("/dev/full", "w") as full, open(theirs, "w") as closed:
        done = [
            subprocess.run([*COLD, *arguments], stdout=closed, stderr=stream, check=False)
            for stream in (closed, full)
        ]
    assert [process.returncode for process in done] == [ExitCode.JOB, ExitCode.JOB]


def test_a_full_standard_output_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = _app.run_command_line(["plan", "--models"])
    assert code == ExitCode.RESOURCES
    # As it is called here; the process's own is called standard output.
    assert capsys.readouterr().err.startswith("phalanx: /dev/full: no space left while ")


def test_an_end_of_a_run_that_nobody_can_read_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        RunOutput().warn("stopped by SIGTERM")


@pytest.mark.long
@pytest.mark.parametrize("where", ["closed", "full"])
def test_training_goes_on_where_nothing_can_be_printed(tmp_path: Path, where: str) -> None:
    """`phalanx train >&-`, `phalanx train > /dev/full`: the run is what counts."""
    text = write_text(tmp_path / "text")
    arguments = [
        "train",
        *TINY,
        f"data.source={text}",
        "parallel.ranks=1",
        "run.dir=run",
        "train.steps=5",
    ]
    redirect = {"closed": "<&- >&- 2>&-", "full": "> /dev/full"}[where]
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *COLD, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "run" / "checkpoints" / "step-5" / "manifest.json").exists()


def test_a_refused_resume_leaves_the_facts_of_the_run(tmp_path: Path) -> None:
    """What was asked for in vain is not what the run is."""
    text = write_text(tmp_path / "text")
    run_dir = tmp_path / "run"
    job = [*TINY, f"data.source={text}", "parallel.ranks=2"]
    with prepare_run(load_job(None, job), run_dir, resume=False, num_ranks=None):
        pass
    before = {name: (run_dir / name).read_bytes() for name in ("job.json", "plan.json")}
    with prepare_run(load_job(None, [*job, "model.dim=64"]), run_dir, resume=True, num_ranks=None):
        assert (run_dir / "job.json").read_bytes() != before[
            "job.json"
        ]  # and then the ranks refuse it
    assert {name: (run_dir / name).read_bytes() for name in before} == before


def test_a_name_that_no_file_system_takes(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="File name too long"):
        with prepare_run(load_job(None), tmp_path / ("x" * 300), resume=False, num_ranks=None):
            pass


def test_the_loser_of_a_race_for_a_new_directory_leaves_the_winner_alone(tmp_path: Path) -> None:
    """Both found no directory there; the second must not tidy up the first one's run."""
    run_dir = tmp_path / "run"
    job = load_job(
        None, [f"data.source={Path(__file__).parent}", "data.seq_len=32", "parallel.ranks=2"]
    )
    with prepare_run(job, run_dir, resume=False, num_ranks=None):
        kept = sorted(path.name for path in run_dir.iterdir())
        with pytest.raises(RunLockedError):
            with prepare_run(job, run_dir, resume=False, num_ranks=None):
                pass
        assert sorted(path.name for path in run_dir.iterdir()) == kept
    assert (run_dir / "job.json").exists()


def test_a_live_job_is_named_before_anything_slow(tmp_path: Path) -> None:
    """Also where the other one has not got further than its lock, and planning would import
    torch."""
    job = load_job(None, ["model.kind=no_such_module:build"])
    with holding_run_lock(tmp_path):
        with pytest.raises(RunLockedError, match=f"process {os.getpid()} on"):
            with prepare_run(job, tmp_path, resume=False, num_ranks=None):
                pass


def test_a_directory_that_was_there_stays(tmp_path: Path) -> None:
    """With what the user had put into it."""
    (tmp_path / "notes.txt").write_text("mine")
    job = load_job(None, [f"data.source={tmp_path / 'nothing'}"])
    with pytest.raises(DataError):
        with prepare_run(job, tmp_path, resume=False, num_ranks=None):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


LEAKY = """
import os
def data(split):
    raise ValueError("no https://u:pw@host/x?token=abcd with " + os.environ["MY_API_KEY"])
def build():
    import torch
    return torch.nn.Linear(2, 2)
"""


def test_what_a_users_code_raises_shows_no_secrets(tmp_path: Path) -> None:
    """Neither for people nor for programs."""
    (tmp_path / "leaky.py").write_text(LEAKY)
    job = ["model.kind=leaky:build", "data.source=leaky:data", "run.dir=run"]
    done = run("train", "--json", *job, cwd=tmp_path, env=environment(MY_API_KEY="SEKRET-1234567"))
    assert done.code == 4
    assert "no https://u:***@host/x?token=*** with ***" in done.problem
    assert json.loads(done.out)["what"] == "ValueError: no https://u:***@host/x?token=*** with ***"


LIBRARIES = (
    *(
        "numpy",
        "xxhash",
        "safetensors",
        "torch",
        "typer",
        "pydantic",
        "pydantic_core",
        "fsspec",
        "click",
        "rich",
    ),
    *sorted(sys.stdlib_module_names),
)


@pytest.mark.long
def test_nothing_in_the_folder_one_stands_in_stands_for_a_library(tmp_path: Path) -> None:
    """A stranger's folder: `python -m phalanx` is as inert there as the command.

    A module of one's own is found.
    """
    text = write_text(tmp_path / "texts")
    folder = tmp_path / "downloads"
    folder.mkdir()
    (tmp_path / "imports.py").write_text("import sys; print(*sys.modules)")
    command = [sys.executable, "-m", "imports"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    there = {name for name in LIBRARIES if importlib.util.find_spec(name)}
    for name in there - set(done.stdout.split()):  # which python -m imports by itself, before us
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10))"
        )
    (folder / "of_my_own.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n"
    )
    verbs = [
        ["train", *TINY, f"data.source={text}", "parallel.ranks=1", "run.dir=run", "train.steps=4"],
        ["checkpoint", "verify", "run"],
        ["plan", "model.kind=of_my_own:build", f"data.source={text}", "parallel.ranks=1"],
    ]
    for verb in verbs:
        finished = run(*verb, cwd=folder, command=COLD)
        assert finished.code == 0, finished.err
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_an_exception_that_nobody_expected_is_a_traceback_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks() -> None:
        raise RuntimeError("it quotes SEKRET-1234567")

    monkeypatch.setenv("MY_API_KEY", "SEKRET-1234567")
    monkeypatch.setattr(_app, "build_app", breaks)
    assert _app.run_command_line([]) == ExitCode.INTERNAL
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("RuntimeError: it quotes ***\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["data", "build", "--out", "x"],
            "phalanx: Missing argument 'INPUT...'; see phalanx data build --help",
        ),
        (["train", "--bogus"], "phalanx: No such option: --bogus; see phalanx train --help"),
    ],
)
def test_a_mistake_on_the_command_line_leads_to_the_help_of_its_verb(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _app.run_command_line(arguments) == 2
    assert capsys.readouterr().err == said + "\n"


IMAGES = """
import numpy as np
def data(split, size):
    picture = np.zeros((3, size, size), np.float32)
    return [{"inputs": picture, "labels": 1}] * 8 if split == "train" else None
"""


def test_images_of_another_size_are_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pictures.py").write_text(IMAGES)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = ["model.preset=small-vit", "model.num_classes=2", "data.source=pictures:data"]
    for size in (32, 64):
        job = load_job(
            None, [*model, f"data.args={{ size = {size} }}", f"run.dir={tmp_path / 'run'}"]
        )
        refused = pytest.raises(
            LayoutError, match=r"images are 3 x 64 x 64 .* and the model takes 3 x 32 x 32"
        )
        with contextlib.nullcontext() if size == 32 else refused:
            with prepare_run(job, tmp_path / "run", resume=False, num_ranks=1) as run:
                run.remove_run_directory()
        assert not (tmp_path / "run").exists()


def test_how_a_single_document_is_held_out_is_said_before_the_start(tmp_path: Path) -> None:
    source = write_text(tmp_path / "text") / "abc.py"
    job = load_job(
        None, [*TINY, f"data.source={source}", "parallel.ranks=1", f"run.dir={tmp_path / 'run'}"]
    )
    with prepare_run(job, tmp_path / "run", resume=False, num_ranks=None) as run:
        said = "\n".join(format_run_announcement(run))
    assert re.search(r"in 1 documents, [0-9,]+ held out by position \(there is one document", said)


def test_keys_of_a_cluster_that_play_no_part_in_a_run_are_named_before_the_start(
    tmp_path: Path,
) -> None:
    """`phalanx plan` refuses them, for which they would be the question."""
    source = write_text(tmp_path / "text") / "abc.py"
    keys = [*TINY, f"data.source={source}", "parallel.ranks=1", "cluster.memory_gib=8"]
    for more in ([], ["cluster.nodes=2", "cluster.gpus_per_node=8"]):
        run_dir = tmp_path / f"run-{len(more)}"
        job = load_job(None, [*keys, *more, "cluster.device=cpu", f"run.dir={run_dir}"])
        with prepare_run(job, run_dir, resume=False, num_ranks=None) as run:
            said = [line for line in format_run_announcement(run) if line.startswith("cluster")]
        if more:
            assert said[0].startswith("cluster cluster.nodes and cluster.gpus_per_node play no")
        assert len(said) == bool(more)


def test_a_refusal_takes_no_checkpoints_along_where_events_were_lost(tmp_path: Path) -> None:
    """The run of a refusal before its first step is removed. Without the events of its steps a run
    that has trained must not be taken for one."""
    source = write_text(tmp_path / "text") / "abc.py"
    job = load_job(
        None, [*TINY, f"data.source={source}", "parallel.ranks=1", f"run.dir={tmp_path / 'run'}"]
    )
    refused = RunOutcome(ExitCode.DATA, "failed", "shard-00000.tokens is not what was written", 1)
    with prepare_run(job, tmp_path / "run", resume=False, num_ranks=None) as run:
        assert isinstance(find_refusal_before_first_step(run, refused), DataError)
        (tmp_path / "run" / "checkpoints" / "step-10").mkdir(parents=True)
        assert find_refusal_before_first_step(run, refused) is None


def test_a_new_run_does_not_take_checkpoints_that_lie_in_its_directory(tmp_path: Path) -> None:
    """As of a run whose job.json is gone: it would go on from step 400 in silence."""
    source, run_dir = write_text(tmp_path / "text") / "abc.py", tmp_path / "run"
    step = run_dir / "checkpoints" / "step-400"
    step.mkdir(parents=True)
    keys = [*TINY, f"data.source={source}", "parallel.ranks=1", f"run.dir={run_dir}"]
    with (
        pytest.raises(UsageError, match="there are checkpoints of another run") as caught,
        prepare_run(load_job(None, keys), run_dir, resume=False, num_ranks=None),
    ):
        raise AssertionError("it is not refused")
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(run_dir / "checkpoints") in str(caught.value)
    assert f"model.init_from={run_dir}" in str(caught.value)
    assert "job.json is not there" in str(caught.value)
    assert [path.name for path in run_dir.iterdir()] == ["checkpoints"]
    step.rmdir()
    with prepare_run(load_job(None, keys), run_dir, resume=False, num_ranks=None) as run:
        assert run.store.folders() == []


def test_a_run_without_a_directory_gets_a_fresh_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the name of this second is taken: by another run, or before the clock was set
    back."""
    from phalanx.run import training

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training.time, "strftime", lambda form: "20260101-000000")
    names = []
    for _ in range(3):
        names.append(training._name_new_run_dir(Job()))
        Path(names[-1]).mkdir(parents=True)
    first = "runs/train-20260101-000000"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_jobs_that_chose_one_name_get_a_directory_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each looked before the other had begun. Of a job that is refused nothing stays."""
    monkeypatch.chdir(tmp_path)
    source, chosen = write_text(tmp_path / "text") / "abc.py", Path("runs/train-20260101-000000")
    job = load_job(None, [*TINY, f"data.source={source}", "parallel.ranks=1"])

    def prepare(job: Job) -> contextlib.AbstractContextManager[PreparedRun]:
        return prepare_run(job, chosen, resume=False, num_ranks=None, is_name_chosen=True)

    with prepare(job) as one, prepare(job) as other:
        assert (one.run_dir, other.run_dir) == (chosen, Path(f"{chosen}-2"))
        assert one.lock.path.parent == chosen
        assert (other.run_dir / "job.json").exists()
    broken = load_job(None, [*TINY, f"data.source={tmp_path / 'text' / 'none'}"])
    with pytest.raises(DataError), prepare(broken):
        pass
    directory = RunDirectory(chosen, is_name_chosen=True)
    with directory.hold():
        assert directory.path == Path(f"{chosen}-3")
        (directory.path / "data").mkdir()
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        chosen.name,
        f"{chosen.name}-2",
    ]


def test_ctrl_c_while_a_command_is_still_imported_ends_as_later_ones_do() -> None:
    program = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "phalanx.cli._app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from phalanx.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
