"""Sleep until a word of shared memory changes (Linux's futex), and wake those who sleep.

A call into the kernel is a full memory barrier. Words are read and written without one elsewhere,
which x86 allows: its stores become visible in the order of the program. See `is_supported`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from collections.abc import Callable

_WAIT, _WAKE = 0, 1
_ALL_WAITERS = 2**31 - 1
_SYSCALL_NUMBERS = {"x86_64": 202, "AMD64": 202}


class _TimeSpec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def is_supported() -> bool:
    """True on Linux on x86-64.

    Other processors may show stores to other cores in another order than they were made.
    """
    return sys.platform == "linux" and platform.machine() in _SYSCALL_NUMBERS


def _load_syscall() -> Callable[..., int]:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    call: Callable[..., int] = syscall
    return call


_syscall = _load_syscall() if is_supported() else None
_number = _SYSCALL_NUMBERS.get(platform.machine(), 0)


def wait_for_change(address: int, expected: int, timeout_s: float) -> None:
    """Return when the 32-bit word at `address` is no longer `expected`, after `timeout_s`, or
    earlier (a signal): the caller looks again.

    Other threads of this process run meanwhile.
    """
    assert _syscall is not None
    seconds = int(timeout_s)
    timeout = _TimeSpec(seconds, int((timeout_s - seconds) * 1e9))
    result = _syscall(_number, address, _WAIT, expected, ctypes.byref(timeout), None, 0)
    if result == -1:
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(code, "futex wait failed")


def wake_waiters(address: int) -> None:
    """Wake all threads of all processes that wait for the word at `address` to change."""
    assert _syscall is not None
    _syscall(_number, address, _WAKE, _ALL_WAITERS, None, None, 0)
