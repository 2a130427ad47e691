"""How ranks find each other: the store at MASTER_ADDR, the wait until all have arrived, the
default process group."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist

from phalanx.core.errors import EnvironmentProblem
from phalanx.core.launchers import SUPERVISED_VARIABLE

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
# Another launcher's ranks wait for containers, images and file systems of many machines.
RENDEZVOUS_TIMEOUT_S = 300.0
# Our ranks are forks of one process, which has imported torch.
SUPERVISED_RENDEZVOUS_TIMEOUT_S = 20.0
# For ranks that have all arrived to read one key.
READ_TIMEOUT_S = 20.0
# One try to connect to a store, of many.
CONNECT_TRY_S = 0.5

# Of this process: how often its ranks have met in each incarnation, and the stores that it holds
# for the others, by process (a fork has none), host and port.
_rendezvous_counters: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
_held_stores: dict[tuple[int, str, int], dist.TCPStore] = {}


def wait_for_all_ranks(
    store: dist.Store, rank: int, world_size: int, *, rendezvous_s: float, timeout_s: float
) -> None:
    """Say that this rank is here and return when all are; the store's timeout is then that of
    collectives.

    Raises EnvironmentProblem naming the ranks that did not arrive within `rendezvous_s`.
    """
    store.set(f"arrived/{rank}", "1")
    try:
        store.wait(
            [f"arrived/{r}" for r in range(world_size)], datetime.timedelta(seconds=rendezvous_s)
        )
    except dist.DistStoreError:
        absent = [str(r) for r in range(world_size) if not store.check([f"arrived/{r}"])]
        ranks = "ranks"
        if len(absent) == 1:
            ranks = "rank"
        raise EnvironmentProblem(
            f"{ranks} {', '.join(absent)} did not arrive in {rendezvous_s:g} s",
            fix="see why they did not start, or set resilience.rendezvous_s to more",
        ) from None
    # NCCL makes a communicator at the first use of its group, through the store: a rank that is
    # late by then, because of a slow first batch or compilation, is late to a collective and not to
    # the rendezvous.
    store.set_timeout(datetime.timedelta(seconds=timeout_s))


def require_own_gpu_per_rank(store: dist.Store, rank: int, world_size: int, gpu: str) -> None:
    """Return when all ranks have named their GPU.

    Raises EnvironmentProblem, on each of them, where two have the same.

    NCCL would refuse it too, in words about a bus, and only at the first collective.
    """
    store.set(f"gpu/{rank}", json.dumps([socket.gethostname(), gpu]))
    keys = [f"gpu/{r}" for r in range(world_size)]
    store.wait(keys)
    gpus = [tuple(json.loads(host_and_gpu)) for host_and_gpu in store.multi_get(keys)]
    problem = find_shared_gpu_error(gpus)
    if problem is None:
        return
    store.set(f"gpu_read/{rank}", "1")
    read_keys = [f"gpu_read/{r}" for r in range(world_size)]
    # This rank may hold the store that the others read from: it leaves after them.
    with contextlib.suppress(dist.DistError):
        store.wait(read_keys, datetime.timedelta(seconds=READ_TIMEOUT_S))
    raise problem


def find_shared_gpu_error(gpus_of_ranks: Sequence[tuple[str, str]]) -> EnvironmentProblem | None:
    """The error if two ranks have the same GPU, else None; a GPU is its host and its UUID."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, gpu_of_rank in enumerate(gpus_of_ranks):
        ranks_of.setdefault(gpu_of_rank, []).append(rank)
    for (host, gpu), ranks in ranks_of.items():
        if len(ranks) > 1:
            first, last = ", ".join(map(str, ranks[:-1])), ranks[-1]
            return EnvironmentProblem(
                f"ranks {first} and {last} have the same GPU",
                where=host,
                why=f"its UUID is {gpu}",
                fix="start as many ranks as there are GPUs, and see CUDA_VISIBLE_DEVICES",
            )
    return None


def open_default_group(
    store: dist.Store, rank: int, world_size: int, device: torch.device, *, timeout_s: float
) -> None:
    """Open the default process group of ranks that have all arrived.

    On GPUs it is NCCL's alone: gloo beside it would connect all ranks of every subgroup by TCP, for
    nobody's use (what needs tensors on the CPU opens its own group, see `Mesh.open_cpu_mesh`).
    """
    set_gloo_interface(os.environ)
    # No device_id: with it NCCL opens one communicator at once, whose one stream all unbatched
    # sends and receives of a group then share. A pipeline asks for messages of several ranks ahead,
    # in an order of its own: it needs the communicators of two ranks each that are opened at first
    # use.
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def set_gloo_interface(environ: Any) -> None:
    """Set GLOO_SOCKET_IFNAME, unless it is set, to the interface through which this rank reaches
    MASTER_ADDR.

    By default gloo announces the address of the host's own name, which many machines resolve to
    loopback: ranks on other machines then connect to themselves. Where MASTER_ADDR is such a name
    of this machine, and there are other machines, it is the interface of the default route.
    """
    host = environ.get("MASTER_ADDR", "")
    if environ.get("GLOO_SOCKET_IFNAME") or not host or host in LOOPBACK_HOSTS:
        return
    name = find_interface_towards(host)
    is_one_machine = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if name is not None and not is_one_machine and _is_loopback_interface(name):
        # Addresses that documentation is given and no network has (RFC 5737, 3849): the way to
        # them is the default route.
        name = find_interface_towards("192.0.2.1") or find_interface_towards("2001:db8::1")
    if name is not None:
        environ["GLOO_SOCKET_IFNAME"] = name


def find_interface_towards(host: str) -> str | None:
    """The network interface that packets to `host` leave by; None if there is no way, or no such
    host.

    Nothing is sent: connecting a datagram socket only asks the routing table.
    """
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own_address = probe.getsockname()[0]
        except OSError:
            continue
        name = _find_interface_of_address(own_address)
        if name is not None:
            return name
    return None


def _find_interface_of_address(address: str) -> str | None:
    # Without the zone of a link-local address, as in fe80::1%eth0.
    address = address.partition("%")[0]
    # The whole block is one interface's, which lists its first address alone.
    if address.startswith("127."):
        address = "127.0.0.1"
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return None


def _is_loopback_interface(name: str) -> bool:
    return any(each.address in LOOPBACK_HOSTS for each in psutil.net_if_addrs().get(name, ()))


def open_rendezvous_store(*, rendezvous_s: float = RENDEZVOUS_TIMEOUT_S) -> dist.Store:
    """The key-value store at MASTER_ADDR:MASTER_PORT, which rank 0 holds unless its launcher does.

    Keys are those of this incarnation of the ranks, and of this opening of the store, which all
    ranks open equally often: a restart never reads what the dead ones wrote, nor a second run of
    the same processes what the first one did.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    incarnation = (
        os.environ.get("PHALANX_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    )
    store = _open_tcp_store(rank, world_size, rendezvous_s)
    # Of the incarnation: of its ranks some may have met in an earlier one, and others not.
    number = next(_rendezvous_counters[incarnation])
    return dist.PrefixStore(f"phalanx/{incarnation}/{number}", store)


def _is_store_of_supervisor() -> bool:
    is_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_of_launcher and SUPERVISED_VARIABLE in os.environ


def _connect_to_store_of_supervisor(
    host: str, port: int, world_size: int, rendezvous_s: float
) -> dist.Store:
    """A client of the store of phalanx's own launcher, which listens before a rank starts, and is
    ended where the ranks are to leave.

    Raises torch's error as soon as nobody listens. torch alone tries again until its time is over,
    and a rank that holds its state for the next attempt would be killed as one that hangs.
    """
    until_s = time.monotonic() + rendezvous_s
    while True:
        # torch itself would try again for some seconds.
        if not _does_anybody_listen(host, port):
            raise dist.DistNetworkError(f"the rendezvous store at {host}:{port} is gone")
        try:
            store = dist.TCPStore(
                host,
                port,
                world_size,
                is_master=False,
                timeout=datetime.timedelta(seconds=min(CONNECT_TRY_S, rendezvous_s)),
                wait_for_workers=False,
            )
        except (dist.DistNetworkError, dist.DistStoreError):
            if time.monotonic() >= until_s:
                raise
        else:
            store.set_timeout(datetime.timedelta(seconds=rendezvous_s))
            return store


def _does_anybody_listen(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_TRY_S):
            return True
    except ConnectionRefusedError:
        return False
    except OSError:
        # Slow, or a limit of this process: nothing is known of the other side.
        return True


def _open_tcp_store(rank: int, world_size: int, rendezvous_s: float) -> dist.Store:
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    hosts_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    holding = os.getpid(), host, port
    if hosts_store and holding in _held_stores:
        store = _held_stores[holding]
        store.set_timeout(datetime.timedelta(seconds=rendezvous_s))
        return store
    if _is_store_of_supervisor():
        return _connect_to_store_of_supervisor(host, port, world_size, rendezvous_s)
    listening: socket.socket | None = None
    options: dict[str, Any] = {}
    try:
        if hosts_store and host in LOOPBACK_HOSTS:
            # A TCPStore binds every interface unless it is handed a socket.
            family = socket.AF_INET
            if ":" in host:
                family = socket.AF_INET6
            listening = socket.create_server((host, port), family=family)
            # Detached: the store owns the descriptor from here on, and closes it.
            options["master_listen_fd"] = listening.detach()
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=hosts_store,
            timeout=datetime.timedelta(seconds=rendezvous_s),
            # `wait_for_all_ranks` waits, and can name who is absent.
            wait_for_workers=False,
            **options,
        )
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        why = str(error).splitlines()[0]
        if not hosts_store:
            raise EnvironmentProblem(f"no rank 0 answers at {host}:{port}", why=why) from None
        # The same in words of the system (ours to bind) and of torch (its own).
        if "in use" in str(error).lower() or "EADDRINUSE" in str(error):
            why = "address in use"
        raise EnvironmentProblem(
            f"port {port} on {host} cannot be listened on",
            why=why,
            fix="choose another MASTER_PORT",
        ) from None
    if hosts_store:
        # Held to the end of the process: a rank that is early for the next run must not meet the
        # store of the last one while that is being closed.
        _held_stores[holding] = store
    return store
