"""Every metric: its name, type, labels and meaning, by Prometheus' conventions.

Base units (seconds, bytes, ratios of 0 to 1), `_total` for counters, no label that grows with
steps. docs/metrics.md is generated from here.

Source: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True)
class MetricDefinition:
    """One metric. `labels` come on top of `run`, which every sample has: one port may serve one run
    after another, and their counters must not be taken for one."""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ()


def _counter(name: str, meaning: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name, "counter", meaning, labels)


def _gauge(name: str, meaning: str, *labels: str) -> MetricDefinition:
    return MetricDefinition(name, "gauge", meaning, labels)


RUN_STATES = (
    "starting",
    "training",
    "restarting",
    "finished",
    "preempted",
    "interrupted",
    "failed",
)
"""Values of the label `state` of phalanx_run_state; the first three are those of a live run."""

RESTART_CAUSES = (
    "exception",
    "signal",
    "exit",
    "hang",
    "lost_connection",
    "out of memory",
    "launcher",
)
"""Values of the label `cause` of phalanx_restarts_total; the last one where another launcher than
phalanx started the ranks again."""

SKIP_REASONS = ("nonfinite_gradients", "no_targets", "overflow", "loss_spike")
"""Values of the label `reason` of phalanx_skipped_steps_total."""

HANG_KINDS = (
    "gone",
    "frozen",
    "gil_held",
    "spinning",
    "waiting_elsewhere",
    "absent_collective",
    "left_early",
    "endless_step",
    "link_cut",
)
"""Values of the label `kind` of phalanx_hangs_total (docs/hangs.md)."""

STEP_SECONDS_BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)

METRICS: tuple[MetricDefinition, ...] = (
    # --- the run
    MetricDefinition(
        "phalanx_run",
        "info",
        "1, with what the run is as labels: layout (axes above 1), model, ranks, device, and the"
        " version of phalanx that serves the metrics.",
        ("layout", "model", "ranks", "device", "version"),
    ),
    _gauge(
        "phalanx_run_state",
        "1 for the state that the run is in, 0 for the others: starting, training, restarting"
        " (live), finished, preempted, interrupted, failed (ended).",
        "state",
    ),
    _counter(
        "phalanx_restarts_total",
        "Times that ranks were started again after a failure. cause: exception, signal, exit, hang,"
        " lost_connection or out of memory, as the supervisor saw it; launcher where another"
        " launcher started them again.",
        "cause",
    ),
    _counter(
        "phalanx_hangs_total",
        "Hangs that the supervisor found, and killed ranks for. kind: gone, frozen,"
        " gil_held, spinning, waiting_elsewhere, absent_collective, left_early, endless_step,"
        " link_cut (docs/hangs.md).",
        "kind",
    ),
    _counter(
        "phalanx_roll_backs_total",
        "Times that ranks went back to a checkpoint of before. cause: loss_spike, corruption or"
        " nonfinite_weights.",
        "cause",
    ),
    _gauge(
        "phalanx_rank_slow",
        "1 while the supervisor finds the rank slower than those with the same work, 0 once it is"
        " as fast again; absent for a rank that never was.",
        "rank",
    ),
    _counter("phalanx_resumes_total", "Times that the run was continued with --resume."),
    _gauge(
        "phalanx_last_progress_timestamp_seconds",
        "Unix time at which the rank last showed progress: an event, or a phase or collective in"
        " its black box.",
        "rank",
    ),
    _gauge(
        "phalanx_goodput_ratio",
        "Part (0 to 1) of the run's life so far that went into steps that stand and were applied,"
        " without their waiting for data, saving and evaluating. Life: from the start of each"
        " command to its end, without the pauses between commands.",
    ),
    # --- steps
    _gauge("phalanx_step", "The newest step that is done."),
    _gauge("phalanx_target_steps", "The step at which the run ends."),
    _counter("phalanx_steps_total", "Steps done, those done again after a restart included."),
    _counter("phalanx_steps_redone_total", "Of those, steps that had been done before."),
    _counter(
        "phalanx_skipped_steps_total",
        "Steps whose update was not applied. reason: nonfinite_gradients, no_targets, overflow (of"
        " fp16, which then halves its loss scale), loss_spike (resilience.on_loss_spike).",
        "reason",
    ),
    _counter(
        "phalanx_nonfinite_steps_total",
        "Steps whose loss or gradient norm was NaN or infinite; neither steps without targets nor"
        " overflows of fp16.",
    ),
    _counter(
        "phalanx_tokens_total",
        "Targets of all steps done, over all ranks: tokens of text models, samples of others.",
    ),
    MetricDefinition(
        "phalanx_step_seconds",
        "histogram",
        "Seconds from the record of one step to that of the next, on rank 0: steps leave no gap.",
    ),
    _counter(
        "phalanx_phase_seconds_total",
        "Seconds of the rank's steps by phase (docs/reference.md lists them); unaccounted is what"
        " no phase has.",
        "rank",
        "phase",
    ),
    _counter(
        "phalanx_wait_seconds_total",
        "Seconds of steps in collectives and for other stages: sending and waiting for others.",
        "rank",
    ),
    _counter(
        "phalanx_self_seconds_total",
        "Seconds of steps without those of phalanx_wait_seconds_total: the rank that has most is"
        " the one that others wait for.",
        "rank",
    ),
    _gauge(
        "phalanx_step_self_seconds",
        "Of that, the mean of the rank's newest 50 steps or so. In runs so large that ranks write"
        " sums of steps, of the newest sum.",
        "rank",
    ),
    _gauge("phalanx_step_wait_seconds", "The same of waiting.", "rank"),
    _counter(
        "phalanx_communication_seconds_total",
        "Seconds in collectives by axis (dp, tp, cp, ep, pp, world): a part of waiting.",
        "rank",
        "axis",
    ),
    _counter(
        "phalanx_between_steps_seconds_total",
        "Seconds that belong to no step. activity: startup, evaluate, trace, ending.",
        "rank",
        "activity",
    ),
    _counter("phalanx_cpu_seconds_total", "Processor seconds of the rank's steps.", "rank"),
    _counter(
        "phalanx_sent_bytes_total",
        "Bytes that the rank sent in steps that it wrote one by one. axis: dp (gradients), tp, cp,"
        " ep, pp. Weights that FSDP and ZeRO-1 gather are not counted.",
        "rank",
        "axis",
    ),
    _gauge(
        "phalanx_step_drift_ratio",
        "Part by which steps take longer at the end of the newest attempt than at its beginning, by"
        " a robust slope; 0 where that is within its noise. From 240 steps on.",
    ),
    _gauge(
        "phalanx_memory_drift_bytes",
        "Bytes a step by which the rank's memory that no file backs grows, by a robust slope over"
        " the newest attempt; 0 where that is within its noise. From 240 steps on.",
        "rank",
    ),
    # --- numerics
    _gauge("phalanx_loss", "Loss of the newest step, per target over all ranks (nats for text)."),
    _gauge("phalanx_grad_norm", "Global gradient norm of the newest step, before clipping."),
    _gauge(
        "phalanx_block_grad_norm",
        "Gradient norm of a block of the model, before clipping, of the step measured last"
        " (observe.norms_every).",
        "block",
    ),
    _gauge(
        "phalanx_block_update_ratio",
        "Norm of the last measured update of a block over the norm of its weights.",
        "block",
    ),
    _gauge("phalanx_learning_rate", "Learning rate of the newest step."),
    _gauge("phalanx_loss_scale", "What fp16 multiplied the newest loss by."),
    _counter(
        "phalanx_loss_spikes_total",
        "Steps whose loss rose far above the median of the 128 before: by more than 6 robust"
        " standard deviations and by a tenth of it.",
    ),
    _counter(
        "phalanx_invariant_failures_total",
        "Checks of what must hold in any training that failed (docs/invariants.md).",
        "invariant",
    ),
    _counter(
        "phalanx_replica_mismatch_total",
        "Of those, checks in which replicas did not have the same bits.",
    ),
    # --- evaluation
    _counter("phalanx_evaluations_total", "Evaluations done."),
    _counter("phalanx_eval_seconds_total", "Seconds of evaluations."),
    _gauge("phalanx_eval_loss", "Loss of the newest evaluation, per target on held-out data."),
    _gauge(
        "phalanx_eval_metric", "What the objective measures besides, newest evaluation.", "metric"
    ),
    # --- checkpoints
    _counter(
        "phalanx_checkpoints_total",
        "Saves by result: saved, failed, postponed (one was due while another was being written),"
        " unusable (damaged when it was to be read).",
        "result",
    ),
    _gauge("phalanx_checkpoint_step", "Step of the newest checkpoint."),
    _gauge("phalanx_checkpoint_timestamp_seconds", "Unix time of the newest checkpoint."),
    _gauge(
        "phalanx_checkpoint_age_seconds",
        "Seconds of training that a crash would cost now: since the newest checkpoint, or since"
        " training began; also where ranks were started again with what they held in memory. Only"
        " while the run is live.",
    ),
    _counter("phalanx_checkpoint_seconds_total", "Seconds that saves took, beside training too."),
    _counter("phalanx_checkpoint_stall_seconds_total", "Seconds that training waited for saves."),
    _counter("phalanx_checkpoint_written_bytes_total", "Bytes that saves wrote."),
    # --- memory
    _gauge("phalanx_memory_resident_bytes", "Resident memory of the rank's process.", "rank"),
    _gauge(
        "phalanx_memory_peak_bytes",
        "Most memory that the rank has had: its own part of the process, or what a GPU's allocator"
        " gave out.",
        "rank",
    ),
    _gauge(
        "phalanx_memory_reserved_bytes", "Memory that a GPU's allocator holds for the rank.", "rank"
    ),
    _counter(
        "phalanx_gpu_energy_joules_total",
        "Energy of the rank's GPU while it trained, of all that used it; where NVML says it.",
        "rank",
    ),
    _gauge(
        "phalanx_gpu_busy_ratio",
        "Part (0 to 1) of the driver's last sample period in which any kernel ran on the rank's"
        " GPU: also one that waits for the network.",
        "rank",
    ),
    # --- experts and pipelines
    _gauge(
        "phalanx_expert_busiest_ratio",
        "Tokens of the busiest expert over the mean, of the layer where that is most (1: even).",
    ),
    _gauge(
        "phalanx_expert_dropped_ratio",
        "Part (0 to 1) of token-to-expert choices dropped because the expert was full.",
    ),
    _gauge(
        "phalanx_pipeline_bubble_ratio",
        "Part (0 to 1) of a step in which a rank of the pipeline computes nothing, of the step"
        " measured last. source: measured, predicted (from its stages' times), planned.",
        "source",
    ),
    # --- what observes
    _counter("phalanx_sink_dropped_events_total", "Events that a sink did not get.", "sink"),
    _counter(
        "phalanx_loader_worker_replacements_total",
        "Processes reading data ahead that died or hung, and were replaced.",
    ),
    _counter("phalanx_unreadable_lines_total", "Lines in RUN/events that are no event."),
    _gauge(
        "phalanx_refresh_timestamp_seconds",
        "Unix time at which the run directory was last read: metrics are no newer.",
    ),
)

METRIC_BY_NAME: dict[str, MetricDefinition] = {metric.name: metric for metric in METRICS}
