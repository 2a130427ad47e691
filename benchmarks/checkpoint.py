"""Saving and loading a sharded state beside torch's distributed checkpoints (DCP), synchronous and
asynchronous.

python benchmarks/checkpoint.py [--mb 1024] [--ranks 4] [--repeats 5] [--dir FOLDER] [--json FILE]

Every rank holds an equal part of weights and two moments, all fp32, as DTensors sharded in rows
(what FSDP holds). Contenders take turns, in another order each time; before each save the state
changes and the disk is quiet. A row is the median over the repeats of the slowest rank. Loads are
cold: the files' pages are dropped before. Peak memory is what a rank's resident set reached beyond
what it held before (phalanx's staging memory, which it keeps, added), in multiples of its part of
the state, which counts as the first. With `--mb` small it is a check that all of this runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.tensor import DTensor, Shard

from phalanx.checkpoint.chunks import CHUNK_BYTES
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.reading.load import load_checkpoint_into_shards
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.checkpoint.writing.async_checkpointer import AsyncCheckpointer
from phalanx.checkpoint.writing.write import RankSnapshot
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Checkpoint
from phalanx.mesh.logical import make_logical_shard
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.observe.bus import Bus
from phalanx.plan.layout import Layout
from throughput.machine import machine_facts

MIB = 1 << 20
LAYER = {
    "attention.qkv": (3072, 1024),
    "attention.out": (1024, 1024),
    "ffn.up": (4096, 1024),
    "ffn.down": (1024, 4096),
}
SMALL = {"norm.weight": (1024,), "ffn.bias": (4096,)}

# name of a ratio: (numerator, denominator, aim: at most)
RATIOS: dict[str, tuple[str, str, float | None]] = {
    "stall ÷ DCP save": ("phalanx async: stall", "DCP: save", 0.2),
    "stall ÷ plain copy": ("phalanx async: stall", "plain copy", 1.5),
    "stall ÷ DCP async stall": ("phalanx async: stall", "DCP async: stall", None),
    "save ÷ DCP save": ("phalanx: save", "DCP: save", 1.1),
    "async until committed ÷ DCP async": ("phalanx async: committed", "DCP async: committed", None),
    "cold load ÷ DCP cold load": ("phalanx: cold load", "DCP: cold load", None),
    "checksums of a cold load ÷ cold load": ("checksums of a load", "phalanx: cold load", 0.15),
    "peak memory, save ÷ DCP save": ("phalanx: save, memory", "DCP: save, memory", None),
    "peak memory, async ÷ DCP async": ("phalanx async: memory", "DCP async: memory", None),
    "peak memory, load ÷ DCP load": ("phalanx: cold load, memory", "DCP: cold load, memory", None),
}


class Bench:
    """One rank: the state, and a number of seconds or MiB under each name."""

    def __init__(self, mesh: Mesh, folder: Path, total_bytes: int) -> None:
        self.mesh, self.folder, self.step = mesh, folder, 0
        self.found: dict[str, list[float]] = {}
        self.state = make_state(mesh, total_bytes)
        self.plain = [torch.empty_like(tensor.to_local()) for tensor in self.state.values()]
        self.shards = {
            name: make_logical_shard(name, t, replica=0, num_replicas=1)
            for name, t in self.state.items()
        }
        storage = RunStorage.open(folder / "phalanx")
        self.store = storage.store
        self.saver = AsyncCheckpointer(
            storage, Checkpoint(), mesh, Bus(rank=mesh.rank), PhaseTimer(), job_digest=""
        )
        self.gloo = dist.new_group(backend="gloo")

    def take(self, name: str, value: float) -> None:
        """The slowest rank's, or the largest."""
        self.found.setdefault(name, []).append(max(self.mesh.gather_json(value)))

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self.mesh.barrier()
        began = time.perf_counter()
        yield
        self.take(name, time.perf_counter() - began)

    @contextlib.contextmanager
    def peak(self, name: str, *, staging: bool = False) -> Iterator[None]:
        gc.collect()
        held, before = self.saver.staging_bytes if staging else 0, reset_peak()
        yield
        more = max(0.0, peak_bytes() - before) + held
        part = sum(tensor.nbytes for tensor in self.plain)
        self.take(name, 1.0 + more / part)

    def next_state(self) -> None:
        """Another step, a quiet disk, and nothing left of the save before."""
        self.step += 1
        for tensor in self.state.values():
            tensor.to_local().add_(1.0)
        self.mesh.barrier()
        if self.mesh.rank == 0:
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
            shutil.rmtree(self.folder / "phalanx", ignore_errors=True)
            os.sync()
        self.mesh.barrier()

    def snapshot(self) -> RankSnapshot:
        return RankSnapshot(self.step, self.shards, {}, {"step": self.step})

    def plain_copy(self) -> None:
        with self.timed("plain copy"):
            for target, tensor in zip(self.plain, self.state.values(), strict=True):
                target.copy_(tensor.to_local())

    def phalanx_save(self) -> None:
        with self.peak("phalanx: save, memory"), self.timed("phalanx: save"):
            self.saver.save(self.step, self.snapshot, record=lambda: None)

    def phalanx_async(self) -> None:
        with (
            self.peak("phalanx async: memory", staging=True),
            self.timed("phalanx async: committed"),
        ):
            began = time.perf_counter()
            assert self.saver.begin_save(self.step, self.snapshot, record=lambda: None)
            stall_s = time.perf_counter() - began
            assert not self.saver.wait()
            self.saver.release_finished_write()
        self.take("phalanx async: stall", stall_s)

    def dcp_save(self) -> None:
        with self.peak("DCP: save, memory"), self.timed("DCP: save"):
            dcp.save(self.state, checkpoint_id=self.folder / "dcp")

    def dcp_async(self) -> None:
        with self.peak("DCP async: memory"), self.timed("DCP async: committed"):
            began = time.perf_counter()
            future = dcp.async_save(
                self.state, checkpoint_id=self.folder / "dcp", process_group=self.gloo
            )
            stall_s = time.perf_counter() - began
            future.result()
        self.take("DCP async: stall", stall_s)

    def phalanx_load(self) -> None:
        (checkpoint,) = list_checkpoint_paths_of_run(self.folder / "phalanx")
        self.forget(checkpoint)
        with self.peak("phalanx: cold load, memory"), self.timed("phalanx: cold load"):
            load_checkpoint_into_shards(
                checkpoint, self.shards, group=self.mesh, phases=PhaseTimer()
            )
        with self.timed("checksums of a load"):
            for tensor in self.plain:
                view = memoryview(tensor.view(torch.uint8).view(-1).numpy())
                for begin in range(0, len(view), CHUNK_BYTES):
                    xxhash.xxh3_64_hexdigest(view[begin : begin + CHUNK_BYTES])

    def dcp_load(self) -> None:
        self.forget(self.folder / "dcp")
        with self.peak("DCP: cold load, memory"), self.timed("DCP: cold load"):
            dcp.load(self.state, checkpoint_id=self.folder / "dcp")

    def verify(self) -> None:
        """`phalanx checkpoint verify`: one process reads every byte."""
        (checkpoint,) = list_checkpoint_paths_of_run(self.folder / "phalanx")
        self.forget(checkpoint)
        with self.timed("phalanx: cold verify, one process"):
            if self.mesh.rank == 0:
                assert find_checkpoint_problems(checkpoint) == []
            self.mesh.barrier()

    def forget(self, directory: Path) -> None:
        """Drop the pages of its files, so that the next reader waits for the disk."""
        self.mesh.barrier()
        if self.mesh.rank == 0:
            for path in directory.rglob("*"):
                if path.is_file():
                    fd = os.open(path, os.O_RDONLY)
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(fd)
        self.mesh.barrier()


def make_state(mesh: Mesh, total_bytes: int) -> dict[str, DTensor]:
    """Weights of as many layers as fill a third of the bytes, and two moments of each."""
    layer_bytes = 4 * sum(a * b for a, b in LAYER.values()) + 4 * sum(a for (a,) in SMALL.values())
    layers = max(1, round(total_bytes / 3 / layer_bytes))
    scale = min(1.0, total_bytes / 3 / layer_bytes)  # a smaller state has smaller layers
    shapes: dict[str, tuple[int, ...]] = LAYER | SMALL
    state: dict[str, DTensor] = {}
    device_mesh = mesh.submesh("dp_shard")
    for number in range(layers):
        for name, shape in shapes.items():
            rows = max(mesh.world_size, int(shape[0] * scale) // mesh.world_size * mesh.world_size)
            for slot in ("", "/exp_avg", "/exp_avg_sq"):
                local = torch.randn(rows // mesh.world_size, *shape[1:])
                state[f"layers.{number}.{name}{slot}"] = DTensor.from_local(
                    local, device_mesh, [Shard(0)]
                )
    return state


def reset_peak() -> float:
    """Bytes resident now; from here on the kernel's high-water mark counts."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_bytes() -> float:
    return status_bytes("VmHWM")


def status_bytes(key: str) -> float:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return 1024.0 * int(line.split()[1])


def rank_main(
    rank: int, ranks: int, port: int, folder: str, total_bytes: int, repeats: int, out: Any
) -> None:
    warnings.filterwarnings("ignore")
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"
    )
    with open_mesh(Layout(dp_shard=ranks), device="cpu") as mesh:
        bench = Bench(mesh, Path(folder), total_bytes)
        saves: list[tuple[Callable[[], None], tuple[Callable[[], None], ...]]] = [
            (bench.plain_copy, ()),
            (bench.phalanx_save, (bench.phalanx_load, bench.verify)),
            (bench.phalanx_async, ()),
            (bench.dcp_save, (bench.dcp_load,)),
            (bench.dcp_async, ()),
        ]
        for repeat in range(repeats + 1):
            for index in range(len(saves)):
                save, others = saves[(index + repeat) % len(saves)]
                bench.next_state()
                save()
                for other in others:
                    other()
            if (
                repeat == 0
            ):  # allocations, imports, connections; what the first asynchronous save costs is kept
                first = {name: values[0] for name, values in bench.found.items()}
                bench.found.clear()
            elif rank == 0:
                print(f"repeat {repeat} of {repeats}", flush=True)
        if rank == 0:
            state_bytes = sum(t.numel() * 4 for t in bench.state.values())
            out.put({"seconds": bench.found, "first": first, "state_bytes": state_bytes})
        mesh.barrier()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(ranks: int, total_bytes: int, repeats: int, folder: Path) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    out, port = context.Queue(), free_port()
    processes = [
        context.Process(
            target=rank_main, args=(rank, ranks, port, str(folder), total_bytes, repeats, out)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while True:
        with contextlib.suppress(Exception):
            found: dict[str, Any] = out.get(timeout=1.0)
            break
        if failed := [process.exitcode for process in processes if process.exitcode]:
            for process in processes:
                process.kill()
            raise SystemExit(f"a rank ended with {failed[0]}")
    for process in processes:
        process.join()
    return found


def say(found: dict[str, Any], ranks: int) -> None:
    medians = {name: statistics.median(values) for name, values in found["seconds"].items()}
    size = found["state_bytes"] / MIB
    print(f"\nstate of {size:,.0f} MiB on {ranks} ranks\n")
    print(f"| {'what':<38} | median | extremes | GiB/s |")
    print("| --- | ---: | ---: | ---: |")
    for name, value in sorted(medians.items()):
        values = found["seconds"][name]
        extremes = f"{min(values):.3g} to {max(values):.3g}"
        is_memory = name.endswith("memory")
        speed, unit = ("", " x state") if is_memory else (f"{size / 1024 / value:.2f}", " s")
        print(f"| {name:<38} | {value:.3g}{unit} | {extremes} | {speed} |")
    print(
        "\nfirst asynchronous save, which allocates: stall"
        f" {found['first']['phalanx async: stall']:.3g} s\n"
    )
    print("| ratio | measured | aim |")
    print("| --- | ---: | ---: |")
    for name, (above, below, aim) in RATIOS.items():
        ratio = medians[above] / medians[below] if medians[below] else float("nan")
        told = "" if aim is None else f"≤ {aim}{'' if ratio <= aim else ' (missed)'}"
        print(f"| {name} | {ratio:.3f} | {told} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=int, default=1024, help="MiB of state over all ranks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--dir", type=Path, help="a folder on the disk to measure; default the temporary one"
    )
    parser.add_argument(
        "--json", type=Path, help="append all numbers to this file, one line of JSON"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measure(args.ranks, args.mb * MIB, args.repeats, Path(folder))
    say(found, args.ranks)
    if args.json:
        body = {"machine": machine_facts(), "ranks": args.ranks, **found}
        with open(args.json, "a", encoding="utf-8") as file:
            file.write(json.dumps(body) + "\n")


if __name__ == "__main__":
    main()
