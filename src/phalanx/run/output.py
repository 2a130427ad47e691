"""Where a run's words go: lines, problems, and a console that follows its steps.

It may also be quiet.
"""

from __future__ import annotations

import sys

from phalanx.core import output
from phalanx.core.terminal import wrap_stream_in_filter
from phalanx.job.schema import Job
from phalanx.observe.console import Console, open_console
from phalanx.observe.units import choose_metric_units_of_job


class RunOutput:
    """Standard output and error as they are when something is said; nothing at all if `quiet`.

    What is said is filtered, also in a script or a notebook: a model's or a data source's name may
    be a stranger's. A stream that nobody reads any more takes no run with it.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_quiet = quiet

    def say(self, *lines: str) -> None:
        """Print lines for the person who started the run."""
        if not self._is_quiet:
            output.say(*lines)

    def warn(self, text: str) -> None:
        """Print on standard error why a run did not finish."""
        if not self._is_quiet:
            output.warn(text)

    def open_console(self, job: Job) -> Console:
        """The console that shows the steps of `job` while it trains."""
        stream = None
        if not self._is_quiet:
            stream = wrap_stream_in_filter(sys.stdout)
        return open_console(
            stream,
            total_steps=job.train.steps,
            log_every=job.observe.log_every,
            units=choose_metric_units_of_job(job.to_json()),
        )
