"""Seeds of the global random generators: what a user's code draws from them is a function of the
step, so that it repeats.

These are the generators of Python, of numpy (the old, global one) and of torch: a forward may use
any of them. A generator of the user's own is state that phalanx does not see.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from phalanx.core.digest import hash_to_stable_64_bits


def seed_generators(*parts: object) -> None:
    """Seed all global generators by a hash of `parts`."""
    number = hash_to_stable_64_bits(*parts)
    random.seed(number)
    # numpy takes 32 bits, and torch a signed number of 64.
    np.random.seed(number % 2**32)
    # Not torch.manual_seed, which formats the stack for each kind of device that has not begun:
    # half a millisecond.
    torch.default_generator.manual_seed(number % 2**63)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number % 2**63)


@contextmanager
def separate_generators(*parts: object, device: torch.device) -> Iterator[None]:
    """Seed the global generators by `parts` inside; outside they go on as if nothing was drawn."""
    # `fork_rng` sets torch's generators aside alone.
    states = random.getstate(), np.random.get_state()
    # The CPU's generator is always set aside. Without a list `fork_rng` would copy every GPU's.
    devices = []
    if device.type == "cuda":
        devices = [device]
    with torch.random.fork_rng(devices=devices):
        seed_generators(*parts)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
