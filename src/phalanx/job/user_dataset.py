"""How `data.source` names a user's own dataset.

Imports nothing heavy: loader workers start with it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.job.schema import Data


def is_own_dataset(source: str) -> bool:
    """True for "package.module:factory", unless a file has that name."""
    module, colon, attribute = source.partition(":")
    names = (*module.split("."), *attribute.split("."))
    # File names may have colons: a file that is there is meant.
    return bool(colon) and all(name.isidentifier() for name in names) and not os.path.exists(source)


def count_loader_processes(data: Data) -> int:
    """Processes of each rank that read ahead.

    Tokens need none: a thread does. A user's code cannot run beside ours.
    """
    if data.workers is not None:
        return data.workers
    if is_own_dataset(data.source) and not data.mixture:
        return 1
    return 0
