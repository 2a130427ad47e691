"""Ranks of a benchmark: forks of this process, so that torch is imported once."""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def measure_in_forked_ranks(
    num_ranks: int, measure: Callable[[int, Path], dict[str, Any]]
) -> dict[str, Any]:
    """Call `measure(rank, folder)` in `num_ranks` processes that have met over gloo, with a folder
    that goes afterwards; what rank 0 returned, through JSON. Raises SystemExit if a rank failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Bound before the ranks are forked: they connect to it, and none of them holds it.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _run_rank(rank, num_ranks, measure, folder, store.port)
            pids.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            raise SystemExit("a rank failed")
        return dict(json.loads((folder / "result.json").read_text()))


def _run_rank(
    rank: int,
    num_ranks: int,
    measure: Callable[[int, Path], dict[str, Any]],
    folder: Path,
    port: int,
) -> None:
    code = 1
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        result = measure(rank, folder)
        if rank == 0:
            (folder / "result.json").write_text(json.dumps(result))
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        # Without torch's teardown of groups that other ranks may have left.
        os._exit(code)
