"""Which errors are those of a file server or a network that may be back soon."""

from __future__ import annotations

import errno
import socket

import pytest

from phalanx.core.errors import DataError, DataSourceError
from phalanx.core.outages import find_outage
from phalanx.data.unreadable import build_unreadable_data_error
from phalanx.data.user_dataset import format_user_exception
from phalanx.data.worker import _encode_error, decode_worker_error
from phalanx.launch.reports import build_error_report


def raise_from(cause: Exception) -> Exception:
    """An error of a client library, which has its own kinds: raised while it handles `cause`."""
    try:
        try:
            raise cause
        except Exception:
            raise RuntimeError("max retries exceeded") from None
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (OSError(errno.EIO, "Input/output error"), "OSError: Input/output error"),
        (OSError(errno.ESTALE, "Stale file handle"), "OSError: Stale file handle"),
        (raise_from(ConnectionRefusedError(errno.ECONNREFUSED, "x")), "ConnectionRefusedError: "),
        (raise_from(socket.gaierror(-2, "Name or service not known")), "gaierror"),
        (TimeoutError("timed out"), "TimeoutError"),
        # A program's own, or of what was read.
        (FileNotFoundError(errno.ENOENT, "No such file"), ""),
        (PermissionError(errno.EACCES, "Permission denied"), ""),
        (OSError("cannot identify image file"), ""),
        (ValueError("this picture cannot be decoded"), ""),
    ],
)
def test_outages_are_told_from_errors_of_programs_and_files(error: Exception, outage: str) -> None:
    found = find_outage(error)
    assert found.startswith(outage)
    assert bool(found) == bool(outage)
    # By way of a loader's process, too; and samples and lines differ from rank to rank.
    of_rank = format_user_exception(error, "sample 17 of own:sums")
    of_worker = decode_worker_error(_encode_error(of_rank))
    assert isinstance(of_worker, DataSourceError)
    assert build_error_report(of_worker).outage == build_error_report(of_rank).outage == found


def test_a_disk_that_fails_is_no_outage_and_a_file_server_is() -> None:
    def outage_of(code: int) -> str:
        try:
            try:
                raise OSError(code, "as it says")
            except OSError as error:
                raise build_unreadable_data_error(error, "tokens.bin") from None
        except DataError as error:
            return build_error_report(error).outage

    assert not outage_of(errno.EIO)
    assert outage_of(errno.ESTALE) == "OSError: Stale file handle"


class _NoWords(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_of_a_dataset_that_cannot_be_printed_is_still_that_of_the_dataset() -> None:
    assert str(format_user_exception(_NoWords(), "sample 17 of own:sums")) == (
        "sample 17 of own:sums: _NoWords: <its message cannot be printed>"
    )
    assert str(format_user_exception(StopIteration(), "sample 17 of own:sums")) == (
        "sample 17 of own:sums: StopIteration"
    )
    told = str(format_user_exception(ValueError("x" * 10_000_000), "sample 17 of own:sums"))
    assert len(told) < 20_000
