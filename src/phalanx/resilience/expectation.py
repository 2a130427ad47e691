"""What a run must make of a fault: each fault of the folder declares its own."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Ending(enum.Enum):
    """The end of a run that met a fault."""

    RECOVERS = "recovers"
    """By itself: it finishes."""
    RESUMES = "resumes"
    """It ends with the fault's exit code, and finishes when it is run again with --resume."""
    STOPS = "stops"
    """It ends with the fault's exit code: going on would not help."""


STEP_PHASES = ("data", "forward", "backward", "optimizer")
SAVE_PHASES = ("ckpt_write", "before_commit", "after_commit")
CRASH_DETECTION_S = 1.0
CRASH_RECOVERY_S = 5.0
HANG_RECOVERY_S = 20.0
NO_VERDICT = "none"
"""The class of what should go on as if nothing had happened."""
HANG_DETECTION = "hang"
"""In place of seconds: the larger of 5 s and ten times the 99th percentile of this run's steps."""
EACH_SAMPLE_ONCE = "each once"
SAMPLES_LEFT_OUT = "some left out, the others once"


@dataclass(frozen=True)
class Expectation:
    """The right answer to a fault, and the bars that it must meet.

    `verdict` is the class that a right verdict has. `detected_s`: most seconds from the fault to
    the verdict; `detected_steps`: most steps, where steps are what counts. `trained_again_s`: most
    seconds from the fault to the next step that was never done before. `may_lose_steps`: those
    since the last checkpoint. `is_named_by_majority`: with two ranks no verdict tells which one is
    wrong. `exit_code`: of a run that does not finish by itself. `also`: more faults that are
    injected with it, whose {rank}, {other}, {step} and {phase} are filled in. `overrides`: keys of
    the job that the fault needs. `settling_steps`: the run needs so many after the fault. `stage`:
    what the drill builds around the run for it, by its name in `drills.stages`. `preceded_by`:
    classes of verdicts that come before the one that counts. `needs_saves`: the fault strikes after
    so many checkpoints; `lost_intervals`: how many intervals of them may be lost. `lasts_s`: the
    fault goes on for so long after it struck. `ranks_go_on`: they train on as if nothing had
    happened, and start again later for the same reason. `says`: a regular expression of what the
    command must say at its end. `warm_up_steps`: the fault strikes after so many steps. `samples`:
    what the ledger of samples must prove, EACH_SAMPLE_ONCE or SAMPLES_LEFT_OUT ("": it is not
    asked). `loss_difference`: how far the loss of a step may be from that of the undisturbed run,
    as a part of it (None: it is not asked).
    """

    verdict: str
    ending: Ending = Ending.RECOVERS
    detected_s: float | str | None = CRASH_DETECTION_S
    detected_steps: int | None = None
    trained_again_s: float | None = CRASH_RECOVERY_S
    may_lose_steps: bool = True
    names_rank: bool = True
    is_named_by_majority: bool = False
    exit_code: int = 0
    is_bit_equal: bool = True
    phases: tuple[str, ...] = STEP_PHASES
    also: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    stage: str = ""
    preceded_by: tuple[str, ...] = ()
    needs_saves: int = 0
    lost_intervals: int = 1
    strikes_at_saves: bool = False
    settling_steps: int = 0
    lasts_s: float = 0.0
    ranks_go_on: bool = False
    says: str = ""
    warm_up_steps: int = 0
    samples: str = ""
    loss_difference: float | None = None


# A process that the run's owner takes back: the run saves, and goes on with --resume.
PREEMPTION = Expectation(
    verdict="preempted",
    ending=Ending.RESUMES,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    exit_code=75,
    # A run may finish before it hears of the signal.
    settling_steps=20,
)
# The disk, or what it is written through, refuses a save and then works again: the run tells so,
# trains on, and saves later. `stage` and `says` are the fault's own.
REFUSED_SAVE = Expectation(
    verdict="save failed",
    detected_s=None,
    detected_steps=10,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    phases=("data",),
    settling_steps=14,
)
# The network between the ranks is worse for some steps, and never cut: the run waits, and nobody is
# to blame. `settling_steps` is the fault's own.
BORNE_BY_NETWORK = Expectation(
    verdict=NO_VERDICT,
    detected_s=None,
    trained_again_s=None,
    may_lose_steps=False,
    names_rank=False,
    phases=("data",),
    stage="own_network",
    # What ranks exchange through memory no network can hold up.
    overrides=("parallel.collectives=gloo",),
)
