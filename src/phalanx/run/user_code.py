"""The source of the user's modules in each rank: a rank that is started again imports what is in
the files by then, and a machine may have other files.

Torch-free.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.core.errors import RanksDifferError
from phalanx.core.files import read_whole_regular_file
from phalanx.core.registry import is_foreign
from phalanx.core.uncaught import is_library_file
from phalanx.job.schema import Job

# By name of module: of a process that is kept, as its files were when it first asked.
_digests: dict[str, str] = {}


def names_user_code(job: Job) -> bool:
    """True if ranks of `job` compute with code of the user's."""
    kinds = (job.model.kind, job.model.objective, job.optim.kind, job.data.source)
    return any(is_foreign(kind) for kind in kinds)


def digest_user_modules() -> Mapping[str, str]:
    """By name, a digest of the file of each imported module that is neither Python's, nor an
    installed package's, nor ours.

    A module that an earlier call in this process has seen keeps its digest, as it keeps its code.
    """
    # A copy: another thread may import meanwhile.
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name in _digests or not isinstance(file, str) or not file.endswith(".py"):
            continue
        if not is_library_file(file):
            try:
                _digests[name] = hashlib.sha256(read_whole_regular_file(Path(file))).hexdigest()[
                    :16
                ]
            except (OSError, ValueError):
                # Gone since, or no source any more: nobody can tell what it was.
                continue
    return dict(_digests)


def require_same_user_code(digests_of_ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise RanksDifferError if a module that several ranks have imported has not the same digest
    in all of them. Rank 0's is taken for right, or that of the first rank that has it."""
    first_with: dict[str, int] = {}
    differences = []
    for rank, digests in enumerate(digests_of_ranks):
        for name in sorted(digests):
            first = first_with.setdefault(name, rank)
            if digests[name] != digests_of_ranks[first][name]:
                differences.append(f"module {name} of rank {rank} is not that of rank {first}")
    if differences:
        raise RanksDifferError(
            f"the ranks differ in code: {'; '.join(differences)}",
            why=(
                "a rank that is started again imports files as they are by then: they were changed"
                " while the run trained, or machines have other files"
            ),
            fix="put them back, or go on with what they are now by --resume",
        )
