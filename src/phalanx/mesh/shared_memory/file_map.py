"""A file mapped into this process that need not stay open.

Python's mmap keeps a descriptor of its own for each map, and a rank maps each bucket of gradients
of each other rank: of a usual limit (1,024 open files) nothing would be left.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Any

_FAILED = ctypes.c_void_p(-1).value


def _load(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function


_mmap = _load(
    *("mmap", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_munmap = _load("munmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_madvise = _load("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FileMap:
    """`num_bytes` of an open file, shared with all who map it. `values`, which are gone from this
    process when nothing refers to them, have the buffer interface. Raises OSError."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap(None, num_bytes, access, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            _raise_last_error()
        self._address, self._num_bytes = address, num_bytes
        self.values = (ctypes.c_ubyte * num_bytes).from_address(address)
        # At exit all of it goes anyway, and others may still read it here.
        weakref.finalize(self.values, _munmap, address, num_bytes).atexit = False

    def madvise(self, advice: int, start: int = 0, num_bytes: int | None = None) -> None:
        """Tell the system of a range, which begins at a page, what is to be done with it."""
        length = self._num_bytes if num_bytes is None else num_bytes
        if _madvise(self._address + start, length, advice):
            _raise_last_error()


def _raise_last_error() -> None:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code))
