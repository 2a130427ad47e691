"""The section [observe]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from phalanx.job.schema.base import Count, Positive, PositiveFloat, Section, Text


class Observe(Section):
    """The places that the facts of a run go to."""

    sinks: tuple[str, ...] | None = None
    """The places that facts go to besides RUN/events: names of phalanx.observe.sinks, or
    package.module:function that opens your own (open_sink(run_dir)).

    Default: tensorboard where it is installed.
    """
    samples: bool = False
    """Record which samples every step read, so that `phalanx data ledger RUN` can prove that none
    was repeated or left out."""
    log_every: Positive = 10
    """Steps between lines when the output is not a terminal."""
    invariants_every: Count = 100
    """Steps between checks of what must hold in any training: replicas have the same bits, the
    optimizer has the model's parameters, and each that has a gradient moves.

    The first step and the last are checked, too, sums of targets and of experts' loads in every
    step, and that each evaluation leaves the weights as they were. 0 checks nothing.
    """
    norms_every: Count = 100
    """Steps between measurements of the norms of gradients, updates and weights by block of the
    model (docs/numerics.md); the first step is measured, too. 0 measures none."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port on which the run's metrics are served for Prometheus, at /metrics, by a process of its
    own (docs/metrics.md). 0 takes a free one, which RUN/metrics-target.json names.

    Default: none are served; `phalanx metrics RUN` does it for any run.
    """
    metrics_host: Text = "127.0.0.1"
    """Address that the metrics are served on; "0.0.0.0" for all of this machine, to whoever
    reaches it."""
    alert_webhook: Text | None = None
    """URL that alerts (docs/alerts.md) are POSTed to as JSON; $NAME takes it from that environment
    variable, where it belongs if whoever has it may write there."""
    alert_command: tuple[Text, ...] = ()
    """Program and arguments that are run for each alert, which comes as JSON on standard input."""
    hang_alert_s: PositiveFloat = 300.0
    """Seconds without progress of any rank, in steps, evaluations or saves, after which a hang is
    alerted. A collective that takes longer than resilience.collective_timeout_s ends the
    attempt."""
    trace_steps: tuple[Positive | Text, ...] = ()
    """Steps that all ranks trace, as numbers or ranges: [100, "200:203"]; at most 100.

    `phalanx trace RUN` makes the trace a file for Perfetto (docs/traces.md).
    """
    profile_steps: tuple[Positive | Text, ...] = ()
    """Steps that are traced with every operator and kernel that torch.profiler sees; at most 10.

    They are slower than others.
    """
    nvtx: bool = False
    """On a GPU, name phases as NVTX ranges, for Nsight Systems."""

    @property
    def has_observer(self) -> bool:
        """True where metrics are to be served or somebody is to be alerted."""
        return (
            self.metrics_port is not None
            or self.alert_webhook is not None
            or bool(self.alert_command)
        )
