"""Pickled weights, read in a process of their own, and only when the user says that they trust
them.

Torch-free.

Unpickling runs what the file says: torch's weights_only narrows that and has been got around before
(CVE-2025-32434). So nothing of phalanx unpickles but the process that this starts. It has no
credentials in its environment and leaves safetensors, which are then read as any others; it is no
sandbox.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phalanx.checkpoint.exchange.tensor_readers import SafetensorsReader, open_safetensors_reader
from phalanx.core.disk_errors import build_path_resource_error
from phalanx.core.errors import CheckpointError, ResourceError
from phalanx.core.files import open_regular_file

UNPICKLE_PROCESS_MODULE = "phalanx.checkpoint.exchange.unpickle"
# Without these Python or its libraries do not start; everything else may hold a credential.
_VARIABLES_FOR_UNPICKLE_PROCESS = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "SYSTEMROOT",
    "VIRTUAL_ENV",
)


@dataclass(frozen=True)
class UnpickledWeights:
    """`num_skipped` things in it were no tensors, `left_out` are tensors that no checkpoint holds,
    with what they are.

    `aliases` are names of tied tensors; `ran_code`: torch could not read it as mere weights.
    """

    reader: SafetensorsReader
    num_skipped: int
    left_out: tuple[str, ...]
    aliases: Mapping[str, str]
    ran_code: bool


def has_head_of_torch_save(path: Path) -> bool:
    """True if the file begins as a pickle (of protocol 2 or later) or as a zip archive with one.

    Raises CheckpointError if it cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            return file.read(4).startswith((b"\x80", b"PK\x03\x04"))
    except OSError as error:
        raise CheckpointError("it cannot be read", where=str(path), why=error.strerror) from None


def untrusted_pickle_error(source: Path) -> CheckpointError:
    return CheckpointError(
        "it is pickled, and reading it can run any program that was put into it",
        where=str(source),
        fix="give --trust-pickle if you know where it comes from",
    )


@contextmanager
def open_pickled_weights_in_subprocess(source: Path, *, parent: Path) -> Iterator[UnpickledWeights]:
    """The tensors of a torch.save file, of a directory of pytorch_model*.bin, or of a DCP
    directory.

    They are written to a temporary directory in `parent`, beside the result, which is gone
    afterwards. Raises CheckpointError for what is wrong with `source`, ResourceError where the disk
    of `parent` does not take them.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryDirectory(dir=parent, prefix=".unpickled-", ignore_cleanup_errors=True)
    except OSError as error:
        raise build_path_resource_error(
            error, "making a directory for the unpickled weights", parent, place="--out"
        ) from None
    with temporary as folder:
        answer = _unpickle_in_subprocess(source.absolute(), Path(folder))
        reader = open_safetensors_reader(Path(folder))
        # A message must not name the temporary folder.
        reader.where = str(source)
        left_out = tuple(map(str, answer["left_out"]))
        yield UnpickledWeights(
            reader,
            int(answer["num_skipped"]),
            left_out,
            dict(answer["aliases"]),
            bool(answer["ran_code"]),
        )


def _unpickle_in_subprocess(source: Path, folder: Path) -> dict[str, Any]:
    environment = {
        name: os.environ[name] for name in _VARIABLES_FOR_UNPICKLE_PROCESS if name in os.environ
    }
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-m", UNPICKLE_PROCESS_MODULE, str(source), str(folder)],
        cwd=folder,
        env=environment,
        # Code in the pickle must not read what the person types.
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    # What is unpickled may print, too: the answer is the last line.
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    try:
        answer = json.loads(lines[-1])
        has_answer = done.returncode == 0 and isinstance(answer, dict)
    except (ValueError, IndexError):
        has_answer = False
    if has_answer and "disk" in answer:
        refusal = answer["disk"]
        # A message must not name the temporary folder.
        raise ResourceError(
            str(refusal["what"]), where=str(folder.parent), why=refusal["why"], fix=refusal["fix"]
        )
    if has_answer and "refused" in answer:
        raise CheckpointError(str(answer["refused"]), where=str(source), why=answer["why"])
    if has_answer:
        return dict(answer)
    why = f"the process that read it ended with {done.returncode}"
    errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if errors:
        why = errors[-1][:300]
    raise CheckpointError("it cannot be read", where=str(source), why=why)
