"""Every way phalanx refuses or fails, each with its own exit code and one line that says what to
do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """The process exit codes of every verb; the README's table is generated from here."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    JOB = 3
    DATA = 4
    CHECKPOINT = 5
    ENVIRONMENT = 6
    RESOURCES = 7
    NUMERICS = 8
    RUN_LOCKED = 9
    RESTART_BUDGET = 10
    VERIFICATION = 11
    PREEMPTED = 75
    INTERRUPTED = 130


EXIT_CODE_MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "finished",
    ExitCode.INTERNAL: (
        "a bug; your own code raised or left in a rank before the first step (with its traceback); "
        "or a rank of a verb that does not train ended early"
    ),
    ExitCode.USAGE: "the command line is wrong",
    ExitCode.JOB: (
        "the job file is wrong, a layout or model is refused, or your model cannot be built"
    ),
    ExitCode.DATA: (
        "data is missing, empty or does not fit the model, or your dataset raised an exception"
        " before the first step was done"
    ),
    ExitCode.CHECKPOINT: "a checkpoint is missing, damaged or does not fit",
    ExitCode.ENVIRONMENT: "environment, rendezvous or port",
    ExitCode.RESOURCES: (
        "a disk or store refuses or fails (full, read-only, EIO, ...), the run directory was"
        " removed while the run trained, a worker of data build dies, or ranks differ"
    ),
    ExitCode.NUMERICS: (
        "too many steps with non-finite gradients, or corruption where the job says stop"
    ),
    ExitCode.RUN_LOCKED: (
        "another job uses or took the run directory, or checkpoint.url is another run's"
    ),
    ExitCode.RESTART_BUDGET: (
        "the restart budget is spent, or a crash (or your code's exception or exit) repeats"
    ),
    ExitCode.VERIFICATION: (
        "a verification or a drill failed, checkpoint diff found a difference, data ledger a sample"
        " that was repeated or left out, or a layout of bench train computes something else"
    ),
    ExitCode.PREEMPTED: (
        "stopped by SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 after saving; run again with --resume"
    ),
    ExitCode.INTERRUPTED: "stopped by Ctrl-C; saved unless it was pressed twice",
}


class PhalanxError(Exception):
    """An error a user can act on.

    `what` happened, `where` (file, key, rank), `why`, and `fix`: what to do. `str()` is one line.
    """

    exit_code = ExitCode.INTERNAL
    is_printed_as_json = False

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(what)

    def __str__(self) -> str:
        line = self.what
        if self.where:
            line = f"{self.where}: {line}"
        if self.why:
            line += f" ({self.why})"
        if self.fix:
            line += f"; {self.fix}"
        # A library's error in it may have several lines.
        return " ".join(line.split())

    def to_json(self) -> dict[str, object]:
        return {
            "error": type(self).__name__,
            "exit_code": int(self.exit_code),
            "what": self.what,
            "where": self.where,
            "why": self.why,
            "fix": self.fix,
        }


class UsageError(PhalanxError):
    exit_code = ExitCode.USAGE


class LayoutError(PhalanxError):
    """A layout or model that cannot be had; names the nearest one that can."""

    exit_code = ExitCode.JOB


class DataError(PhalanxError):
    exit_code = ExitCode.DATA


class DataSourceError(DataError):
    """A user's dataset raised an exception, or a process that reads it ended: a file server may be
    gone for a moment. What is wrong with its samples is a DataError.

    `outage`: the error of a file server or network behind it, in words; empty if there is none.
    `rank`: whose dataset it was, where another rank raises it, too; -1: of the process that raises
    it.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
        outage: str = "",
        rank: int = -1,
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.outage, self.rank = outage, rank


class DataStorageError(DataError):
    """Data cannot be read because the disk fails, and not because a file is damaged or missing."""

    exit_code = ExitCode.RESOURCES


class CheckpointError(PhalanxError):
    exit_code = ExitCode.CHECKPOINT


class StorageError(CheckpointError):
    """A checkpoint cannot be written or read because the disk or the store refuses, and not
    because it is damaged."""

    exit_code = ExitCode.RESOURCES


class RunTakenError(CheckpointError):
    """Another job has the run: this one must leave it alone."""

    exit_code = ExitCode.RUN_LOCKED


class StoreTakenError(RunTakenError):
    """Another run has the store of this run's checkpoints; the run's directory is still its own."""


class RunRemovedError(RunTakenError):
    """The directory of the run, or its epoch in it, was removed: nobody has it, and nothing more
    can be saved there."""

    exit_code = ExitCode.RESOURCES


class EnvironmentProblem(PhalanxError):
    """Something outside the job: a port, a variable, a missing compiler, a rank that never came."""

    exit_code = ExitCode.ENVIRONMENT


class ResourceError(PhalanxError):
    exit_code = ExitCode.RESOURCES


class OutOfMemoryError(ResourceError):
    """A rank asked for memory and got none."""


class RanksDifferError(ResourceError):
    """The ranks do not hold the same job, plan, code or data."""


class CodeDiffersError(RanksDifferError):
    """A rank that was started again has other code of the user's than ranks that were kept."""


class NumericsError(PhalanxError):
    exit_code = ExitCode.NUMERICS


class RunLockedError(PhalanxError):
    exit_code = ExitCode.RUN_LOCKED


class RestartBudgetError(PhalanxError):
    exit_code = ExitCode.RESTART_BUDGET


@dataclass(frozen=True)
class JobProblem:
    """One thing wrong with a job: the key, what was wrong, and where it stands."""

    key: str
    what: str
    where: str = ""  # "job.toml:12:5", or "override" for key=value
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.key}: {self.what}"
        if self.where:
            line = f"{self.where}: {line}"
        if self.fix:
            line += f"; {self.fix}"
        return line


class JobError(PhalanxError):
    """The job cannot be used. Holds *all* problems, in file order."""

    exit_code = ExitCode.JOB

    def __init__(self, problems: list[JobProblem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the job")

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def to_json(self) -> dict[str, object]:
        return super().to_json() | {"problems": [vars(problem) for problem in self.problems]}


def format_nearest_word_hint(word: str, known: list[str] | tuple[str, ...]) -> str:
    """' (did you mean "x"?)' for the nearest known word, or an empty string."""
    import difflib

    for match in difflib.get_close_matches(word, known, n=1, cutoff=0.6):
        return f'did you mean "{match}"?'
    return ""
