"""The machine of a published row: its GPU by any spelling, and its links from their description."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.plan.accelerators import Accelerator, list_accelerators
from phalanx.plan.timing.machine import MachineRates, build_rates_of_accelerator
from phalanx.plan.validation.row_values import (
    UnusableRow,
    get_optional_number,
    get_optional_positive_int,
    get_text,
)

# InfiniBand generations: Gbit/s of one port of four lanes.
INFINIBAND_GBIT_S = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}


def build_row_machine(row: Mapping[str, Any]) -> MachineRates:
    """The rates of a row's GPUs and links. Raises UnusableRow for a GPU that no table knows."""
    text = get_text(row, "gpu")
    accelerator = find_row_accelerator(text, get_optional_number(row, "gpu_mem_gb"))
    bandwidth = re.search(r"(\d+(?:\.\d+)?)\s*TB/s", text)
    if bandwidth:
        accelerator = replace(accelerator, memory_gb_s=1000 * float(bandwidth[1]))
    share = 1.0
    watts = re.search(r"(\d{2,4})\s*W\b", text)
    if watts and accelerator.watts:
        share = min(1.0, max(0.2, float(watts[1]) / accelerator.watts))
    gpus_per_node = get_optional_positive_int(row, "gpus_per_node") or accelerator.gpus_per_node
    domain = get_optional_positive_int(row, "nvlink_domain") or 0
    return build_rates_of_accelerator(
        accelerator,
        gpus_per_node=gpus_per_node,
        link_domain=domain if domain >= gpus_per_node else 0,
        link_gb_s=parse_link_gb_s(get_text(row, "intra_net")),
        nic_gb_s=parse_network_gb_s(get_text(row, "inter_net"), gpus_per_node),
        power_share=share,
    )


def find_row_accelerator(text: str, memory_gb: float | None = None) -> Accelerator:
    """The accelerator that a text means: "H100-SXM5 80GB", "NVIDIA A100 PCIe", "gb200 NVL72".

    Raises UnusableRow for one that no table knows.
    """
    if memory_gb is None and text in list_accelerators():
        # By its own name: of two with one chip not the one that is found first.
        return list_accelerators()[text]
    size = re.search(r"(\d+)\s*G(?:i?B)?\b(?!/s)", text, re.IGNORECASE)
    if memory_gb is None and size:
        memory_gb = float(size[1])
    best: Accelerator | None = None
    best_length = 0
    for name, accelerator in list_accelerators().items():
        model = name if name.startswith("rtx") else name.split("-")[0]
        # "h100" is in "gh100" as "b200" is in "gb200": the longest model wins.
        if len(model) < best_length or not _names_gpu_model(text, model):
            continue
        if len(model) == best_length and not _is_better_variant_match(name, text, memory_gb, best):
            continue
        best, best_length = accelerator, len(model)
    if best is None:
        best = _match_related_gpu(text)
    if best is None:
        raise UnusableRow("unknown GPU")
    return best


def _names_gpu_model(text: str, model: str) -> bool:
    """True if `text` has `model`, however its parts are joined: "rtx-4090" as "RTX 4090". An L40 is
    no L4."""
    parts = re.findall(r"[a-z]+|\d+", model)
    return bool(re.search(r"[^a-z0-9]*".join(parts) + r"(?!\d)", text.lower()))


def _is_better_variant_match(
    name: str, text: str, memory_gb: float | None, other: Accelerator | None
) -> bool:
    """True if the variant `name` fits a text better than `other`, of the same model."""
    if re.search(r"pci[^a-z0-9]*e", text.lower()):
        return "pcie" in name
    if "pcie" in name:
        return False
    if other is None or "pcie" in other.name:
        return other is not None
    memory = list_accelerators()[name].memory_gib
    if memory_gb:
        return abs(memory - memory_gb) < abs(other.memory_gib - memory_gb)
    # Where nobody says, the A100 that most have: that of 80 GB.
    return name.split("-")[0] == other.name.split("-")[0] and memory > other.memory_gib


def _match_related_gpu(text: str) -> Accelerator | None:
    """The GPU that one sold elsewhere is made after: the same chip with slower links."""
    table = list_accelerators()
    relatives = {
        "a800": ("a100-sxm", 200.0),
        "h800": ("h100-sxm", 200.0),
    }
    for model, (name, link_gb_s) in relatives.items():
        if _names_gpu_model(text, model) and name in table:
            return replace(table[name], link_gb_s=link_gb_s)
    return None


def parse_link_gb_s(text: str) -> float:
    """GB/s of one GPU in one direction to others of its node; 0 where the text does not say."""
    match = re.search(r"(\d+(?:\.\d+)?)\s*GB/s(?: per direction)?", text)
    if not match:
        return 0.0
    rate = float(match[1])
    if re.search(r"bidirectional|both directions|total", text):
        rate /= 2
    return rate if 1 <= rate <= 10_000 else 0.0


def parse_network_gb_s(text: str, gpus_per_node: int) -> float:
    """GB/s of one GPU's share of the network, in one direction; 0 where the text does not say."""
    lowered = text.lower()
    # Only capitals tell bytes from bits.
    in_bytes = re.search(r"(\d+(?:\.\d+)?)\s*(?:GB/s|GBps)", text)
    in_bits = re.search(r"(\d+(?:\.\d+)?)\s*(?:gb/s|gbps|gbit/s|gbe|g\b)", lowered)
    generation = re.search(r"\b(edr|hdr|ndr|xdr)\b", lowered)
    count = re.search(r"(\d+)\s*x\s*(?=\D*\d|hdr|ndr|edr|xdr)", lowered)
    if in_bytes:
        gbit = 8 * float(in_bytes[1])
    elif in_bits:
        gbit = float(in_bits[1])
    elif generation:
        gbit = float(INFINIBAND_GBIT_S[generation[1]])
    else:
        return 0.0
    if not 1 <= gbit <= 100_000:
        return 0.0
    is_total = "=" in lowered or (count is None and "per node" in lowered) or gbit > 1600
    if "per gpu" in lowered:
        return gbit / 8
    if is_total:
        return gbit / 8 / gpus_per_node
    if count:
        # No more than one for each GPU.
        return min(int(count[1]), gpus_per_node) * gbit / 8 / gpus_per_node
    return gbit / 8
