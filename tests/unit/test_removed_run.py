"""A run whose directory is removed while it trains is said to be that, and no run is where its file
system only does not answer."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from phalanx.checkpoint.all_ranks import run_on_all_ranks_or_raise
from phalanx.checkpoint.ownership import fence as fence_module
from phalanx.checkpoint.ownership.fence import RunOwnershipClaim, RunOwnershipWatch
from phalanx.checkpoint.ownership.fencing_token import (
    FencingToken,
    find_removal_of_run,
    write_next_fencing_token,
)
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.core.errors import CheckpointError, ExitCode, PhalanxError, RunRemovedError
from phalanx.mesh.mesh import open_mesh
from phalanx.plan.layout import Layout


@pytest.fixture
def token(tmp_path: Path) -> FencingToken:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return write_next_fencing_token(run_dir)


def require_removal(error: PhalanxError, what: str, where: Path) -> None:
    assert str(error) == (
        f"the {what} was removed or moved while the run trained: {where};"
        " nothing more can be saved there"
    )
    assert error.exit_code == ExitCode.RESOURCES


def test_a_save_into_a_removed_run_says_that_it_was_removed(token: FencingToken) -> None:
    def save() -> None:
        with run_on_all_ranks_or_raise(mesh, "somewhere", "saving"):
            token.require_newest_token()

    shutil.rmtree(token.run_dir)
    with open_mesh(Layout(), device="cpu") as mesh:
        with pytest.raises(RunRemovedError, match="the run directory was removed") as shared:
            save()
    assert shared.value.exit_code == ExitCode.RESOURCES
    token.run_dir.mkdir()
    with pytest.raises(RunRemovedError) as raised:
        token.require_newest_token()
    require_removal(raised.value, "run's epoch", token.run_dir / "epoch")


def test_a_look_every_second_sees_it_and_no_other_job(
    token: FencingToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_module, "FENCE_CHECK_INTERVAL_S", 0.0)
    fence = RunOwnershipWatch.for_rank(token.run_dir, RunOwnershipClaim(token.number))
    away = token.run_dir.with_name("away")
    token.run_dir.rename(away)
    # Missing once: a file system may replace files by removing them first.
    assert not fence.is_lost()
    away.rename(token.run_dir)
    assert not fence.is_lost()
    shutil.rmtree(token.run_dir)
    assert not fence.is_lost()
    assert fence.is_lost()
    require_removal(fence.run_taken_error(), "run directory", token.run_dir)


def test_the_error_is_that_of_a_removal_before_the_second_look(token: FencingToken) -> None:
    """As on the ranks that did not look themselves."""
    fence = RunOwnershipWatch(token.run_dir, None, token)
    shutil.rmtree(token.run_dir)
    require_removal(fence.run_taken_error(), "run directory", token.run_dir)


def test_a_process_that_goes_elsewhere_has_lost_no_run(
    token: FencingToken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the user's code changes the directory, and the run has a relative name."""
    monkeypatch.chdir(token.run_dir.parent)
    fence = RunOwnershipWatch.for_rank(Path("run"), RunOwnershipClaim(token.number))
    elsewhere = token.run_dir.with_name("elsewhere")
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert not fence.is_lost(now=True)
    unseen = RunOwnershipWatch.for_rank(Path("run"), RunOwnershipClaim(token.number))
    assert not unseen.is_lost(now=True)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN])
def test_a_file_system_that_does_not_answer_has_removed_nothing(
    token: FencingToken, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = RunOwnershipWatch(token.run_dir, None, token)
    shutil.rmtree(token.run_dir)
    real = os.stat

    def stat(path: str | Path) -> os.stat_result:
        if os.fspath(path).startswith(os.fspath(token.run_dir)):
            raise OSError(code, os.strerror(code), os.fspath(path))
        return real(path)

    with monkeypatch.context() as unreachable:
        unreachable.setattr(os, "stat", stat)
        assert not fence.is_lost(now=True)
    assert fence.is_lost(now=True)


def test_a_file_system_that_is_not_mounted_for_a_moment_has_removed_nothing(
    token: FencingToken,
) -> None:
    device = os.stat(token.run_dir).st_dev
    shutil.rmtree(token.run_dir)
    assert find_removal_of_run(token.run_dir, device + 1) is None
    assert find_removal_of_run(token.run_dir, device) is not None


def test_no_attempt_begins_in_a_run_that_was_removed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with holding_run_lock(run_dir) as lock:
        lock.acquire_token_for_attempt()
        shutil.rmtree(run_dir)
        with pytest.raises(CheckpointError) as raised:
            lock.acquire_token_for_attempt()
    require_removal(raised.value, "run directory", run_dir)
