"""How the ranks of a host find each other's memory."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.distributed as dist

from phalanx.core.black_box import read_boot_id
from phalanx.core.errors import EnvironmentProblem
from phalanx.core.process_stat import read_process_stat_or_raise
from phalanx.mesh.c10d_calls import HandlerDepth, handling_c10d_calls
from phalanx.mesh.reduce_ops import following_reduce_ops
from phalanx.mesh.shared_memory import futex
from phalanx.mesh.shared_memory.arena import ARENA_BYTES, OwnArena, open_arena_of_process
from phalanx.mesh.shared_memory.board import SEGMENT_TABLE_AT, read_nonce, reserve_directory
from phalanx.mesh.shared_memory.peers import Peer
from phalanx.mesh.shared_memory.segments import SeenSegments
from phalanx.mesh.shared_memory.transport import SharedMemoryTransport

CollectivesChoice = Literal["auto", "shared", "gloo"]

# Of this process: nested layouts of the same ranks use what is open.
_open_transports: list[SharedMemoryTransport] = []
_is_assumed = False


def current_transport() -> SharedMemoryTransport | None:
    """The shared memory that is open in this process; None where collectives go through gloo."""
    return _open_transports[-1] if _open_transports else None


def shares_memory(group: dist.ProcessGroup) -> bool:
    """True if collectives of `group` go through shared memory."""
    transport = current_transport()
    return transport is not None and transport.shares_memory(group)


def find_transport_in_place(group: dist.ProcessGroup) -> SharedMemoryTransport | None:
    """The shared memory by which ranks of `group` read each other's tensors where they lie; None
    where they do not."""
    transport = current_transport()
    if transport is None or not transport.reads_in_place(group):
        return None
    return transport


def gathers_in_one_call(group: dist.ProcessGroup) -> bool:
    """True if one all-gather, or one reduce-scatter, is the quickest way on the CPU: through shared
    memory, or where a program is followed that would run there."""
    return _is_assumed or shares_memory(group)


@contextlib.contextmanager
def assuming_shared_memory(is_assumed: bool) -> Iterator[None]:
    """Inside, ranks that are not there would share memory with this one."""
    global _is_assumed
    before, _is_assumed = _is_assumed, is_assumed
    try:
        yield
    finally:
        _is_assumed = before


@contextlib.contextmanager
def sharing_memory_between_ranks(
    rank: int, gather: Callable[[Any], list[Any]], choice: CollectivesChoice
) -> Iterator[SharedMemoryTransport | None]:
    """Have collectives of ranks on one host go through shared memory while the body runs.

    Collective over all ranks: `gather` returns every rank's JSON value on every rank. Yields None
    where this rank shares memory with none, or `choice` is "gloo". Raises EnvironmentProblem if it
    is "shared" and some two ranks do not.
    """
    outer = current_transport()
    if outer is not None and choice == "gloo":
        with outer.paused():
            yield None
        return
    if choice == "gloo" or outer is not None:
        yield outer
        return
    arena, problem = _open_arena()
    peers: dict[int, Peer] = {}
    facts = gather(_describe_process(arena, problem))
    if arena is not None:
        peers, problem = _open_arenas_of_peers(arena, rank, facts)
    mapped = gather({"ranks": sorted(peers), "problem": problem})
    reach = [set(fact["ranks"]) for fact in mapped]
    if choice == "shared":
        _require_all_mapped(mapped)
    if arena is None or not peers:
        if arena is not None:
            arena.close()
        yield None
        return
    with following_reduce_ops() as reduce_ops:
        transport = SharedMemoryTransport(arena, rank, peers, reach, reduce_ops)
        _open_transports.append(transport)
        try:
            with handling_c10d_calls(transport, HandlerDepth.TAKES):
                yield transport
        finally:
            _open_transports.remove(transport)
            transport.close()


def _open_arena() -> tuple[OwnArena | None, str]:
    """This rank's arena; or None and why it has none."""
    if not futex.is_supported():
        return None, "only Linux on x86-64 orders memory as shared words need"
    try:
        arena = OwnArena(ARENA_BYTES)
    except (OSError, AttributeError) as error:
        # RLIMIT_AS or RLIMIT_FSIZE; a kernel or a C library without memfd.
        return None, f"{ARENA_BYTES >> 30} GiB of sparse memory cannot be mapped ({error})"
    reserve_directory(arena)
    return arena, ""


def _describe_process(arena: OwnArena | None, problem: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"host": _name_host(), "pid": os.getpid(), "problem": problem}
    if arena is not None:
        # Without this the other ranks would take this one for dead: rather an error of its own.
        stat = read_process_stat_or_raise(os.getpid())
        facts |= {
            "started": stat.start_ticks if stat is not None else None,
            "descriptor": arena.descriptor,
            "num_bytes": arena.num_bytes,
            "nonce": read_nonce(arena),
        }
    return facts


def _name_host() -> str:
    """What processes that can open each other's files have in common: the boot of a kernel, and the
    namespace that numbers processes; and the network, so that ranks which somebody has put into
    networks of their own stay as far from each other as these are."""
    boot = read_boot_id()
    try:
        namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("pid", "net")]
    except OSError:
        boot = ""
    if not boot:
        # A host of its own. Its number may be another one's, too, in another sandbox.
        return f"process {uuid.uuid4()}"
    return f"{boot} {namespaces} {os.getuid()}"


def _open_arenas_of_peers(
    arena: OwnArena, rank: int, facts: list[Any]
) -> tuple[dict[int, Peer], str]:
    """The other ranks whose memory this one has mapped; and why, if it has not mapped all."""
    peers: dict[int, Peer] = {}
    problem = ""
    for other, fact in enumerate(facts):
        if other == rank:
            continue
        if fact["host"] != facts[rank]["host"]:
            problem = f"rank {other} is on another host"
            continue
        if "descriptor" not in fact:
            problem = f"rank {other}: {fact['problem']}"
            continue
        try:
            mapped = open_arena_of_process(fact["pid"], fact["descriptor"], fact["num_bytes"])
        except OSError as error:
            problem = f"the memory of rank {other} cannot be mapped: {error}"
            continue
        if read_nonce(mapped) != fact["nonce"]:
            problem = f"rank {other} is not the process {fact['pid']} of this host"
            continue
        peers[other] = Peer(
            other,
            fact["pid"],
            fact["started"],
            mapped,
            SeenSegments(fact["pid"], mapped, SEGMENT_TABLE_AT),
        )
    return peers, problem


def _require_all_mapped(mapped: list[Any]) -> None:
    for rank, fact in enumerate(mapped):
        if len(fact["ranks"]) < len(mapped) - 1:
            raise EnvironmentProblem(
                "not all ranks share memory",
                where=f"rank {rank}",
                why=fact["problem"],
                fix="set parallel.collectives to auto, or to gloo",
            )
