"""Numbers between host and device without a wait: a copy from pageable memory drains a
GPU's stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def create_fp64_on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """`values` as fp64 on `device`, written there by kernels."""
    filled = torch.zeros(len(values), dtype=torch.float64, device=device)
    for element, value in zip(filled, values, strict=True):
        # Most are flags that are not set: a kernel less for each.
        if value:
            element.fill_(value)
    return filled


def start_copy_of_numbers_to_host(tensor: torch.Tensor) -> Callable[[], list[float]]:
    """Begins to copy `tensor` [N] to the host; the result gives its numbers, once the device was
    waited for since."""
    if tensor.device.type == "cpu":
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host.tolist


def pin_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` in page-locked memory, from which a copy to `device` does not wait for the
    device's work."""
    if device.type != "cuda" or tensor.device.type != "cpu" or tensor.is_pinned():
        return tensor
    return tensor.pin_memory()
