"""Collectives over slow links, predicted and measured: `python benchmarks/slow_links.py
[--mbit 20 50 200] [--json]`.

Two ranks stand in two network namespaces that this script makes, joined by a pair of virtual
interfaces whose bandwidth `tc` shapes (a token bucket); both are removed at the end. Needs root,
`ip` and `tc`. Predicted is what the time model says of a group over a network of that bandwidth
(phalanx.plan.timing.collectives, with its constants as they come).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
SIZES = (256 * 1024, MIB, 4 * MIB)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
TIMEOUT_S = 300
PORT = 29517


class NoSlowLinksError(Exception):
    """Why this machine cannot make shaped links."""


@dataclass(frozen=True)
class LinkRow:
    """One operation of `num_bytes` over a link of `mbit` megabits a second in each direction."""

    operation: str
    num_bytes: int
    mbit: float
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


def require_slow_links() -> None:
    """Raise NoSlowLinksError with what is missing."""
    if os.geteuid() != 0:
        raise NoSlowLinksError("only root may make network namespaces")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NoSlowLinksError(f"there is no {program} (package iproute2)")


def measure_links(mbits: Sequence[float]) -> list[LinkRow]:
    """A row for each bandwidth, operation and size. Raises NoSlowLinksError."""
    require_slow_links()
    rows = []
    with _open_namespaces() as (first, second):
        for mbit in mbits:
            for space, link in (first, second):
                _shape(space, link, mbit)
            for measured in _run_ranks((first, second)):
                operation, num_bytes = measured["operation"], measured["num_bytes"]
                predicted_s = predict_collective(operation, num_bytes, mbit)
                rows.append(LinkRow(operation, num_bytes, mbit, predicted_s, measured["seconds"]))
    return rows


def predict_collective(operation: str, num_bytes: int, mbit: float) -> float:
    """Seconds by the time model, of two ranks on two machines."""
    import numpy as np

    from phalanx.plan.accelerators import list_accelerators
    from phalanx.plan.timing import collectives
    from phalanx.plan.timing.constants import load_timing_constants
    from phalanx.plan.timing.machine import LinkRate, MachineRates

    constants = load_timing_constants()
    # Links alone are asked for: whose they are makes no difference.
    accelerator = next(iter(list_accelerators().values()))
    links = (LinkRate(1, 1e12), LinkRate(2, mbit * 1e6 / 8))
    machine = MachineRates(accelerator, links, 1)
    two, one, size = np.array([2.0]), np.array([1.0]), np.array([float(num_bytes)])
    group = collectives.build_group_links(two, one, machine, constants)
    if operation == "all_reduce":
        return float(collectives.all_reduce_s(group, size)[0])
    return float(collectives.all_gather_s(group, size)[0])


# Namespaces


@contextlib.contextmanager
def _open_namespaces() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Two namespaces with the name of their interface; their addresses are 10.213.0.1 and .2."""
    name = f"phx{os.getpid()}"
    spaces = ((f"{name}a", f"{name}va"), (f"{name}b", f"{name}vb"))
    made: list[str] = []
    try:
        for space, _ in spaces:
            _call("ip", "netns", "add", space)
            made.append(space)
        (first, link), (second, peer) = spaces
        _call(
            *("ip", "-n", first, "link", "add", link, "type", "veth"),
            *("peer", "name", peer, "netns", second),
        )
        for number, (space, interface) in enumerate(spaces, 1):
            _call("ip", "-n", space, "addr", "add", f"10.213.0.{number}/24", "dev", interface)
            _call("ip", "-n", space, "link", "set", interface, "up")
            _call("ip", "-n", space, "link", "set", "lo", "up")
        yield spaces[0], spaces[1]
    finally:
        for space in made:
            # The interfaces go with their namespaces.
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _shape(space: str, link: str, mbit: float) -> None:
    # A bucket of some packets: what is sent at once beyond it waits its turn, and is not lost.
    _call(
        *("tc", "-n", space, "qdisc", "replace", "dev", link, "root", "tbf"),
        *("rate", f"{1000 * mbit:.0f}kbit", "burst", "64kb", "latency", "2s"),
    )


def _call(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoSlowLinksError(f"{' '.join(command)}: {done.stderr.strip()}")


def _run_ranks(spaces: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """What rank 0 measured."""
    processes = []
    try:
        for rank, (space, link) in enumerate(spaces):
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "10.213.0.1",
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": link,
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", space, sys.executable, __file__, "--as-rank"]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("a rank failed")
    return [json.loads(line) for line in outputs[0].splitlines()]


def _measure_as_rank() -> None:
    import torch
    import torch.distributed as dist

    from phalanx.mesh.gloo_collectives import all_gather_rows_in_place, reduce_scatter_rows

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    for num_bytes in SIZES:
        rows = torch.zeros(2, num_bytes // 8)
        calls = {
            "all_reduce": lambda rows=rows: dist.all_reduce(rows),
            "all_gather": lambda rows=rows: all_gather_rows_in_place(rows, group),
            "reduce_scatter": lambda rows=rows: reduce_scatter_rows(rows, group),
        }
        for operation in OPERATIONS:
            times = []
            for _ in range(4):
                dist.barrier()
                began = time.perf_counter()
                calls[operation]()
                times.append(time.perf_counter() - began)
            if dist.get_rank() == 0:
                # The first opens connections.
                facts = {
                    "operation": operation,
                    "num_bytes": num_bytes,
                    "seconds": statistics.median(times[1:]),
                }
                print(json.dumps(facts), flush=True)
    dist.destroy_process_group()


def print_table(rows: Sequence[LinkRow]) -> None:
    """Markdown."""
    print("| link Mbit/s | operation | KiB | predicted ms | measured ms | measured / predicted |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row.mbit:.0f} | {row.operation} | {row.num_bytes // 1024} |"
            f" {1e3 * row.predicted_s:.1f} | {1e3 * row.measured_s:.1f} | {row.ratio:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, nargs="+", default=[20.0, 50.0, 200.0])
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        _measure_as_rank()
        return
    try:
        rows = measure_links(arguments.mbit)
    except NoSlowLinksError as error:
        print(error, file=sys.stderr)
        raise SystemExit(6) from None
    if arguments.as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
