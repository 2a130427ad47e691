"""A compiler that does not work is refused in one line, before a rank starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from compilers import needs_cpp_compiler
from phalanx.core.cpp_compiler import find_why_compiler_fails, split_compiler_command
from phalanx.core.errors import EnvironmentProblem
from phalanx.job.schema import Job
from phalanx.run.needs import require_packages


def write_program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@needs_cpp_compiler
def test_the_compiler_of_this_machine_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    assert split_compiler_command() == ["g++"]
    assert find_why_compiler_fails() == ""


def test_one_that_is_not_there_or_fails_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = write_program(tmp_path / "failing", "echo 'x.c:1: error: no OpenMP here' >&2; exit 1")
    no_program = tmp_path / "no-program"
    no_program.write_bytes(b"\x7fELF")
    no_program.chmod(0o755)
    expected = {
        "no-such-compiler": "there is no no-such-compiler",
        "ccache g++": "several words",
        "/bin/false": "it ends with code 1",
        "/bin/true": "it ends with code 0 and writes no library",
        failing: "x.c:1: error: no OpenMP here",
        str(no_program): "does not run",
    }
    for command, words in expected.items():
        monkeypatch.setenv("CXX", command)
        assert words in find_why_compiler_fails(), command


def test_a_path_with_spaces_is_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write_program(tmp_path / "my compiler", 'exec g++ "$@"')
    monkeypatch.setenv("CXX", program)
    assert split_compiler_command() == [program]
    monkeypatch.setenv("CXX", "ccache g++ -m64")
    assert split_compiler_command() == ["ccache", "g++", "-m64"]
    monkeypatch.setenv("CXX", 'g++ "')
    assert split_compiler_command() == ['g++ "']


@needs_cpp_compiler
def test_a_compiler_whose_path_has_spaces_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", write_program(tmp_path / "my compiler", 'exec g++ "$@"'))
    assert find_why_compiler_fails() == ""


def test_only_a_job_that_compiles_on_cpus_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", os.path.realpath("/bin/false"))
    compiling, plain = (
        Job.model_validate_json(json.dumps({"train": {"compile": compiles}}))
        for compiles in (True, False)
    )
    with pytest.raises(
        EnvironmentProblem, match=r"train\.compile needs a C\+\+ compiler, and"
    ) as e:
        require_packages(compiling, "cpu")
    assert "\n" not in str(e.value).strip()
    require_packages(compiling, "cuda")
    require_packages(plain, "cpu")
