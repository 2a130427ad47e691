"""The source of the user's modules in each rank: a rank that is started again imports what is in
the files by then, and a machine may have other files.

Torch-free.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.core.errors import CodeDiffersError
from phalanx.core.files import read_whole_regular_file
from phalanx.core.registry import is_foreign
from phalanx.core.uncaught import is_library_file
from phalanx.job.schema import Job

# Larger sources are tables that a program wrote, and take long to parse.
_MAX_PARSED_BYTES = 512 << 10
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
        file = _find_source_file(module)
        if name in _digests or not file.endswith(".py") or is_library_file(file):
            continue
        try:
            _digests[name] = _digest_source(read_whole_regular_file(Path(file)))
        except (OSError, ValueError):
            # Gone since, or no source any more: nobody can tell what it was.
            continue
    return dict(_digests)


def _find_source_file(module: object) -> str:
    # Not getattr: a module that is imported at its first use, and what stands in for a library that
    # is missing, would run.
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:
        return ""
    return file if isinstance(file, str) else ""


def _digest_source(source: bytes) -> str:
    """A digest that comments and layout do not change, of sources that Python can parse."""
    content = source
    if len(source) <= _MAX_PARSED_BYTES:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            content = ast.dump(ast.parse(source)).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:16]


def describe_code_differences(digests_of_ranks: Sequence[Mapping[str, str]]) -> str:
    """The modules that several ranks have imported, and whose digests differ, as in "module model
    of rank 2 is not that of rank 0"; "" for none.

    Rank 0's is taken for right, or that of the first rank that has it.
    """
    first_with: dict[str, int] = {}
    differences = []
    for rank, digests in enumerate(digests_of_ranks):
        for name in sorted(digests):
            first = first_with.setdefault(name, rank)
            if digests[name] != digests_of_ranks[first][name]:
                differences.append(f"module {name} of rank {rank} is not that of rank {first}")
    return "; ".join(differences)


def build_code_error(differences: str) -> CodeDiffersError:
    """The error for a rank that was started again with other code than ranks that were kept."""
    return CodeDiffersError(
        f"the ranks differ in code: {differences}",
        why=(
            "a rank that is started again imports files as they are by then, and they were changed"
            " while the run trained"
        ),
        fix="put them back, or go on with what they are now by --resume",
    )
