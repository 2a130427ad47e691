"""`Accelerator`: what a GPU can do as its data sheet says, found by name. Torch-free.

The figures stand in accelerators.toml, each with its source.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from phalanx.core.errors import LayoutError, format_nearest_word_hint

GB = 1e9


@dataclass(frozen=True)
class Accelerator:
    """A kind of GPU: rates of its data sheet, and the node that it is usually sold in.

    TFLOP/s are dense, by type; 0 where it has no such type. GB are 1e9 bytes; bandwidths are per
    direction and per GPU.
    """

    name: str
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float  # to GPUs of its link domain
    nic_gb_s: float  # its share of the node's network
    gpus_per_node: int
    link_domain: int  # GPUs that NVLink joins
    num_sms: int
    compute_capability: str
    fp32_tflops: float  # outside of the tensor cores: TF32 stays off
    source: str
    fp32_source: str
    is_checked: bool  # somebody compared the entry with its source
    bf16_tflops: float = 0.0
    fp16_tflops: float = 0.0
    fp8_tflops: float = 0.0
    fp4_tflops: float = 0.0
    watts: float = 0.0
    note: str = ""

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of matrix products in `precision`: "fp32", "bf16", "fp16", "fp8", "fp4"; of a type
        of 16 bits or fewer that it does not have, those of the next wider one."""
        if precision == "fp32":
            return self.fp32_tflops * 1e12
        tflops = {
            "fp4": self.fp4_tflops or self.fp8_tflops or self.bf16_tflops,
            "fp8": self.fp8_tflops or self.bf16_tflops,
            "fp16": self.fp16_tflops,
        }.get(precision, self.bf16_tflops)
        return (tflops or self.fp16_tflops) * 1e12


@cache
def list_accelerators() -> dict[str, Accelerator]:
    """Every accelerator of the table, by name."""
    text = files("phalanx.plan").joinpath("accelerators.toml").read_text(encoding="utf-8")
    return {name: Accelerator(name, **entry) for name, entry in tomllib.loads(text).items()}


# Words of a driver's name of a GPU, and the entry of the table; the first match counts.
_DRIVER_NAME_PATTERNS = (
    ("gb300", "gb300"),
    ("gb200", "gb200"),
    ("gh200", "gh200"),
    ("b300", "b300-sxm"),
    ("b200", "b200-sxm"),
    ("h200", "h200-sxm"),
    ("h800", "h800-sxm"),
    ("h100 pcie", "h100-pcie"),
    ("h100", "h100-sxm"),
    ("a100 pcie", "a100-pcie"),
    ("a100", "a100-sxm"),
    ("v100 sxm", "v100-sxm"),
    ("l40s", "l40s"),
    ("a10g", "a10g"),
    ("4090", "rtx-4090"),
    ("l4", "l4"),
    ("t4", "t4"),
)


def find_accelerator_by_driver_name(driver_name: str, memory_bytes: int) -> Accelerator | None:
    """The accelerator that a driver calls `driver_name` ("NVIDIA H100 80GB HBM3"); None where the
    table has none, or only one with more memory than this one has (a slice of a GPU, say)."""
    words = driver_name.lower().replace("-", " ").split()
    for needed, name in _DRIVER_NAME_PATTERNS:
        if not all(word in words for word in needed.split()):
            continue
        accelerator = list_accelerators()[name]
        if name == "a100-sxm" and memory_bytes < 60 * 2**30:
            accelerator = list_accelerators()["a100-sxm-40"]
        # A slice has a part of the memory, and of the speed that the table names.
        if memory_bytes < 0.8 * accelerator.memory_gib * 2**30:
            return None
        return accelerator
    return None


def find_accelerator(name: str) -> Accelerator:
    """The accelerator called `name`. Raises LayoutError, with the nearest name, for another."""
    table = list_accelerators()
    named_accelerator = table.get(name.lower())
    if named_accelerator is None:
        raise LayoutError(f"no accelerator is called {name!r}", fix=_suggest_accelerators(name))
    return named_accelerator


def _suggest_accelerators(name: str) -> str:
    """What a name that the table has not may mean: those of its family with their memory ("a100",
    "A100-80GB"), else the nearest name, else all of them."""
    table = list_accelerators()
    words = name.lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-").split("-")
    family = [known for known in table if known.split("-")[0] == words[0]]
    if len(family) > 1:
        return "one of " + ", ".join(
            f'"{known}" ({table[known].memory_gib:g} GB)' for known in family
        )
    if family:
        return f'did you mean "{family[0]}"?'
    nearest = format_nearest_word_hint(name.lower(), tuple(table))
    return nearest or f"one of {', '.join(table)}"
