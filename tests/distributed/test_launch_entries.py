"""What the ranks of test_launch.py run, and, as a program, a supervisor that the tests can kill."""

from __future__ import annotations

import atexit
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from phalanx.core.black_box import BlackBox
from phalanx.core.errors import DataError, ExitCode, ResourceError, RunLockedError
from phalanx.core.phases import PhaseTimer
from phalanx.launch.paths import black_box_path
from phalanx.launch.rank_link import RankLink

DEADLINE_S = 300.0


@dataclass(frozen=True)
class Payload:
    """Any JSON object."""

    fields: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.fields


def rank() -> int:
    return int(os.environ["RANK"])


def attempt() -> int:
    return int(os.environ["PHALANX_ATTEMPT"])


def mark(payload: dict[str, Any], name: str) -> None:
    """Tell the test that this rank got here, and when."""
    path = Path(payload["marks"]) / f"{name}-{rank()}-{attempt()}"
    path.with_suffix(".partial").write_text(
        json.dumps({"pid": os.getpid(), "monotonic_s": time.monotonic()})
    )
    path.with_suffix(".partial").rename(path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, pid
        time.sleep(0.005)


def at_step(payload: dict[str, Any], step: int, phase: str) -> PhaseTimer:
    phases = PhaseTimer(BlackBox(black_box_path(Path(payload["run_dir"]), rank())))
    phases.step = step
    phases.enter(phase)
    return phases


def parents(payload: dict[str, Any], link: RankLink) -> int:
    """Tell which process forked the one that forked this rank."""
    template_pid = psutil.Process(os.getppid()).ppid()
    (Path(payload["marks"]) / f"template-{rank()}").write_text(str(template_pid))
    link.report_work_done()
    return 0


def reduce(payload: dict[str, Any], link: RankLink) -> int:
    """Rendezvous through the environment; hold still until the test has looked at the sockets."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print("total", total.item())
    mark(payload, "reduced")
    wait_for(Path(payload["marks"]) / "go")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def one_raises(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 fails before the first step; the others learn it from their collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if rank() == 1:
        raise ValueError("boom\nin two lines")
    dist.all_reduce(torch.ones(1))
    return 0


def bad_data(payload: dict[str, Any], link: RankLink) -> int:
    at_step(payload, 3, "data")
    raise DataError("the corpus is empty", where="corpus.txt", fix="choose another file")


def killed_once(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 of the first attempt dies at step 2; rank 0 waits for ever, as in a collective."""
    at_step(payload, 2, "forward")
    mark(payload, f"epoch-{payload.get('epoch')}")
    mark(payload, "running")
    if attempt() == payload.get("deadly_attempt", 0):
        wait_for(Path(payload["marks"]) / f"running-{1 - rank()}-{attempt()}")
        if rank() == 1:
            os.kill(os.getpid(), payload.get("signal", signal.SIGKILL))
        signal.pause()
    return 0


def survives_without_a_processor(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 of the first attempt dies at step 2. Rank 0 needs little time to leave its groups, on
    a core that others use."""
    at_step(payload, 2, "forward")
    if attempt() > 0:
        return 0
    if rank() == 1:
        wait_for(Path(payload["marks"]) / "crowded-0-0")
        os.kill(os.getpid(), signal.SIGKILL)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(6)]
    mark(payload, "crowded")
    until_s = time.process_time() + payload["needed_s"]
    while time.process_time() < until_s:
        pass
    for other in others:
        other.kill()
        other.wait()
    assert link.wait_for_next_attempt(2) is not None
    mark(payload, "kept")
    return 0


def is_asked_to_stop_as_it_starts(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 dies once, and is asked to stop as soon as it is there again, before it has handlers.
    Code of rank 0 has moved to another folder."""
    # Here: it brings torch, which each rank of every other test would import, too.
    from phalanx.train.stop import StopSignalFlags

    stop = StopSignalFlags()
    if attempt() == 0:
        at_step(payload, 31, "data")
        pid_of_1 = Path(payload["marks"]).parent / "pid of rank 1"
        if rank() == 1:
            pid_of_1.with_suffix(".part").write_text(str(os.getpid()))
            pid_of_1.with_suffix(".part").rename(pid_of_1)
            os.kill(os.getpid(), signal.SIGKILL)
        # Who waits is the end of an attempt: a rank that lives then has not failed, and is killed.
        wait_for(pid_of_1)
        wait_until_gone(int(pid_of_1.read_text()))
        os.chdir(payload["marks"])
        assert link.wait_for_next_attempt(2) is not None
    else:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.request_stop_on_signals()
        mark(payload, "asked" if stop.sigterm else "not asked")
    return int(ExitCode.PREEMPTED)


def meets_an_outage(payload: dict[str, Any], link: RankLink) -> int:
    """A server that rank 0 needs is away for the first attempts."""
    at_step(payload, 31, "data")
    if attempt() < payload["num_attempts"] and rank() == 0:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    if attempt() < payload["num_attempts"]:
        signal.pause()
    return 0


def always_raises(payload: dict[str, Any], link: RankLink) -> int:
    at_step(payload, 31, "backward")
    if rank() == 0:
        raise ValueError(f"boom {attempt() if payload['differently'] else ''}")
    signal.pause()
    return 0


def leaves_a_helper(payload: dict[str, Any], link: RankLink) -> int:
    """Finishes while a program it started, which knows nothing of lifelines, still runs."""
    program = subprocess.Popen(["sleep", "600"])
    (Path(payload["marks"]) / f"helper-{rank()}").write_text(str(program.pid))
    return 0


def leaves_threads(payload: dict[str, Any], link: RankLink) -> int:
    """Finishes while one thread still works and a pool of others waits for work that never
    comes."""
    payload["pool"] = ThreadPoolExecutor(2)  # as compilers keep theirs: nobody shuts it down
    payload["pool"].submit(time.monotonic).result()

    def work() -> None:
        wait_for(Path(payload["marks"]) / f"left-{rank()}-{attempt()}")
        mark(payload, "worked")

    threading.Thread(target=work).start()
    atexit.register(mark, payload, "at-exit")
    mark(payload, "left")
    return 0


def segfaults(payload: dict[str, Any], link: RankLink) -> int:
    if rank() == 0:
        ctypes.string_at(0)
    signal.pause()
    return 0


def exits(payload: dict[str, Any], link: RankLink) -> int:
    """The ranks of `leavers` leave, each in the way `how`; others wait for ever, as in a
    collective."""
    at_step(payload, payload.get("step", 5), "data")
    if rank() not in payload["leavers"]:
        signal.pause()
    match payload["how"]:
        case "os._exit":
            os._exit(payload["code"])
        case "thread":
            threading.Thread(target=os._exit, args=(payload["code"],)).start()
            signal.pause()
        case "C":
            ctypes.CDLL(None).exit(payload["code"])
        case "return":
            return int(payload["code"])
    raise SystemExit(payload["code"])


def reports_and_hangs(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 0 reports its error, then waits for ever in its cleanup, as for communicators of
    ranks that do not come."""
    if rank() == 0:
        link.report_error(ValueError("boom"))
    while True:
        signal.pause()


def reduces_without_one(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 stops where others reduce: they run into the collective's timeout."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    # Not before they have met, which takes longer on a busy machine.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=payload["timeout_s"]), dist.group.WORLD)
    phases = at_step(payload, 12, "data")
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with phases("collective", "all_reduce gradients"):
        dist.all_reduce(torch.ones(1))
    return 0


def waits_for_one(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 hangs in the way `how`; the other raises what gloo raises when a peer does not
    come."""
    phases = at_step(payload, 12, "forward")
    mark(payload, "there")
    if rank() == 1:
        match payload["how"]:
            case "busy":
                while True:
                    pass
            case "lock held":
                ctypes.PyDLL(None).sleep(600)
    wait_for(Path(payload["marks"]) / f"there-1-{attempt()}")
    with phases("collective", "all_reduce gradients"):
        error = RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation"
        )
        # By a line of torch's: what a line of the user's raises blames no other rank.
        exec(
            compile("raise error", "/site-packages/torch/distributed.py", "exec"), {"error": error}
        )
    raise AssertionError


def aborts_because_of_another(payload: dict[str, Any], link: RankLink) -> int:
    """Rank 1 leaves, or hangs if it `hangs`; NCCL's watchdog aborts the other one, earlier than
    anybody reports."""
    phases = at_step(payload, 12, "backward")
    if rank() == 0:
        phases.enter("collective", "all_reduce gradients")
        print(
            "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 9 s",
            flush=True,
        )
        print("a line\n" * 60, flush=True)
        mark(payload, "aborting")
        os.abort()
    wait_for(Path(payload["marks"]) / f"aborting-0-{attempt()}")
    while payload["hangs"]:
        signal.pause()
    wait_until_gone(
        json.loads((Path(payload["marks"]) / f"aborting-0-{attempt()}").read_text())["pid"]
    )
    os._exit(0)


def trains(payload: dict[str, Any], link: RankLink) -> int:
    """Steps until told to stop; a rank that hears of it tells the others, and all leave with the
    same code."""
    codes = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGUSR1: 75}
    heard: list[int] = []
    for number in codes:
        signal.signal(number, lambda number, frame: heard.append(codes[signal.Signals(number)]))
    phases = at_step(payload, 1, "forward")
    mark(payload, "training")
    told = Path(payload["marks"]) / "told"
    while not told.exists():
        if heard:
            told.with_suffix(f".{rank()}").write_text(str(heard[0]))
            told.with_suffix(f".{rank()}").rename(told)
        time.sleep(0.005)
        phases.step += 1
    return int(told.read_text())


def refused_when_it_stops(payload: dict[str, Any], link: RankLink) -> int:
    """Asked to stop, finds that another job has the run by now, or that the disk is full."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    at_step(payload, 1, "forward")
    mark(payload, "training")
    while not heard:
        time.sleep(0.005)
    raise {9: RunLockedError, 7: ResourceError}[payload["code"]](
        "the last save is refused", where="run"
    )


def stubborn(payload: dict[str, Any], link: RankLink) -> int:
    """Hears nothing; rank 1 may be frozen altogether.

    From the attempt `willing_attempt` on, it just finishes.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    at_step(payload, 1, "forward")
    mark(payload, "stuck")
    if attempt() >= payload.get("willing_attempt", 99):
        return 0
    if rank() == 1 and payload.get("frozen"):
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


def main() -> int:
    """`python test_launch_entries.py RUN ENTRY PAYLOAD`: a supervisor of two ranks."""
    from phalanx.launch.launch_spec import LaunchSpec, RepeatedAttempts
    from phalanx.launch.supervisor import supervise_ranks
    from phalanx.observe.bus import Bus

    run_dir, entry, payload = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    bus = Bus(rank=-1, run_dir=run_dir)
    attempts = RepeatedAttempts(lambda: Payload(payload))
    outcome = supervise_ranks(LaunchSpec(entry, attempts, 2, run_dir, ()), bus=bus, say=print)
    bus.close()
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())


def uses_the_driver(payload: dict[str, Any], link: RankLink) -> int:
    """Marks this rank if the driver that lies at `payload["driver"]` can still be begun with
    here."""
    driver = ctypes.CDLL(payload["driver"])
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 3:
        mark(payload, "clean")
    __import__("begins_cuda")
    if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0:
        mark(payload, "begun")
    return 0
