"""What compiled code depends on besides its graph, and what a machine needs once before it compiles
C++: checks of vector instructions, a precompiled header.

Both take seconds of a processor, so a thread does them while the rank starts.
"""

from __future__ import annotations

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

from phalanx.core.digest import digest
from phalanx.mesh.compiled import inductor
from phalanx.mesh.compiled.store import CodeStore
from phalanx.mesh.cpu_kind import describe_cpu_for_equal_bits, describe_cpu_model_and_features

# A check that is not done within this time is left to torch.
_CHECK_TIMEOUT_S = 600.0


def compute_toolchain_key(device: torch.device) -> str:
    """A digest that differs where compiled code must not be shared: another torch, Python, CPU, GPU
    or C++ compiler."""
    gpu = ""
    if device.type == "cuda":
        gpu = f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
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


def _describe_compiler() -> list[Any]:
    """The program, and what changes when another version is put in its place."""
    found = shutil.which(os.environ.get("CXX") or "g++")
    if found is None:
        return []
    program = os.path.realpath(found)
    status = os.stat(program)
    return [program, status.st_size, status.st_mtime_ns]


class Toolchain:
    """What is known of the C++ compiler of this machine, kept in `store` as the entry `name`."""

    def __init__(self, store: CodeStore | None, key: str, folder: Path) -> None:
        self._store, self._name, self._folder = store, f"toolchain-{key}", folder
        self.checks: dict[str, bool] = {}
        self._is_checked = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """True if nothing is to be prepared but what each process must do by itself."""
        return self._is_complete

    @property
    def is_being_prepared(self) -> bool:
        """True if this process prepares it, or has done so."""
        return self._thread is not None

    def load(self, *, verify: bool) -> None:
        """Take what an earlier run has found. With `verify` large files are read, too:
        they are used where code is compiled."""
        data = None if self._store is None else self._store.read(self._name)
        if self._store is None or data is None:
            return
        try:
            facts = json.loads(data)
            self.checks.update(facts["checks"])
            placed = [
                self._place_header(self._store, name, fact, verify)
                for name, fact in facts["headers"].items()
            ]
            self._is_complete = bool(placed) and all(placed)
        # Of another phalanx.
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            self._is_complete = False

    def _place_header(
        self, store: CodeStore, name: str, fact: dict[str, Any], verify: bool
    ) -> bool:
        if Path(name).name != name:
            return False
        path = self._folder / inductor.HEADERS_FOLDER / name
        path.parent.mkdir(exist_ok=True)
        if "text" in fact:
            path.write_text(fact["text"])
            return True
        checksum = fact["sha256"] if verify else None
        return store.link_file(self._kept_name(name), path, fact["num_bytes"], checksum)

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
        headers: dict[str, Any] = {}
        for path in sorted((self._folder / inductor.HEADERS_FOLDER).iterdir()):
            if path.suffix == ".h":
                headers[path.name] = {"text": path.read_text()}
            elif path.suffix == ".gch":
                checksum = store.keep_file(self._kept_name(path.name), path)
                headers[path.name] = {"sha256": checksum, "num_bytes": path.stat().st_size}
        facts = {"checks": self.checks, "headers": headers}
        store.write(self._name, json.dumps(facts).encode())
        self._is_complete = True

    def _kept_name(self, header: str) -> str:
        return f"{self._name}-{digest(header)}"
