"""Processor microseconds of one phase: with the black box, and without. No torch.

    python benchmarks/phase_cost.py

The smallest mean of 40 loops of 2,000 phases, so that other work on the machine counts little.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.core.black_box import BlackBox
from phalanx.core.phases import PhaseTimer

NUM_LOOPS, NUM_CALLS = 40, 2000


def measure_us(call: Callable[[], None]) -> float:
    """The smallest mean of all loops."""
    means = []
    for _ in range(NUM_LOOPS):
        began = time.thread_time()
        for _ in range(NUM_CALLS):
            call()
        means.append((time.thread_time() - began) / NUM_CALLS)
    return 1e6 * min(means)


def main() -> None:
    """Measure, and print."""
    with tempfile.TemporaryDirectory() as folder:
        box = BlackBox(Path(folder) / "box")
        recorded, plain = PhaseTimer(box), PhaseTimer()

        def enter(phases: PhaseTimer) -> None:
            with phases("collective", "all_reduce step facts", axis="world"):
                pass

        with_box_us = measure_us(lambda: enter(recorded))
        without_us = measure_us(lambda: enter(plain))
        position_us = measure_us(lambda: box.write(1, "forward"))
    print(f"a phase with the black box (two positions)  {with_box_us:.2f} µs")
    print(f"a phase without                             {without_us:.2f} µs")
    print(f"a position                                  {position_us:.2f} µs")


if __name__ == "__main__":
    main()
