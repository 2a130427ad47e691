"""Meshes of real ranks: who stands where, what they agree on, and what is refused when they meet."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.core.errors import EnvironmentProblem, ExitCode, RanksDifferError
from phalanx.mesh.logical import Box, shard_of
from phalanx.mesh.mesh import choose_device, open_mesh
from phalanx.plan.layout import AXES, Layout
from ranks import run_ranks

HSDP = Layout(dp_replicate=2, dp_shard=2)


def look_around(rank: int) -> dict[str, Any]:
    with open_mesh(HSDP, device="cpu") as mesh:
        return {
            "coordinates": mesh.coordinates,
            "from torch": dict(zip(AXES, mesh.device_mesh.get_coordinate(), strict=True)),
            "replicate": dist.get_process_group_ranks(mesh.submesh("dp_replicate").get_group()),
            "shard": dist.get_process_group_ranks(mesh.submesh("dp_shard").get_group()),
            "both": mesh.submesh("dp_replicate", "dp_shard").shape,
            "share": mesh.data_parallel_rank,
            "sum": mesh.all_reduce_sum(torch.tensor([float(rank)])).item(),
            "json": mesh.gather_json({"rank": rank, "text": "é" * rank}),
        }


def test_each_rank_stands_where_the_layout_says() -> None:
    for rank, found in enumerate(run_ranks(4, look_around)):
        assert found["coordinates"] == found["from torch"] == HSDP.coordinates(rank)
        assert found["replicate"] == [rank % 2, rank % 2 + 2]
        assert found["shard"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["both"] == (2, 2)
        assert found["share"] == rank
        assert found["sum"] == 6.0
        assert found["json"] == [{"rank": r, "text": "é" * r} for r in range(4)]


def agree(rank: int) -> list[str]:
    facts: list[dict[str, Any]] = [
        {"job": {"steps": 3}},
        {"job": {"steps": 3 if rank != 2 else 4, "lr": 1.0}},
        {"only": rank % 2},
        {"many": {str(key): rank == 1 for key in range(9)}},
    ]
    outcomes = []
    with open_mesh(Layout(dp_replicate=4), device="cpu") as mesh:
        for each in facts:
            try:
                mesh.require_agreement(each)
                outcomes.append("")
            except RanksDifferError as error:
                outcomes.append(str(error))
    return outcomes


def test_ranks_that_differ_are_named_with_key_and_values_on_all_ranks() -> None:
    every = run_ranks(4, agree)
    assert all(outcomes == every[0] for outcomes in every)
    same, one, half, many = every[0]
    assert same == ""
    assert "rank 2: job.steps = 4, not 3" in one
    assert "rank 0" not in one
    assert "rank 1: only = 1, not 0" in half
    assert "rank 3: only = 1, not 0" in half
    assert "and 5 more" in many


# Logical shards of distributed tensors


def distribute(rank: int) -> dict[str, Any]:
    whole = torch.arange(35.0).view(7, 5)
    placements = {
        "rows": (Replicate(), Shard(0)),
        "columns": (Replicate(), Shard(1)),
        "both": (Shard(0), Shard(1)),
        "whole": (Replicate(), Replicate()),
        "few": (Shard(0), Shard(0)),
    }
    found = {}
    with open_mesh(HSDP, device="cpu") as mesh:
        for name, placement in placements.items():
            source = whole[:3] if name == "few" else whole
            tensor: DTensor = distribute_tensor(source, mesh.submesh("dp_replicate", "dp_shard"), placement)
            shard = shard_of(name, tensor, replica=9, num_replicas=9)
            right = all(
                torch.equal(
                    shard.tensor[tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True))],
                    source[tuple(slice(o, o + n) for o, n in zip(box.global_offset, box.size, strict=True))],
                )
                for box in shard.boxes
            )
            found[name] = (right, shard.global_shape, shard.boxes, shard.replica, shard.num_replicas, shard.num_local)
    return found


def test_boxes_hold_what_they_say_and_tile_the_tensor_once_per_replica() -> None:
    """7 x 5 over 2 x 2 ranks: uneven rows, uneven columns, both, none; and 3 rows over 4 ranks, one of them empty."""
    every = run_ranks(4, distribute)
    num_replicas = {"rows": 2, "columns": 2, "both": 1, "whole": 4, "few": 1}
    for name, replicas in num_replicas.items():
        cells: dict[tuple[int, int, int], int] = {}
        for found in every:
            right, shape, boxes, replica, count, num_local = found[name]
            assert right
            assert count == replicas
            assert num_local == sum(box.size[0] * box.size[1] for box in boxes)
            for box in boxes:
                for row in range(box.size[0]):
                    for column in range(box.size[1]):
                        cell = (replica, box.global_offset[0] + row, box.global_offset[1] + column)
                        cells[cell] = cells.get(cell, 0) + 1
        rows, columns = shape
        assert cells == {(r, i, j): 1 for r in range(replicas) for i in range(rows) for j in range(columns)}, name
    assert every[3]["few"][2] == ()
    assert every[1]["rows"][2] == (Box((4, 0), (0, 0), (3, 5)),)


# Meeting


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def meet(rank: int, port: int, address: str, world_size: int, layout: Layout) -> Any:
    """Through the environment, as under any launcher. (`run_ranks` opened a group already: leave it.)"""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(world_size), RANK=str(rank))
    began = time.monotonic()
    try:
        with open_mesh(layout, device="cpu", rendezvous_s=2) as mesh:
            listening = listeners(port) if rank == 0 else []
            outcome = (mesh.rank, mesh.all_reduce_sum(torch.ones(1)).item(), listening)
    except EnvironmentProblem as error:
        outcome = (str(error), time.monotonic() - began, error.exit_code)
    after = dist.is_initialized()
    # run_ranks ends with a barrier of a group; give it one, of this rank alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return outcome, after


def listeners(port: int) -> list[str]:
    """Local addresses that listen on `port`, as the kernel tells it (hexadecimal, little-endian)."""
    found = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in open(file).readlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.append(local.rpartition(":")[0])
    return found


def test_ranks_meet_through_the_environment_on_loopback_only_and_part_at_the_end() -> None:
    (first, first_after), (second, second_after) = run_ranks(
        2, meet, free_port(), "127.0.0.1", 2, Layout(dp_replicate=2)
    )
    assert first == (0, 2.0, ["0100007F"])
    assert second[:2] == (1, 2.0)
    assert not first_after
    assert not second_after


def test_a_rank_that_never_comes_is_named() -> None:
    outcome, after = run_ranks(1, meet, free_port(), "127.0.0.1", 3, Layout(dp_replicate=3))[0]
    message, seconds, code = outcome
    assert code == ExitCode.ENVIRONMENT
    assert "ranks 1, 2 did not arrive in 2 s" in message
    assert seconds < 10
    assert not after


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome, _ = run_ranks(1, meet, port, "127.0.0.1", 2, Layout(dp_replicate=2))[0]
    assert f"port {port} on 127.0.0.1 cannot be listened on (address in use)" in outcome[0]


def test_a_layout_of_other_ranks_is_refused() -> None:
    outcome, _ = run_ranks(1, meet, free_port(), "127.0.0.1", 1, Layout(dp_replicate=2))[0]
    assert "needs 2 ranks and 1 are running" in outcome[0]


def stay_open(rank: int) -> bool:
    with open_mesh(Layout(dp_replicate=2), device="cpu"):
        pass
    return dist.is_initialized()


def test_a_group_that_was_open_is_used_and_left_open() -> None:
    assert run_ranks(2, stay_open) == [True, True]


def alone(rank: int) -> list[Any]:
    os.environ.update(RANK="0", WORLD_SIZE="1")
    with open_mesh(Layout(), device="cpu") as mesh:
        mesh.require_agreement({"a": 1})
        mesh.barrier()
        return [
            mesh.device_mesh,
            mesh.gather_json([1]),
            mesh.all_reduce_sum(torch.ones(1)).item(),
            dist.is_initialized(),
        ]


def test_one_rank_needs_no_process_group() -> None:
    assert run_ranks(1, alone) == [[None, [[1]], 1.0, False]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what this machine has")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("auto", 3) == torch.device("cpu")
    with pytest.raises(EnvironmentProblem, match="no CUDA device"):
        choose_device("cuda", 0)


def threads_of_meshes(rank: int) -> list[int]:
    """How many threads there are after each mesh."""
    found = []
    for layout in (Layout(dp_shard=2, tp=2), Layout(pp=2, dp_shard=2), Layout(dp_shard=4, ep=2)) * 2:
        with open_mesh(layout, device="cpu") as mesh:
            mesh.stage_group(), mesh.data_parallel_group()
            mesh.barrier()
        found.append(len(os.listdir("/proc/self/task")))
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux's own list of threads")
def test_a_mesh_that_is_opened_again_costs_no_threads() -> None:
    """A hundred layouts in one process, as `phalanx verify` has them, came to two thousand threads in each rank."""
    for found in run_ranks(4, threads_of_meshes):
        assert found[3:] == found[2:3] * 3
