"""How `data.source` names a user's own dataset.

Imports nothing heavy: loader workers start with it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.job.schema import Data, Job


def is_own_dataset(source: str) -> bool:
    """True for "package.module:factory", unless a file has that name."""
    module, colon, attribute = source.partition(":")
    names = (*module.split("."), *attribute.split("."))
    # File names may have colons: a file that is there is meant.
    return bool(colon) and all(name.isidentifier() for name in names) and not os.path.exists(source)


def is_given_unknown_samples(job: Job) -> bool:
    """True where only a user's own dataset says what goes into a user's own module. A model of
    Hugging Face takes tokens, or images of its size, wherever they come from."""
    # Here: loader workers do not need it.
    from phalanx.job.hugging_face import is_hugging_face

    is_own_data = is_own_dataset(job.data.source) and not job.data.mixture
    return is_own_data and job.model.is_foreign and not is_hugging_face(job.model.kind)


def count_loader_processes(data: Data) -> int:
    """Processes of each rank that read ahead.

    Tokens need none: a thread does. A user's code cannot run beside ours.
    """
    if data.workers is not None:
        return data.workers
    if is_own_dataset(data.source) and not data.mixture:
        return 1
    return 0
