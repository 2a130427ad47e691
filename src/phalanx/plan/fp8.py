"""Products in fp8: what they need of a device and of a batch, and what they take. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.errors import LayoutError
from phalanx.job import counts
from phalanx.job.shape import ModelShape

if TYPE_CHECKING:
    from phalanx.plan.memory import Workload

MULTIPLE = 16  # of both widths of a matrix and of the tokens of a microbatch: what the kernels take
CAPABILITY = (8, 9)  # the first GPUs that multiply fp8: Ada, and Hopper (9.0)
INSTEAD = "set precision.compute=bf16"


def require_fp8(work: Workload, device: str, *, is_known: bool) -> None:
    """Raises LayoutError for a plan that asks for fp8 and cannot have it.

    Of a user's own module tokens are unknown.
    """
    if work.precision != "fp8":
        return
    if device != "cuda":
        raise LayoutError(
            f"precision.compute=fp8 needs GPUs, and this plan is for {device.upper()}s",
            why="no other multiplies fp8",
            fix=INSTEAD,
        )  # fmt: skip
    if is_known and work.tokens % MULTIPLE:
        raise LayoutError(
            f"precision.compute=fp8 multiplies {MULTIPLE} tokens at a time, and a rank's microbatch"
            f" has {work.tokens}",
            fix=(
                "choose train.micro_batch_size and data.seq_len so that their product is a"
                f" multiple of {MULTIPLE}"
            ),
        )


def fp8_params(shape: ModelShape) -> int:
    """Of the layers that multiply in fp8: of blocks, without the experts that tokens are sent
    to."""
    routed = shape.num_experts * counts.ffn_params(shape, shape.expert_ffn_dim)
    return shape.blocks_params - shape.num_expert_layers * routed


def fp8_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes of what one product casts to fp8, of the largest: what goes in, and the matrix."""
    if work.precision != "fp8":
        return 0
    widest = max(shape.ffn_dim, shape.num_heads * shape.head_dim, shape.dim)
    return widest * (work.tokens + shape.dim)
