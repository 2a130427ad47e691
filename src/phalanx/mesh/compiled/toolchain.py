"""What compiled code depends on besides its graph, and what a machine needs once before it compiles
C++: checks of vector instructions, a precompiled header.

Both take seconds of a processor, so a thread does them while the rank starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from phalanx.core.cpp_compiler import split_compiler_command
from phalanx.core.digest import digest
from phalanx.mesh.compiled import inductor
from phalanx.mesh.compiled.store import CodeStore, hash_file
from phalanx.mesh.cpu_kind import describe_cpu_for_equal_bits, describe_cpu_model_and_features

# Of g++. clang's (.pch) serve only where they were made.
_PRECOMPILED_SUFFIX = ".gch"
# A check that is not done within this time is left to torch.
_CHECK_TIMEOUT_S = 600.0


def compute_toolchain_key(device: torch.device) -> str:
    """A digest that differs where compiled code must not be shared: another torch, Python, CPU, GPU
    or C++ compiler."""
    gpu: list[Any] = []
    if device.type == "cuda":
        gpu = [torch.cuda.get_device_name(device), torch.version.cuda]
    return digest(
        {
            "torch": [
                torch.__version__,
                torch.version.git_version,
                os.path.dirname(torch.__file__),
            ],
            "python": [sys.version, str(sysconfig.get_config_var("SOABI"))],
            "cpu": [describe_cpu_for_equal_bits(), describe_cpu_model_and_features()],
            "chosen": os.environ.get("ATEN_CPU_CAPABILITY", ""),
            "gpu": gpu,
            "compiler": _describe_compiler(),
        }
    )


def describe_device_of_code(device: torch.device) -> list[Any]:
    """The part of a device that code depends on besides its kind: torch's keys have the index of
    the GPU, so that ranks of one host have code of their own there."""
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]


def _describe_compiler() -> list[Any]:
    """The programs that CXX names (a launcher may stand before the compiler), and what changes when
    another version is put in the place of one."""
    programs = []
    for word in split_compiler_command():
        program = shutil.which(word)
        if program is not None:
            path = os.path.realpath(program)
            status = os.stat(path)
            programs.append([path, status.st_size, status.st_mtime_ns])
    return [os.environ.get("CXX", ""), *programs]


class Toolchain:
    """What is known of the C++ compiler of this machine, kept in `store` as the entry `name`; the
    precompiled header only if it serves in another folder (`keeps_headers`)."""

    def __init__(
        self, store: CodeStore | None, key: str, folder: Path, keeps_headers: bool = True
    ) -> None:
        self._store, self._name, self._folder = store, f"toolchain-{key}", folder
        self._keeps_headers = keeps_headers
        self.checks: dict[str, bool] = {}
        self._is_checked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_complete = False
        # Headers that were given to this process unread: checksums by header.
        self._unread: dict[str, str] = {}
        self._unread_lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """True if nothing is to be prepared but what each process must do by itself."""
        return self._is_complete

    @property
    def is_being_prepared(self) -> bool:
        """True if this process prepares it, or has done so."""
        return self._thread is not None

    def load(self, *, verify: bool) -> None:
        """Take what an earlier run has found. With `verify` large files are read; without it they
        are when the compiler is to use them (`verify_headers`)."""
        data = None if self._store is None else self._store.read(self._name)
        if self._store is None or data is None:
            return
        try:
            facts = json.loads(data)
            self.checks.update(facts["checks"])
            self._is_complete = self._place_headers(self._store, facts["headers"], verify)
        # Of another phalanx.
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            self._is_complete = False

    def _place_headers(self, store: CodeStore, headers: dict[str, Any], verify: bool) -> bool:
        """True if this process needs not precompile."""
        if not self._keeps_headers:
            return True
        placed = [self._place_header(store, name, fact, verify) for name, fact in headers.items()]
        # Sources alone are no headers: torch would precompile them in each process.
        return all(placed) and any("sha256" in fact for fact in headers.values())

    def _place_header(
        self, store: CodeStore, name: str, fact: dict[str, Any], verify: bool
    ) -> bool:
        if Path(name).name != name:
            return False
        path = self._header_path(name)
        path.parent.mkdir(exist_ok=True)
        if "text" in fact:
            path.write_text(fact["text"])
            return True
        checksum = fact["sha256"]
        is_placed = store.link_file(
            self._kept_name(name), path, fact["num_bytes"], checksum if verify else None
        )
        if is_placed and not verify:
            self._unread[name] = checksum
        return is_placed

    def verify_headers(self) -> None:
        """Remove headers that are not what was kept: the compiler would fail of them. Called before
        it runs, in any thread; each header is read once."""
        with self._unread_lock:
            while self._unread:
                name, checksum = self._unread.popitem()
                path = self._header_path(name)
                with contextlib.suppress(OSError):
                    if hash_file(path) == checksum:
                        continue
                # Without it the compiler takes longer. A later process makes another one.
                path.unlink(missing_ok=True)
                self._is_complete = False
                if self._store is not None:
                    self._store.remove_file(self._kept_name(name))

    def begin_preparing(self, when_done: Callable[[], None] = lambda: None) -> None:
        """Begin, in a thread, what torch would otherwise do when it compiles first."""
        self._thread = threading.Thread(
            target=self._prepare, args=(when_done,), name="prepare-compiler", daemon=True
        )
        self._thread.start()

    def _prepare(self, when_done: Callable[[], None]) -> None:
        try:
            inductor.prepare_cpp_compiler(self._is_checked.set)
            if self._store is not None and not self._is_complete:
                self._save(self._store)
        # It is only ahead of time: who compiles meets the error again, and says it.
        except Exception:
            pass
        finally:
            self._is_checked.set()
            when_done()

    def wait_until_checked(self) -> None:
        """Torch changes the flags of its checks while it makes them, so that two threads must not.
        What comes after them may run beside."""
        if self._thread is not None:
            self._is_checked.wait(_CHECK_TIMEOUT_S)

    def wait_until_kept(self) -> None:
        """Until what this process has prepared can be read by others."""
        if self._thread is not None:
            self._thread.join(_CHECK_TIMEOUT_S)

    def _save(self, store: CodeStore) -> None:
        headers = self._keep_headers(store) if self._keeps_headers else {}
        is_complete = not self._keeps_headers or bool(headers)
        # What another process has kept of headers is worth more than these checks.
        if is_complete or store.read(self._name) is None:
            facts = {"checks": self.checks, "headers": headers}
            store.write(self._name, json.dumps(facts).encode())
        self._is_complete = is_complete

    def _keep_headers(self, store: CodeStore) -> dict[str, Any]:
        """Keep the headers in the folder of this process; returns what an entry says of them, empty
        where none was precompiled."""
        headers: dict[str, Any] = {}
        for path in sorted(self._header_path("").glob(f"*{_PRECOMPILED_SUFFIX}")):
            source = path.with_suffix("")
            headers[source.name] = {"text": source.read_text()}
            checksum = store.keep_file(self._kept_name(path.name), path)
            headers[path.name] = {"sha256": checksum, "num_bytes": path.stat().st_size}
        return headers

    def _header_path(self, name: str) -> Path:
        return self._folder / inductor.HEADERS_FOLDER / name

    def _kept_name(self, header: str) -> str:
        return f"{self._name}-{digest(header)}"
