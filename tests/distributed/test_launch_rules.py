"""The supervisor's decisions as pure functions: whose fault, restart or not, who am I, which
attempt."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.core.black_box import BlackBox
from phalanx.core.black_box_reader import LastPosition
from phalanx.core.cores import count_allowed_cores
from phalanx.core.disk_errors import PERMANENT_WRITE_ERRNOS
from phalanx.core.errors import (
    DataError,
    DataSourceError,
    EnvironmentProblem,
    NumericsError,
    RanksDifferError,
    RestartBudgetError,
)
from phalanx.core.files import write_bytes_atomically
from phalanx.core.library_errors import find_os_error_behind
from phalanx.data.corpus import Corpus
from phalanx.data.user_dataset import UserDatasetFacts
from phalanx.launch.absence import AbsentRank, find_absent_rank
from phalanx.launch.attempt_end import AttemptEnd, RankExit
from phalanx.launch.end_record import EndRecord, EndWriter, open_end_pipe
from phalanx.launch.external import read_external_launch
from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
from phalanx.launch.outcome import RunOutcome
from phalanx.launch.paths import black_box_path, clear_black_boxes, next_attempt_number
from phalanx.launch.rank_env import (
    ALLOCATOR_VARIABLES,
    SERVER_CHOSE_THREADS_VARIABLE,
    RankEnv,
    build_flight_recorder_variables,
    build_rank_env_variables,
)
from phalanx.launch.rank_failure import LOST_CONNECTION, RankFailure
from phalanx.launch.recovery import RecoveryPolicy, StartAgain
from phalanx.launch.reports import ErrorReport, build_error_report
from phalanx.launch.restarts import NUM_PROGRESS_STEPS, RestartPolicy
from phalanx.launch.server_process import _build_server_environment
from phalanx.launch.signature import remove_varying_text_from_failure
from phalanx.launch.stop_request import StopRequest
from phalanx.launch.verdict import find_root_failure
from phalanx.mesh.mesh import open_mesh
from phalanx.observe.bus import Bus
from phalanx.observe.events import RestartScheduled
from phalanx.observe.tail import read_recorded_events
from phalanx.plan.layout import Layout
from phalanx.run.data import require_same_samples_on_all_ranks
from phalanx.run.user_code import build_code_error
from ranks import run_ranks

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def place_of(environ: dict[str, str]) -> RankEnv | None:
    found = read_external_launch(environ)
    return found and found.rank_env


class TestExternalRanks:
    def test_none_where_nobody_started_ranks(self) -> None:
        assert read_external_launch({}) is None
        assert read_external_launch({"MASTER_ADDR": "node0", "RANK": ""}) is None

    def test_torchrun(self) -> None:
        assert place_of(TORCHRUN) == RankEnv(3, 4, 1, 2, attempt=2)

    def test_one_process_on_each_node_sets_no_local_rank(self) -> None:
        kubernetes = {
            name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        assert place_of(kubernetes) == RankEnv(3, 4, 0, 1)

    def test_a_supervised_rank_reads_back_what_it_was_given(self) -> None:
        ranks = RankEnv(1, 2, 1, 2, attempt=7)
        variables = build_rank_env_variables(ranks, 12345, {"OMP_NUM_THREADS": "4"})
        assert place_of(variables) == ranks
        assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
        assert variables["MASTER_ADDR"] == "127.0.0.1"
        assert "OMP_NUM_THREADS" not in variables

    @pytest.mark.parametrize("num_local", [1, 2, 1000])
    def test_ranks_share_the_cores_of_their_node_unless_the_user_says_otherwise(
        self, num_local: int
    ) -> None:
        """The tests themselves say otherwise."""
        ranks, share = (
            RankEnv(0, num_local, 0, num_local),
            max(1, count_allowed_cores() // num_local),
        )
        of_a_server = {"OMP_NUM_THREADS": "1", SERVER_CHOSE_THREADS_VARIABLE: "1"}
        for environ in ({}, of_a_server):
            variables = build_rank_env_variables(ranks, 12345, environ)
            assert variables["OMP_NUM_THREADS"] == str(share)

    def test_the_flight_recorder_records_and_writes_unless_the_user_says_otherwise(self) -> None:
        trace = Path("run/logs/nccl-attempt-00-rank-")
        variables = build_flight_recorder_variables(trace, {})
        assert variables["TORCH_FR_DUMP_TEMP_FILE"] == str(trace)
        assert variables["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == str(trace)
        assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert int(variables["TORCH_FR_BUFFER_SIZE"]) > 0
        chosen = {
            "TORCH_FR_DUMP_TEMP_FILE": "elsewhere",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        }
        assert list(build_flight_recorder_variables(trace, chosen)) == [
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
        ]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"RANK": None}, "WORLD_SIZE is set and RANK is not"),
            ({"RANK": None, "WORLD_SIZE": "1"}, "WORLD_SIZE is set and RANK is not"),
            ({"WORLD_SIZE": None}, "RANK is set and WORLD_SIZE is not"),
            ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
            ({"RANK": "-1"}, "RANK is -1"),
            ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', which is not an integer"),
            ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
            ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
            ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT are not set"),
            ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
            ({"LOCAL_RANK": None}, "LOCAL_RANK is not set"),
        ],
    )
    def test_half_a_description_is_refused(
        self, changes: dict[str, str | None], words: str
    ) -> None:
        environ = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
        with pytest.raises(EnvironmentProblem) as caught:
            read_external_launch(environ)
        assert words in str(caught.value)
        assert caught.value.exit_code == 6
        assert "\n" not in str(caught.value)


class TestAttempts:
    def test_counts_on_from_any_file_an_attempt_left(self, tmp_path: Path) -> None:
        assert next_attempt_number(tmp_path) == 0
        for name in (
            "events/rank-0000-attempt-03.jsonl",
            "logs/rank-0001-attempt-12.error.json",
            "logs/server.log",
        ):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        assert next_attempt_number(tmp_path) == 13

    def test_an_old_place_is_not_taken_for_a_new_one(self, tmp_path: Path) -> None:
        BlackBox(black_box_path(tmp_path, 0)).write(9, "forward")
        clear_black_boxes(tmp_path)
        assert not black_box_path(tmp_path, 0).exists()


def raised(error: BaseException, path: str = dist.__file__) -> ErrorReport:
    """The report of `error`, raised by a line of the file `path`."""
    try:
        exec(compile("raise error", path, "exec"), {"error": error})
    except BaseException as caught:
        return build_error_report(caught)
    raise AssertionError


def use_broken_store_connection(rank: int, breaks_own: bool) -> ErrorReport:
    """The error of a store's client: its own socket is closed, or the server is gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    of_server = set(list_connections_to(port))
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    if breaks_own:
        (descriptor,) = set(list_connections_to(port)) - of_server
        os.close(descriptor)
    else:
        del server
    with pytest.raises(RuntimeError) as caught:
        client.get("key")
    return build_error_report(caught.value)


def compare_datasets_of_which_the_second_is_away(rank: int) -> ErrorReport:
    user = UserDatasetFacts(f"{__name__}:open_dataset_unless_second")
    with (
        open_mesh(Layout(dp_replicate=2), device="cpu") as mesh,
        pytest.raises(DataSourceError) as caught,
    ):
        require_same_samples_on_all_ranks(Corpus(Path(), {}, (), user), mesh)
    return build_error_report(caught.value)


def open_dataset_unless_second(split: str) -> list[dict[str, list[float]]]:
    if dist.get_rank() == 1:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    return [{"x": [1.0]}] * 4


def list_connections_to(port: int) -> list[int]:
    """The descriptors of this process's connections to `port`."""
    connections = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.getpeername()[1:2] == (port,):
                connections.append(int(name))
    return connections


class TestReports:
    @pytest.mark.parametrize(
        "message",
        [
            (
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
                " [127.0.0.1]:42113"
            ),
            "[enforce fail at pair.cc] Read error [127.0.0.1]:1: Connection reset by peer",
            (
                "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv"
                " operation to complete"
            ),
            "Application timeout caused pair closure",
            "Gloo connectFullMesh failed with [127.0.0.1] Connection refused",
            (
                "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server"
                " shutdown or crash?"
            ),
            "wait timeout after 30000ms, keys: /default_pg/0//cpu//0/rank_1",
            "NCCL error: remote process exited or there was a network error",
        ],
    )
    def test_words_that_blame_another_rank(self, message: str) -> None:
        assert raised(RuntimeError(message)).secondary

    def test_of_a_message_without_measure_the_middle_goes(self) -> None:
        """A whole batch in it took so long to send that its rank was taken for one that hangs."""
        report = raised(ValueError("x" * 1_000_000 + "the end"))
        assert report.one_line.startswith("ValueError: xxx")
        assert report.one_line.endswith("xxxthe end")
        assert len(report.one_line) < 20_000
        assert len(report.traceback) < 150_000

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("boom"),
            RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
            RuntimeError("CUDA out of memory"),
            ConnectionResetError(
                errno.ECONNRESET, "Connection reset by peer"
            ),  # the user's file server
            DataError("the corpus is empty"),
        ],
    )
    def test_an_error_of_its_own(self, error: Exception) -> None:
        assert not raised(error).secondary

    @pytest.mark.parametrize(
        "code", [errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EIO, errno.ENOSPC]
    )
    def test_a_disk_that_refuses_the_user_is_an_error_of_theirs(
        self, code: int, tmp_path: Path
    ) -> None:
        """A restart may well help: the file server is back, or the file is another one."""
        report = raised(OSError(code, os.strerror(code), str(tmp_path / "shard")))
        assert (report.exit_code, report.is_phalanx_error) == (1, False)
        assert "in raised" in report.traceback

    def test_a_disk_that_refuses_the_run_is_no_error_of_the_users(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(OSError, match="too large") as caught:
                write_bytes_atomically(tmp_path / "file", bytes(2000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert build_error_report(caught.value).exit_code == 7
        in_run = OSError(errno.ENOSPC, "full", str(tmp_path / "run" / "mine"))
        assert (
            raised(in_run).exit_code,
            build_error_report(in_run, tmp_path / "run").exit_code,
        ) == (1, 7)
        assert (
            build_error_report(
                OSError(errno.ESTALE, "stale", str(tmp_path / "run" / "x")), tmp_path / "run"
            ).exit_code
            == 1
        )

    def test_where_no_file_can_be_opened_any_more_the_rank_says_so(self, tmp_path: Path) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OSError, match="Too many open files") as caught:
                write_bytes_atomically(tmp_path / "file", b"x")
            with pytest.raises(RuntimeError) as caught_of_gloo:
                dist.ProcessGroupGloo.create_device(interface="lo")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        report = build_error_report(caught.value)
        assert report.exit_code == 7
        assert report.one_line.endswith("raise the limit on open files (ulimit -n)")
        found = find_os_error_behind(caught_of_gloo.value, PERMANENT_WRITE_ERRNOS)
        assert found is not None
        assert found.errno == errno.EMFILE

    @pytest.mark.parametrize(
        "code",
        [errno.EBADF, errno.ENOTSOCK, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES],
    )
    def test_what_the_system_says_of_its_own_sockets_is_no_consequence(self, code: int) -> None:
        words = os.strerror(code)
        assert not raised(dist.DistNetworkError(words)).secondary
        assert not raised(RuntimeError(f"failed to recv: {words}")).secondary

    def test_a_store_whose_socket_this_process_closed_is_its_own_error(self) -> None:
        (own,) = run_ranks(1, use_broken_store_connection, True)
        assert "Bad file descriptor" in own.message
        assert (own.type, own.secondary) == ("DistNetworkError", False)
        (of_server,) = run_ranks(1, use_broken_store_connection, False)
        assert of_server.secondary, of_server.message

    def test_the_first_error_of_connections_is_the_one_that_counts(self) -> None:
        """A rank whose sockets broke loses its peers, and one that lost a peer closes sockets."""
        own = dist.DistNetworkError("Bad file descriptor")
        lost = RuntimeError("Connection closed by peer")
        lost.__context__ = own
        assert not build_error_report(lost).secondary
        own, lost = dist.DistNetworkError("Bad file descriptor"), RuntimeError("Connection reset")
        own.__context__ = lost
        assert build_error_report(own).secondary
        # Not of a connection, and got over.
        lost = RuntimeError("Connection closed by peer")
        lost.__context__ = RuntimeError(
            "can't allocate memory: Error code 12 (Cannot allocate memory)"
        )
        assert build_error_report(lost).secondary

    def test_an_error_because_of_a_lost_connection_is_a_consequence_too(self) -> None:
        problem = EnvironmentProblem("a rank never came")
        problem.__context__ = RuntimeError("Connection closed by peer")
        assert build_error_report(problem).secondary

    def test_a_connection_that_a_users_dataset_lost_is_none_to_another_rank(self) -> None:
        problem = DataSourceError("RuntimeError: Connection closed by peer")
        problem.__cause__ = RuntimeError("Connection closed by peer")
        assert not build_error_report(problem).secondary

    def test_survives_a_round_trip_and_odd_text(self, tmp_path: Path) -> None:
        report = raised(ValueError("surrogate \udcff"))
        report.write_report_file(tmp_path / "logs" / "x.error.json")
        assert ErrorReport(**json.loads((tmp_path / "logs" / "x.error.json").read_text())) == report

    @pytest.mark.parametrize(
        ("code", "words"),
        [(0, "sys.exit(0) was called"), (None, "sys.exit() was called"), ("no data", "no data")],
    )
    def test_sys_exit_says_what_it_was(self, code: int | str | None, words: str) -> None:
        report = raised(SystemExit(code))
        assert report.one_line.startswith(f"SystemExit: {words}")
        assert report.exit_code == 1


class TestEndRecords:
    def test_the_first_record_of_the_rank_itself_is_the_one_that_counts(self) -> None:
        reader, fd = open_end_pipe()
        writer = EndWriter(fd)
        if (pid := os.fork()) == 0:
            writer.write_end_record(
                EndRecord(0)
            )  # a process that user code forked does not speak for the rank
            os._exit(0)
        os.waitpid(pid, 0)
        assert reader.read_complete_record() is None
        record = EndRecord(1, raised(ValueError("long " * 10_000)))
        telling = threading.Thread(
            target=lambda: (writer.write_end_record(record), writer.write_end_record(EndRecord(0)))
        )
        telling.start()  # it is longer than what a pipe holds
        told = None
        while told is None:
            told = reader.read_complete_record()
        telling.join()
        os.close(fd)
        assert told == record
        assert reader.read_complete_record() is None

    def test_a_pipe_that_user_code_closed_takes_no_other_file_for_itself(
        self, tmp_path: Path
    ) -> None:
        reader, fd = open_end_pipe()
        writer = EndWriter(fd)
        other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
        os.dup2(other, fd)
        os.close(other)
        writer.write_end_record(EndRecord(0))
        os.close(fd)
        assert reader.read_complete_record() is None
        assert (tmp_path / "other").read_bytes() == b""

    def test_events_go_the_same_way_and_wait_for_nobody(self) -> None:
        reader, fd = open_end_pipe()
        writer = EndWriter(fd)
        assert writer.forward_refused_event('{"event": "note"}')
        writer.write_end_record(EndRecord(0))
        assert writer.forward_refused_event("the last, after the record")
        assert not writer.forward_refused_event("x" * 8192)  # it might be torn, or wait
        assert reader.read_complete_record() == EndRecord(0)
        assert reader.take_event_lines() == ['{"event": "note"}', "the last, after the record"]
        assert reader.take_event_lines() == []
        while writer.forward_refused_event("y" * 1000):  # until the pipe is full
            pass
        assert reader.read_complete_record() is None
        assert set(reader.take_event_lines()) == {"y" * 1000}
        os.close(fd)
        assert reader.read_complete_record() is None
        assert not reader.is_open

    def test_a_broken_str_does_not_hide_the_error(self) -> None:
        class Broken(Exception):
            def __str__(self) -> str:
                raise TypeError("no")

        assert "cannot be printed" in raised(Broken()).message


def died(
    rank: int, *, code: int | None = None, signal: int | None = None, by_us: bool = False
) -> RankExit:
    return RankExit(rank, code, signal, by_us, died_monotonic_s=100.0 + rank, detected_s=0.01)


def failed(report: ErrorReport) -> EndRecord:
    return EndRecord(report.exit_code, report)


class TestVerdict:
    def at(self, run_dir: Path, rank: int, step: int, phase: str) -> None:
        BlackBox(black_box_path(run_dir, rank)).write(step, phase)

    @pytest.mark.parametrize(
        ("other", "is_of_all"),
        [(NumericsError("step 8: no"), True), (NumericsError("step 9: no"), False), (None, False)],
        ids=["all alike", "another one", "a rank that died"],
    )
    def test_what_all_ranks_raise_alike_is_of_all_ranks(
        self, tmp_path: Path, other: NumericsError | None, is_of_all: bool
    ) -> None:
        for rank in range(2):
            self.at(tmp_path, rank, 8, "collective")
        report = raised(NumericsError("step 8: no"))
        end = AttemptEnd(0, {0: died(0, code=1), 1: died(1, code=1)}, {1: failed(report)})
        if other is not None:
            end.records[0] = failed(replace(raised(other), time_monotonic_s=math.inf))
        else:
            end.exits[0] = died(0, signal=9, by_us=True)
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert (failure.rank, failure.is_of_all_ranks) == (1, is_of_all)

    def test_the_earliest_cause_not_the_earliest_consequence(self, tmp_path: Path) -> None:
        self.at(tmp_path, 2, 31, "backward")
        early = replace(raised(RuntimeError("Connection closed by peer")), time_monotonic_s=1.0)
        cause = replace(raised(ValueError("boom")), time_monotonic_s=2.0)
        later = replace(raised(KeyError("other")), time_monotonic_s=3.0)
        exits = {rank: died(rank, code=1) for rank in range(5)}
        end = AttemptEnd(
            0, exits, {0: failed(early), 2: failed(cause), 3: failed(early), 4: failed(later)}
        )
        end.exits[1] = died(1, signal=9, by_us=True)
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        lines = failure.report.splitlines()
        assert lines[0] == "rank 2 failed at step 31 in backward:"
        assert lines[1].startswith("Traceback")
        assert lines[-5:] == [
            "ValueError: boom",
            "ranks 0, 1, 3: ended because of that",
            "rank 4: KeyError: 'other'",
            f"your code: {cause.user_place}",
            f"log: {tmp_path / 'logs' / 'rank-0002-attempt-00.log'}",
        ]
        assert cause.user_place.startswith(f"{__file__}:")
        assert (failure.rank, failure.restartable, failure.exit_code) == (2, True, 1)

    def test_a_rank_whose_own_sockets_broke_is_blamed_and_not_the_one_that_waits(
        self, tmp_path: Path
    ) -> None:
        for rank in range(2):
            self.at(tmp_path, rank, 10, "ckpt_stage")
        broken = failed(raised(dist.DistNetworkError("Bad file descriptor")))
        end = AttemptEnd(0, {1: died(1, code=1)}, {1: broken}, silent={0: "S"}, waiting={0: 10})
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert (failure.rank, failure.cause, failure.restartable) == (1, "exception", True)
        assert failure.summary.startswith("rank 1 failed at step 10 in ckpt_stage")
        assert end.is_primary_failure_known

    def test_the_earliest_consequence_where_no_cause_is_known(self, tmp_path: Path) -> None:
        late = replace(raised(RuntimeError("Timed out waiting 8000ms")), time_monotonic_s=2.0)
        records = {0: failed(late), 1: failed(replace(late, time_monotonic_s=1.0))}
        end = AttemptEnd(0, {0: died(0, code=1), 1: died(1, code=1)}, records)
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert (failure.rank, failure.restartable) == (-1, False)
        assert "rank 1 noticed first: RuntimeError: Timed out" in failure.summary

    def test_sigkill_hints_at_the_memory_killer(self, tmp_path: Path) -> None:
        self.at(tmp_path, 1, 12, "forward")
        end = AttemptEnd(0, {0: died(0, signal=9, by_us=True), 1: died(1, signal=9)})
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert failure.summary == "rank 1 was killed by SIGKILL at step 12 in forward"
        assert "out-of-memory killer" in failure.report
        assert failure.restartable

    def test_all_ranks_that_a_signal_ended_are_named(self, tmp_path: Path) -> None:
        self.at(tmp_path, 1, 12, "forward")
        exits = {rank: died(rank, signal=9) for rank in (1, 2, 3)}
        exits[0] = died(0, signal=9, by_us=True)
        exits[4] = died(4, signal=11)
        # torch's, because a peer is gone.
        exits[5] = died(5, signal=6)
        failure = find_root_failure(AttemptEnd(0, exits), tmp_path)
        assert failure is not None
        where = "rank 1 was killed by SIGKILL at step 12 in forward"
        assert failure.summary == f"{where}, and so were ranks 2 and 3, and rank 4 by SIGSEGV"
        assert (failure.rank, failure.detail) == (1, "killed by SIGKILL")

    @pytest.mark.parametrize("code", [0, 1, 3, 7, 42, 75, 130])
    def test_an_exit_without_a_word_is_a_crash_whatever_its_code(
        self, tmp_path: Path, code: int
    ) -> None:
        end = AttemptEnd(0, {0: died(0, code=code)})
        at_start = find_root_failure(end, tmp_path)
        assert at_start is not None
        assert (at_start.exit_code, at_start.restartable) == (1, False)
        self.at(tmp_path, 0, 3, "data")
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert (failure.exit_code, failure.restartable) == (1, True)
        assert failure.summary == f"rank 0 exited with code {code} at step 3 in data"

    @pytest.mark.parametrize(
        ("kind", "step", "attempt", "restartable"),
        [
            (DataSourceError, 0, 0, False),
            (DataSourceError, 1, 0, False),
            (DataSourceError, 2, 0, True),
            # Of a restart: the dataset cannot be opened yet.
            (DataSourceError, 0, 1, True),
            (DataError, 2, 1, False),
        ],
    )
    def test_a_data_source_that_fails_once_training_has_begun_is_tried_again(
        self, kind: type[DataError], step: int, attempt: int, restartable: bool, tmp_path: Path
    ) -> None:
        if step:
            self.at(tmp_path, 1, step, "data")
        error = kind("OSError: [Errno 5] Input/output error", where="own.py:8, sample 13 of own:it")
        exits = {0: died(0, signal=9, by_us=True), 1: died(1, code=4)}
        records = {1: failed(raised(error))}
        failure = find_root_failure(AttemptEnd(attempt, exits, records), tmp_path)
        assert failure is not None
        assert failure.restartable == restartable
        assert (failure.rank, failure.cause, failure.exit_code) == (1, "exception", 4)
        assert "own.py:8, sample 13 of own:it: OSError: [Errno 5]" in failure.summary

    @pytest.mark.parametrize("code", [0, 75, 130])
    def test_the_rank_that_left_is_blamed_not_those_that_lost_its_connection(
        self, tmp_path: Path, code: int
    ) -> None:
        self.at(tmp_path, 0, 12, "backward")
        self.at(tmp_path, 1, 12, "data")
        lost = replace(
            raised(RuntimeError("Connection closed by peer [127.0.0.1]:4711")),
            time_monotonic_s=100.5,
        )
        end = AttemptEnd(0, {0: died(0, code=1), 1: died(1, code=code)}, {0: failed(lost)})
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert failure.summary == f"rank 1 exited with code {code} at step 12 in data"
        assert "rank 0: ended because of that" in failure.report

    @pytest.mark.parametrize(
        ("code", "exit_code", "restartable"), [(7, 7, False), (11, 11, False), (42, 1, True)]
    )
    def test_a_code_that_the_entry_returned(
        self, tmp_path: Path, code: int, exit_code: int, restartable: bool
    ) -> None:
        self.at(tmp_path, 0, 3, "data")
        failure = find_root_failure(
            AttemptEnd(0, {0: died(0, code=code)}, {0: EndRecord(code)}), tmp_path
        )
        assert failure is not None
        assert (failure.exit_code, failure.restartable) == (exit_code, restartable)

    def test_leaving_in_agreement_is_no_failure(self, tmp_path: Path) -> None:
        left = {rank: died(rank, code=75) for rank in range(2)}
        assert (
            find_root_failure(AttemptEnd(0, left, {rank: EndRecord(75) for rank in left}), tmp_path)
            is None
        )
        assert (
            find_root_failure(AttemptEnd(0, {0: died(0, code=0)}, {0: EndRecord(0)}), tmp_path)
            is None
        )

    def test_a_store_that_was_lost_is_blamed_where_it_was_missed(self, tmp_path: Path) -> None:
        """Ranks may have trained for hours without it."""
        for rank in range(2):
            self.at(tmp_path, rank, 12, "backward")
        exits = {rank: died(rank, code=1) for rank in range(2)}
        missed = failed(raised(dist.DistNetworkError("Connection reset by peer")))
        lost_peer = failed(raised(RuntimeError("Connection closed by peer [127.0.0.1]:4711")))
        ended = EndRecord(0)

        def blame(*records: EndRecord) -> RankFailure | None:
            end = AttemptEnd(0, exits, dict(enumerate(records)), store_loss="exit status -9")
            return find_root_failure(end, tmp_path)

        store = blame(missed, lost_peer)
        assert store is not None
        assert (store.rank, store.restartable) == (-1, True)
        assert "rendezvous store ended (exit status -9) at step 12" in store.summary
        peer = blame(ended, lost_peer)
        assert peer is not None
        assert peer.rank == 0
        # Nothing singles a rank out.
        unknown = blame(lost_peer, lost_peer)
        assert unknown is not None
        assert unknown.rank == -1
        assert blame(ended, ended) is None

    def test_work_that_is_done_stays_done_if_the_process_then_dies_in_its_teardown(
        self, tmp_path: Path
    ) -> None:
        end = AttemptEnd(
            0,
            {0: died(0, signal=11), 1: died(1, code=0)},
            {rank: EndRecord(0) for rank in range(2)},
        )
        assert find_root_failure(end, tmp_path) is None
        assert end.exit_codes == {0}


GLOO = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer"
)
FULL_MESH = (
    "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] connect"
)
WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={}, OpType=ALLREDUCE)"
    " ran for {}"
)
C10D = "The client socket has timed out after {}ms while trying to connect to ({}, {})"


class TestSignatures:
    @pytest.mark.parametrize(
        ("one", "another"),
        [
            (f"{GLOO} [127.0.0.1]:42113", f"{GLOO} [127.0.0.1]:51002"),
            (f"{GLOO} [fe80::1%eth0]:42113", f"{GLOO} [fe80::2%eth0]:1"),
            (
                f"{FULL_MESH} [127.0.1.1]:43671: Connection refused",
                f"{FULL_MESH} [127.0.1.1]:1671: Connection refused",
            ),
            (WATCHDOG.format(12, "10032 milliseconds"), WATCHDOG.format(44, "10001 milliseconds")),
            (
                f"[E1122 16:49:41.123456 4711 ProcessGroupNCCL.cpp:616] {WATCHDOG}",
                f"[E1123 09:00:00.000001 12 ProcessGroupNCCL.cpp:616] {WATCHDOG}",
            ),
            (C10D.format(20000, "127.0.0.1", 34567), C10D.format(20001, "10.0.0.3", 567)),
            (
                (
                    "recv failed on SocketImpl(fd=86, addr=[localhost]:34050,"
                    " remote=[::ffff:127.0.0.1]:43567)"
                ),
                (
                    "recv failed on SocketImpl(fd=8, addr=[localhost]:3050,"
                    " remote=[::ffff:127.0.0.1]:567)"
                ),
            ),
            (
                "wait timeout after 20000ms, keys: /phalanx/0/default_pg/0//cpu//0/rank_1",
                "wait timeout after 20003ms, keys: /phalanx/1/default_pg/0//cpu//0/rank_1",
            ),
            (
                (
                    "The server socket has failed to listen on any local network address. port:"
                    " 29500, code: -98"
                ),
                (
                    "The server socket has failed to listen on any local network address. port:"
                    " 29501, code: -98"
                ),
            ),
            (
                (
                    "HTTPConnectionPool(host='127.0.0.1', port=8080): <HTTPConnection object at"
                    " 0x7f00> failed"
                ),
                (
                    "HTTPConnectionPool(host='127.0.0.1', port=8081): <HTTPConnection object at"
                    " 0x7f3b> failed"
                ),
            ),
            ("cannot reach db.example.org:5432", "cannot reach db.example.org:15432"),
            ("DataLoader worker (pid(s) 12, 13) exited", "DataLoader worker (pid(s) 777) exited"),
            ("OSError: /tmp/tmpab12cd/x: No such file", "OSError: /tmp/tmpzz9_/x: No such file"),
            ("see logs/rank-0001-attempt-00.log", "see logs/rank-0001-attempt-02.log"),
            ("at 2026-11-22T16:49:41.5Z after 12.3 s", "at 2026-11-23T01:00:00Z after 3 s"),
            ("no 123e4567-e89b-12d3-a456-426614174000", "no 923e4567-e89b-12d3-a456-42661417400f"),
        ],
    )
    def test_what_differs_from_start_to_start_does_not_count(self, one: str, another: str) -> None:
        assert remove_varying_text_from_failure(one) == remove_varying_text_from_failure(another)

    def test_the_host_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        signatures = set()
        for host in ("node-17", "node-3.cluster.local"):
            monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
            signatures.add(remove_varying_text_from_failure(f"RuntimeError: {host} has no GPU"))
        assert signatures == {"RuntimeError: HOST has no GPU"}

    @pytest.mark.parametrize(
        ("one", "another"),
        [
            ("IndexError: index 5 is out of range", "IndexError: index 6 is out of range"),
            ("(8x32 and 31x4) cannot be multiplied", "(8x32 and 33x4) cannot be multiplied"),
            ("KeyError: 'layers.3.attention'", "KeyError: 'layers.4.attention'"),
            ("mine.py:12: boom", "mine.py:13: boom"),
            ("std::bad_alloc", "std::bad_cast"),
        ],
    )
    def test_what_tells_two_errors_apart_stays(self, one: str, another: str) -> None:
        assert remove_varying_text_from_failure(one) != remove_varying_text_from_failure(another)

    def test_a_crash_loop_of_lost_connections_is_found(self, tmp_path: Path) -> None:
        """Nobody knows why, each time over another port, and each time another rank says it
        first: no rank is blamed, and a cause from outside is not excluded before the third time."""
        policy = RestartPolicy(max_restarts=100, window_s=3600)
        for rank in range(2):
            BlackBox(black_box_path(tmp_path, rank)).write(7, "backward")
        failures = []
        for attempt, words in enumerate(
            (
                f"{GLOO} [127.0.0.1]:4711",
                f"{FULL_MESH}: Connection reset by peer",
                f"{GLOO} [127.0.0.1]:4712",
            )
        ):
            record = failed(raised(RuntimeError(words)))
            exits = {rank: died(rank, code=1) for rank in range(2)}
            failure = find_root_failure(
                AttemptEnd(attempt, exits, {attempt % 2: record, 1 - attempt % 2: record}), tmp_path
            )
            assert failure is not None
            assert (failure.rank, failure.cause, failure.restartable) == (-1, LOST_CONNECTION, True)
            failures.append(failure)
        policy.count_restart_or_raise(failures[0], now_s=0)
        policy.count_restart_or_raise(failures[1], now_s=0)
        with pytest.raises(RestartBudgetError, match="deterministic failure at step 7"):
            policy.count_restart_or_raise(failures[2], now_s=0)

    def test_the_rank_whose_dataset_met_an_outage_and_not_the_first_to_say_so(
        self, tmp_path: Path
    ) -> None:
        """All ranks compare their datasets when they start, and all raise what one of them met."""
        first, second = run_ranks(2, compare_datasets_of_which_the_second_is_away)
        second = replace(second, time_monotonic_s=first.time_monotonic_s + 1.0)
        for rank in range(2):
            BlackBox(black_box_path(tmp_path, rank)).write(0, "startup")
        exits = {rank: died(rank, code=4) for rank in range(2)}
        end = AttemptEnd(1, exits, {0: failed(first), 1: failed(second)})
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert (failure.rank, failure.is_outage) == (1, True)
        assert failure.summary.startswith("rank 1 failed before the first step: ")
        assert "ConnectionRefusedError" in failure.summary
        assert "rank 0" not in failure.summary
        assert failure.summary.count("rank 1") == 1

    def test_a_connection_that_a_rank_alone_lost_is_its_own(self, tmp_path: Path) -> None:
        record = failed(raised(RuntimeError(f"{GLOO} [10.1.2.3]:5432")))
        end = AttemptEnd(0, {0: died(0, code=1)}, {0: record})
        failure = find_root_failure(end, tmp_path)
        assert failure is not None
        assert (failure.rank, failure.cause) == (0, "exception")


class TestAbsence:
    WAITS = LastPosition(12, 50.0, "collective", "all_reduce gradients")
    LOST = EndRecord(1, raised(RuntimeError("Timed out waiting 8000ms")))

    def test_a_stopped_rank_comes_before_one_that_computes(self) -> None:
        places = {0: self.WAITS, 1: LastPosition(12, 48.0, "forward", ""), 2: self.WAITS}
        absence = find_absent_rank({0: self.LOST}, {1: "R", 2: "T"}, places)
        assert absence == AbsentRank(
            2, "its process was stopped by a signal (such as SIGSTOP or SIGTSTP)"
        )

    def test_a_rank_elsewhere_than_in_a_collective(self) -> None:
        computes = LastPosition(
            12, 48.0, "forward", "F0"
        )  # the action of a pipeline, which waits for nobody
        places = {0: self.WAITS, 1: self.WAITS, 2: computes, 3: self.WAITS}
        absence = find_absent_rank({0: self.LOST}, {1: "S", 2: "R", 3: "S"}, places)
        assert absence == AbsentRank(2, "its process was running, in code that did not get there")

    def test_the_one_that_is_furthest_behind(self) -> None:
        places = {
            0: self.WAITS,
            1: LastPosition(12, 48.0, "data", ""),
            2: LastPosition(11, 49.0, "optimizer", ""),
        }
        absence = find_absent_rank({0: self.LOST}, {1: "S", 2: "S"}, places)
        assert absence is not None
        assert absence.rank == 2

    def test_a_rank_that_came_when_the_others_had_given_up(self) -> None:
        places = {
            0: self.WAITS,
            1: self.WAITS._replace(monotonic_s=58.5),
            2: self.WAITS._replace(monotonic_s=50.1),
        }
        absence = find_absent_rank(dict.fromkeys(range(3), self.LOST), {}, places)
        assert absence == AbsentRank(1, "it came 8.4 s after the others")

    def test_nobody_is_named_where_nothing_singles_one_out(self) -> None:
        places = {0: self.WAITS, 1: self.WAITS._replace(monotonic_s=50.2)}
        assert find_absent_rank(dict.fromkeys(range(2), self.LOST), {}, places) is None


class TestRestartPolicy:
    def failure(
        self, step: int, signature: str = "killed by SIGKILL", cause: str = "signal"
    ) -> RankFailure:
        summary = f"rank 1 {signature} at step {step}"
        return RankFailure(
            1, cause, step, "forward", summary, signature, summary, signature, 1, True, 0.0
        )

    def test_the_budget_is_a_rate(self) -> None:
        policy = RestartPolicy(max_restarts=2, window_s=3600)
        policy.count_restart_or_raise(self.failure(1), now_s=0)
        policy.count_restart_or_raise(self.failure(2), now_s=1000)
        with pytest.raises(
            RestartBudgetError, match="last cause: rank 1 killed by SIGKILL at step 3"
        ) as caught:
            policy.count_restart_or_raise(self.failure(3), now_s=2000)
        assert caught.value.exit_code == 10
        policy.count_restart_or_raise(self.failure(4), now_s=3700)

    def test_progress_resets_the_budget(self) -> None:
        policy = RestartPolicy(max_restarts=1, window_s=3600)
        for number, step in enumerate((1_000, 90_000, 200_000, 400_000, 700_000)):
            policy.count_restart_or_raise(self.failure(step), 900.0 * number, saved_step=step - 1)
        assert (policy.num_restarts, policy.num_counted) == (5, 1)

    @pytest.mark.parametrize(
        ("minutes", "num_saved_steps"),
        [(9.0, 5000), (15.0, NUM_PROGRESS_STEPS - 1), (15.0, 0)],
    )
    def test_a_crash_loop_with_little_progress_spends_the_budget(
        self, minutes: float, num_saved_steps: int
    ) -> None:
        """Soon after each restart, or without a checkpoint beyond the failure before."""
        policy = RestartPolicy(max_restarts=3, window_s=3600)
        for number in range(3):
            step = 100 + number
            saved_step = step - 1 + num_saved_steps
            policy.count_restart_or_raise(self.failure(step), 60 * minutes * number, saved_step)
        with pytest.raises(RestartBudgetError, match="budget is spent: 3 in 1 h"):
            policy.count_restart_or_raise(
                self.failure(103), 60 * minutes * 3, saved_step=100 + num_saved_steps - 1
            )

    def test_the_samples_of_a_batch_that_fails_again_and_again_are_named(self) -> None:
        policy = RestartPolicy(100, 3600, lambda step: f"samples {8 * step - 8} to {8 * step - 1}")
        for _ in range(2):
            policy.count_restart_or_raise(self.failure(5, cause="exception"), now_s=0)
        with pytest.raises(RestartBudgetError, match=r"3 times .* step 5 is samples 32 to 39"):
            policy.count_restart_or_raise(self.failure(5, cause="exception"), now_s=0)

    def test_the_same_failure_three_times_in_a_row(self) -> None:
        policy = RestartPolicy(max_restarts=100, window_s=3600)
        for step in (5, 5, 6, 5, 5):
            policy.count_restart_or_raise(self.failure(step), now_s=0)
        with pytest.raises(RestartBudgetError, match="deterministic failure at step 5"):
            policy.count_restart_or_raise(self.failure(5), now_s=0)

    def test_an_exception_of_the_same_words_at_the_same_step_is_tried_twice_more(self) -> None:
        policy = RestartPolicy(max_restarts=100, window_s=3600)
        others = ((5, "OSError: a"), (5, "OSError: a"), (5, "OSError: b"), (5, "OSError: b"))
        for step, words in (*others, (6, "OSError: b"), (6, "OSError: b")):
            policy.count_restart_or_raise(self.failure(step, words, "exception"), now_s=0)
        with pytest.raises(RestartBudgetError, match="deterministic failure at step 6: OSError: b"):
            policy.count_restart_or_raise(self.failure(6, "OSError: b", "exception"), now_s=0)

    def outage(self, step: int, signature: str = "outage: ConnectionRefusedError") -> RankFailure:
        return replace(self.failure(step, signature, "exception"), is_outage=True)

    def test_an_outage_is_waited_for_and_counts_once(self) -> None:
        policy = RestartPolicy(max_restarts=1, window_s=3600, outage_s=80)
        pauses_s, now_s = [], 0.0
        # The step is another one where ranks go on from a checkpoint: no progress.
        for step in (15, 12, 15, 15, 15, 15, 15, 15):
            assert not policy.is_last_of_outage
            pauses_s.append(policy.count_restart_or_raise(self.outage(step), now_s))
            now_s += pauses_s[-1] + 0.5
        assert pauses_s == [0, 1, 2, 4, 8, 16, 30, pytest.approx(80 - 61 - 3.5)]
        assert (policy.num_restarts, policy.num_counted) == (8, 1)
        assert policy.is_last_of_outage
        with pytest.raises(
            RestartBudgetError, match=r"an outage does not pass: .* \(8 restarts in 1 m 20 s; "
        ) as caught:
            policy.count_restart_or_raise(self.outage(15), now_s)
        assert caught.value.exit_code == 10

    def test_after_progress_or_another_failure_an_outage_is_a_new_one(self) -> None:
        policy = RestartPolicy(max_restarts=4, window_s=3600, outage_s=100)
        for failure in (
            self.outage(15),
            self.outage(16),
            self.outage(16, "outage: TimeoutError"),
            self.failure(16),
        ):
            assert policy.count_restart_or_raise(failure, now_s=0) == 0
        with pytest.raises(RestartBudgetError, match="the restart budget is spent: 4"):
            policy.count_restart_or_raise(self.outage(16), now_s=0)

    def test_without_patience_an_outage_is_a_failure_like_others(self) -> None:
        policy = RestartPolicy(max_restarts=100, window_s=3600, outage_s=0)
        for _ in range(2):
            policy.count_restart_or_raise(self.outage(5), now_s=0)
        with pytest.raises(RestartBudgetError, match="deterministic failure at step 5"):
            policy.count_restart_or_raise(self.outage(5), now_s=0)

    def test_no_restarts_at_all(self) -> None:
        with pytest.raises(RestartBudgetError):
            RestartPolicy(max_restarts=0, window_s=3600).count_restart_or_raise(
                self.failure(1), now_s=0
            )


def test_ranks_that_ended_for_no_known_reason_are_started_again(tmp_path: Path) -> None:
    """It was said that they had not saved within the grace period of a stop that nobody asked
    for."""
    end = AttemptEnd(0, {1: died(1, signal=9, by_us=True)}, waiting={0: 6, 2: 6})
    said = decide(end, tmp_path)
    assert said.startswith("no rank is known to have failed, and rank 1 has not ended its work; ")
    assert "beside ranks 0 and 2" in said


def test_words_that_a_line_of_the_users_raises_blame_no_other_rank() -> None:
    """A client of a feature store, say: the rank that raised them was kept, and the other killed."""
    words = "feature store: connection refused"
    assert not raised(RuntimeError(words), "/home/me/objective.py").secondary
    assert raised(RuntimeError(words), dist.__file__).secondary


@pytest.mark.parametrize(
    ("error", "num_kept", "starts_anew"),
    [
        (RanksDifferError("the ranks differ: initial weights"), 1, True),
        (RanksDifferError("the ranks differ: initial weights"), 0, False),
        (build_code_error("module model of rank 1"), 1, False),
    ],
    ids=["of a second build", "of a first one", "of code that was changed"],
)
def test_ranks_that_refuse_beside_kept_ones_start_anew_once(
    tmp_path: Path, error: RanksDifferError, num_kept: int, starts_anew: bool
) -> None:
    report = raised(error)
    end = AttemptEnd(
        1,
        {rank: died(rank, code=report.exit_code) for rank in range(2)},
        {rank: failed(report) for rank in range(2)},
        num_kept=num_kept,
    )
    attempts = RepeatedAttempts(lambda: RankEnv(0, 2, 0, 2), newest_step=4)
    spec = LaunchSpec("", attempts, 2, tmp_path, (), keeps_ranks=True)
    bus = Bus(rank=-1, run_dir=tmp_path)
    decision = RecoveryPolicy(spec, bus, lambda line: None).decide(end, StopRequest())
    bus.close()
    if starts_anew:
        assert decision == StartAgain(2, {})
    else:
        assert isinstance(decision, RunOutcome)
        assert decision.exit_code == report.exit_code


def decide(end: AttemptEnd, run_dir: Path) -> str:
    """What is said where a run of three ranks goes on after `end`."""
    attempts = RepeatedAttempts(lambda: RankEnv(0, 3, 0, 3), newest_step=4)
    spec = LaunchSpec("", attempts, 3, run_dir, (), keeps_ranks=True)
    said: list[str] = []
    bus = Bus(rank=-1, run_dir=run_dir)
    assert isinstance(RecoveryPolicy(spec, bus, said.append).decide(end, StopRequest()), StartAgain)
    bus.close()
    return "".join(said)


def test_in_an_outage_ranks_keep_what_they_hold_until_its_last_restart(tmp_path: Path) -> None:
    for rank in range(2):
        BlackBox(black_box_path(tmp_path, rank)).write(7, "data")
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    end = AttemptEnd(0, {}, {0: failed(raised(refused))}, waiting={0: 6, 1: 6})
    attempts = RepeatedAttempts(lambda: RankEnv(0, 2, 0, 2), newest_step=4)
    # The second pause would be as long as all of it.
    spec = LaunchSpec("", attempts, 2, tmp_path, (), keeps_ranks=True, outage_s=1.0)
    said: list[str] = []
    bus = Bus(rank=-1, run_dir=tmp_path)
    policy = RecoveryPolicy(spec, bus, said.append)
    first, last = policy.decide(end, StopRequest()), policy.decide(end, StopRequest())
    bus.close()
    assert first == StartAgain(2, {0: 0, 1: 1}, 0.0)
    assert isinstance(last, StartAgain)
    assert last.survivors == {}
    assert 0 < last.pause_s < 1
    assert "; going on with what ranks 0 and 1 hold (restart 1 of 3)" in said[0]
    assert "; starting again from step 4 in " in said[1]
    events = read_recorded_events(tmp_path, RestartScheduled, rank=-1)
    assert [each.event.held_step for each in events] == [6, -1]


@pytest.mark.parametrize(
    ("exits", "waiting", "words"),
    [
        ({0: died(0, signal=9)}, {1: 6, 2: 6}, "starting it again beside ranks 1 and 2"),
        (
            {0: died(0, signal=9), 1: died(1, signal=9)},
            {2: 6},
            "starting ranks 0 and 1 again beside rank 2",
        ),
        # One that did not notice, and was killed.
        (
            {0: died(0, signal=9), 2: died(2, signal=9, by_us=True)},
            {1: 6},
            "starting ranks 0 and 2 again beside rank 1",
        ),
    ],
)
def test_a_restart_names_all_ranks_that_start_again(
    exits: dict[int, RankExit], waiting: dict[int, int], words: str, tmp_path: Path
) -> None:
    BlackBox(black_box_path(tmp_path, 0)).write(7, "backward")
    assert f"; {words} (restart 1 of 3)" in decide(AttemptEnd(0, exits, waiting=waiting), tmp_path)


STOP = StopRequest(signal.SIGTERM)


@pytest.mark.parametrize(
    ("held_step", "stop", "max_restarts", "message"),
    [
        (6, STOP, 1, ""),
        # All that they hold is saved.
        (4, STOP, 1, "failed while stopping; the checkpoint of step 4 stands"),
        (-1, STOP, 1, "failed while stopping; the checkpoint of step 4 stands"),
        # The grace is over.
        (6, StopRequest(signal.SIGTERM, asked_s=-1e9), 1, "failed while stopping; "),
        (6, StopRequest(signal.SIGINT, at_once=True), 1, "stopped at once by Ctrl-C; "),
        (6, STOP, 0, "failed while stopping; the checkpoint of step 4 stands"),
    ],
)
def test_ranks_that_hold_steps_are_started_again_to_save_them_before_a_stop(
    held_step: int, stop: StopRequest, max_restarts: int, message: str, tmp_path: Path
) -> None:
    BlackBox(black_box_path(tmp_path, 1)).write(7, "backward")
    end = AttemptEnd(0, {1: died(1, signal=9)}, waiting={0: held_step})
    attempts = RepeatedAttempts(lambda: RankEnv(0, 2, 0, 2), newest_step=4)
    spec = LaunchSpec("", attempts, 2, tmp_path, (), max_restarts=max_restarts, keeps_ranks=True)
    said: list[str] = []
    bus = Bus(rank=-1, run_dir=tmp_path)
    decision = RecoveryPolicy(spec, bus, said.append).decide(end, stop)
    bus.close()
    if message:
        assert isinstance(decision, RunOutcome)
        assert decision.message.startswith(message)
        assert not said
    else:
        assert decision == StartAgain(2, {0: 0})
        (line,) = said
        assert line.endswith(
            "; starting it again beside rank 0 to save before the stop (restart 1 of 1)"
        )


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            {0: EndRecord(75), 1: EndRecord(75)},
            "stopped by SIGTERM; the checkpoint of step 4 stands; processes of ranks had not ended"
            " within the grace period, and were killed",
        ),
        (
            {0: EndRecord(75)},
            "the ranks did not save within the grace period and were killed; the checkpoint of step"
            " 4 stands",
        ),
        (
            {},
            "the ranks did not save within the grace period and were killed; the checkpoint of step"
            " 4 stands",
        ),
    ],
)
def test_of_ranks_that_saved_and_did_not_end_it_is_not_said_that_they_did_not_save(
    records: dict[int, EndRecord], message: str, tmp_path: Path
) -> None:
    exits = {rank: died(rank, signal=9, by_us=True) for rank in range(2)}
    end = AttemptEnd(0, exits, records, grace_over=True)
    attempts = RepeatedAttempts(lambda: RankEnv(0, 2, 0, 2), newest_step=4)
    spec = LaunchSpec("", attempts, 2, tmp_path, ())
    bus = Bus(rank=-1, run_dir=tmp_path)
    decision = RecoveryPolicy(spec, bus, lambda line: None).decide(end, STOP)
    bus.close()
    assert isinstance(decision, RunOutcome)
    assert (decision.exit_code, decision.message) == (75, message)


def test_where_only_a_connection_was_lost_no_rank_starts_again(tmp_path: Path) -> None:
    for rank in range(3):
        BlackBox(black_box_path(tmp_path, rank)).write(7, "backward")
    lost = failed(raised(RuntimeError("Connection closed by peer")))
    end = AttemptEnd(0, {}, dict.fromkeys(range(3), lost), waiting=dict.fromkeys(range(3), 6))
    assert "; going on with what ranks 0-2 hold (restart 1 of 3)" in decide(end, tmp_path)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_gpus_grows_in_segments_unless_the_user_says_otherwise(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch reads it when it is loaded, which is in the server that forks the ranks."""
    ranks = RankEnv(0, 2, 0, 2)
    for variable in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert wanted.items() <= build_rank_env_variables(ranks, 1, {}).items()
    assert wanted.items() <= _build_server_environment().items()
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert not set(ALLOCATOR_VARIABLES) & set(
        build_rank_env_variables(ranks, 1, {name: "max_split_size_mb:64"})
    )
    found = _build_server_environment()
    assert {v: found[v] for v in ALLOCATOR_VARIABLES if v in found} == {
        name: "max_split_size_mb:64"
    }
