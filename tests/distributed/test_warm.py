"""The tests themselves: ranks of their commands start from a process that has imported torch
already."""

from __future__ import annotations

from pathlib import Path

import psutil

from commands import nursery
from phalanx.launch.server_process import start_template


def test_a_server_of_ranks_is_a_fork_of_the_nursery(tmp_path: Path) -> None:
    """Else every test that trains imports torch anew, and the whole takes three times as long,
    in silence."""
    server = start_template(tmp_path)
    try:
        assert psutil.Process(server.pid).ppid() == nursery().pid
    finally:
        server.kill()
