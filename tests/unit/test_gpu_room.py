"""A GPU that another process uses is told from the plan's numbers before training meets the
wall."""

from __future__ import annotations

from phalanx.core.units import GIB
from phalanx.train.gpu_room import find_gpu_memory_shortage_of_any_rank


def test_the_gpu_with_too_little_room_is_named() -> None:
    assert find_gpu_memory_shortage_of_any_rank([(79 * GIB, 80 * GIB)] * 2, [70 * GIB] * 2) == ""
    one = find_gpu_memory_shortage_of_any_rank(
        [(79 * GIB, 80 * GIB), (20 * GIB, 80 * GIB)], [70 * GIB, 60 * GIB]
    )
    assert one.startswith(
        "the GPU of rank 1 has 20.0 GiB of 80.0 GiB free, and the plan predicts 60.0 GiB: "
    )
    two = find_gpu_memory_shortage_of_any_rank(
        [(30 * GIB, 80 * GIB), (20 * GIB, 80 * GIB)], [70 * GIB, 60 * GIB]
    )
    assert "of rank 0 " in two or "of rank 1 " in two
    assert "1 more ranks have too little" in two
