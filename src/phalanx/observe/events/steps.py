"""Events of the training loop: steps, and the seconds between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phalanx.observe.events.base import Event


@dataclass(frozen=True)
class StepFinished(Event):
    """One optimizer update, from every rank. Loss is nats per target token over all ranks.

    `step_s` runs from the record of the step before, so steps leave no gap. Of a save beside
    training only the copy of the state belongs to its step; of one that training waits for the
    writing does, too, and its commit, which comes after the record, belongs to the next. `phases_s`
    are seconds of this rank by phase, without those of a save beside training; `unaccounted_s` is
    `step_s` minus their sum. `sent_bytes` are those that this rank sent to reduce gradients, by
    ring algorithms; weights that FSDP and ZeRO-1 gather are not counted. `sent_tp_bytes` are those
    it sent over tp, of activations and their gradients (0 also with train.compile, where nobody
    counts); `sent_cp_bytes` over cp, of keys and values (or heads) and their gradients;
    `sent_ep_bytes` over ep, of rows of tokens and their gradients; `sent_pp_bytes` over pp, of
    hidden states, their gradients, and gradients of tied parameters.
    `loss_scale` is what fp16 multiplied the loss by (0: nothing did). `rss_bytes` are resident now,
    pages shared with other processes counted whole, `own_bytes` of these those that no file backs
    (0: nobody knows); `peak_bytes` the most memory that this rank had so far, shared pages by their
    share, or what a GPU's allocator gave out, which held `reserved_bytes` for it
    (phalanx.core.process_memory; 0: nobody knows). `cpu_s`: processor
    seconds of this rank's process, all its threads, within `step_s` (0: nobody counted); on a CPU
    where these are far fewer than `step_s` times the threads, the rank waited, or had no turn.
    `queued_s`: seconds for which its main thread wanted a processor and had none (0: nobody
    counted).

    `communication_s`: seconds of the phase `collective` by "axis: operation" ("tp: all_gather
    sequence"); empty in files of earlier releases.
    """

    step: int
    loss: float
    num_targets: int
    tokens_seen: int
    learning_rate: float
    grad_norm: float
    step_s: float
    tokens_per_s: float
    phases_s: dict[str, float]
    unaccounted_s: float
    rss_bytes: int
    sent_bytes: int = 0
    loss_scale: float = 0.0
    sent_tp_bytes: int = 0
    peak_bytes: int = 0
    reserved_bytes: int = 0
    sent_cp_bytes: int = 0
    sent_ep_bytes: int = 0
    sent_pp_bytes: int = 0
    cpu_s: float = 0.0
    communication_s: dict[str, float] = field(default_factory=dict)
    own_bytes: int = 0
    queued_s: float = 0.0

    @property
    def sent_by_axis(self) -> dict[str, int]:
        """Bytes that this rank sent over each axis that cuts the model or its sequences."""
        return {
            "tp": self.sent_tp_bytes,
            "cp": self.sent_cp_bytes,
            "ep": self.sent_ep_bytes,
            "pp": self.sent_pp_bytes,
        }

    @property
    def waiting_s(self) -> float:
        """Seconds in collectives and for other stages: sending, and waiting for other ranks."""
        return _sum_waits(self.phases_s)


@dataclass(frozen=True)
class StepsSummed(Event):
    """`num_steps` steps of this rank from `first_step` to `last_step`, summed: from ranks other
    than 0 in runs so large that each step of each rank would be too much
    (phalanx.train.step_detail).

    All ranks have the same windows. Steps in between that took unusually long have a
    `step_finished` of their own, and are in no sum. Seconds are sums over the steps, `longest_s` is
    that of `longest_step`; `rss_bytes`, `own_bytes` and `peak_bytes` are the largest of
    them.
    """

    first_step: int
    last_step: int
    num_steps: int
    step_s: float
    longest_s: float
    longest_step: int
    phases_s: dict[str, float]
    communication_s: dict[str, float]
    unaccounted_s: float
    cpu_s: float
    rss_bytes: int
    peak_bytes: int
    own_bytes: int = 0

    @property
    def waiting_s(self) -> float:
        """Seconds in collectives and for other stages: sending, and waiting for other ranks."""
        return _sum_waits(self.phases_s)


@dataclass(frozen=True)
class TimeBetweenSteps(Event):
    """Seconds of this rank that belong to no step: those of `activity`, which has just ended.

    From every rank. `activity`: "startup" (from when the run was asked for, or this process
    restarted, to the first step) | "evaluate" | "trace" | "ending" (from the record of the last
    step, or the evaluation after it, until the rank has done all and leaves). `step` is the last
    one before it.
    """

    step: int
    activity: str
    seconds: float


@dataclass(frozen=True)
class WorkProgressed(Event):
    """Rank 0 is at something that is no step: `activity` is "evaluate" or "sample".

    `num_done` of `num_total` batches or tokens are done (`num_total` 0: nobody knows how many).
    Where it begins, and at most twice a second; its end has an event of its own.
    """

    step: int
    activity: str
    num_done: int = 0
    num_total: int = 0


@dataclass(frozen=True)
class StepSkipped(Event):
    """A step whose update was not applied, on all ranks together.

    `reason`: "nonfinite_gradients" | "no_targets" | "overflow" (of fp16: the next step has half the
    loss scale) | "loss_spike" (resilience.on_loss_spike).
    """

    step: int
    reason: str
    grad_norm: float
    first_sample: int
    num_samples: int


def _sum_waits(phases_s: dict[str, float]) -> float:
    waits = (phases_s.get("collective", 0.0), phases_s.get("pipeline", 0.0))
    return sum(seconds for seconds in waits if math.isfinite(seconds))
