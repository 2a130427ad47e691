"""Run a pipeline: each rank does its row of the schedule, action by action.

An action waits for what it needs, computes, and sends on what it made. Communication goes on beside
computation; how long an action computed is noted, so that what remains of a step is waiting: the
bubble.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.core.errors import LayoutError, PhalanxError
from phalanx.mesh.casts import share_casts
from phalanx.parallel.dropout.interceptor import RandomOpInterceptor
from phalanx.parallel.pipeline.p2p import P2PQueue, TensorSpec
from phalanx.parallel.pipeline.shape_inference import rehearse, share
from phalanx.parallel.pipeline.transform import Staged
from phalanx.parallel.pipeline.weight_grads import DeferredWeightGrads
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.saved_tensors import SavedBytes
from phalanx.plan.pipeline.messages import Messages, P2PMessage, output_of, plan_messages
from phalanx.plan.pipeline.pipeline_plan import FROM_FILE, Pipeline
from phalanx.plan.pipeline.schedule import Action, Schedule

Batch = Mapping[str, torch.Tensor]
Forward = Callable[[Batch, Any], Any]
"""(microbatch, objective) -> hidden states; of the last stage what the objective returns."""
Span = tuple[str, Any, Any]
"""(action, begin, end): marks of the clock of phases."""


@dataclass
class Kept:
    """What a forward leaves for its backward: the stage's input (None: tokens), and its output
    or its loss."""

    given: torch.Tensor | None
    made: torch.Tensor


@dataclass
class PipelineRun:
    """One rank's part. `spans`: the actions of the last step, without waiting for messages.

    `most_held`: microbatches of each own stage that were held at once, over all steps;
    `stage_bytes`: what autograd kept of one microbatch, where it was counted. `sent_bytes`: to
    other ranks, of the last step.
    """

    context: ParallelContext
    staged: Staged
    drawing: RandomOpInterceptor
    forward: Forward
    scaled: Callable[[torch.Tensor], torch.Tensor]
    spans: list[Span] = field(default_factory=list)
    most_held: Counter[int] = field(default_factory=Counter)
    stage_bytes: dict[int, int] = field(default_factory=dict)
    peak_bytes: int = 0
    sent_bytes: int = 0
    counts_saved: bool = False
    is_under_way: bool = False
    """Stays true where an error left a schedule half done: other ranks then wait for this one."""
    _weights: DeferredWeightGrads = field(default_factory=DeferredWeightGrads)
    _kept: dict[tuple[int, int], Kept] = field(default_factory=dict)
    _forms: dict[Any, dict[int, TensorSpec]] = field(default_factory=dict)
    _num_tokens: dict[Any, int] = field(default_factory=dict)
    _schedules: dict[int, Schedule] = field(default_factory=dict)
    _messages: dict[tuple[str, int], Messages] = field(default_factory=dict)

    def forward_backward(
        self,
        microbatches: Sequence[Batch],
        objective: Any,
        step: int,
        add: Callable[[torch.Tensor, Any], None],
    ) -> None:
        """All actions of this rank.

        `add(loss, num_targets)` is called for each microbatch of the last stage.
        """
        self._require_in_step()
        schedule = self._schedule(len(microbatches))
        self.spans, self.sent_bytes = [], 0
        self._kept.clear()
        with self.context.sync(True):
            self._learn_forms(microbatches, objective)
            post = self._post(schedule, microbatches)
            self.is_under_way = True
            with share_casts():
                for place, action in enumerate(schedule.actions[self.staged.peers.rank]):
                    post.ask_before(place)
                    self._do(action, post, microbatches, objective, step, add)
            with self.context.phases("pipeline", "settle sends"):
                post.settle()
        self.is_under_way = False
        assert not self._kept, "a schedule that was checked leaves nothing"
        assert not self._weights.num_due, "nor does it leave a W"

    def _require_in_step(self) -> None:
        """Another step's messages would be taken for those that other ranks still wait for."""
        if self.is_under_way:
            raise PhalanxError(
                "an error left the pipeline in the middle of a schedule, and nothing can follow it",
                why="the other ranks wait for what this one has not sent",
                fix="end the process after such an error, and start again from a checkpoint",
            )

    def _schedule(self, num_microbatches: int) -> Schedule:
        if num_microbatches not in self._schedules:
            pipeline = self.staged.pipeline
            if (
                num_microbatches != pipeline.num_microbatches
                and pipeline.schedule_name == FROM_FILE
            ):
                raise LayoutError(
                    f"the schedule is of {pipeline.num_microbatches} microbatches, and a step has"
                    f" {num_microbatches}"
                )
            self._schedules[num_microbatches] = pipeline.replace_microbatches(
                num_microbatches
            ).schedule()
        return self._schedules[num_microbatches]

    # One action

    def _do(
        self,
        action: Action,
        post: P2PQueue,
        microbatches: Sequence[Batch],
        objective: Any,
        step: int,
        add: Callable[[torch.Tensor, Any], None],
    ) -> None:
        made: torch.Tensor | None = None
        if action.kind == "F":
            given = self._receive(post, action, is_gradient=False)
            with self._timed(action, "forward"):
                made = self._do_forward(
                    action, given, microbatches[action.microbatch], objective, step, add
                )
        elif action.kind == "W":
            with self._timed(action, "backward"):
                self._weights.do((action.stage, action.microbatch))
                self.context.after_weights()
        else:
            gradient = self._receive(post, action, is_gradient=True)
            self._tell_tokens(microbatches[action.microbatch])  # a recomputation asks
            with self._timed(action, "backward"):
                made = self._do_backward(action, gradient)
        parcel = output_of(action, self.staged.pipeline.num_stages)
        if parcel is not None:
            assert made is not None
            self.sent_bytes += post.hand_on(parcel, made)

    def _receive(self, post: P2PQueue, action: Action, *, is_gradient: bool) -> torch.Tensor | None:
        edge = self.staged.pipeline.num_stages - 1 if is_gradient else 0
        if action.stage == edge:
            return None
        parcel = P2PMessage(action.stage, action.microbatch, is_gradient)
        if post.is_here(parcel):
            return post.take(parcel)
        with self.context.phases("pipeline", f"receive for {action}"):
            return post.take(parcel)

    @contextmanager
    def _timed(self, action: Action, phase: str) -> Iterator[None]:
        clock = self.context.phases.clock
        began = clock.mark()
        with self.context.phases(phase, str(action)):
            yield
        self.spans.append((str(action), began, clock.mark()))

    def _do_forward(
        self,
        action: Action,
        given: torch.Tensor | None,
        batch: Batch,
        objective: Any,
        step: int,
        add: Callable[[torch.Tensor, Any], None],
    ) -> torch.Tensor:
        if given is not None:
            given.requires_grad_()
        with self.drawing.microbatch(step, action.microbatch, batch), self._counting(action.stage):
            with self.drawing.forward(action.stage):
                found = self._compute(action.stage, given, batch, objective)
        if action.stage + 1 == self.staged.pipeline.num_stages:
            loss, num_targets = found
            add(loss.detach(), num_targets)
            found = self.scaled(loss)
        self._kept[action.stage, action.microbatch] = Kept(given, found)
        self._note_held()
        return found.detach()

    def _do_backward(self, action: Action, gradient: torch.Tensor | None) -> torch.Tensor | None:
        key = (action.stage, action.microbatch)
        kept = self._kept.pop(key)
        if action.kind == "I":
            with self._weights.putting_off(key):
                self._backward(kept, gradient)
        else:
            self._backward(kept, gradient)
        self.context.after_backward()
        if kept.given is None:
            return None
        return torch.zeros_like(kept.given) if kept.given.grad is None else kept.given.grad

    def _backward(self, kept: Kept, gradient: torch.Tensor | None) -> None:
        if kept.made.requires_grad:  # not a first stage whose parameters are all frozen
            kept.made.backward(gradient)

    def _compute(self, stage: int, given: torch.Tensor | None, batch: Batch, objective: Any) -> Any:
        ranges = self.staged.pipeline.stages.ranges
        if not self.staged.door.is_rehearsal:
            self._tell_tokens(batch)
        with self.staged.door.open(stage, ranges[stage], given):
            return self.forward(batch, objective)

    def _tell_tokens(self, batch: Batch) -> None:
        """How long its sequences are, which only the first stage's embedding sees."""
        if self.context.tensor_group is not None:
            self.context.tensor_group.num_tokens = self._num_tokens[self._form_key(batch)]

    # What is kept

    @contextmanager
    def _counting(self, stage: int) -> Iterator[None]:
        """Count what autograd saves in the first forward of each stage."""
        if not self.counts_saved or stage in self.stage_bytes:
            yield
            return
        saved = SavedBytes()
        with saved.counting():
            yield
        self.stage_bytes[stage] = saved.num_bytes

    def _note_held(self) -> None:
        held = Counter(stage for stage, _ in self._kept)
        for stage, count in held.items():
            self.most_held[stage] = max(self.most_held[stage], count)
        self.peak_bytes = max(
            self.peak_bytes, sum(n * self.stage_bytes.get(s, 0) for s, n in held.items())
        )

    # Forms

    def _form_key(self, batch: Batch) -> Any:
        shapes = tuple(sorted((name, tuple(t.shape), str(t.dtype)) for name, t in batch.items()))
        return shapes, self.context.root.module.training

    def _learn_forms(self, microbatches: Iterable[Batch], objective: Any) -> None:
        for batch in microbatches:
            key = self._form_key(batch)
            if key in self._forms:
                continue
            door = self.staged.door
            door.is_rehearsal = self.is_under_way = True

            def compute(stage: int, given: torch.Tensor | None, batch: Batch = batch) -> Any:
                return self._compute(stage, given, batch, objective)

            try:
                with self.context.phases("pipeline", "rehearse a microbatch of a new form"):
                    pipeline = self.staged.pipeline
                    self._forms[key] = rehearse(
                        self.context.root,
                        self.staged.peers,
                        pipeline.rank_of_stage,
                        compute,
                        self.context.tensor_group,
                    )
                if self.context.tensor_group is not None:
                    self._num_tokens[key] = self.context.tensor_group.num_tokens
                self.is_under_way = False
            except PhalanxError:  # the same on every rank
                self.is_under_way = False
                raise
            finally:
                door.is_rehearsal = False

    def _post(self, schedule: Schedule, microbatches: Sequence[Batch]) -> P2PQueue:
        forms = {
            (stage, index): form
            for index, batch in enumerate(microbatches)
            for stage, form in self._forms[self._form_key(batch)].items()
        }
        peers, key = self.staged.peers, (schedule.name, schedule.num_microbatches)
        if key not in self._messages:
            self._messages[key] = plan_messages(
                schedule, peers.rank, in_one_queue=peers.is_one_queue
            )
        return P2PQueue(peers, self._messages[key], self.staged.pipeline.rank_of_stage, forms)

    # Without gradients

    def only_forward(self, microbatches: Iterable[Batch], objective: Any) -> Iterator[Any]:
        """What the objective makes of each microbatch, where the last stage is; None elsewhere.

        No gradients.

        As many microbatches as there are ranks are under way together.
        """
        self._require_in_step()
        pipeline = self.staged.pipeline
        batches = iter(microbatches)
        while some := list(itertools.islice(batches, pipeline.num_ranks)):
            self.context.gather()
            self._learn_forms(some, objective)
            schedule = _forwards(pipeline, len(some))
            post, found = self._post(schedule, some), [None] * len(some)
            self.is_under_way = True
            for place, action in enumerate(schedule.actions[self.staged.peers.rank]):
                post.ask_before(place)
                given = self._receive(post, action, is_gradient=False)
                made = self._compute(action.stage, given, some[action.microbatch], objective)
                parcel = output_of(action, pipeline.num_stages)
                if parcel is None:
                    found[action.microbatch] = made
                else:
                    post.hand_on(parcel, made.detach())
            post.settle()
            self.is_under_way = False
            yield from found

    def on_all(self, value: torch.Tensor | None) -> torch.Tensor:
        """`value` of the rank with the last stage, on every rank of the pipeline. Collective."""
        return share(self.staged.peers, self.staged.last_rank, value)


def _forwards(pipeline: Pipeline, num_microbatches: int) -> Schedule:
    """A pass without gradients: on each rank the microbatches of its first stage, then those of
    its second."""
    rows = tuple(
        tuple(
            Action("F", stage, index)
            for stage in pipeline.stages_of(rank)
            for index in range(num_microbatches)
        )
        for rank in range(pipeline.num_ranks)
    )
    return Schedule("forward", num_microbatches, pipeline.rank_of_stage, rows)
