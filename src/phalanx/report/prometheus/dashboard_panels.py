"""The panels of the Grafana dashboard, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The variable `run` is set at the top of the page; several runs may be chosen.
RUN_SELECTOR = 'run=~"$run"'
_INTERVAL = "$__rate_interval"


@dataclass(frozen=True)
class PanelQuery:
    """A query of a panel. `legend`: Grafana's format, "{{rank}}" is a label's value."""

    expression: str
    legend: str


@dataclass(frozen=True)
class DashboardPanel:
    """A panel. `unit` is one of Grafana's ids; `width` of 24 columns, `height` in rows of 30
    pixels. `needs_gpus`: its data come from dcgm-exporter."""

    title: str
    meaning: str
    queries: tuple[PanelQuery, ...]
    unit: str = "none"
    kind: Literal["timeseries", "stat", "heatmap", "table"] = "timeseries"
    width: int = 8
    height: int = 8
    needs_gpus: bool = False
    is_stacked: bool = False
    shows_name: bool = False
    """Of a stat: the name of the series is what it says, and its value is 1."""


@dataclass(frozen=True)
class DashboardRow:
    """A titled row of panels."""

    title: str
    panels: tuple[DashboardPanel, ...]


def _query(expression: str, legend: str = "{{run}}") -> PanelQuery:
    """A query with RUN in place of the selector of the chosen runs."""
    return PanelQuery(
        expression.replace("RUN", RUN_SELECTOR).replace("INTERVAL", _INTERVAL), legend
    )


def _stat(title: str, meaning: str, expression: str, unit: str = "none") -> DashboardPanel:
    return DashboardPanel(title, meaning, (_query(expression),), unit, "stat", 4, 4)


DASHBOARD_ROWS: tuple[DashboardRow, ...] = (
    DashboardRow(
        "Is it well?",
        (
            DashboardPanel(
                "State",
                "The state that the run is in.",
                (_query("phalanx_run_state{RUN} == 1", "{{state}}"),),
                kind="stat",
                width=4,
                height=4,
                shows_name=True,
            ),
            _stat("Step", "The newest step that is done.", "phalanx_step{RUN}"),
            _stat(
                "Time left",
                "Steps that are left, at the pace of the last ten minutes.",
                "max by (run) (phalanx_target_steps{RUN} - phalanx_step{RUN})"
                " / on (run) max by (run) (rate(phalanx_steps_total{RUN}[10m]) > 0)",
                "s",
            ),
            _stat(
                "Goodput",
                "Part of the run's life that went into steps that stand.",
                "phalanx_goodput_ratio{RUN}",
                "percentunit",
            ),
            _stat(
                "Since progress",
                "Seconds since any rank showed progress: in a hang they grow.",
                "time() - max by (run) (phalanx_last_progress_timestamp_seconds{RUN})",
                "s",
            ),
            _stat(
                "A crash costs",
                "Training since the newest checkpoint.",
                "phalanx_checkpoint_age_seconds{RUN}",
                "s",
            ),
            DashboardPanel(
                "Runs",
                "What each run is.",
                (_query("phalanx_run_info{RUN}", "{{run}}"),),
                kind="table",
                width=24,
                height=4,
            ),
        ),
    ),
    DashboardRow(
        "Learning",
        (
            DashboardPanel(
                "Loss",
                "Loss per target over all ranks, and on held-out data.",
                (
                    _query("phalanx_loss{RUN}", "{{run}}"),
                    _query("phalanx_eval_loss{RUN}", "{{run}} held out"),
                ),
                width=12,
            ),
            DashboardPanel(
                "Gradient norm",
                "Before clipping.",
                (_query("phalanx_grad_norm{RUN}"),),
                width=6,
            ),
            DashboardPanel(
                "Learning rate",
                "Of the newest step.",
                (_query("phalanx_learning_rate{RUN}"),),
                width=6,
            ),
            DashboardPanel(
                "Trouble",
                "Spikes, steps without an update, numbers that are none and failed checks, each"
                " hour.",
                (
                    _query("increase(phalanx_loss_spikes_total{RUN}[1h])", "loss spikes"),
                    _query("increase(phalanx_skipped_steps_total{RUN}[1h])", "skipped: {{reason}}"),
                    _query("increase(phalanx_nonfinite_steps_total{RUN}[1h])", "not finite"),
                    _query("increase(phalanx_replica_mismatch_total{RUN}[1h])", "replicas differ"),
                ),
                width=24,
                height=6,
            ),
        ),
    ),
    DashboardRow(
        "Speed",
        (
            DashboardPanel(
                "Tokens per second",
                "Targets of all ranks.",
                (_query("rate(phalanx_tokens_total{RUN}[INTERVAL])"),),
            ),
            DashboardPanel(
                "Step time",
                "Median, and the step that one in twenty exceeds.",
                (
                    _query(
                        "histogram_quantile(0.5,"
                        " sum by (run, le) (rate(phalanx_step_seconds_bucket{RUN}[INTERVAL])))",
                        "{{run}} median",
                    ),
                    _query(
                        "histogram_quantile(0.95,"
                        " sum by (run, le) (rate(phalanx_step_seconds_bucket{RUN}[INTERVAL])))",
                        "{{run}} 95 %",
                    ),
                ),
                "s",
            ),
            DashboardPanel(
                "Where a step goes",
                "Mean seconds of a step by phase, over all ranks.",
                (
                    _query(
                        "avg by (run, phase) (rate(phalanx_phase_seconds_total{RUN}[INTERVAL]))"
                        " / on (run) group_left () (rate(phalanx_steps_total{RUN}[INTERVAL]) > 0)",
                        "{{phase}}",
                    ),
                ),
                "s",
                is_stacked=True,
            ),
            DashboardPanel(
                "A step of each rank by itself",
                "Seconds of a step without waiting for others: a straggler has most.",
                (_query("phalanx_step_self_seconds{RUN}", "rank {{rank}}"),),
                "s",
            ),
            DashboardPanel(
                "Waiting of each rank",
                "Seconds of a step in collectives and for other stages: a straggler has least.",
                (_query("phalanx_step_wait_seconds{RUN}", "rank {{rank}}"),),
                "s",
            ),
            DashboardPanel(
                "Communication by axis",
                "Mean seconds of a step in collectives, over all ranks.",
                (
                    _query(
                        "avg by (run, axis)"
                        " (rate(phalanx_communication_seconds_total{RUN}[INTERVAL]))"
                        " / on (run) group_left () (rate(phalanx_steps_total{RUN}[INTERVAL]) > 0)",
                        "{{axis}}",
                    ),
                ),
                "s",
            ),
            DashboardPanel(
                "Sent by axis",
                "Bytes a second of all ranks together.",
                (
                    _query(
                        "sum by (run, axis) (rate(phalanx_sent_bytes_total{RUN}[INTERVAL]))",
                        "{{axis}}",
                    ),
                ),
                "Bps",
            ),
            DashboardPanel(
                "Pipeline bubble",
                "Part of a step in which ranks of a pipeline compute nothing.",
                (_query("phalanx_pipeline_bubble_ratio{RUN}", "{{source}}"),),
                "percentunit",
            ),
            DashboardPanel(
                "Experts",
                "Load of the busiest over the mean, and choices that were dropped.",
                (
                    _query("phalanx_expert_busiest_ratio{RUN}", "busiest / mean"),
                    _query("phalanx_expert_dropped_ratio{RUN}", "dropped"),
                ),
            ),
        ),
    ),
    DashboardRow(
        "Memory, checkpoints, failures",
        (
            DashboardPanel(
                "Memory of each rank",
                "Peak so far, and what is resident now.",
                (
                    _query("phalanx_memory_peak_bytes{RUN}", "rank {{rank}} peak"),
                    _query("phalanx_memory_resident_bytes{RUN}", "rank {{rank}} resident"),
                ),
                "bytes",
            ),
            DashboardPanel(
                "Saves",
                "By result, each hour.",
                (_query("increase(phalanx_checkpoints_total{RUN}[1h])", "{{result}}"),),
            ),
            DashboardPanel(
                "Restarts",
                "By cause, each hour.",
                (_query("increase(phalanx_restarts_total{RUN}[1h])", "{{cause}}"),),
            ),
        ),
    ),
    DashboardRow(
        "GPUs (dcgm-exporter)",
        (
            DashboardPanel(
                "Utilisation",
                "Part of the time in which a kernel ran.",
                (PanelQuery("DCGM_FI_DEV_GPU_UTIL / 100", "{{hostname}}{{Hostname}} {{gpu}}"),),
                "percentunit",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Power",
                "Of each GPU.",
                (PanelQuery("DCGM_FI_DEV_POWER_USAGE", "{{hostname}}{{Hostname}} {{gpu}}"),),
                "watt",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Last Xid",
                "The last error that the driver reported of each GPU; 0 is none.",
                (PanelQuery("DCGM_FI_DEV_XID_ERRORS", "{{hostname}}{{Hostname}} {{gpu}}"),),
                needs_gpus=True,
            ),
        ),
    ),
)
