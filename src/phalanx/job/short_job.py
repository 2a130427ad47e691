"""Any job made short: so few steps of its training that whatever it does besides would come too
late, cost more than they do, or reach people and places that the run itself is for."""

from __future__ import annotations

from phalanx.job.schema import Job


def list_short_job_overrides(num_steps: int) -> tuple[str, ...]:
    """Overrides with which every job that can be loaded trains `num_steps` steps, and can be loaded
    still: what its checks relate to the number of steps goes with it.

    It saves at the end alone, in its own run directory; it evaluates, samples, traces and serves
    nothing, and alerts nobody.
    """
    optim, warmup_steps = Job().optim, max(num_steps // 10, 1)
    return (
        f"train.steps={num_steps}",
        # Both, as they have to fit into the steps together.
        f"optim.warmup_steps={warmup_steps}",
        f"optim.decay_fraction={optim.decay_fraction}",
        "train.sample_tokens=0",
        "eval.tokens=0",
        "eval.every_steps=none",
        "eval.keep_best=false",
        "checkpoint.every_steps=none",
        "checkpoint.every_minutes=none",
        "checkpoint.every=none",
        "checkpoint.mtbf_hours=none",
        "checkpoint.at_end=true",
        # The store belongs to the run that the job is for.
        "checkpoint.url=none",
        "observe.sinks=[]",
        "observe.trace_steps=[]",
        "observe.profile_steps=[]",
        "observe.metrics_port=none",
        "observe.alert_webhook=none",
        "observe.alert_command=[]",
        "resilience.inject=[]",
    )
