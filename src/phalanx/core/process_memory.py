"""How much memory a process has: the one definition that a plan, the console, the page and
benchmarks go by.

- *Of its own*: pages that no file backs (heap and other anonymous memory, and shared memory by its
  share: ranks of one host map what others of them show). Training's memory is what a rank has of
  its own on top of what it had when training began: what is compared with a plan.
- *In all*: every resident page, one that several processes share by its share: the kernel's Pss.
  Ranks are forked from a process that has imported torch, and share its pages until they write to
  them, and libraries and token shards.

Peaks are the kernel's own: VmHWM, the most pages that were ever resident at once, which may be set
back to now. So nothing that happens between two readings is missed. docs/memory.md says it for
users.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.core.units import KIB

# Where the kernel's mark cannot be set back.
SAMPLE_INTERVAL_S = 0.005
_PROC_STATUS_FIELDS = (b"VmHWM:", b"RssAnon:", b"RssFile:", b"RssShmem:")


@dataclass(frozen=True)
class ResidentMemory:
    """Resident bytes of a process: now by kind, and the most there were at once since its mark
    was set back."""

    peak_bytes: int
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int

    @property
    def own_bytes(self) -> int:
        """Pages that no file backs, now."""
        return self.anonymous_bytes + self.shared_bytes

    def compute_anonymous_peak_bytes(self, file_bytes_before: int) -> int:
        """Pages that no file backs, at the worst moment since a reading that found
        `file_bytes_before` of files.

        Of files there were no more in between than at one of its ends.
        """
        return max(self.peak_bytes - max(self.file_bytes, file_bytes_before), self.own_bytes)

    @property
    def all_bytes(self) -> int:
        """Resident now, shared pages counted whole."""
        return self.own_bytes + self.file_bytes


@dataclass(frozen=True)
class BytesOfOthers:
    """Resident bytes of a process that other processes' shares account for: Rss less Pss.

    `shared_bytes`: those of them in shared memory; 0 where the kernel does not tell them apart.
    """

    all_bytes: int = 0
    shared_bytes: int = 0


class ProcessMemoryReader:
    """Reads the memory of a process (None: this one), which costs some ten microseconds a time."""

    def __init__(self, pid: int | None = None) -> None:
        self._directory = f"/proc/{pid or 'self'}"
        # Kept open: a reading is one system call.
        self._status: int | None = None
        try:
            self._status = os.open(f"{self._directory}/status", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # No Linux, or the process is gone.
            pass

    def close(self) -> None:
        if self._status is not None:
            os.close(self._status)
            self._status = None

    def read(self) -> ResidentMemory | None:
        """The resident memory; None if the kernel does not say, or no longer."""
        if self._status is None:
            return None
        try:
            # The file has some 1.5 KiB: one read gets all of it, from one moment.
            text = os.pread(self._status, 8192, 0)
            return ResidentMemory(*(_read_kib_field(text, name) for name in _PROC_STATUS_FIELDS))
        except (OSError, ValueError):
            return None

    def reset_peak_resident_bytes(self) -> bool:
        """Set the kernel's mark back to what is resident now. False where that is not allowed."""
        try:
            file = os.open(f"{self._directory}/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            try:
                # 5 sets VmHWM back and touches nothing else (proc(5)).
                os.write(file, b"5")
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    def measure_bytes_of_others(self) -> BytesOfOthers | None:
        """What of the resident memory counts for other processes; None where the kernel does not
        say.

        It walks the process's page tables: ten milliseconds for each few hundred MiB, so not in
        every step.
        """
        try:
            with open(f"{self._directory}/smaps_rollup", "rb") as file:
                text = file.read()
            # With the line's beginning: "SwapPss:" ends in the same letters.
            all_bytes = _read_kib_field(text, b"Rss:") - _read_kib_field(text, b"\nPss:")
        except (OSError, ValueError):
            return None
        shared_bytes, now = 0, self.read()
        # Older kernels do not say.
        if now is not None and b"Pss_Shmem:" in text:
            shared_bytes = now.shared_bytes - _read_kib_field(text, b"Pss_Shmem:")
        return BytesOfOthers(max(0, all_bytes), max(0, shared_bytes))


def _read_kib_field(text: bytes, name: bytes) -> int:
    start = text.index(name) + len(name)
    # The kernel says kB and means KiB.
    return int(text[start : text.index(b"kB", start)]) * KIB


class PeriodicSampler:
    """Calls `look` every few milliseconds in a thread: for peaks that the kernel does not keep."""

    def __init__(self, look: Callable[[], object], period_s: float = SAMPLE_INTERVAL_S) -> None:
        self._look, self._period_s = look, period_s
        self._ended = threading.Event()
        # A daemon: a rank that ends by an error does not wait for it.
        self._thread = threading.Thread(
            target=self._sample_until_stopped, name="memory sampler", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def _sample_until_stopped(self) -> None:
        while not self._ended.wait(self._period_s):
            self._look()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()


class ResidentBytesReader:
    """Reads all resident bytes of this process, in a microsecond or two: fit for every phase."""

    def __init__(self) -> None:
        self._fd = -1
        try:
            self._fd = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # No Linux.
            pass
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def read_resident_bytes(self) -> int:
        """Resident bytes, shared pages counted whole; -1 where the kernel does not say."""
        if self._fd < 0:
            return -1
        return int(os.pread(self._fd, 128, 0).split()[1]) * self._page_bytes

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
