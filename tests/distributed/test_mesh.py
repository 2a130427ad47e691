"""Meshes of real ranks: who stands where, what they agree on, and what is refused when they
meet."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from phalanx.core.errors import EnvironmentProblem, ExitCode, RanksDifferError
from phalanx.core.launchers import SUPERVISED_VARIABLE, find_loopback_interface_name
from phalanx.launch.rank_env import RankEnv, build_rank_env_variables
from phalanx.mesh import mesh as mesh_file
from phalanx.mesh import rendezvous
from phalanx.mesh.devices import choose_device
from phalanx.mesh.logical import Box, make_logical_shard
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.rendezvous import (
    find_interface_towards,
    find_shared_gpu_error,
    open_rendezvous_store,
    set_gloo_interface,
)
from phalanx.plan.layout import AXES, Layout
from ports import free_port
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
            tensor: DTensor = distribute_tensor(
                source, mesh.submesh("dp_replicate", "dp_shard"), placement
            )
            shard = make_logical_shard(name, tensor, replica=9, num_replicas=9)
            right = all(
                torch.equal(
                    shard.tensor[
                        tuple(
                            slice(o, o + n) for o, n in zip(box.local_offset, box.size, strict=True)
                        )
                    ],
                    source[
                        tuple(
                            slice(o, o + n)
                            for o, n in zip(box.global_offset, box.size, strict=True)
                        )
                    ],
                )
                for box in shard.boxes
            )
            found[name] = (
                right,
                shard.global_shape,
                shard.boxes,
                shard.replica,
                shard.num_replicas,
                shard.num_local,
            )
    return found


def test_boxes_hold_what_they_say_and_tile_the_tensor_once_per_replica() -> None:
    """7 x 5 over 2 x 2 ranks: uneven rows, uneven columns, both, none; and 3 rows over 4 ranks,
    one of them empty."""
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
        assert cells == {
            (r, i, j): 1 for r in range(replicas) for i in range(rows) for j in range(columns)
        }, name
    assert every[3]["few"][2] == ()
    assert every[1]["rows"][2] == (Box((4, 0), (0, 0), (3, 5)),)


# Meeting


def meet(
    rank: int, port: int, address: str, world_size: int, layout: Layout, rendezvous_s: float = 60.0
) -> Any:
    """Through the environment, as under any launcher.

    (`run_ranks` opened a group already: leave it.)
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR=address, MASTER_PORT=str(port), WORLD_SIZE=str(world_size), RANK=str(rank)
    )
    began = time.monotonic()
    try:
        with open_mesh(layout, device="cpu", rendezvous_s=rendezvous_s) as mesh:
            listening = listeners(port) if rank == 0 else []
            outcome = (mesh.rank, mesh.all_reduce_sum(torch.ones(1)).item(), listening)
    except EnvironmentProblem as error:
        outcome = (str(error), time.monotonic() - began, error.exit_code)
    after = dist.is_initialized()
    # run_ranks ends with a barrier of a group; give it one, of this rank alone
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return outcome, after


def listeners(port: int) -> list[str]:
    """Local addresses that listen on `port`, as the kernel tells it (hexadecimal,
    little-endian)."""
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
    layout = Layout(dp_replicate=3)
    outcome, after = run_ranks(1, meet, free_port(), "127.0.0.1", 3, layout, 2.0)[0]
    message, seconds, code = outcome
    assert code == ExitCode.ENVIRONMENT
    assert "ranks 1, 2 did not arrive in 2 s" in message
    assert seconds < 30
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


def test_old_names_of_a_mesh_work_and_warn_until_0_2() -> None:
    with open_mesh(Layout(), device="cpu") as mesh:
        with pytest.warns(DeprecationWarning, match=r"counts_samples is now .*is_tp_leader"):
            assert mesh.counts_samples is mesh.is_tp_leader is True
        with pytest.warns(DeprecationWarning, match=r"place_in_stage is now .*stage_rank_and_size"):
            assert mesh.place_in_stage == mesh.stage_rank_and_size == (0, 1)
        with pytest.warns(DeprecationWarning, match=r"open_beside is now .*open_cpu_mesh"):
            assert mesh.open_beside(timeout_s=5).device.type == "cpu"


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
    for layout in (
        Layout(dp_shard=2, tp=2),
        Layout(pp=2, dp_shard=2),
        Layout(dp_shard=4, ep=2),
    ) * 2:
        with open_mesh(layout, device="cpu") as mesh:
            mesh.stage_group(), mesh.data_parallel_group()
            mesh.barrier()
        found.append(len(os.listdir("/proc/self/task")))
    return found


@pytest.mark.skipif(
    not os.path.exists("/proc/self/task"), reason="needs Linux's own list of threads"
)
def test_a_mesh_that_is_opened_again_costs_no_threads() -> None:
    """A hundred layouts in one process, as `phalanx verify` has them, came to two thousand
    threads in each rank."""
    for found in run_ranks(4, threads_of_meshes):
        # One that has ended may still be listed for a moment; a mesh would cost several.
        assert max(found[3:]) <= found[2] + 2


# Timeouts


def timeouts(rank: int, port: int) -> dict[str, float]:
    """Seconds, of every group of the process and of its store, for layouts with all axes; opened
    by ourselves."""
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="4", RANK=str(rank)
    )
    found: dict[str, float] = {}
    layouts = {
        "a": Layout(dp_shard=2, tp=2),
        "b": Layout(pp=2, dp_replicate=2),
        "c": Layout(cp=2, dp_shard=2),
        "d": Layout(dp_shard=4, ep=2),
        "e": Layout(dp_replicate=2, dp_shard=2),
    }
    with open_mesh(layouts["a"], device="cpu", timeout_s=70, rendezvous_s=60):
        found["store"] = dist.distributed_c10d._get_default_store().timeout.total_seconds()
        for name, layout in layouts.items():
            with open_mesh(
                layout, device="cpu", timeout_s=80
            ) as mesh:  # of a group that was open: whoever opens more
                mesh.stage_group(), mesh.data_parallel_group()
                if layout.pp > 1:
                    mesh.open_second_group("pp")
                if layout.ep > 1:
                    mesh.submesh("dp_replicate", "expert_shard")._flatten("experts_dp")
                found |= {
                    f"{name} {kind}": seconds for kind, seconds in timeouts_of_groups().items()
                }
        with open_mesh(
            layouts["c"], device="cpu", timeout_s=90
        ) as mesh:  # these groups are there already
            found |= {
                f"again {axis}": timeout_of(mesh.submesh(axis).get_group())
                for axis in ("cp", "dp_shard")
            }
        beside = mesh.open_cpu_mesh(timeout_s=50)
        assert beside.group is not None
        found["beside"] = timeout_of(beside.group)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def timeout_of(group: dist.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def timeouts_of_groups() -> dict[str, float]:
    """By name; those that an earlier layout opened keep what they had."""
    groups = dist.distributed_c10d._world.pg_names
    return {name: timeout_of(group) for group, name in groups.items()}


def test_every_group_and_the_store_have_the_timeout_of_collectives() -> None:
    for found in run_ranks(4, timeouts, free_port()):
        assert found.pop("store") == 70
        assert found.pop("beside") == 50
        again = {name: found.pop(name) for name in ("again cp", "again dp_shard")}
        assert again == dict.fromkeys(again, 90)
        assert len(found) > 20
        assert set(found.values()) == {70, 80}, found


def wait_in_the_store_after_the_rendezvous(rank: int, port: int) -> float:
    """Seconds for which a rank waits in the store once all have met, as that of NCCL does where a
    group is first used."""
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank)
    )
    with open_mesh(Layout(dp_replicate=2), device="cpu", timeout_s=90, rendezvous_s=60) as mesh:
        patience_s = dist.distributed_c10d._get_default_store().timeout.total_seconds()
        mesh.barrier()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return patience_s


def test_a_rank_may_be_slower_to_its_first_batch_than_to_the_rendezvous() -> None:
    assert run_ranks(2, wait_in_the_store_after_the_rendezvous, free_port()) == [90.0, 90.0]


def all_arrive_before_the_device(rank: int, port: int) -> list[str]:
    """What a rank on a GPU does, in order, with those calls replaced that need one."""
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE="2",
        RANK=str(rank),
        LOCAL_RANK="0",
    )
    did: list[str] = []
    torch.cuda.is_available = lambda: True  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 2  # type: ignore[assignment]

    def set_device(device: torch.device) -> None:
        others = store.check([f"arrived/{other}" for other in range(2)])
        did.append(f"{device}, all there: {others}")
        # The store is a thread of rank 0, and ends with it.
        store.set(f"checked/{rank}", "")
        if rank == 0:
            store.wait(["checked/1"])
        raise RuntimeError("there is none")

    torch.cuda.set_device = set_device  # type: ignore[assignment]
    mesh_file.read_gpu_uuid = lambda device: f"GPU-{rank}"  # type: ignore[assignment]
    store = open_rendezvous_store(rendezvous_s=30)
    with (
        contextlib.suppress(RuntimeError),
        open_mesh(Layout(dp_replicate=2), device="cuda", store=store),
    ):
        pass
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return did


def test_ranks_arrive_before_they_touch_their_device() -> None:
    assert (
        run_ranks(2, all_arrive_before_the_device, free_port()) == [["cuda:0, all there: True"]] * 2
    )


# Ends


def fail_inside(rank: int, port: int) -> tuple[str, bool]:
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank)
    )
    try:
        with open_mesh(Layout(dp_replicate=2), device="cpu"):
            raise ValueError("boom")
    except ValueError as error:
        found = str(error), dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_an_error_inside_leaves_no_group_open() -> None:
    assert run_ranks(2, fail_inside, free_port()) == [("boom", False)] * 2


def test_an_error_on_a_gpu_aborts_instead_of_destroying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying waits for kernels that wait for the other ranks; here it would wait for ever."""
    did: list[str] = []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: did.append("destroyed"))
    monkeypatch.setattr(
        dist.distributed_c10d, "_abort_process_group", lambda: did.append("aborted")
    )
    mesh_file._abandon_process_groups(torch.device("cuda", 0))
    assert did == ["aborted"]


def leave_early(rank: int, port: int) -> tuple[bool, bool]:
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank)
    )
    with open_mesh(Layout(dp_replicate=2), device="cpu") as mesh:
        mesh.barrier()
        mesh_file.abandon_mesh(mesh)
        found = mesh.is_ours, dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_a_mesh_whose_groups_were_left_closes_without_them() -> None:
    assert run_ranks(2, leave_early, free_port()) == [(True, False)] * 2


# Devices and interfaces


def test_a_rank_that_is_shown_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv(SUPERVISED_VARIABLE, raising=False)
    assert choose_device("cuda", 3) == torch.device("cuda", 0)
    monkeypatch.setenv("PHALANX_ATTEMPT", "1")  # as a requeued job of Slurm has it
    assert choose_device("cuda", 3) == torch.device("cuda", 0)
    for name, value in build_rank_env_variables(RankEnv(3, 4, 3, 4), 12345, {}).items():
        monkeypatch.setenv(name, value)  # our own ranks are all shown the same
    with pytest.raises(EnvironmentProblem, match="local rank 3 has no GPU"):
        choose_device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(SUPERVISED_VARIABLE)
    with pytest.raises(EnvironmentProblem, match="local rank 3 has no GPU"):
        choose_device("cuda", 3)


def refuse_to_join(*args: Any, **more: Any) -> None:
    raise EnvironmentProblem("joined")  # there is no NCCL here


def join_with_gpu(rank: int, gpus: list[str], port: int) -> str:
    """What a rank of another launcher's is told that has a GPU (which there is not)."""
    dist.destroy_process_group()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    mesh_file.choose_device = lambda kind, local_rank: torch.device("cuda", 0)  # type: ignore[assignment]
    mesh_file.read_gpu_uuid = lambda device: gpus[rank]  # type: ignore[assignment]
    mesh_file.open_default_group = refuse_to_join  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    with (
        pytest.raises(EnvironmentProblem) as caught,
        open_mesh(Layout(dp_shard=2), rendezvous_s=60),
    ):
        pass
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # what run_ranks leaves
    return str(caught.value)


def test_ranks_with_the_same_gpu_are_refused_before_they_join() -> None:
    assert run_ranks(2, join_with_gpu, ["GPU-a", "GPU-b"], free_port()) == ["joined"] * 2
    told = run_ranks(2, join_with_gpu, ["GPU-a", "GPU-a"], free_port())
    assert all("ranks 0 and 1 have the same GPU" in words for words in told), told


def test_the_same_gpu_is_that_of_one_host() -> None:
    assert find_shared_gpu_error([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")]) is None
    problem = find_shared_gpu_error(
        [("a", "GPU-1"), ("b", "GPU-1"), ("b", "GPU-2"), ("b", "GPU-1")]
    )
    assert problem is not None
    assert (problem.what, problem.where) == ("ranks 1 and 3 have the same GPU", "b")
    assert problem.exit_code == 6


def own_address() -> str:
    """An address of this machine that other machines could use."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has no interface but loopback")


def test_a_store_of_the_supervisor_that_is_gone_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that still connects when another one fails holds its state: it must not try for as
    long as a store may take that nobody has opened yet."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(SUPERVISED_VARIABLE, "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    began_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        open_rendezvous_store(rendezvous_s=60)
    # torch alone tries as long as it may.
    assert time.monotonic() - began_s < 20


def test_gloo_takes_the_interface_that_leads_to_rank_0() -> None:
    assert (
        find_interface_towards("127.0.0.1")
        == find_interface_towards("127.0.1.1")
        == find_loopback_interface_name()
    )
    assert find_interface_towards("no-such-host.invalid") is None
    environ = {"MASTER_ADDR": "127.0.0.1"}
    set_gloo_interface(environ)
    assert environ == {"MASTER_ADDR": "127.0.0.1"}, "one machine needs nothing"
    environ = {"MASTER_ADDR": "127.0.1.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    set_gloo_interface(environ)  # what a machine's own name often resolves to
    assert environ["GLOO_SOCKET_IFNAME"] == find_loopback_interface_name()
    environ = {"MASTER_ADDR": "127.0.1.1", "GLOO_SOCKET_IFNAME": "eth7"}
    set_gloo_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_of_several_machines_the_one_with_rank_0_does_not_announce_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        rendezvous,
        "find_interface_towards",
        lambda host: "lo" if host.startswith("127.") else "eth1",
    )
    environ = {"MASTER_ADDR": "127.0.1.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    set_gloo_interface(environ)
    assert environ["GLOO_SOCKET_IFNAME"] == "eth1"


def meet_by_alias(rank: int, port: int) -> str:
    """As on two machines: rank 0 is known by an address that is none of LOOPBACK's names."""
    dist.destroy_process_group()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(
        MASTER_ADDR="127.0.0.3", MASTER_PORT=str(port), WORLD_SIZE="2", RANK=str(rank)
    )
    os.environ.update(LOCAL_WORLD_SIZE="2")
    with open_mesh(Layout(dp_replicate=2), device="cpu", rendezvous_s=60) as mesh:
        mesh.barrier()
        found = os.environ["GLOO_SOCKET_IFNAME"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


def test_ranks_meet_at_an_address_that_is_not_the_first_of_its_interface() -> None:
    assert run_ranks(2, meet_by_alias, free_port()) == [find_loopback_interface_name()] * 2


def groups_in_order(rank: int, world_size: int, layouts: list[Layout]) -> list[list[list[int]]]:
    """The ranks of each group that this rank of `world_size` asks for, in order, of each layout.

    No other rank runs.
    """
    found = []
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"
    )
    for layout in layouts:
        asked: list[list[int]] = []
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
        new_group = dist.distributed_c10d.new_group

        def noted(
            ranks: Any = None,
            *args: Any,
            to: list[list[int]] = asked,
            new: Any = new_group,
            **more: Any,
        ) -> Any:
            to.append(list(range(world_size)) if ranks is None else list(ranks))
            return new(ranks, *args, **more)

        for module in (dist, dist.distributed_c10d, torch.distributed.device_mesh):
            module.new_group = noted  # type: ignore[attr-defined]
        try:
            with open_mesh(layout, device="cpu") as mesh:
                mesh.stage_group(), mesh.data_parallel_group()
                for axis in ("pp", "cp") if layout.pp > 1 else ():
                    mesh.open_second_group(axis)
                if layout.ep > 1:
                    experts = mesh.submesh("dp_replicate", "expert_shard")
                    experts._flatten("experts_dp")
        finally:
            for module in (dist, dist.distributed_c10d, torch.distributed.device_mesh):
                module.new_group = new_group  # type: ignore[attr-defined]
        dist.destroy_process_group()
        found.append(asked)
    return found


def products(world_size: int) -> list[Layout]:
    """Every product of degrees that are powers of two, over all axes, of this many ranks."""
    found = []
    powers = [
        1 << power for power in range(world_size.bit_length()) if world_size % (1 << power) == 0
    ]
    for pp, replicate, shard, cp, tp in itertools.product(powers, repeat=5):
        if pp * replicate * shard * cp * tp == world_size:
            found.append(Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp))
            if shard > 1 and cp == 1:
                found.append(Layout(pp=pp, dp_replicate=replicate, dp_shard=shard, tp=tp, ep=2))
    return found


def orders(rank: int, world_size: int, layouts: list[Layout], seen_from: list[int]) -> list[Any]:
    """In a process of its own, for it replaces functions of torch."""
    return [groups_in_order(each, world_size, layouts) for each in seen_from]


@pytest.mark.parametrize(("world_size", "most"), [(16, 1000), (32, 16), (64, 10)])
def test_all_ranks_ask_for_the_same_groups_in_the_same_order(world_size: int, most: int) -> None:
    """NCCL and gloo match groups by their number: one more or another order on one rank is a
    hang."""
    every = products(world_size)
    chosen = random.Random(world_size).sample(every, min(most, len(every)))
    ranks = [0, world_size // 2 - 1, world_size - 1]
    first, *others = run_ranks(1, orders, world_size, chosen, ranks)[0]
    assert all(groups for groups in first)
    for rank, other in zip(ranks[1:], others, strict=True):
        for layout, mine, theirs in zip(chosen, first, other, strict=True):
            assert mine == theirs, f"{layout}: ranks 0 and {rank}"


def threads_of(rank: int) -> tuple[int, int, int]:
    """Before, inside and after, where the rank has a GPU (which there is not) and the server one
    thread."""
    mesh_file.choose_device = lambda kind, local_rank: torch.device("cuda", local_rank)  # type: ignore[assignment]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    os.environ |= {"OMP_NUM_THREADS": "3", "LOCAL_WORLD_SIZE": "1"}
    before = torch.get_num_threads()
    with open_mesh(Layout()) as opened:
        assert opened.device.type == "cuda"
        inside = torch.get_num_threads()
    return before, inside, torch.get_num_threads()


def test_ranks_with_a_gpu_have_their_threads_too() -> None:
    """Reference: OMP_NUM_THREADS of the rank, which torch read in the server before it was set."""
    assert run_ranks(1, threads_of) == [(1, 3, 1)]
