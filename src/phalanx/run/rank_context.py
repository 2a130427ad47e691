"""What goes with one rank of a run from start to end, and how it is opened: its events, its black
box, its storage, and the report of its errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from phalanx.checkpoint.ownership.fence import RunOwnershipWatch
from phalanx.checkpoint.run_storage import RunStorage
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.core.phases import PhaseTimer
from phalanx.launch.paths import black_box_path
from phalanx.mesh.collective_checks import CollectiveChecks, raising_error_of_checks
from phalanx.mesh.collective_recorder import CollectiveRecorder
from phalanx.mesh.determinism import raising_layout_error_for_nondeterminism
from phalanx.observe.bus import Bus, OpenSink
from phalanx.observe.events import Envelope, InvariantChecked, Note, SinkDropped
from phalanx.observe.tail import EVENT_CLASSES_SHOWN_OF_ANY_RANK
from phalanx.parallel.model import ParallelModel
from phalanx.resilience.fault import FaultSite
from phalanx.run.needs import list_sink_openers
from phalanx.run.out_of_memory import explaining_out_of_memory
from phalanx.run.rank_run import RankRunInputs
from phalanx.run.survivor import Survivor
from phalanx.train.collectives_record import build_collectives_event
from phalanx.train.memory import MemoryMeter
from phalanx.train.stop import StopSignalFlags


@dataclass(frozen=True)
class RankContext:
    """One rank's part of a run, and what goes with it from start to end: its events, its phases,
    its memory, the signals it got, and the fence around the run."""

    run: RankRunInputs
    bus: Bus
    phases: PhaseTimer
    meter: MemoryMeter
    stop: StopSignalFlags
    fence: RunOwnershipWatch
    survivor: Survivor
    checks: CollectiveChecks | None
    faults: FaultSite
    recorder: CollectiveRecorder

    def find_model(self) -> ParallelModel | None:
        """The model, once there is a trainer."""
        trainer = self.faults.trainer
        return None if trainer is None else trainer.state.model

    def emit_collectives(self) -> None:
        """Emit what this rank sent in this attempt, by who called it."""
        self.bus.emit(build_collectives_event(self.phases.step, self.recorder.list_totals()))


def open_bus_of_rank(
    run: RankRunInputs,
    sinks: Sequence[tuple[str, OpenSink]],
    fence: RunOwnershipWatch,
    survivor: Survivor,
) -> Bus:
    """The bus of this rank's events, with those that an earlier attempt could not write."""
    # Events of rank 0 are those that people watch: no other rank opens the job's sinks.
    if run.rank == 0:
        sinks = [*sinks, *list_sink_openers(run.job, run.run_dir)]
    return Bus(
        rank=run.rank,
        attempt=run.attempt,
        run_dir=run.run_dir,
        sinks=sinks,
        on_unwritten=partial(_show_event_if_watched, run),
        # Not a byte into a run that another job has by now.
        may_write=lambda: not fence.is_lost(),
        earlier=survivor.take_unwritten_events(),
    )


def open_black_box_of_rank(run: RankRunInputs) -> BlackBox:
    """The black box of this rank, in which whoever watches the run sees where it is."""
    identity = RankIdentity(run.rank, run.plan.layout.world_size, run.attempt, run.plan.device)
    return BlackBox(black_box_path(run.run_dir, run.rank), identity)


def _show_event_if_watched(run: RankRunInputs, envelope: Envelope) -> None:
    """Rank 0's events are those that people watch; of other ranks they must know that some are
    lost, what a check found, and what befell that rank alone."""
    watched = (InvariantChecked, Note, SinkDropped, *EVENT_CLASSES_SHOWN_OF_ANY_RANK)
    if run.rank == 0 or isinstance(envelope.event, watched):
        run.link.forward_refused_event(envelope.to_line())


@contextlib.contextmanager
def reporting_errors_at_once(rank: RankContext) -> Iterator[None]:
    """Report an error of the body at once: what encloses it may block on the way out."""
    run = rank.run
    try:
        with (
            raising_error_of_checks(rank.checks),
            raising_layout_error_for_nondeterminism(bool(run.job.train.deterministic)),
            explaining_out_of_memory(run, rank.meter, rank.find_model),
        ):
            yield
    except BaseException as error:
        run.link.report_error(error)
        raise


def open_storage_of_run(rank: RankContext) -> RunStorage:
    """The run's storage, opened once for all that this rank reads and saves."""

    def emit_slow_store(why: str) -> None:
        rank.bus.emit(Note("store_is_slow", {"why": why}))

    run, box = rank.run, rank.phases.black_box
    assert box is not None, "a rank has a black box"
    return RunStorage.open(
        run.run_dir,
        run.job.checkpoint.url,
        fence=rank.fence,
        say=emit_slow_store,
        # What goes over a socket is in none of the kernel's books about this process.
        on_work=box.note_work,
    )
