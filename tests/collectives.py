"""Count collectives where the process group receives them, DDP's C++ ones too."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """`counts`: by the names of torch's c10d operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::")
            self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))
