"""The C++ compiler that torch compiles CPU code with, asked without torch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig

from phalanx.core.places import open_temporary_directory

_DEFAULT_COMPILER = "g++"
# What each kernel needs: OpenMP, and a linker.
_PROBE = '#include <omp.h>\nextern "C" int probe() { return omp_get_max_threads(); }\n'
_PROBE_TIMEOUT_S = 60.0
_MAX_MESSAGE_CHARS = 200


def find_compiler_command() -> str:
    """The command in CXX, else g++."""
    return os.environ.get("CXX") or _DEFAULT_COMPILER


def split_compiler_command() -> list[str]:
    """The words of the command: the compiler, perhaps with a launcher such as ccache before it."""
    command = find_compiler_command()
    if shutil.which(command):
        return [command]
    try:
        return shlex.split(command)
    except ValueError:
        return [command]


def find_why_compiler_fails() -> str:
    """Why the compiler cannot compile and link a small program; empty if it can."""
    command = find_compiler_command()
    if not shutil.which(command):
        if len(split_compiler_command()) > 1:
            return f"CXX={command!r} has several words, and torch takes the name of one program"
        return f"there is no {command}"
    source, include = _PROBE, sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        # It may lie where the compiler looks by itself.
        source = f"#include <Python.h>\n{_PROBE}"
    with open_temporary_directory("phalanx-cxx-") as folder:
        library = folder / "probe.so"
        options = ["-x", "c++", "-", "-shared", "-fPIC", "-fopenmp", "-o", str(library)]
        try:
            done = subprocess.run(
                [command, *options],
                input=source.encode(),
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command} does not run: {getattr(error, 'strerror', None) or error}"
        if done.returncode == 0 and library.exists():
            return ""
    return f"{command} does not compile a small program: {_find_reason(done)}"


def _find_reason(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").splitlines()
    errors = [line for line in lines if "error" in line or "not found" in line] or lines
    if errors:
        return errors[0].strip()[:_MAX_MESSAGE_CHARS]
    return f"it ends with code {done.returncode} and writes no library"
