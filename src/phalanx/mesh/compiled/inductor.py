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
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.codecache as codecache
import torch._inductor.compile_fx as inductor
import torch._inductor.config
import torch._inductor.cpu_vec_isa as vec_isa
from torch._dynamo.utils import counters

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
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
    return "" if chosen == os.path.abspath(codecache.default_cache_dir()) else chosen


@contextlib.contextmanager
def keeping_code_in(folder: Path) -> Iterator[None]:
    """Torch's compiler keeps all its files in `folder` during the body."""
    before = os.environ.get(CACHE_VARIABLE)
    headers = getattr(codecache, "_HEADER_DIR", None), getattr(codecache, "_HEADER_LOCK_DIR", None)
    os.environ[CACHE_VARIABLE] = str(folder)
    _set_header_folders(str(folder / HEADERS_FOLDER), str(folder / HEADERS_FOLDER / "locks"))
    try:
        yield
    finally:
        _set_header_folders(*headers)
        os.environ.pop(CACHE_VARIABLE)
        if before is not None:
            os.environ[CACHE_VARIABLE] = before


def _set_header_folders(headers: str | None, locks: str | None) -> None:
    if hasattr(codecache, "_HEADER_DIR"):
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = headers, locks


def count_compiled_graphs() -> int:
    """How many forwards and backwards were compiled in this process, and not found in a cache."""
    return counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


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
