"""The panels of the Grafana dashboard, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The variable `run` is set at the top of the page; several runs may be chosen.
RUN_SELECTOR = 'run=~"$run"'
_INTERVAL = "$__rate_interval"
# Steps a second, each counted once for each rank that did it: also where not all of them have a
# phase, or send over an axis, its seconds are then in the mean over all.
_RANK_STEPS = (
    "(count by (run) (rate(phalanx_self_seconds_total{RUN}[INTERVAL]) > 0)"
    " * on (run) (rate(phalanx_steps_total{RUN}[INTERVAL]) > 0))"
)


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
    """A query with RUN in place of the selector of the chosen runs, of which there may be several:
    each line says which one it is of."""
    if "{{run}}" not in legend:
        legend = f"{{{{run}}}} {legend}"
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
                    _query("increase(phalanx_roll_backs_total{RUN}[1h])", "rolled back: {{cause}}"),
                ),
                width=24,
                height=6,
            ),
            DashboardPanel(
                "Failed checks",
                "Checks of what must hold in any training that failed so far.",
                (_query("phalanx_invariant_failures_total{RUN}", "{{invariant}}"),),
                width=6,
            ),
            DashboardPanel(
                "Gradient norm of each block",
                "Before clipping, of the step measured last.",
                (_query("phalanx_block_grad_norm{RUN}", "{{block}}"),),
                width=6,
            ),
            DashboardPanel(
                "Update of each block",
                "Norm of the last measured update over that of the weights.",
                (_query("phalanx_block_update_ratio{RUN}", "{{block}}"),),
                width=6,
            ),
            DashboardPanel(
                "Loss scale and own metrics",
                "What fp16 multiplies the loss by, and what the objective measures besides.",
                (
                    _query("phalanx_loss_scale{RUN}", "loss scale"),
                    _query("phalanx_eval_metric{RUN}", "{{metric}}"),
                ),
                width=6,
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
                        "sum by (run, phase) (rate(phalanx_phase_seconds_total{RUN}[INTERVAL]))"
                        f" / on (run) group_left () {_RANK_STEPS}",
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
                        "sum by (run, axis)"
                        " (rate(phalanx_communication_seconds_total{RUN}[INTERVAL]))"
                        f" / on (run) group_left () {_RANK_STEPS}",
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
                "Processors of each rank",
                "Cores that the rank's steps used: below 1 it waited, for others, data or a core.",
                (
                    _query(
                        "sum by (run, rank) (rate(phalanx_cpu_seconds_total{RUN}[INTERVAL]))",
                        "rank {{rank}}",
                    ),
                ),
            ),
            DashboardPanel(
                "Beside the steps",
                "Seconds in each second of rank 0's: starting, evaluating, tracing, saving.",
                (
                    _query(
                        'rate(phalanx_between_steps_seconds_total{RUN,rank="0"}[INTERVAL])',
                        "{{activity}}",
                    ),
                    _query(
                        "rate(phalanx_checkpoint_stall_seconds_total{RUN}[INTERVAL])",
                        "standing still for saves",
                    ),
                ),
                "percentunit",
            ),
            DashboardPanel(
                "Steps get slower",
                "Part by which steps take longer than at the beginning of the attempt, where that"
                " is beyond their noise. From 240 steps on.",
                (_query("phalanx_step_drift_ratio{RUN}"),),
                "percentunit",
            ),
            DashboardPanel(
                "Ranks found slow",
                "1 while the supervisor finds the rank slower than those with the same work.",
                (_query("phalanx_rank_slow{RUN}", "rank {{rank}}"),),
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
                "Memory that grows",
                "Bytes a step, where that is beyond its noise. From 240 steps on.",
                (_query("phalanx_memory_drift_bytes{RUN}", "rank {{rank}}"),),
                "bytes",
            ),
            DashboardPanel(
                "Saves",
                "By result, each hour.",
                (_query("increase(phalanx_checkpoints_total{RUN}[1h])", "{{result}}"),),
            ),
            DashboardPanel(
                "Restarts and hangs",
                "By cause, and by the kind of the hang, each hour; and resumes.",
                (
                    _query("increase(phalanx_restarts_total{RUN}[1h])", "{{cause}}"),
                    _query("increase(phalanx_hangs_total{RUN}[1h])", "hang: {{kind}}"),
                    _query("increase(phalanx_resumes_total{RUN}[1h])", "resumed"),
                ),
            ),
            DashboardPanel(
                "Steps done again",
                "Steps that a failure or going back undid, each hour.",
                (_query("increase(phalanx_steps_redone_total{RUN}[1h])"),),
            ),
            DashboardPanel(
                "What observes",
                "Age of the metrics in seconds; events that a sink did not get, lines that could"
                " not be read and loader processes that were replaced, so far.",
                (
                    _query("time() - phalanx_refresh_timestamp_seconds{RUN}", "age of metrics"),
                    _query("phalanx_sink_dropped_events_total{RUN}", "not in {{sink}}"),
                    _query("phalanx_unreadable_lines_total{RUN}", "unreadable lines"),
                    _query("phalanx_loader_worker_replacements_total{RUN}", "loaders replaced"),
                ),
            ),
        ),
    ),
    DashboardRow(
        "GPUs",
        (
            DashboardPanel(
                "Power while it trains",
                "Energy of each rank's GPU by the driver, of all that used it.",
                (
                    _query(
                        "rate(phalanx_gpu_energy_joules_total{RUN}[5m])",
                        "rank {{rank}}",
                    ),
                ),
                "watt",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Busy",
                "Part of the driver's last sample period in which any kernel ran: also one that"
                " waits for the network.",
                (_query("phalanx_gpu_busy_ratio{RUN}", "rank {{rank}}"),),
                "percentunit",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Memory held by the allocator",
                "Of each rank's GPU.",
                (_query("phalanx_memory_reserved_bytes{RUN}", "rank {{rank}}"),),
                "bytes",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Utilisation (dcgm-exporter)",
                "Part of the time in which a kernel ran.",
                (PanelQuery("DCGM_FI_DEV_GPU_UTIL / 100", "{{hostname}}{{Hostname}} {{gpu}}"),),
                "percentunit",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Power (dcgm-exporter)",
                "Of each GPU.",
                (PanelQuery("DCGM_FI_DEV_POWER_USAGE", "{{hostname}}{{Hostname}} {{gpu}}"),),
                "watt",
                needs_gpus=True,
            ),
            DashboardPanel(
                "Last Xid (dcgm-exporter)",
                "The last error that the driver reported of each GPU; 0 is none.",
                (PanelQuery("DCGM_FI_DEV_XID_ERRORS", "{{hostname}}{{Hostname}} {{gpu}}"),),
                needs_gpus=True,
            ),
        ),
    ),
)
