"""What decides how this machine's CPU rounds: its vendor, its vector instructions, and the torch
that picks kernels.

Sums of floating-point numbers depend on their order, and kernels for other instruction sets add in
another order. A resumed run repeats the bits of the run before it only on a CPU of the same kind.
"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

import torch

# Instruction sets that torch, oneDNN or MKL have kernels of their own for, beyond what
# `get_cpu_capability` tells.
_CPU_FLAGS_THAT_CHANGE_BITS = (
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "bf16",
    "sve",
    "sve2",
)
# Variables that choose among the kernels that a CPU could run.
_VARIABLES_THAT_CHOOSE_KERNELS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)


@functools.cache
def describe_cpu_for_equal_bits(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """One line that is equal on machines whose CPUs compute the same bits with this torch.

    Example: "x86_64 AuthenticAMD AVX2, torch 2.13.0". Where `cpuinfo` cannot be read, vendor and
    features are missing.
    """
    facts = _read_first_cpuinfo_entry(cpuinfo)
    vendor = facts.get("vendor_id") or facts.get("CPU implementer", "")
    flags = set((facts.get("flags") or facts.get("Features", "")).split())
    features = [name for name in _CPU_FLAGS_THAT_CHANGE_BITS if name in flags]
    words = [platform.machine(), vendor, torch.backends.cpu.get_cpu_capability(), *features]
    choices = [
        f"{name}={os.environ[name]}"
        for name in _VARIABLES_THAT_CHOOSE_KERNELS
        if os.environ.get(name)
    ]
    cpu = " ".join(filter(None, words))
    return ", ".join([cpu, *choices, f"torch {torch.__version__.split('+')[0]}"])


@functools.cache
def describe_cpu_model_and_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """One line that is equal on CPUs that run the same machine code, as a compiler that compiles
    for "this machine" (-march=native) sees them."""
    facts = _read_first_cpuinfo_entry(cpuinfo)
    names = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part")
    words = [platform.machine(), *(facts.get(name, "") for name in names)]
    return " ".join(
        [*filter(None, words), *sorted((facts.get("flags") or facts.get("Features", "")).split())]
    )


def _read_first_cpuinfo_entry(cpuinfo: Path) -> dict[str, str]:
    try:
        # An empty line ends each CPU: the first one stands for all.
        first, _, _ = cpuinfo.read_text(errors="replace").partition("\n\n")
    except OSError:
        return {}
    facts = {}
    for line in first.splitlines():
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    return facts
