"""Shell completion through the shells' own protocols: what a person sees when they press Tab."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import COLD, PHALANX, SLACK, environment, run
from cpu_time import measure_cpu_s
from phalanx.job.schema import Job, Optim


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: job files, a run, a directory with another."""
    folder = tmp_path_factory.mktemp("home")
    for name in (
        "job.toml",
        "jobs/large.toml",
        "notes.txt",
        "runs/first/job.json",
        "runs/empty/x",
        "other/job.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def ask(folder: Path, command: Sequence[str] = PHALANX, **variables: str) -> str:
    done = run(cwd=folder, env=environment(**variables), command=command)
    assert done.err == ""
    return done.out


def bash(folder: Path, *words: str, command: Sequence[str] = PHALANX) -> list[str]:
    """What bash is offered for the last of `words`; it splits at "=", as COMP_WORDBREAKS says."""
    split = [part for word in words for part in word.replace("=", "\n=\n").split("\n")]
    if split[-1] == "" and len(split) > 1 and split[-2] == "=":
        split.pop()  # the cursor is behind the equals sign: that is the word
    out = ask(
        folder,
        command,
        _PHALANX_COMPLETE="complete_bash",
        COMP_WORDS="\n".join(("phalanx", *split)),
        COMP_CWORD=str(len(split)),
    )
    return out.split("\n")[:-1] if out.strip() else []


def zsh(folder: Path, line: str) -> str:
    return ask(folder, _PHALANX_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)


def fish(folder: Path, line: str) -> list[str]:
    variables = {"_PHALANX_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return ask(folder, **variables, _TYPER_COMPLETE_ARGS=line).splitlines()


def test_verbs_and_options(folder: Path) -> None:
    assert bash(folder, "tr") == ["trace", "train"]
    assert {"init", "plan", "report", "train"} <= set(bash(folder, ""))
    assert {"--resume", "--explain", "--json"} <= set(bash(folder, "train", "--"))
    assert "--install-completion" in bash(folder, "--")


def test_keys_of_a_section(folder: Path) -> None:
    assert bash(folder, "train", "optim.") == [f"optim.{key}=" for key in Optim.model_fields]
    assert bash(folder, "plan", "job.toml", "optim.b") == [
        "optim.betas=",
        "optim.betas=[0.9, 0.95]",
    ]


def test_one_key_is_offered_twice_so_that_no_space_is_set_behind_its_equals_sign(
    folder: Path,
) -> None:
    assert bash(folder, "train", "train.step") == ["train.steps=", "train.steps=500"]


def test_a_key_without_its_section_and_a_misspelt_one_are_found(folder: Path) -> None:
    assert bash(folder, "train", "global_b") == [
        "train.global_batch_size=",
        "train.global_batch_size=16",
    ]
    assert "train.steps=" in bash(folder, "train", "trian.steps")
    assert bash(folder, "train", "qqqqqq") == []


def test_values(folder: Path) -> None:
    assert bash(folder, "train", "optim.schedule=") == ["cosine", "linear", "wsd", "constant"]
    assert bash(folder, "train", "optim.schedule=c") == ["cosine", "constant"]
    assert bash(folder, "train", "train.compile=") == ["false", "true"]
    assert bash(folder, "train", "parallel.zero_stage=") == ["none", "1", "2", "3"]
    assert "llama3-70b" in bash(folder, "train", "model.preset=llama3-")
    assert "decoder" in bash(folder, "train", "model.kind=")
    assert bash(folder, "train", "run.nonsense=") == []


def test_job_files_and_sections_come_first(folder: Path) -> None:
    offered = bash(folder, "train", "")
    assert offered[0] == "job.toml"
    assert offered[1:] == [f"{section}." for section in Job.model_fields]
    assert bash(folder, "train", "jobs/") == ["jobs/large.toml"]
    assert "jobs/" in bash(folder, "train", "jo")


def test_runs(folder: Path) -> None:
    for words in (["report", ""], ["train", "--resume", ""]):
        assert bash(folder, *words) == ["other", "runs/first"]
    assert bash(folder, "report", "runs/") == ["runs/first"]


def test_zsh_and_fish_see_the_whole_word(folder: Path) -> None:
    assert '"optim.schedule=wsd"' in zsh(folder, "phalanx train optim.schedule=w")
    assert fish(folder, "phalanx train optim.schedule=c") == [
        "optim.schedule=cosine",
        "optim.schedule=constant",
    ]
    first = fish(folder, "phalanx train optim.sch")[0]
    assert first.startswith("optim.schedule=\tShape after warm-up")  # with its words


def test_bash_takes_the_script(folder: Path) -> None:
    """The script that --show-completion prints, run by bash itself, completes a command line."""
    script = subprocess.run(
        [*COLD, "--show-completion", "bash"],
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [
        f"phalanx() {{ {shlex.quote(sys.executable)} -m phalanx; }}; export -f phalanx",
        script.replace(
            "_PHALANX_COMPLETE=complete_bash $1",
            f"_PHALANX_COMPLETE=complete_bash {shlex.join(COLD)}",
        ),
        "COMP_WORDS=(phalanx train optim.schedule = w); COMP_CWORD=4",
        "_phalanx_completion phalanx",
        'echo "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "wsd"


def test_completion_is_quick_and_imports_nothing_heavy(folder: Path) -> None:
    """A person waits for it at every press of a key."""
    code = (
        "import os, sys; os.environ.update(_PHALANX_COMPLETE='complete_bash',"
        " COMP_WORDS='phalanx\\ntrain\\noptim.', COMP_CWORD='2'); sys.argv = ['phalanx'];\nfrom"
        " phalanx.__main__ import main\ntry: main()\nexcept SystemExit: pass\nprint([name for name"
        " in ('torch', 'numpy', 'phalanx.job.schema', 'phalanx.cli.plan') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert measure_cpu_s(lambda: bash(folder, "train", "optim.", command=COLD)) < 0.4 * SLACK
