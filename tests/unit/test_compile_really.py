"""Torch's compiler and g++ in processes that keep code: what a process remembers, and what damage
does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compilers import needs_cpp_compiler
from phalanx.mesh.compiled.store import CodeStore

pytestmark = [pytest.mark.long, needs_cpp_compiler]

PROGRAM = """
import os, sys, torch
from pathlib import Path
from phalanx.mesh.compiled.reuse import reusing_compiled_code

def compile_powers(power):
    @torch.compile
    def compute(x):
        return (x.sin() ** power).sum(-1)
    x = torch.randn(64, 64)
    expected = (x.sin() ** power).sum(-1)
    torch.testing.assert_close(compute(x), expected)

def compile_in_body(facts, power):
    torch._dynamo.reset()
    with reusing_compiled_code(facts, Path.cwd(), torch.device("cpu")) as rank:
        compile_powers(power)
        # A run goes on for longer than this takes.
        rank._toolchain.wait_until_kept()
        counts = rank.counts
        print(counts.num_graphs, counts.num_taken, counts.why_not_kept or "kept", flush=True)
"""


def run_program(folder: Path, text: str) -> list[str]:
    (folder / "tmp").mkdir(exist_ok=True)
    env = {
        name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"
    } | {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + text], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def find_precompiled(store: CodeStore) -> list[Path]:
    return [path for path in store.root.iterdir() if path.stat().st_size > 50_000_000]


def test_one_process_compiles_twice_and_after_it(tmp_path: Path) -> None:
    lines = run_program(
        tmp_path,
        "compile_in_body('one', 2)\n"
        "compile_in_body('other', 3)\n"
        "compile_in_body('one', 2)\n"
        "torch._dynamo.reset()\n"
        "compile_powers(4)\n",
    )
    assert lines == ["1 0 kept", "1 0 kept", "1 1 kept"]


def test_a_damaged_header_fails_no_run(tmp_path: Path) -> None:
    assert run_program(tmp_path, "compile_in_body('one', 2)\n") == ["1 0 kept"]
    store = CodeStore.open(tmp_path / "cache" / "phalanx" / "compiled")
    [kept] = find_precompiled(store)
    with open(kept, "r+b") as file:
        file.seek(20_000_000)
        file.write(bytes(2_000_000))
    # The code of its key is known, and another graph has it: the source of a module has changed.
    assert run_program(tmp_path, "compile_in_body('one', 3)\n") == ["1 0 kept"]
    assert find_precompiled(store) == []
    assert run_program(tmp_path, "compile_in_body('one', 2)\n") == ["1 1 kept"]
    assert len(find_precompiled(store)) == 1
