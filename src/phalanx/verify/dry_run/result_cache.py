"""Results of dry runs, kept under a digest of all that decides about them. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import phalanx
from phalanx.core.digest import digest
from phalanx.core.files import read_json, write_json_atomically
from phalanx.core.registry import is_foreign
from phalanx.job.module_probe import find_module_sources, list_file_states
from phalanx.job.schema import Job
from phalanx.plan.plan import Plan
from phalanx.verify.dry_run.rank_kinds import RankKind
from phalanx.verify.dry_run.report import SCHEMA_VERSION, RankKindReport

DRY_RUN_CACHE = Path(os.path.expanduser("~/.cache/phalanx/dry-run"))
# What a plan says for people, and what it was chosen from, changes nothing of a program.
_WORDS = ("reasons", "warnings", "value_reasons", "alternatives")


class ResultCache:
    """Reports of one job and plan in `directory`."""

    def __init__(self, job: Job, plan: Plan, directory: Path = DRY_RUN_CACHE) -> None:
        self._directory = directory
        self._key = _hash_inputs_and_sources(job, plan)

    def find(self, kind: RankKind) -> RankKindReport | None:
        """The report of an earlier dry run of this kind; None if there is none that can be read."""
        # Without a home there is no cache, and no folder that is called "~".
        if not self._directory.is_absolute():
            return None
        try:
            return RankKindReport.from_json(read_json(self._path_of_report(kind))).copy_as_cached()
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def add(self, kind: RankKind, report: RankKindReport) -> None:
        if not self._directory.is_absolute():
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Not durable: it can be run again.
            write_json_atomically(self._path_of_report(kind), report.to_json(), durable=False)
        except OSError:  # the cache only saves time
            pass

    def _path_of_report(self, kind: RankKind) -> Path:
        return self._directory / f"{self._key}-{kind.rank}.json"


def _hash_inputs_and_sources(job: Job, plan: Plan) -> str:
    job_body, plan_body = job.to_json(), plan.to_json()
    del job_body["run"]["dir"]
    for words in _WORDS:
        plan_body.pop(words, None)
    memory = [plan.memory_of_rank(rank) for rank in _list_first_rank_of_stages(plan)]
    return digest(
        [
            SCHEMA_VERSION,
            job_body,
            plan_body,
            memory,
            list_file_states(_list_source_files(job)),
            sys.version,
            _read_torch_version(),
        ]
    )


def _list_first_rank_of_stages(plan: Plan) -> Sequence[int]:
    return range(0, plan.world_size, plan.world_size // plan.layout.pp)


def _list_source_files(job: Job) -> list[Path]:
    """The files of phalanx, and those of the user's own modules that the job names."""
    sources = sorted(Path(phalanx.__file__).parent.rglob("*.py"))
    names = (job.model.kind, job.model.objective, job.optim.kind, job.data.source)
    for name in names:
        if name is not None and is_foreign(name):
            sources += find_module_sources(name.partition(":")[0].split("."))
    return sources


def _read_torch_version() -> str:
    # From its metadata: importing it takes seconds.
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
