"""What a rank says of its memory: the true peak, whenever it was, beside what another process
sees of it."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import pytest
import torch

from phalanx.core.process_memory import ProcessMemoryReader
from phalanx.core.units import MIB
from phalanx.observe.events import MemoryMeasured
from phalanx.train.memory import MemoryMeter
from ranks import run_ranks

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel has no smaps_rollup"
)


class _Model:
    """All that `measure` asks of a parallel model, of one without parameters."""

    module = torch.nn.Identity()
    saved_bytes = None


def event_of(meter: MemoryMeter) -> MemoryMeasured:
    return meter.build_memory_event({}, _Model(), {"parameters": 10})  # type: ignore[arg-type]


def touch(num_mib: int) -> None:
    """Have so much memory for a moment, and give it back."""
    memory = mmap.mmap(-1, num_mib * MIB)
    memory.write(b"x" * (num_mib * MIB))
    memory.close()


def between_phases(rank: int) -> tuple[MemoryMeasured, int]:
    meter = MemoryMeter()
    touch(300)  # before anything counts
    meter.start(CPU)
    meter.begin_phase(1, "forward")
    meter.begin_phase(1, "backward")
    touch(96)  # and it is gone where the next phase begins
    meter.begin_phase(1, "optimizer")
    step_peak = meter.read_rank_memory().peak_bytes
    meter.begin_phase(2, "forward")
    return event_of(meter), step_peak


def test_what_is_gone_when_the_next_phase_begins_was_measured_with_its_moment() -> None:
    ((event, step_peak),) = run_ranks(1, between_phases)
    # Python's copy of what is written is there as well.
    assert 190 * MIB <= event.measured_bytes["peak"] <= 215 * MIB
    assert (event.peak_step, event.peak_phase) == (1, "backward")
    assert step_peak >= event.measured_bytes["peak"]
    assert event.start_bytes > 0


def sampled(rank: int) -> MemoryMeasured:
    meter = MemoryMeter()
    meter._process.reset_peak_resident_bytes = lambda: False  # type: ignore[method-assign]  # as in a container that forbids it
    meter.start(CPU)
    meter.begin_phase(4, "backward")
    memory = mmap.mmap(-1, 96 * MIB)
    memory.write(b"x" * 96 * MIB)
    until = time.monotonic() + 60
    while meter._peak_bytes - meter.before.own_bytes < 90 * MIB and time.monotonic() < until:
        pass
    memory.close()
    meter.begin_phase(4, "optimizer")
    event = event_of(meter)
    meter.stop()
    return event


def test_a_sampler_stands_in_where_the_mark_cannot_be_set_back() -> None:
    (event,) = run_ranks(1, sampled)
    assert 95 * MIB <= event.measured_bytes["peak"] <= 215 * MIB
    assert (event.peak_step, event.peak_phase) == (4, "backward")


def beside_files(rank: int, path: str) -> list[int]:
    meter = MemoryMeter()
    meter.start(CPU)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        meter.begin_phase(1, "data")
        sum(pages[:: mmap.PAGESIZE])
        meter.begin_phase(1, "forward")
        found = [event_of(meter).measured_bytes["peak"]]
    meter.begin_phase(1, "backward")  # they are gone, and the mark with them
    event_of(meter)
    touch(32)
    meter.begin_phase(1, "optimizer")
    return [*found, event_of(meter).measured_bytes["peak"]]


def test_pages_of_files_are_no_memory_of_training_and_hide_none(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"x" * 200 * MIB)
    ((with_files, after),) = run_ranks(1, beside_files, str(tmp_path / "tokens"))
    assert with_files < 16 * MIB
    assert (
        31 * MIB <= after <= 80 * MIB
    )  # 32, and a copy where the allocator takes new pages for it


def share(rank: int) -> tuple[int, int, int]:
    """(what is in all, by the meter; Pss and Rss by the kernel) of a process that shares its
    parent's pages."""
    meter = MemoryMeter()
    meter.start(CPU)
    touch(8)
    meter.begin_phase(1, "forward")
    event = event_of(meter)
    text = Path("/proc/self/smaps_rollup").read_text()
    pss, rss = (int(text.split(f"\n{name}:")[1].split()[0]) * 1024 for name in ("Pss", "Rss"))
    return event.runtime_bytes + event.measured_bytes["peak"], pss, rss


def test_shared_pages_count_by_their_share() -> None:
    """Ranks of a test are forked from a process that has imported torch, as those of a run are."""
    ((in_all, pss, rss),) = run_ranks(1, share)
    assert rss - pss > 50 * MIB
    assert pss - 4 * MIB <= in_all <= pss + 24 * MIB


def map_what_another_process_maps(rank: int) -> tuple[MemoryMeasured, int]:
    """64 MiB of shared memory that a second process has mapped as well; (the event, the record of
    a step after that)."""
    meter = MemoryMeter()
    meter.start(CPU)
    meter.begin_phase(1, "backward")
    memory = mmap.mmap(-1, 64 * MIB)
    for start in range(0, len(memory), MIB):
        memory[start : start + MIB] = b"x" * MIB
    has_read, say_read = os.pipe()
    may_end, say_end = os.pipe()
    child = os.fork()
    if child == 0:
        sum(memory[:: mmap.PAGESIZE])
        os.write(say_read, b".")
        os.read(may_end, 1)
        os._exit(0)
    os.read(has_read, 1)
    meter.begin_phase(1, "optimizer")
    step = meter.read_rank_memory().own_bytes
    event = event_of(meter)
    os.write(say_end, b".")
    os.waitpid(child, 0)
    return event, step


def test_shared_memory_counts_by_its_share() -> None:
    """The kernel's Pss of a page that two processes map is half a page, as between two ranks that
    show each other as much: counted whole in each, twice their memory would be measured."""
    if "Pss_Shmem:" not in Path("/proc/self/smaps_rollup").read_text():
        pytest.skip("the kernel does not tell shared memory apart")
    ((event, step),) = run_ranks(1, map_what_another_process_maps)
    assert 31 * MIB <= event.measured_bytes["peak"] <= 40 * MIB
    assert event.start_bytes + 31 * MIB <= step <= event.start_bytes + 40 * MIB


def test_a_process_that_is_gone_has_no_memory() -> None:
    gone = ProcessMemoryReader(2**22 + 1)
    assert (
        gone.read(),
        gone.reset_peak_resident_bytes(),
        gone.measure_bytes_of_others(),
    ) == (None, False, None)
    gone.close()


def test_another_process_is_read_as_itself_is() -> None:
    mine, same = ProcessMemoryReader().read(), ProcessMemoryReader(os.getpid()).read()
    assert mine is not None
    assert same is not None
    assert abs(mine.own_bytes - same.own_bytes) < 4 * MIB


def after_a_reset(rank: int) -> tuple[int, int]:
    meter = MemoryMeter()
    meter.start(CPU)
    meter._counts_all = False  # as where getrusage begins with this process
    meter.begin_phase(1, "forward")
    touch(96)
    meter.begin_phase(1, "backward")
    before = meter._known_maxrss
    meter._file_bytes += 64 * MIB  # as if pages of files had gone: the mark is set back
    meter.begin_phase(1, "optimizer")
    meter._update_memory_peak()
    return before, meter._known_maxrss


def test_a_mark_that_was_set_back_counts_from_there() -> None:
    ((before, after),) = run_ranks(1, after_a_reset)
    assert after < before, (
        "getrusage's peak fell with the kernel's mark: the next one is seen against what it is now"
    )
