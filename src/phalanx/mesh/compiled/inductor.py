"""What is private of torch's compiler, in one place: where a torch lacks a name, that part is left
out, and costs time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.codecache as codecache
import torch._inductor.compile_fx as inductor
import torch._inductor.config
import torch._inductor.cpp_builder as cpp_builder
import torch._inductor.cpu_vec_isa as vec_isa
from torch._dynamo.utils import counters

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
TRITON_VARIABLE = "TRITON_CACHE_DIR"
HEADERS_FOLDER = "precompiled_headers"
_NOTHING_KERNEL = 'extern "C" void kernel(float* nothing) {}'

Compile = Callable[..., Any]


@contextlib.contextmanager
def wrapping_inductor(wrap: Callable[[Compile], Compile]) -> Iterator[None]:
    """In the body torch's compiler is what `wrap` makes of it: called for each graph that is
    traced, with the graph and its inputs. Backwards are compiled with their forwards."""
    before = inductor.compile_fx
    inductor.compile_fx = wrap(before)
    changes = {}
    if hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        changes["force_non_lazy_backward_lowering"] = True
    try:
        with torch._functorch.config.patch(**changes):
            yield
    finally:
        inductor.compile_fx = before


def find_chosen_folder() -> str:
    """The folder that the user has chosen for what torch compiles; empty where there is none."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    # Torch writes its own choice into the variable when it is imported.
    return "" if chosen == find_default_folder() else chosen


def find_default_folder() -> str:
    """The folder, of all this user's processes, in which torch compiles by itself."""
    return os.path.abspath(codecache.default_cache_dir())


def find_why_no_cache() -> str:
    """Why torch takes no graph from a cache, as the user has told it; empty if it does."""
    config = torch._inductor.config
    if getattr(config, "force_disable_caches", False):
        return "torch's caches are off (TORCHINDUCTOR_FORCE_DISABLE_CACHES)"
    if not getattr(config, "fx_graph_cache", True):
        return "torch's cache of graphs is off (TORCHINDUCTOR_FX_GRAPH_CACHE)"
    return ""


def has_movable_headers() -> bool:
    """True if a precompiled header serves in another folder than that in which it was made: g++'s
    does; clang refuses it there."""
    is_gcc = getattr(cpp_builder, "is_gcc", None)
    # Raises many errors where there is no compiler.
    with contextlib.suppress(Exception):
        return is_gcc is not None and bool(is_gcc())
    return False


@contextlib.contextmanager
def keeping_code_in(folder: Path) -> Iterator[None]:
    """Torch's compiler keeps all its files in `folder` during the body, and remembers none of them
    after it."""
    names = (CACHE_VARIABLE, TRITON_VARIABLE)
    before = {name: os.environ.get(name) for name in names}
    headers = getattr(codecache, "_HEADER_DIR", None), getattr(codecache, "_HEADER_LOCK_DIR", None)
    os.environ[CACHE_VARIABLE] = str(folder)
    # Where torch has compiled for a GPU it has chosen a folder for Triton, too, for good.
    if (before[TRITON_VARIABLE] or "").startswith(find_default_folder() + os.sep):
        os.environ.pop(TRITON_VARIABLE)
    if has_movable_headers():
        _set_header_folders(str(folder / HEADERS_FOLDER), str(folder / HEADERS_FOLDER / "locks"))
    try:
        with _remembering_no_paths():
            yield
    finally:
        _set_header_folders(*headers)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _set_header_folders(headers: str | None, locks: str | None) -> None:
    if hasattr(codecache, "_HEADER_DIR"):
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = headers, locks


@contextlib.contextmanager
def _remembering_no_paths() -> Iterator[None]:
    """Torch remembers for the life of a process where it has put a header or measured times, and
    which kernels it has loaded. In the body it begins anew, and after it has what it had before:
    each time the files lie in another folder, and those of the body are gone after it.

    Put in their place, not cleared: a thread that still prepares the compiler then would remember
    the folder of the body.
    """
    header = getattr(codecache, "_precompile_header", None)
    function = getattr(header, "__wrapped__", None)
    tuned = getattr(getattr(codecache, "CacheBase", None), "get_local_cache_path", None)
    forget_tuned = getattr(tuned, "cache_clear", lambda: None)
    kernels = getattr(codecache, "CppPythonBindingsCodeCache", None)
    loaded = getattr(kernels, "cache", None)
    if function is not None:
        codecache._precompile_header = functools.cache(function)
    if isinstance(loaded, dict):
        setattr(kernels, "cache", {})  # noqa: B010 (a torch may have no such class)
    forget_tuned()
    try:
        yield
    finally:
        if function is not None:
            codecache._precompile_header = header
        if isinstance(loaded, dict):
            setattr(kernels, "cache", loaded)  # noqa: B010
        forget_tuned()


# A torch without it: what is compiled is not seen, so what it needs is verified before.
CAN_WATCH_CPP_COMPILER = hasattr(codecache, "_worker_compile_cpp")


@contextlib.contextmanager
def watching_cpp_compiler(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell`, in the body, each time before the C++ compiler runs, in the thread that
    runs it."""
    if not CAN_WATCH_CPP_COMPILER:
        yield
        return
    work = codecache._worker_compile_cpp

    def tell_and_work(lock_path: str, cpp_builders: Any) -> None:
        if not all(os.path.exists(each.get_target_file_path()) for each in cpp_builders):
            tell()
        work(lock_path, cpp_builders)

    codecache._worker_compile_cpp = tell_and_work
    try:
        yield
    finally:
        codecache._worker_compile_cpp = work


@dataclass(frozen=True)
class GraphCounts:
    """Forwards and backwards of this process so far: those that its compiler made, and those that
    torch found in its cache."""

    num_compiled: int
    num_found: int


def count_graphs() -> GraphCounts:
    """Returns what torch has counted so far. It counts nothing where its caches are off."""
    counts = counters["inductor"]
    return GraphCounts(
        counts["fxgraph_cache_miss"] + counts["fxgraph_cache_bypass"],
        counts["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    )


@contextlib.contextmanager
def remembering_vector_checks(known: dict[str, bool]) -> Iterator[None]:
    """In the body torch checks of what the CPU and the C++ compiler can do only what `known` does
    not tell, and only of the first instructions that it would choose; `known` gets what it finds.

    Torch compiles a program for each, and has a process load it, in every run.
    """
    check, choose = getattr(vec_isa.VecISA, "check_build", None), vec_isa.valid_vec_isa_list
    if check is None:
        yield
        return

    def check_once(self: Any, code: str) -> bool:
        key = hashlib.sha256(f"{self.build_arch_flags()}\n{code}".encode()).hexdigest()
        if not known.get(key) and check(self, code):
            known[key] = True
        return known.get(key, False)

    @functools.cache
    def choose_first() -> Any:
        is_free = torch._inductor.config.cpp.simdlen is None and not os.environ.get(
            "ATEN_CPU_CAPABILITY"
        )
        if not (is_free and sys.platform == "linux" and platform.machine() == "x86_64"):
            return choose()
        flags = vec_isa.x86_isa_checker()
        for isa in vec_isa.supported_vec_isa_list:
            if all(flag in flags for flag in str(isa).split()) and isa:
                return [isa]
        return []

    vec_isa.VecISA.check_build = check_once
    if hasattr(vec_isa, "x86_isa_checker") and hasattr(vec_isa, "supported_vec_isa_list"):
        vec_isa.valid_vec_isa_list = choose_first
    try:
        yield
    finally:
        vec_isa.VecISA.check_build, vec_isa.valid_vec_isa_list = check, choose


def prepare_cpp_compiler(when_checked: Callable[[], None]) -> None:
    """Do what torch does before the first C++ kernel: check vector instructions, and then (after
    `when_checked`) precompile the header that all kernels include."""
    vec_isa.pick_vec_isa()
    when_checked()
    # Returns how to compile it, which nobody does.
    codecache.CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _NOTHING_KERNEL)
