"""Events: facts with units in their names, and no text for people. Sinks do the formatting.

One module holds one family of events; all names are imported from here:
`from phalanx.observe.events import StepFinished`. A new event goes into its family's module and
into the names below.
"""

from __future__ import annotations

from phalanx.observe.events.base import Event
from phalanx.observe.events.checkpoints import (
    CheckpointFailed,
    CheckpointIntervalChosen,
    CheckpointPostponed,
    CheckpointSaved,
    CheckpointsRemoved,
    CheckpointUnusable,
)
from phalanx.observe.events.checks import InvariantChecked, NonFiniteFound, ReplicasReplayed
from phalanx.observe.events.data import LoaderWorkerReplaced, SamplesRead
from phalanx.observe.events.envelope import (
    SCHEMA,
    Envelope,
    MonotonicClockReading,
    wrap_event_in_envelope,
)
from phalanx.observe.events.evaluation import BaselineMeasured, EvalFinished, TextGenerated
from phalanx.observe.events.measurements import (
    BlockNormsMeasured,
    CollectivesCounted,
    ExpertsLoaded,
    GpuMeasured,
    MemoryMeasured,
    OperatorsCounted,
    PipelineMeasured,
)
from phalanx.observe.events.notes import (
    EVENTS_REMOVED,
    EVENTS_UNWRITTEN,
    RESUMED,
    Note,
    SinkDropped,
    is_resume,
)
from phalanx.observe.events.parse import EVENT_CLASS_OF_KIND, parse_event_line
from phalanx.observe.events.run import RunFinished, RunStarted, StopRequested, WeightsTaken
from phalanx.observe.events.steps import (
    StepFinished,
    StepSkipped,
    StepsSummed,
    TimeBetweenSteps,
    WorkProgressed,
)
from phalanx.observe.events.supervision import (
    HangFound,
    LayoutChanged,
    RankFailed,
    RankSlow,
    RankSlowEnded,
    RanksStarted,
    ReliabilityMeasured,
    RestartScheduled,
    RolledBack,
    StoreLost,
)

__all__ = [
    "Event",
    "RunStarted",
    "WeightsTaken",
    "StopRequested",
    "RunFinished",
    "StepFinished",
    "StepsSummed",
    "TimeBetweenSteps",
    "WorkProgressed",
    "StepSkipped",
    "EvalFinished",
    "BaselineMeasured",
    "TextGenerated",
    "CheckpointSaved",
    "CheckpointPostponed",
    "CheckpointIntervalChosen",
    "CheckpointsRemoved",
    "CheckpointFailed",
    "CheckpointUnusable",
    "OperatorsCounted",
    "MemoryMeasured",
    "PipelineMeasured",
    "ExpertsLoaded",
    "BlockNormsMeasured",
    "CollectivesCounted",
    "GpuMeasured",
    "InvariantChecked",
    "NonFiniteFound",
    "ReplicasReplayed",
    "RanksStarted",
    "ReliabilityMeasured",
    "RankFailed",
    "HangFound",
    "StoreLost",
    "RankSlow",
    "RankSlowEnded",
    "RestartScheduled",
    "RolledBack",
    "LayoutChanged",
    "SamplesRead",
    "LoaderWorkerReplaced",
    "EVENTS_REMOVED",
    "EVENTS_UNWRITTEN",
    "RESUMED",
    "Note",
    "SinkDropped",
    "is_resume",
    "SCHEMA",
    "MonotonicClockReading",
    "Envelope",
    "wrap_event_in_envelope",
    "EVENT_CLASS_OF_KIND",
    "parse_event_line",
]
