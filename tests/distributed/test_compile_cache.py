"""Compiled blocks are kept: ranks that start again, and later runs, take them, and compute the same
bits. One rank of a host compiles.

A decoder's block is a dozen kernels and more, each two seconds of g++; what is kept and taken shows
with the few of a smaller block as well.

Reference: the losses of the run that compiled.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from commands import TINY, Done, environment, events, loss_curve, run, write_text
from compilers import needs_cpp_compiler
from phalanx.mesh.compiled.store import CodeStore
from phalanx.observe.events import Note, RestartScheduled

pytestmark = needs_cpp_compiler

JOB = (
    *(key for key in TINY if not key.startswith("model.")),
    "data.source=text",
    "parallel.ranks=2",
    "train.compile=true",
    "train.steps=6",
    "checkpoint.every_steps=none",
    "checkpoint.at_end=false",
)


SMALL_BLOCKS = ("model.kind=user_code:bent",)
DECODER = ("model.num_layers=1", "model.dim=32", "model.num_heads=2")


def train(folder: Path, name: str, *keys: str, **variables: str) -> Done:
    env = environment(XDG_CACHE_HOME=str(folder / "cache"), TORCHINDUCTOR_CACHE_DIR=None)
    model = json.loads((folder / "model.json").read_text())
    return run("train", *JOB, *model, *keys, f"run.dir={name}", cwd=folder, env=env | variables)


def notes(run_dir: Path, code: str, attempt: int) -> list[dict[str, Any]]:
    """The facts of the notes `code` of all ranks in an attempt."""
    return [
        each.event.facts
        for each in events(run_dir, Note)
        if isinstance(each.event, Note) and (each.event.code, each.attempt) == (code, attempt)
    ]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SMALL_BLOCKS, id="small blocks"),
        pytest.param(DECODER, id="decoder", marks=pytest.mark.long),
    ],
)
def compiled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder of a run that compiled, lost a rank after it, and started again."""
    folder = tmp_path_factory.mktemp("compiled")
    write_text(folder / "text")
    shutil.copy(Path(__file__).parent / "user_code.py", folder)
    (folder / "model.json").write_text(json.dumps(request.param))
    done = train(folder, "first", 'resilience.inject=["kill:rank=1,step=3,phase=backward"]')
    assert done.code == 0, done.err
    assert (
        "compiling: blocks, for the first time; later runs of this job take them from" in done.out
    )
    return folder


def test_one_rank_compiles_and_the_other_takes_its_code(compiled: Path) -> None:
    each = notes(compiled / "first", "compiled", 0)
    assert len(each) == 2
    [num_graphs] = {facts["graphs"] for facts in each}
    assert sorted(facts["taken"] for facts in each) == [0, num_graphs]
    assert len(notes(compiled / "first", "compiling", 0)) == 1


def test_ranks_that_start_again_take_what_was_compiled(compiled: Path) -> None:
    assert len(events(compiled / "first", RestartScheduled)) == 1
    each = notes(compiled / "first", "compiled", 1)
    assert [facts["taken"] for facts in each] == [facts["graphs"] for facts in each]
    assert len(each) == 2
    assert notes(compiled / "first", "compiling", 1) == []


def test_a_later_run_takes_it_and_repeats_the_bits(compiled: Path) -> None:
    done = train(compiled, "second")
    assert done.code == 0, done.err
    each = notes(compiled / "second", "compiled", 0)
    assert [facts["taken"] for facts in each] == [facts["graphs"] for facts in each]
    assert f"taken from {compiled / 'cache' / 'phalanx' / 'compiled'}" in done.out
    # With those of the second attempt of the first run, which must be equal, too.
    assert loss_curve(compiled / "second") == loss_curve(compiled / "first")
    assert len(loss_curve(compiled / "second")) == 6


def test_nothing_is_left_in_the_cache_but_code(compiled: Path) -> None:
    # A later process removes what the killed rank left.
    kept = {
        path.name for path in CodeStore.open(compiled / "cache/phalanx/compiled").root.iterdir()
    }
    assert all(name.startswith("code-") for name in kept - {"merging.lock"}), kept
    assert len(kept) - len([name for name in kept if name.startswith("code-toolchain-")]) == 2


def test_a_compiler_that_fails_is_one_line_before_a_rank_starts(compiled: Path) -> None:
    done = train(compiled, "refused", CXX="/bin/false")
    assert done.code == 6
    assert "/bin/false does not compile a small program" in done.problem
    assert not (compiled / "refused" / "events").exists()
