"""Code that an earlier run or another rank of this one has compiled is taken, not compiled again.

Each rank compiles in a folder of its own, into which it unpacks what is kept under the key of its
run. What is not there one rank of a host compiles and keeps, while the others wait for that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.core.digest import digest
from phalanx.mesh.compilations import watching_compilations
from phalanx.mesh.compiled import inductor
from phalanx.mesh.compiled.bundle import pack_folder, unpack_into_folder
from phalanx.mesh.compiled.safe_path import find_why_unsafe
from phalanx.mesh.compiled.store import (
    TURN_POLL_INTERVAL_S,
    CodeStore,
    CompileTurn,
    StoreUnusableError,
    find_store_root,
)
from phalanx.mesh.compiled.toolchain import (
    Toolchain,
    compute_toolchain_key,
    describe_device_of_code,
)
from phalanx.mesh.compiled.work_folders import WorkFolders

# A rank that has waited this long for another one compiles by itself: no supervisor may be there to
# end one that hangs.
WAIT_LIMIT_S = 600.0
_TEMPORARY_PREFIX = "phalanx-compiled-"
# What torch writes beside the code.
_NOT_KEPT_FOLDERS = ("locks/", f"{inductor.HEADERS_FOLDER}/")


@dataclass
class CompilationCounts:
    """What one rank has compiled so far: seconds for it, tracing and waiting for others included,
    graphs that were asked for, those that another rank or run had compiled, and why they are not
    kept for later runs (empty: they are)."""

    seconds: float = 0.0
    num_graphs: int = 0
    num_taken: int = 0
    why_not_kept: str = ""


class CodeReuse:
    """Compiles the graphs of one rank, with `store` as what is kept between runs (None: nothing
    is). `key`: of code that is the same; `run`: of the ranks that wait for each other, at most
    `wait_limit_s`."""

    def __init__(
        self,
        store: CodeStore | None,
        key: str,
        run: str,
        folder: Path,
        toolchain: Toolchain,
        wait_limit_s: float = WAIT_LIMIT_S,
    ) -> None:
        self.counts = CompilationCounts()
        self._store, self._key, self._folder, self._toolchain = store, key, folder, toolchain
        self._code_turn, self._prepare_turn = f"{run}-code", f"{run}-prepare"
        self._wait_limit_s = wait_limit_s
        self._version, self._has_missed, self._is_compiling = "", False, False

    @property
    def is_known(self) -> bool:
        """True if this rank has code of its key."""
        return bool(self._version)

    def begin(self, *, prepares_cpp: bool) -> None:
        """Take what is kept; begin to prepare the C++ compiler beside what the rank does next."""
        self._take_newer_code()
        if not prepares_cpp:
            return
        is_verified_later = self.is_known and inductor.CAN_WATCH_CPP_COMPILER
        self._toolchain.load(verify=not is_verified_later)
        if self._toolchain.is_complete or self._store is None:
            self._toolchain.begin_preparing()
        elif (turn := self._store.try_turn(self._prepare_turn)) is not None:
            # A thread has it, that waits for no rank: no rank waits for it without end.
            self._toolchain.begin_preparing(when_done=turn.end)

    def wrap(self, compile_graph: inductor.Compile) -> inductor.Compile:
        """`compile_graph` as the compiler of this rank calls it."""

        def compile_or_take(*args: Any, **kwargs: Any) -> Any:
            # Torch's compiler calls itself.
            if self._is_compiling:
                return compile_graph(*args, **kwargs)
            self._is_compiling = True
            turn = None
            try:
                turn = self._await_turn_or_code()
                self._await_toolchain()
                before = inductor.count_graphs()
                compiled = compile_graph(*args, **kwargs)
                self._count(before, inductor.count_graphs())
                return compiled
            finally:
                self._is_compiling = False
                if turn is not None:
                    turn.end()

        return compile_or_take

    def note_time(self, begins: bool) -> None:
        """Count the seconds between a beginning and the end after it."""
        now_s = time.monotonic()
        self.counts.seconds += -now_s if begins else now_s

    def end(self) -> None:
        """Leave nothing of this run behind but its code."""
        if self._store is not None:
            self._store.end_turns(self._code_turn)
            self._store.end_turns(self._prepare_turn)

    def _count(self, before: inductor.GraphCounts, after: inductor.GraphCounts) -> None:
        self.counts.num_graphs += 1
        has_compiled = after.num_compiled > before.num_compiled
        # Where torch counts neither it has not looked for code.
        if not has_compiled and after.num_found > before.num_found:
            self.counts.num_taken += 1
        else:
            self._has_missed = True
            self._keep_code()

    def _await_turn_or_code(self) -> CompileTurn | None:
        """This rank's turn to compile; None where there is code that it may need, or nobody keeps
        what he compiles."""
        is_content = bool(self._version) and not self._has_missed
        if self._store is None or is_content or self.counts.why_not_kept:
            return None
        has_waited = False
        end_s = time.monotonic() + self._wait_limit_s
        while not self._take_newer_code():
            turn = self._store.try_turn(self._code_turn)
            if turn is None:
                has_waited = True
                if time.monotonic() > end_s:
                    break
                time.sleep(TURN_POLL_INTERVAL_S)
                continue
            is_new = self._take_newer_code()
            if not is_new and not has_waited:
                return turn
            # After one that has kept nothing all compile at once, as without a store.
            turn.end()
            break
        return None

    def _await_toolchain(self) -> None:
        toolchain = self._toolchain
        toolchain.wait_until_checked()
        if self._store is None or toolchain.is_complete or toolchain.is_being_prepared:
            return
        turn = self._store.await_turn(self._prepare_turn, self._wait_limit_s)
        if turn is not None:
            turn.end()
        toolchain.load(verify=True)

    def _take_newer_code(self) -> bool:
        """True if there is code that this rank has not unpacked yet."""
        if self._store is None:
            return False
        version = self._store.find_version(self._key)
        if version in ("", self._version):
            return False
        bundle = self._store.read(self._key)
        try:
            if bundle is None:
                return False
            unpack_into_folder(bundle, self._folder)
        except (ValueError, TypeError, OSError):
            return False
        self._version = version
        return True

    def _keep_code(self) -> None:
        if self._store is None:
            return
        try:
            # Whoever gets the code looks for what was prepared for it, too.
            self._toolchain.wait_until_kept()
            # Ranks that compile at once would each drop what the others have put there meanwhile.
            with self._store.merging():
                self._take_newer_code()
                self._store.write(self._key, pack_folder(self._folder, _is_kept))
                self._version = self._store.find_version(self._key)
        except OSError as error:
            self.counts.why_not_kept = f"{self._store.root}: {error.strerror or error}"


@contextlib.contextmanager
def reusing_compiled_code(
    job_facts: Any, run_dir: Path, device: torch.device
) -> Iterator[CodeReuse]:
    """In the body code is taken that was compiled under equal `job_facts` (JSON), torch, CPU and
    compiler. Ranks of one host wait for each other, by `run_dir`.

    Where the user's cache folder cannot be used, torch's caches are off, or TORCHINDUCTOR_CACHE_DIR
    names another one, torch does what it does by itself, in its own folder, and `counts` says why
    nothing is kept.
    """
    toolchain_key = compute_toolchain_key(device)
    # Kernels are made for a number of threads.
    device_facts = describe_device_of_code(device)
    code_key = digest([toolchain_key, torch.get_num_threads(), device_facts, job_facts])
    run = digest([str(run_dir.resolve()), socket.gethostname(), device_facts])
    with contextlib.ExitStack() as stack:
        store, folder, why = _open_store(stack)
        keeps_headers = store is not None and inductor.has_movable_headers()
        toolchain = Toolchain(store, toolchain_key, folder, keeps_headers)
        reuse = CodeReuse(store, code_key, run, folder, toolchain)
        reuse.counts.why_not_kept = why
        stack.enter_context(watching_compilations(reuse.note_time))
        stack.enter_context(inductor.remembering_vector_checks(toolchain.checks))
        stack.enter_context(inductor.watching_cpp_compiler(toolchain.verify_headers))
        stack.enter_context(inductor.wrapping_inductor(reuse.wrap))
        stack.callback(reuse.end)
        reuse.begin(prepares_cpp=device.type == "cpu")
        yield reuse


def _open_store(stack: contextlib.ExitStack) -> tuple[CodeStore | None, Path, str]:
    """The store (None: there is none, because of the text), and the folder in which this process
    compiles, until `stack` is closed: without a store torch's own, which keeps code, too."""
    chosen = inductor.find_chosen_folder()
    if chosen:
        return None, Path(chosen), f"{inductor.CACHE_VARIABLE} is set"
    why = inductor.find_why_no_cache()
    if not why:
        try:
            store = CodeStore.open(find_store_root())
            folder = stack.enter_context(_find_work_folders(store).making())
            stack.enter_context(inductor.keeping_code_in(folder))
            return store, folder, ""
        except (StoreUnusableError, OSError) as error:
            why = str(error)
    return None, Path(inductor.find_default_folder()), why


def _find_work_folders(store: CodeStore) -> WorkFolders:
    """The folders in which processes compile whose code `store` keeps.

    Raises StoreUnusableError and OSError.
    """
    if not os.statvfs(store.root).f_flag & os.ST_NOEXEC:
        return store.work_folders
    # What may not run there may run where torch puts it by itself.
    parent = Path(tempfile.gettempdir())
    if why := find_why_unsafe(parent):
        raise StoreUnusableError(f"{store.root}: programs may not run there, and {why}")
    folders = WorkFolders(parent, _TEMPORARY_PREFIX)
    folders.remove_abandoned()
    return folders


def _is_kept(name: str) -> bool:
    return not name.startswith(_NOT_KEPT_FOLDERS) and not name.endswith((".lock", ".partial"))
