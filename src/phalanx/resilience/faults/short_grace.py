"""The scheduler takes the machine back and gives less time than a save takes: SIGTERM, and SIGKILL
to all processes while the checkpoint is written."""

from __future__ import annotations

import contextlib
import os
import signal

import psutil

from phalanx.resilience.expectation import Ending, Expectation
from phalanx.resilience.fault import FaultSite
from phalanx.resilience.run_processes import find_supervisor, list_run_processes

EXPECTATION = Expectation(
    # Nobody is left to say it.
    verdict="ended with it",
    ending=Ending.RESUMES,
    detected_s=5.0,
    trained_again_s=None,
    names_rank=False,
    exit_code=-9,
    # A save that was due at a step shortly before may be the one in which all are killed.
    lost_intervals=2,
    settling_steps=20,
)
# Nothing is written yet; everything is but for the manifest.
PHASES_OF_END = ("ckpt_write", "before_commit")


def inject(site: FaultSite) -> None:
    """SIGTERM to the supervisor of this run; SIGKILL to it and all its processes once this rank is
    in the save that follows: of even steps before it writes, of odd ones before the commit."""
    assert site.trainer is not None, "the fault short_grace strikes a rank that trains"
    phases = site.trainer.phases
    last_phase = PHASES_OF_END[phases.step % len(PHASES_OF_END)]

    def kill_all(step: int, phase: str) -> None:
        if phase == last_phase:
            for process in list_run_processes(site.run_dir):
                if process.pid != os.getpid():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            os.kill(os.getpid(), signal.SIGKILL)

    phases.add_listener(kill_all)
    find_supervisor(site.run_dir).send_signal(signal.SIGTERM)
