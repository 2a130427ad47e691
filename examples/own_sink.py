"""A sink of your own: one line of CSV per step.

phalanx train 'observe.sinks=["own_sink:open_csv"]'
"""

import csv
from pathlib import Path

from phalanx.observe.events import Envelope, StepFinished


class CsvSink:
    """Called from a thread of rank 0, never from the step loop: it may be slow, and it may
    raise."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", newline="")
        self.rows = csv.writer(self.file)

    def write(self, envelope: Envelope) -> None:
        event = envelope.event
        if isinstance(event, StepFinished):
            self.rows.writerow([event.step, event.loss, event.tokens_per_s])

    def close(self) -> None:
        self.file.close()


def open_csv(run_dir: Path) -> CsvSink:
    return CsvSink(run_dir / "steps.csv")
