"""Large freed blocks go back to the system, which glibc alone does not do; in processes of their
own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from phalanx.mesh.malloc import make_malloc_return_freed_memory
from phalanx.nn.objective import CausalOutput, causal_cross_entropy

MIB = 2**20


def private_bytes() -> int:
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def held_after_free(rank: int, asks: bool, environment: dict[str, str]) -> float:
    """MiB that twenty freed blocks of 8 MiB leave behind, each with a small one behind it that
    stays."""
    os.environ.update(environment)
    if asks:
        make_malloc_return_freed_memory()
    # Freed at once: from here on glibc takes blocks up to this size from its heap. Several, since
    # one may have found room there already.
    first = [torch.ones(30 * MIB // 4) for _ in range(4)]
    first.clear()
    before = private_bytes()
    large, small = [], []
    for _ in range(20):
        large.append(torch.ones(8 * MIB // 4))
        small.append(torch.ones(16 * 1024))
    large.clear()
    return (private_bytes() - before) / MIB


def held_after_losses(rank: int) -> float:
    """MiB that three losses over four chunks of 16 MiB of logits leave behind, each with a small
    block that stays."""
    num_rows, chunk = 16384, 256
    hidden = torch.randn(1, 4 * chunk, 8)
    head, targets = (
        torch.randn(num_rows, 8, requires_grad=True),
        torch.randint(num_rows, (1, 4 * chunk)),
    )
    before, small = private_bytes(), []
    for _ in range(3):
        loss, _ = causal_cross_entropy(chunk)(CausalOutput(hidden, head), {"targets": targets})
        small.append(torch.ones(16 * 1024))
        loss.backward()
        head.grad = None
    return (private_bytes() - before) / MIB


CASES = ((True, {}), (False, {}), (True, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_blocks_are_returned_unless_the_environment_says_otherwise() -> None:
    """Forked from a young process: one that has run tests has room in its heap for all of them."""
    script = "import test_malloc as t; from ranks import run_ranks as run; "
    script += (
        "print([run(1, t.held_after_free, *case)[0] for case in t.CASES] + run(1,"
        " t.held_after_losses))"
    )
    here = Path(__file__).parent
    places = os.pathsep.join(map(str, (here, here.parent / "support")))
    environment = {
        **os.environ,
        "PYTHONPATH": places + os.pathsep + os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    asked, alone, told_otherwise, after_losses = json.loads(done.stdout.splitlines()[-1])
    assert asked < 16
    assert alone > 80, "glibc returns them by itself: there is nothing to do"
    assert told_otherwise > 80
    assert after_losses < 8, "logits have pages of their own, in any rank"
