"""Count collectives where the process group receives them, DDP's C++ ones too."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

OPERATORS = ("c10d", "_c10d_functional")


class CountCollectives(TorchDispatchMode):
    """`counts`: by the names of torch's operators.

    `num_bytes`: what they make, which for a reduction to one rank, a send and an all-to-all is as
    much as they take. gloo's gather is a broadcast from each rank, and its scatter a reduction to
    each (phalanx.mesh.gloo_collectives).
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.num_bytes: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if namespace in OPERATORS:
            # c10d writes into its first argument; a functional one returns what it makes, and reads
            # what it scatters.
            is_read = namespace == "c10d" or name.startswith("reduce_scatter")
            self.counts[name] = self.counts.get(name, 0) + 1
            self.num_bytes[name] = self.num_bytes.get(name, 0) + _bytes_of(
                args[0] if is_read else made
            )
        return made


def _bytes_of(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(map(_bytes_of, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0
