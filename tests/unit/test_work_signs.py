"""Signs of work of real processes: what moves bytes or takes memory works, what turns in a loop does
not; and compilers and stores say for themselves that they get on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint.stores.object import ObjectStore
from phalanx.core.black_box import BlackBox
from phalanx.core.black_box_reader import LastPosition, read_last_position
from phalanx.launch.work_signs import WINDOW_S, WorkSigns
from phalanx.mesh.compilations import noting_compilations

NOW_S = 1000.0


@contextmanager
def working(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says a line when it is ready, does `code` when it hears one, and says another
    when that is done."""
    source = f"import sys\nprint(flush=True)\ninput()\n{code}\nprint(flush=True)\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def has_worked(code: str) -> bool:
    with working(code) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        signs = WorkSigns([process.pid], NOW_S)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        # Not before the window is over.
        assert signs.find_last_work_s(NOW_S + WINDOW_S / 2, {}) is None
        return signs.find_last_work_s(NOW_S + WINDOW_S, {}) == NOW_S + WINDOW_S


@pytest.mark.parametrize(
    ("code", "is_work"),
    [
        ("open('/dev/null', 'wb').write(bytes(1 << 20))", True),
        ("held = bytearray(b'1' * (32 << 20))", True),
        ("sum(range(1000000))", False),
        ("open('/dev/null', 'wb').write(bytes(1 << 10))", False),
    ],
)
def test_what_works_moves_bytes_or_takes_memory(code: str, is_work: bool) -> None:
    assert has_worked(code) == is_work


def read(path: Path) -> LastPosition:
    position = read_last_position(path)
    assert position is not None
    assert position.header is not None
    return position


def test_a_store_says_that_an_upload_gets_on(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "box")
    box.write(1, "ckpt_write")
    header = read(tmp_path / "box").header
    assert header is not None
    began_s = header.opened_monotonic_s
    signs = WorkSigns([], began_s)
    assert signs.find_last_work_s(began_s + 1.0, {0: read(tmp_path / "box")}) is None
    store = ObjectStore.open("memory://work-signs/run", on_work=box.note_work)
    store.require_writable()
    noted_s = signs.find_last_work_s(began_s + 1.0, {0: read(tmp_path / "box")})
    assert noted_s is not None
    assert noted_s > began_s


@pytest.mark.long
def test_a_rank_says_while_code_is_compiled(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "box")
    box.write(1, "forward")
    seen: list[bool] = []

    def note_and_run(
        graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
    ) -> torch.fx.GraphModule:
        header = read(tmp_path / "box").header
        assert header is not None
        seen.append(header.is_compiling)
        return graph

    with noting_compilations(box):
        torch.compile(lambda x: x.sin() + 1, backend=note_and_run)(torch.ones(3))
    header = read(tmp_path / "box").header
    assert header is not None
    assert (seen, header.is_compiling) == ([True], False)
    # Not told any more.
    torch.compile(lambda x: x.cos() + 1, backend=note_and_run)(torch.ones(3))
    assert seen == [True, False]
