"""Events: facts with units in their names, and no text for people. Sinks do the formatting.

An event is one line of JSON in `RUN/events/`: its own fields plus the envelope `event` (the class
in snake_case), `schema`, `time_unix_s`, `rank` and `attempt` (-1 for the supervisor's rank), `seq`
and `monotonic_s`. Wall clocks are stepped: `time_unix_s` is for people to read. What came first
follows from `seq`, which counts the events of a process, and from `monotonic_s`, which processes of
one machine share: the first event of each process names its clock (`clock`).
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

from phalanx.core.clocks import build_monotonic_clock_id

SCHEMA = 1


@dataclass(frozen=True)
class Event:
    """Base of every fact."""

    @classmethod
    def kind(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@dataclass(frozen=True)
class RunStarted(Event):
    """Once per attempt, from rank 0, before the first step.

    `step` is where training continues (0: from the start).

    `plain_bytes`: what a rank would send in a step to reduce gradients as they are (0: nobody
    counted).
    """

    run: str
    job_digest: str
    world_size: int
    step: int
    total_steps: int
    device: str
    layout: dict[str, int]
    restored_from: str = ""
    startup_s: float = 0.0
    plain_bytes: int = 0


@dataclass(frozen=True)
class WeightsTaken(Event):
    """Training starts from weights that were there (model.init_from), instead of random ones.

    From rank 0.

    `imported_from`: what an imported checkpoint came from. `num_cast`: so many had another type.
    """

    checkpoint: str
    step: int
    num_tensors: int
    imported_from: str = ""
    num_cast: int = 0


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
    pages shared with other processes counted whole; `peak_bytes` the most memory that this rank had
    so far, shared pages by their share, or what a GPU's allocator gave out, which held
    `reserved_bytes` for it (phalanx.core.process_memory; 0: nobody knows). `cpu_s`: processor
    seconds of this rank's process, all its threads, within `step_s` (0: nobody counted); on a CPU
    where these are far fewer than `step_s` times the threads, the rank waited, or had no turn.

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
    that of `longest_step`; `rss_bytes` and `peak_bytes` are the largest of them.
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

    @property
    def waiting_s(self) -> float:
        """Seconds in collectives and for other stages: sending, and waiting for other ranks."""
        return _sum_waits(self.phases_s)


@dataclass(frozen=True)
class OperatorsCounted(Event):
    """The cost of calling operators in a step, whatever the size of its tensors: the forward of one
    microbatch has `num_operators` with a backward, a step has `num_microbatches` of them, and one
    operator takes `operator_s` by itself in both. `matmul_flops_per_s` is what large products
    reached on this rank, in the type of the model's products, while other ranks computed or waited.

    From rank 0, once, after the third step of an attempt; on CPUs, without a pipeline.
    """

    step: int
    num_operators: int
    num_microbatches: int
    operator_s: float
    matmul_flops_per_s: float


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
class NonFiniteFound(Event):
    """Where a step that is not finite began, found by computing its forwards once more. From rank
    0.

    `origin`: "output" (of the module `found_in`, the first one of the forward), "loss" (of the
    objective; all outputs are finite), "gradient" (of the parameter `found_in`, the one nearest to
    the loss; the forward is finite), "unknown" (computed again all is finite). `failed_rank`: whose
    it is, -1 where that is not known. `samples`: global numbers of the samples whose rows are not
    finite, at most 16; empty where the output has no rows of samples. `why`: what was not finite
    before it.
    """

    step: int
    origin: str
    found_in: str
    failed_rank: int
    microbatch: int = -1
    samples: list[int] = field(default_factory=list)
    why: str = ""


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


@dataclass(frozen=True)
class EvalFinished(Event):
    """Loss per target on held-out data, from rank 0; nats per token for models of text.

    `loss_by_source`: of each source of a mixture, where there are several. `metrics`: means of what
    the objective measures besides. `best_step` and `best_loss` are those of the best evaluation of
    the run so far, this one included (step 0: none could be compared); `judged_by` is the metric
    that it is the best by (eval.metric), and `best_value` its value there. With eval.keep_best, the
    best is saved and named in RUN/best.json before this is said.
    """

    step: int
    loss: float
    num_targets: int
    wall_s: float
    loss_by_source: dict[str, float] = field(default_factory=dict)
    best_step: int = 0
    best_loss: float = math.nan
    metrics: dict[str, float] = field(default_factory=dict)
    judged_by: str = "loss"
    best_value: float = math.nan

    def value_of(self, metric: str) -> float:
        """The loss or a metric; NaN where it was not measured."""
        if metric == "loss":
            return self.loss
        return self.metrics.get(metric, math.nan)

    @property
    def best(self) -> float:
        """The best evaluation's value of `judged_by`."""
        if self.judged_by == "loss":
            return self.best_loss
        return self.best_value


@dataclass(frozen=True)
class BaselineMeasured(Event):
    """The loss (nats per token) of an n-gram model that was fitted on the same training split, on
    the same held-out tokens."""

    name: str
    loss: float
    num_targets: int
    wall_s: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint was committed; `path` is relative to the run directory, or a URL. From rank 0.

    `stall_s`: how long training stood still for it. `num_new_bytes` were written, the rest was
    there (-1: not said).
    """

    step: int
    path: str
    num_bytes: int
    wall_s: float
    stall_s: float = 0.0
    num_new_bytes: int = -1


@dataclass(frozen=True)
class CheckpointPostponed(Event):
    """A save was due while that of `saving_step`, begun `since_s` ago, was still being written.

    It comes after the first step that finds the other done. From rank 0, once.
    """

    step: int
    saving_step: int
    since_s: float


@dataclass(frozen=True)
class CheckpointIntervalChosen(Event):
    """checkpoint.every = "auto" saves each `interval_s` from here on: the square root of 2 x
    `stall_s`, which training stands still for a save, x `mtbf_s` (Young 1974, Daly 2006), but at
    least `save_s`, which a save takes.

    From rank 0.
    """

    step: int
    interval_s: float
    stall_s: float
    save_s: float
    mtbf_s: float


@dataclass(frozen=True)
class CheckpointsRemoved(Event):
    """Checkpoints that checkpoint.keep_last and keep_every do not keep are gone; one that stays
    was verified before."""

    steps: list[int]


@dataclass(frozen=True)
class CheckpointFailed(Event):
    """A save failed on some rank; the checkpoints before it stand. From rank 0.

    `training_goes_on`: another save is tried later; False for the last one of a job, and in earlier
    releases.
    """

    step: int
    path: str
    reason: str
    training_goes_on: bool = False


@dataclass(frozen=True)
class CheckpointUnusable(Event):
    """A checkpoint is damaged or does not fit, and an older one is tried instead
    (checkpoint.fallback).

    From rank 0.
    """

    step: int
    path: str
    reason: str


@dataclass(frozen=True)
class TextGenerated(Event):
    """A text that the model wrote after `prompt`. From rank 0."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class MemoryMeasured(Event):
    """Bytes on top of the runtime (interpreter + torch) that this rank used, beside what the plan
    said.

    Keys of both dicts are the plan's memory categories; "peak" is the sum at the worst moment,
    which was in `peak_phase` of `peak_step` (0: before the first; "": nobody knows).
    `runtime_bytes` is what else there was then, pages of files among it, shared pages by their
    share. `start_bytes`: what the process had of its own when training began, shared pages counted
    whole. `device_bytes`, of a GPU: the peaks "allocated" and "reserved" of this rank's allocator,
    and at the end what is "used" by all its processes of the "total".
    """

    predicted_bytes: dict[str, int]
    measured_bytes: dict[str, int]
    runtime_bytes: int
    peak_step: int = 0
    peak_phase: str = ""
    start_bytes: int = 0
    device_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def moment_in_words(self) -> str:
        """When it was: "step 3, backward", "the start", or "" where nobody knows."""
        if not self.peak_phase:
            return ""
        if self.peak_phase != "startup":
            return f"step {self.peak_step}, {self.peak_phase}"
        return "the start"

    @property
    def predicts_activations(self) -> bool:
        """False for a user's own module: its sum lacks the largest part, and cannot be compared."""
        return self.predicted_bytes.get("activations", 0) > 0


@dataclass(frozen=True)
class PipelineMeasured(Event):
    """One step of a pipeline (steps 5, 50, 500, ... and the last): what each rank computed when,
    and how long it waited, beside what was predicted.

    From rank 0.

    `num_blocks` by stage. `stage_seconds`: by stage the mean seconds of one microbatch, [forward,
    backward of inputs, backward of weights]; without `splits_backward` the second is the whole
    backward and the third 0. `spans`: by pipeline rank (of the first data-parallel and
    tensor-parallel rank) [action, begin, end] in seconds since the first action of the step, in
    order, computation only; "3F0" is stage 3's forward of microbatch 0. The bubble is the part of
    the step in which a rank computes nothing, the mean over ranks, 0 to 1: as measured, as the
    schedule must have it if stages take `stage_seconds` and nothing has to be sent, and as the plan
    said before the run (NaN: it could not). `in_flight`: by pipeline rank, microbatches of a stage
    whose activations were held at once, at most.
    """

    step: int
    schedule: str
    num_blocks: list[int]
    stage_seconds: list[list[float]]
    splits_backward: bool
    spans: list[list[list[Any]]]
    bubble_measured: float
    bubble_predicted: float
    bubble_planned: float
    in_flight: list[int]


@dataclass(frozen=True)
class ExpertsLoaded(Event):
    """The load of a model's experts in a step (the first, each observe.log_every-th and the last),
    over all ranks.

    From the first rank of each stage of a pipeline, of the layers in its stages; else from rank 0.

    `tokens_by_expert`: of each layer ("blocks.3.moe") the tokens of the batch that chose each
    expert, dropped ones too; `dropped`: of each layer how many choices were dropped, because the
    expert was full.
    """

    step: int
    tokens_by_expert: dict[str, list[int]]
    dropped: dict[str, int]

    @property
    def worst(self) -> tuple[str, float]:
        """The layer whose busiest expert has most, and how many times the mean; ("", 0) where
        nothing was counted."""
        ratios = {
            name: max(tokens) * len(tokens) / sum(tokens)
            for name, tokens in self.tokens_by_expert.items()
            if sum(tokens) > 0
        }
        return max(ratios.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def dropped_share(self) -> float:
        """Fraction (0 to 1) of all token-to-expert choices that were dropped."""
        chosen = sum(map(sum, self.tokens_by_expert.values()))
        if chosen > 0:
            return sum(self.dropped.values()) / chosen
        return 0.0


@dataclass(frozen=True)
class InvariantChecked(Event):
    """Something that must hold in any training, checked while it trains (observe.invariants_every).

    `name`: "parameters_moved" | "optimizer_parameters" | "replicas_equal" | "targets_counted" |
    "expert_loads" | "memory_unchanged" (resilience.check_memory_every, from the rank itself). Each
    time that a check fails in another way than the one before, with `ok` False
    and what failed in `step`; and after each evaluation and at the end as a summary (`is_summary`)
    of this attempt so far: `ok` if no check failed, `num_checks` of them, the last in `step`,
    `num_failed`, the first of those in `first_failed_step`. From rank 0; of experts' loads from the
    first rank of each stage of a pipeline.

    `tensors`: names of those that failed, at most 20 of `num_tensors`; `ranks`: those that hold
    them otherwise than most, all holders where there is no majority. `expected` and `actual`: sums
    over all ranks where sums are compared. `looked_at`: in words, what the last check compared;
    `not_looked_at`: what it did not, and why.
    """

    step: int
    name: str
    ok: bool
    is_summary: bool = False
    num_checks: int = 0
    num_failed: int = 0
    first_failed_step: int = 0
    tensors: list[str] = field(default_factory=list)
    num_tensors: int = 0
    ranks: list[int] = field(default_factory=list)
    expected: float = math.nan
    actual: float = math.nan
    looked_at: str = ""
    not_looked_at: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StopRequested(Event):
    """All ranks agreed to stop after `step`. `reason`: "sigterm" | "sigint"."""

    step: int
    reason: str


@dataclass(frozen=True)
class RanksStarted(Event):
    """From the supervisor: the processes of one attempt. `kept`: ranks whose process is that of the
    attempt before, as they only had lost another one."""

    pids: list[int]
    start_s: float
    kept: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class RankFailed(Event):
    """From the supervisor: the rank that failed first (-1: the server or the store of the ranks).

    `cause`: "exception" | "signal" | "exit" (it left before its work was done) | "hang" (the others
    waited in vain). `hang_kind`: as in HangFound, also where gloo noticed another collective first
    and aborted a rank; "left_early" for a rank that ended before its work was done without an
    error; empty otherwise, and in files of earlier releases.
    """

    failed_rank: int
    step: int
    phase: str
    cause: str
    detail: str
    detected_s: float
    hang_kind: str = ""


@dataclass(frozen=True)
class HangFound(Event):
    """From the supervisor: no rank made progress for `detected_s`, longer than `limit_s`, because
    of the ranks `culprits`, which are killed now.

    `hang_kind`: "frozen" (stopped) | "gil_held" (C code holds Python's lock) | "spinning" |
    "waiting_elsewhere" (sleeps in what is no collective) | "absent_collective" (in another one than
    the others) | "left_early". `step` and `phase` are those of the first culprit; `collective` is
    what the others wait in; `report` has the stacks of all ranks, the odd ones first.
    """

    hang_kind: str
    culprits: list[int]
    step: int
    phase: str
    collective: str
    report: str
    detected_s: float
    limit_s: float


@dataclass(frozen=True)
class RankSlow(Event):
    """From the supervisor: a rank takes `factor` times as long for its own work as ranks with the
    same work, at least since `first_step`. It is slow, not hung, and nothing is restarted.

    `excess_s` a step is what it takes longer, most in `phase`; the others waited `waited_s` for it
    so far, in sum. `cpu_share` are the cores it used in the seconds of its own work,
    `peers_cpu_share` those of the others (0: nobody counted): with fewer it is starved, throttled
    or waits for something; with as many it computes more, or slower. `why`: the kernel says that it
    is kept from running, and how; then `cpu_share` are the shares (0 to 1) of the time they wanted
    to run, and `excess_s`, `phase` and `waited_s` are not known.
    """

    slow_rank: int
    step: int
    first_step: int
    factor: float
    excess_s: float
    phase: str
    waited_s: float
    cpu_share: float
    peers_cpu_share: float
    why: str = ""


@dataclass(frozen=True)
class RankSlowEnded(Event):
    """From the supervisor: a rank that was slow since `first_step` is as fast as the others again,
    or its attempt is over; they waited `waited_s` for it in sum (0: not known). `why` as in
    RankSlow."""

    slow_rank: int
    step: int
    first_step: int
    waited_s: float
    why: str = ""


@dataclass(frozen=True)
class RestartScheduled(Event):
    """From the supervisor: the ranks start again from the newest checkpoint, of step `from_step`.

    `held_step`: the newest step whose state a rank still holds in memory, -1 for none; whether all
    of it is held, the ranks find out when they have met (`run_started` says).
    """

    restart: int
    budget: int
    from_step: int
    held_step: int = -1


@dataclass(frozen=True)
class RolledBack(Event):
    """From the supervisor: in `step` all ranks agreed to go back to the newest checkpoint that is
    not after `not_after_step`.

    `cause`: "loss_spike" | "corruption"; `failed_rank` holds what is corrupted, -1 where that is
    not known. `skip_to_sample`: the next sample that is read then, -1: as the checkpoint says.
    """

    step: int
    cause: str
    why: str
    not_after_step: int
    skip_to_sample: int
    failed_rank: int


@dataclass(frozen=True)
class LayoutChanged(Event):
    """From the supervisor: the next attempt has another number of ranks. `step` is that of the
    newest state it may go on from, `text` says both layouts, `why` the reason."""

    step: int
    num_ranks_before: int
    num_ranks: int
    text: str
    why: str


@dataclass(frozen=True)
class RunFinished(Event):
    """The last event of a run. `status`: "finished" | "preempted" | "interrupted" | "failed"."""

    status: str
    exit_code: int
    step: int
    wall_s: float


@dataclass(frozen=True)
class SinkDropped(Event):
    """A sink died or fell behind: it is out, or lost `num_dropped` events; training goes on."""

    sink: str
    num_dropped: int
    reason: str


@dataclass(frozen=True)
class SamplesRead(Event):
    """The samples that a rank read for a step that is done, in order (observe.samples).

    `ranges`: first, beyond, first, beyond, ... of global sample numbers. `xxh3`: checksum of all
    that was delivered for them.
    """

    step: int
    data_parallel_rank: int
    data_parallel_size: int
    ranges: list[int]
    xxh3: str


@dataclass(frozen=True)
class LoaderWorkerReplaced(Event):
    """A process that reads ahead died or was silent for too long; another does `step` and what
    follows."""

    step: int
    reason: str


EVENTS_UNWRITTEN = "events_unwritten"  # code of the note that a disk refuses what is recorded
# code of the note with which a person's --resume begins; restarts have an event of their own
RESUMED = "resumed"


@dataclass(frozen=True)
class Note(Event):
    """A fact that has no class of its own; `code` is stable, `facts` is JSON."""

    code: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MonotonicClockReading:
    """A process's monotonic clock: its name ("" in files of earlier releases), and its seconds at
    the first event."""

    name: str
    began_s: float


@dataclass(frozen=True)
class Envelope:
    """An event with who said it and when.

    `seq` and `monotonic_s` are -1 and NaN in files of earlier releases.

    `clock` is written with a process's first event only; whoever reads a file hands it on to those
    that follow.
    """

    event: Event
    rank: int
    attempt: int
    time_unix_s: float
    seq: int = -1
    monotonic_s: float = math.nan
    clock: MonotonicClockReading | None = field(default=None, compare=False)

    schema: ClassVar[int] = SCHEMA

    def to_line(self) -> str:
        """One line of strict JSON; NaN and infinities become null."""
        head = {
            "event": self.event.kind(),
            "schema": SCHEMA,
            # Tenths of a millisecond do: within a process `seq` says what came first.
            "time_unix_s": round(self.time_unix_s, 4),
            "rank": self.rank,
            "attempt": self.attempt,
        }
        if self.seq >= 0:
            head |= {"seq": self.seq, "monotonic_s": round(self.monotonic_s, 4)}
        if self.seq == 0 and self.clock is not None and self.clock.name:
            head["clock"] = self.clock.name
        body = head | vars(self.event)
        # Most events are finite: only the others pay for the walk through their values.
        try:
            return json.dumps(body, separators=(",", ":"), allow_nan=False)
        except ValueError:
            return json.dumps(
                _replace_nonfinite_by_null(body), separators=(",", ":"), allow_nan=False
            )


def wrap_event_in_envelope(event: Event, *, rank: int, attempt: int, seq: int = -1) -> Envelope:
    """Put an event into the envelope of this moment; `seq` numbers those of a process."""
    now_s = time.monotonic()
    return Envelope(
        event,
        rank,
        attempt,
        time.time(),
        seq,
        now_s,
        MonotonicClockReading(build_monotonic_clock_id(), now_s) if seq == 0 else None,
    )


def _sum_waits(phases_s: dict[str, float]) -> float:
    waits = (phases_s.get("collective", 0.0), phases_s.get("pipeline", 0.0))
    return sum(seconds for seconds in waits if math.isfinite(seconds))


def _replace_nonfinite_by_null(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _replace_nonfinite_by_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite_by_null(item) for item in value]
    return value


# Every event stands above this line and derives from Event itself.
EVENT_CLASS_OF_KIND: dict[str, type[Event]] = {cls.kind(): cls for cls in Event.__subclasses__()}


def parse_event_line(line: str, clock: MonotonicClockReading | None = None) -> Envelope | None:
    """The envelope of one line, or None for a line that is torn or of a kind this release does not
    know.

    `clock` is that of the line before in the same file; a line with which a process begins has its
    own.
    """
    try:
        body = json.loads(line)
        cls = EVENT_CLASS_OF_KIND[body["event"]]
        # What a later release added is left out; what an earlier one lacks takes its default.
        fields = {name: body[name] for name in cls.__dataclass_fields__ if name in body}
        fields = {name: math.nan if value is None else value for name, value in fields.items()}
        seq, steady_s = body.get("seq", -1), body.get("monotonic_s", math.nan)
        # Whoever begins in the middle of a file takes the clock of the first line that is read.
        if seq >= 0 and (seq == 0 or clock is None):
            name = body.get("clock")
            clock = MonotonicClockReading(name if type(name) is str else "", steady_s)
        return Envelope(
            cls(**fields), body["rank"], body["attempt"], body["time_unix_s"], seq, steady_s, clock
        )
    except (ValueError, KeyError, TypeError):
        return None
