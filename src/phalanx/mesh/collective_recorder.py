"""Records the collectives, sends and receives of a rank in its black box, whoever posts them.

It sees calls where `c10d_calls` does, writes them down and passes them on. `Work.wait` and
`wait_tensor` are where a rank waits.

Unseen: what never calls c10d (NCCL or MPI called directly, symmetric memory, RPC, the store), and
process groups written in Python, which torch does not dispatch.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from phalanx.core import black_box_format as layout
from phalanx.core.black_box import (
    BlackBox,
    CollectiveObserver,
    PostedCollective,
    format_ranks,
)
from phalanx.core.call_site import CallSite
from phalanx.mesh.c10d_calls import (
    HandlerDepth,
    Operator,
    handling_c10d_calls,
    keys_after_backend_select,
)
from phalanx.mesh.collective_checks import CollectiveChecks
from phalanx.mesh.reduce_ops import ReduceOps, following_reduce_ops
from phalanx.mesh.shared_memory.work import SharedMemoryWork

# Work is kept until it has ended, and its tensors with it: of at most so many collectives.
_MAX_OPEN_WORKS = 64
# Callers whose calls are added up; code that is made anew each time has no end of them.
_MAX_CALLERS = 1024
# Without the function that NamedTuple makes: a step posts many.
_make_named_tuple = tuple.__new__
_LISTS = list, tuple

_TAG_OF_SEND_AT = 3
_TAG_OF_ANY_SOURCE_AT = 2


class _RecordedGroup:
    """A process group that this rank has used, and how often."""

    def __init__(self, number: int, key: str, label: str, ranks: Sequence[int]) -> None:
        self.number, self.key, self.label, self.ranks = number, key, label, ranks
        self._counter = itertools.count(1)
        self._p2p_counters: dict[tuple[str, int, int], Iterator[int]] = {}

    def next_sequence(self) -> int:
        return next(self._counter)

    def next_p2p_sequence(self, op: str, peer: int, tag: int) -> int:
        key = op, peer, tag
        if key not in self._p2p_counters:
            self._p2p_counters[key] = itertools.count(1)
        return next(self._p2p_counters[key])

    def to_global_rank(self, group_rank: int) -> int:
        if 0 <= group_rank < len(self.ranks):
            return self.ranks[group_rank]
        return -1


@dataclass
class CallerTotals:
    """The calls of one operation in one group from one line: how many, of how many bytes, and
    seconds inside of waits for them. `axis` is the name of the group, `ranks` those in it. Without
    `is_timed` nobody measured the waits: those for a device are in its queue."""

    op: str
    axis: str
    ranks: str
    site: CallSite
    num_calls: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0
    is_timed: bool = True


class _OpenWork(NamedTuple):
    """A collective that has not ended, by the number of its record, where its result will be, when
    it was posted, and the totals that waiting for it adds to."""

    work: dist.Work
    number: int
    address: int
    posted_s: float
    totals: CallerTotals


class _RecordedCall(NamedTuple):
    """A call that has been written down, with the number of its record."""

    number: int
    posted: PostedCollective
    group: _RecordedGroup
    totals: CallerTotals


class CollectiveRecorder:
    """Writes the collectives of this process to `box` while it is installed.

    With `checks` each call is compared with those of the other ranks before it runs.
    """

    def __init__(
        self,
        box: BlackBox,
        checks: CollectiveChecks | None = None,
        reduce_ops: ReduceOps | None = None,
    ) -> None:
        self.num_errors = 0
        self._checks, self._reduce_ops = checks, reduce_ops
        self._box = box
        self._training_thread = threading.get_ident()
        self._groups: dict[str, _RecordedGroup] = {}
        self._dtype_names: dict[torch.dtype, str] = {}
        self._totals: dict[tuple[str, _RecordedGroup, CallSite], CallerTotals] = {}
        # By the id of the Work: torch returns the same object to Python as long as one lives.
        self._open: dict[int, _OpenWork] = {}

    def try_record(self, operator: Operator, args: Sequence[Any]) -> _RecordedCall | None:
        """Write a call down; None where that could not be done."""
        try:
            return self._record(operator, args)
        except Exception:
            # What watches training must not end it.
            self.num_errors += 1
            return None

    def require_same_call_on_ranks(self, call: _RecordedCall) -> None:
        """Raise RanksDifferError if another rank of the group calls something else."""
        if self._checks is None:
            return
        step, reduce_op = 0, ""
        if call.posted.is_foreground:
            step = self._box.step
        if self._reduce_ops is not None:
            reduce_op = self._reduce_ops.current
        group = call.group
        self._checks.compare(
            call.number, call.posted, group.key, group.label, group.ranks, reduce_op, step
        )

    def handle(self, operator: Operator, args: Sequence[Any], proceed: Callable[[], Any]) -> Any:
        """Make the call by `proceed`, and write it down."""
        recorded = self.try_record(operator, args)
        if recorded is None:
            return proceed()
        try:
            if self._checks is not None:
                self.require_same_call_on_ranks(recorded)
            result = proceed()
        except BaseException:
            self._box.end_collective(recorded.number, has_failed=True)
            raise
        self.try_hold(recorded, args, result)
        return result

    def list_totals(self) -> list[CallerTotals]:
        """The calls so far by caller, those that were waited for longest first."""
        return sorted(
            self._totals.values(), key=lambda each: (each.wait_s, each.num_bytes), reverse=True
        )

    def find_overdue(self, seconds: float) -> list[int]:
        """The records of calls that have not ended for so long."""
        latest_s = time.monotonic() - seconds
        works = list(self._open.values())
        return [
            each.number
            for each in works
            if each.posted_s < latest_s and not each.work.is_completed()
        ]

    def try_hold(self, call: _RecordedCall, args: Sequence[Any], result: Any) -> None:
        """Watch the Work of `call`, whose operator has returned `result`."""
        try:
            self._hold(call, args, result)
        except Exception:
            self.num_errors += 1

    def _record(self, operator: Operator, args: Sequence[Any]) -> _RecordedCall:
        """Write that `operator` is called with `args`."""
        group = self._find_group(dist.ProcessGroup.unbox(args[operator.group_at]))
        tensors = args[operator.tensors_at]
        if isinstance(tensors, torch.Tensor):
            tensors = (tensors,)
        first = tensors[0]
        num_bytes = 0
        for tensor in tensors:
            num_bytes += tensor.nbytes
        state = layout.QUEUED
        if first.is_cpu:
            state = layout.POSTED
        peer, tag, sequence = _number_call(operator, args, group)
        site = self._box.sites.find(4)
        totals = self._totals.get((operator.words, group, site))
        if totals is None:
            totals = self._add_totals(operator.words, group, site, is_timed=first.is_cpu)
        totals.num_calls += 1
        totals.num_bytes += num_bytes
        fields = (
            operator.words,
            group.number,
            sequence,
            self._dtype_names.get(first.dtype) or self._name_dtype(first.dtype),
            first.shape,
            len(tensors),
            num_bytes,
            peer,
            tag,
            site,
            state,
            self._is_training_thread(),
        )
        posted = _make_named_tuple(PostedCollective, fields)
        number = self._box.post_collective(posted)
        return _make_named_tuple(_RecordedCall, (number, posted, group, totals))

    def _add_totals(
        self, op: str, group: _RecordedGroup, site: CallSite, *, is_timed: bool
    ) -> CallerTotals:
        ranks = format_ranks(group.ranks)
        totals = CallerTotals(op, group.label, ranks, site, is_timed=is_timed)
        if len(self._totals) < _MAX_CALLERS:
            self._totals[op, group, site] = totals
        return totals

    def _hold(self, call: _RecordedCall, args: Sequence[Any], result: Any) -> None:
        number = call.number
        if self._open:
            self.update()
        if isinstance(result, tuple):
            result = result[-1]
        if result is None:
            # monitored_barrier, which has ended when it returns.
            self._box.end_collective(number, end_seen="waited")
            return
        first = _find_first_tensor(args)
        if not first.is_cpu:
            # Works of a device are not asked: a question costs a call of its driver, is not allowed
            # while a graph is captured, and they would hold memory that its queue still uses.
            return
        work = dist.Work.unbox(result)
        if len(self._open) >= _MAX_OPEN_WORKS:
            # The oldest stays "posted" in the box.
            self._open.pop(next(iter(self._open)), None)
        self._open[id(work)] = _make_named_tuple(
            _OpenWork, (work, number, first.data_ptr(), time.monotonic(), call.totals)
        )
        if self._box.observer is not None:
            _tell_observer_when_completed(self._box.observer, work, number)

    def update(self) -> None:
        """Write the end of collectives that have ended since."""
        if not self._open:
            # The usual case, asked before each position.
            return
        for key, each in list(self._open.items()):
            if each.work.is_completed():
                self._end(key, each)

    def forget_open_works(self) -> None:
        """Let go of collectives that have not ended: their groups live as long as they do."""
        self._open.clear()

    def wait_for_work(self, work: dist.Work, wait: Callable[[], Any]) -> Any:
        """Return `wait()`, which waits for `work`, and write that it does."""
        waited_for = self._open.get(id(work))
        if waited_for is None:
            return wait()
        return self._wait(id(work), waited_for, wait)

    def wait_for_tensor(self, tensor: torch.Tensor, wait: Callable[[], Any]) -> Any:
        """Return `wait()`, which waits for the functional collective that makes `tensor`."""
        if self._open:
            address = tensor.data_ptr()
            for key, each in list(self._open.items()):
                if each.address == address:
                    return self._wait(key, each, wait)
        return wait()

    def _wait(self, key: int, waited_for: _OpenWork, wait: Callable[[], Any]) -> Any:
        self._box.begin_wait(waited_for.number)
        began_s = time.monotonic()
        try:
            result = wait()
        except BaseException:
            # It may also have been a wait with a short timeout, after which the operation goes on.
            self.update()
            raise
        waited_for.totals.wait_s += time.monotonic() - began_s
        # Not asked whether it has ended: gloo's reduce_scatter never says so.
        if self._open.pop(key, None) is not None:
            self._box.end_collective(waited_for.number, end_seen="waited")
        return result

    def _end(self, key: int, each: _OpenWork) -> None:
        # Another thread may have come first.
        if self._open.pop(key, None) is not None:
            self._box.end_collective(each.number, has_failed=_has_failed(each.work))

    def _find_group(self, group: dist.ProcessGroup) -> _RecordedGroup:
        name = group.group_name
        recorded = self._groups.get(name)
        if recorded is None:
            recorded = self._groups[name] = self._add_group(group, name)
        return recorded

    def _add_group(self, group: dist.ProcessGroup, name: str) -> _RecordedGroup:
        try:
            ranks = dist.get_process_group_ranks(group)
        except (RuntimeError, ValueError, KeyError):
            # Not one that torch.distributed has opened.
            ranks = []
        text = format_ranks(ranks)
        # Groups of one axis through different ranks may have one name.
        key = hashlib.blake2b(f"{name} {ranks}".encode(), digest_size=8).hexdigest()
        label = _label_group(group, name)
        number = self._box.add_group(key, label, group.size(), text)
        return _RecordedGroup(number, key, label, ranks)

    def _name_dtype(self, dtype: torch.dtype) -> str:
        name = self._dtype_names[dtype] = str(dtype).removeprefix("torch.")
        return name

    def _is_training_thread(self) -> bool:
        if threading.get_ident() == self._training_thread:
            return True
        # Of autograd, which Python did not start: a backward on a device.
        return isinstance(threading.current_thread(), threading._DummyThread)


@contextmanager
def record_collectives(
    box: BlackBox, checks: CollectiveChecks | None = None
) -> Iterator[CollectiveRecorder]:
    """Write every collective that this process posts inside to `box`, and compare it by `checks`,
    if given."""
    if checks is None:
        with _installed(CollectiveRecorder(box), box) as recorder:
            yield recorder
        return
    with (
        following_reduce_ops() as reduce_ops,
        _installed(CollectiveRecorder(box, checks, reduce_ops), box) as recorder,
    ):
        checks.find_overdue = recorder.find_overdue
        try:
            yield recorder
        finally:
            checks.find_overdue = lambda seconds: ()


@contextmanager
def _installed(recorder: CollectiveRecorder, box: BlackBox) -> Iterator[CollectiveRecorder]:
    library = _intercept_wait_tensor(recorder)
    box.on_progress = recorder.update
    try:
        with (
            handling_c10d_calls(recorder, HandlerDepth.WATCHES),
            _intercept_wait(recorder, dist.Work),
            _intercept_wait(recorder, SharedMemoryWork),
        ):
            yield recorder
    finally:
        box.on_progress = None
        # torch keeps the kernels, and they this recorder.
        recorder.forget_open_works()
        library._destroy()


@contextmanager
def _intercept_wait(recorder: CollectiveRecorder, work_class: Any) -> Iterator[None]:
    wait_of_class = work_class.wait

    def wait(work: dist.Work, *args: Any, **options: Any) -> Any:
        return recorder.wait_for_work(work, lambda: wait_of_class(work, *args, **options))

    work_class.wait = wait
    try:
        yield
    finally:
        work_class.wait = wait_of_class


def _intercept_wait_tensor(recorder: CollectiveRecorder) -> torch.library.Library:
    library = torch.library.Library("_c10d_functional", "IMPL")
    call, after = torch.ops._c10d_functional.wait_tensor.default, keys_after_backend_select()

    def kernel(keys: Any, tensor: torch.Tensor) -> Any:
        return recorder.wait_for_tensor(tensor, lambda: call.redispatch(keys & after, tensor))

    library.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)
    return library


def _find_first_tensor(args: Sequence[Any]) -> torch.Tensor:
    """The first tensor of an operator's arguments, which are tensors and lists of them: that of
    its result, on ranks that get one."""
    for each in args:
        while isinstance(each, _LISTS) and each:
            each = each[0]
        if isinstance(each, torch.Tensor):
            return each
    raise TypeError("an operator of c10d without a tensor")


def _tell_observer_when_completed(
    observer: CollectiveObserver, work: dist.Work, number: int
) -> None:
    """Tell `observer` of the moment at which a transfer is done: DDP waits for its buckets in C++,
    where nobody sees it. Called by the thread that transfers, and so only while a trace is
    recorded."""
    if isinstance(work, SharedMemoryWork):
        # At once, and not when a thread comes by.
        work.operation.call_when_done(lambda: observer.end_collective(number, "completed"))
        return
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError):
        # Sends and receives have none.
        return
    future.add_done_callback(lambda _: observer.end_collective(number, "completed"))


def _has_failed(work: dist.Work) -> bool:
    """True for a Work that has ended without its result. Of sends and receives it is not known."""
    try:
        work.get_future().value()
    except NotImplementedError:
        return False
    except RuntimeError as error:
        return "getFuture" not in str(error)
    return False


def _number_call(
    operator: Operator, args: Sequence[Any], group: _RecordedGroup
) -> tuple[int, int, int]:
    """The peer (a global rank, -1 for none), the tag (-1 for a collective) and the sequence."""
    peer = -1
    if operator.peer_at >= 0:
        peer = group.to_global_rank(args[operator.peer_at])
    if not operator.is_p2p:
        return peer, -1, group.next_sequence()
    tag_at = _TAG_OF_SEND_AT
    if operator.peer_at < 0:
        tag_at = _TAG_OF_ANY_SOURCE_AT
    # Negative ones mean no tag.
    tag = max(0, args[tag_at])
    return peer, tag, group.next_p2p_sequence(operator.words, peer, tag)


def _label_group(group: dist.ProcessGroup, name: str) -> str:
    """The axis of a device mesh, "world" for all ranks, or torch's name."""
    description = group.group_desc
    if description == "default_pg":
        return "world"
    if description in ("", "undefined"):
        return f"group {name}"
    return description.removeprefix("mesh_")
