"""The digest of the source that the answer to a fault comes from, so that a campaign knows which of
its trials are of other code than today's."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import phalanx
from phalanx.core.digest import digest

_PACKAGE = Path(phalanx.__file__).parent
RECOVERY_ROOMS = ("checkpoint", "launch", "mesh", "resilience", "run", "train")
"""The rooms that detect faults, or bring a run back from them, and whatever else is in them: a
change of words in `run` counts, too. But for `checkpoint.exchange`, which reads and writes the
checkpoints of other libraries."""
RECOVERY_FILES = (
    "core/black_box.py",
    "core/black_box_format.py",
    "core/black_box_reader.py",
    "core/disk_errors.py",
    "core/files.py",
    "core/outages.py",
    "core/phases.py",
    "core/process_stat.py",
    "core/pulse.py",
    "core/roll_back.py",
    "observe/bus.py",
    "observe/last_step.py",
    "observe/loss_spikes.py",
    "observe/process_status.py",
    "observe/rank_waits.py",
    "observe/tail.py",
)
"""The files of other rooms that detect and recover: what ranks write of where they are, how that is
read and judged, and how files and events are written. Not covered: what else these rooms import
from `core` and `observe`, and all other rooms (`data`, `nn`, `optim`, `parallel`, `plan`)."""
_FAULTS = Path("resilience") / "faults"
_EXCHANGE = Path("checkpoint") / "exchange"
_IMPORTED_FAULT = re.compile(r"phalanx\.resilience\.faults\.(\w+)")


def digest_fault_code(fault: str, package: Path = _PACKAGE) -> str:
    """Digest of the fault's own file, of those of faults that it uses, of all files of
    RECOVERY_ROOMS in `package`, and of RECOVERY_FILES. Other faults do not count."""
    fault_texts = {}
    waiting = [fault]
    while waiting:
        name = waiting.pop()
        if name not in fault_texts:
            text = (package / _FAULTS / f"{name}.py").read_text(encoding="utf-8")
            fault_texts[name] = text
            waiting += _IMPORTED_FAULT.findall(text)
    return digest([fault_texts, digest_recovery_code(package)])


@functools.cache
def digest_recovery_code(package: Path = _PACKAGE) -> str:
    """Digest of all files of RECOVERY_ROOMS in `package`, without the faults and the exchange with
    other libraries, and of RECOVERY_FILES."""
    paths = [path for room in RECOVERY_ROOMS for path in sorted((package / room).rglob("*.py"))]
    paths += [package / name for name in RECOVERY_FILES if (package / name).exists()]
    left_out = [package / _FAULTS, package / _EXCHANGE]
    return _digest_files(package, [path for path in paths if path.parent not in left_out])


@functools.cache
def digest_package_code(package: Path = _PACKAGE) -> str:
    """Digest of all files of phalanx: what may change the numbers of a run."""
    return _digest_files(package, sorted(package.rglob("*.py")))


def _digest_files(package: Path, paths: Sequence[Path]) -> str:
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(f"{path.relative_to(package)}\0".encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()
