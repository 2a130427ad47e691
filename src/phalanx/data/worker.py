"""`python -m phalanx.data.worker FD PID FD NAME`: a process that reads ahead for one rank.

Torch-free; ends with it.

Messages are a length (uint32) and JSON. The rank sends {"open": SampleSpec, "sys_path"} once, then
{"step", "indices"}; the worker answers each step in order with the layout of its arrays, which lie
in an unnamed file that is sent along, or with an error. {"probe"} asks for the facts of a user's
dataset instead. The second descriptor is the memory in which it says which sample it is at; the
name is there for whoever looks at the list of processes.
"""

from __future__ import annotations

import array
import ctypes
import faulthandler
import json
import mmap
import os
import select
import socket
import struct
import sys
import threading
import traceback
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, DataSourceError, PhalanxError
from phalanx.core.outages import find_outage
from phalanx.core.parent import kill_this_process_with_parent
from phalanx.core.printable import describe_foreign_error
from phalanx.core.stop_signals import ignore_stop_signals
from phalanx.data.whereabouts import WorkerStatus, create_unlinked_file

_LENGTH_PREFIX = struct.Struct("<I")
_PR_SET_NAME = 15
_ALIGNMENT = 64

Message = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


def send_message_with_file(link: socket.socket, message: Message, fd: int | None = None) -> None:
    """Send a message, and a file with it."""
    body = json.dumps(message).encode()
    attached = []
    if fd is not None:
        attached.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd])))
    data = _LENGTH_PREFIX.pack(len(body)) + body
    # The descriptor goes with the first bytes; what a full socket did not take follows them.
    num_sent = link.sendmsg([data], attached)
    link.sendall(data[num_sent:])


def receive_message_with_file(link: socket.socket) -> tuple[Message, int | None] | None:
    """The next message and the file that came with it; None at the end of the connection."""
    fds: list[int] = []
    head = _receive_exactly(link, _LENGTH_PREFIX.size, fds)
    body = head and _receive_exactly(link, _LENGTH_PREFIX.unpack(head)[0], fds)
    if not body:
        for fd in fds:
            os.close(fd)
        return None
    return json.loads(body), next(iter(fds), None)


def _receive_exactly(link: socket.socket, size: int, fds: list[int]) -> bytes:
    """`size` bytes, or none of them at the end of the connection.

    Descriptors that come along go to `fds`.
    """
    data = b""
    while len(data) < size:
        try:
            part, descriptors, _, _ = socket.recv_fds(link, size - len(data), 1)
        except ConnectionError:
            return b""
        fds += descriptors
        if not part:
            return b""
        data += part
    return data


def write_arrays_to_memory_file(arrays: Arrays) -> tuple[list[Message], int]:
    """The layout of the arrays, and an unnamed file that holds them."""
    layout: list[Message] = []
    size = 0
    for name, each in arrays.items():
        # Places are known before anything is written, so each array is copied once.
        layout.append({"name": name, "dtype": each.dtype.str, "shape": each.shape, "at": size})
        size += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
    fd = create_unlinked_file("phalanx-batch")
    # An empty file cannot be mapped.
    os.ftruncate(fd, max(size, 1))
    with mmap.mmap(fd, max(size, 1)) as memory:
        for entry, each in zip(layout, arrays.values(), strict=True):
            np.frombuffer(memory, each.dtype, each.size, entry["at"]).reshape(each.shape)[...] = (
                each
            )
    return layout, fd


def map_arrays_of_memory_file(layout: list[Message], fd: int) -> Arrays:
    """The arrays of `write_arrays_to_memory_file`, mapped: nothing is copied. Closes `fd`."""
    memory = mmap.mmap(fd, 0)
    # The map keeps the file, and the arrays keep the map.
    os.close(fd)
    arrays: Arrays = {}
    for entry in layout:
        count = int(np.prod(entry["shape"], dtype=np.int64))
        flat = np.frombuffer(memory, np.dtype(entry["dtype"]), count, entry["at"])
        arrays[entry["name"]] = flat.reshape(entry["shape"])
    return arrays


def serve_sample_requests(link: socket.socket, whereabouts: WorkerStatus) -> None:
    """Answer until the rank closes the connection."""
    samples: Any = None
    while (received := receive_message_with_file(link)) is not None:
        message, fd = received[0], None
        answer: Message | None = None
        try:
            if "open" in message:
                sys.path[:] = message["sys_path"]
                samples = _open_worker_samples(message["open"], whereabouts)
            elif "probe" in message:
                sys.path[:] = message["sys_path"]
                answer = {"facts": _probe_user_dataset_in_worker(message["probe"], whereabouts)}
            else:
                layout, fd = write_arrays_to_memory_file(
                    samples.take(np.array(message["indices"], np.int64))
                )
                answer = {"step": message["step"], "arrays": layout}
        except Exception as error:
            traceback.print_exc()
            answer = {"step": message.get("step"), "error": _encode_error(error)}
        if answer is not None:
            send_message_with_file(link, answer, fd)
        if fd is not None:
            os.close(fd)


def _open_worker_samples(spec: Message, whereabouts: WorkerStatus) -> Any:
    from phalanx.data.samples import SampleSpec
    from phalanx.data.user_dataset import UserSamples

    samples = SampleSpec(**spec).open()
    if isinstance(samples, UserSamples):
        samples.on_sample = whereabouts.mark_reading_sample
    return samples


def _probe_user_dataset_in_worker(request: Message, whereabouts: WorkerStatus) -> Message:
    from phalanx.data.user_dataset import (
        first_shapes,
        hash_sample_subset,
        open_user_dataset,
    )

    source, args = request["source"], request["args"]
    whereabouts.mark_opening_dataset("train")
    train = open_user_dataset(source, args, "train")
    whereabouts.mark_opening_dataset("held_out")
    held_out = open_user_dataset(source, args, "held_out")
    num_held_out = 0
    if held_out is not None:
        num_held_out = len(held_out)
    return {
        "num_train": len(train),
        "num_held_out": num_held_out,
        "some_samples": hash_sample_subset(train, source, whereabouts.mark_reading_sample),
        "first_shapes": first_shapes(train, source, whereabouts.mark_reading_sample),
    }


def _encode_error(error: Exception) -> Message:
    if isinstance(error, PhalanxError):
        parts = {name: getattr(error, name) for name in ("what", "where", "why", "fix")}
        is_of_source, outage = isinstance(error, DataSourceError), ""
        if isinstance(error, DataSourceError):
            outage = error.outage
        parts |= {"is_of_source": is_of_source, "outage": outage}
        return parts | {"exit_code": int(error.exit_code)}
    return {
        "what": describe_foreign_error(error),
        "where": None,
        "why": None,
        "fix": None,
        "exit_code": int(DataSourceError.exit_code),
        "is_of_source": True,
        "outage": find_outage(error),
    }


def decode_worker_error(described: Message) -> PhalanxError:
    """The error that a worker described, as the same kind that it was."""
    parts = {name: described[name] for name in ("what", "where", "why", "fix")}
    if described["is_of_source"]:
        return DataSourceError(parts.pop("what"), **parts, outage=described["outage"])
    error = DataError(parts.pop("what"), **parts)
    for kind in PhalanxError.__subclasses__():
        if kind.exit_code == described["exit_code"] != DataError.exit_code:
            return kind(error.what, **parts)
    return error


def _die_with_rank_process(link: socket.socket, rank_pid: int) -> None:
    """Be killed when the rank is gone, even while stopped or inside C code; elsewhere than on
    Linux, soon after."""
    kill_this_process_with_parent()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"phalanx-data")
    if os.getppid() != rank_pid:  # it was gone before we asked
        os._exit(1)
    threading.Thread(
        target=_die_when_connection_closes, args=(link,), name="phalanx-lifeline", daemon=True
    ).start()


def _die_when_connection_closes(link: socket.socket) -> None:
    # No events: a hang-up is reported unasked, and messages are for the other thread.
    poll = select.poll()
    poll.register(link.fileno(), 0)
    while not any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(1000)):
        pass
    # Not sys.exit, which would end this thread only.
    os._exit(0)


def main() -> int:
    faulthandler.enable()  # a crash in C code says in which line of whose code
    link = socket.socket(fileno=int(sys.argv[1]))
    # The rank is asked to stop, and stops us when it is done.
    ignore_stop_signals()
    _die_with_rank_process(link, int(sys.argv[2]))
    try:
        serve_sample_requests(link, WorkerStatus(int(sys.argv[3])))
    # The rank is gone, or has closed its end: nobody waits for the answer.
    except BrokenPipeError:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
