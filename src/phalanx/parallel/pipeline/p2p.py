"""What stages send each other: hidden states to the next one, their gradients back.

Between two ranks messages travel in the order in which the sender's actions make them; the receiver
knows the schedule, and asks for them in that order, a few before they are needed:
`plan.pipeline.messages` says when. So no message needs a tag, and no rank ever waits for a send
before it receives. Shapes and types are known beforehand (see
`PipelineExecutor._infer_stage_input_specs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.mesh.devices import is_cpu
from phalanx.plan.pipeline.messages import P2PMessage, RankMessages


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def make_empty_tensor(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass
class PipelineProcessGroups:
    """The ranks of a pipeline: their numbers among all, and the groups they talk through.

    `down` carries what goes to higher ranks and `up` what goes to lower ones: over NCCL the two
    ways of a pair would wait for each other in one.
    `sent_bytes`: without those of shape inference.
    """

    rank: int
    numbers: tuple[int, ...]
    down: dist.ProcessGroup
    up: dist.ProcessGroup
    device: torch.device
    sent_bytes: int = 0

    @property
    def is_one_queue(self) -> bool:
        """True where a receive that waits can keep other work of its device waiting."""
        return not is_cpu(self.device)

    def choose_process_group(self, source: int, target: int) -> dist.ProcessGroup:
        if target > source:
            return self.down
        return self.up

    def start_send(self, tensor: torch.Tensor, target: int) -> Any:
        # No tag: the receiver asks in the order in which the sender's schedule makes the messages,
        # which is the only order that NCCL allows as well.
        return dist.isend(
            tensor, self.numbers[target], group=self.choose_process_group(self.rank, target)
        )

    def start_receive(self, tensor: torch.Tensor, source: int) -> Any:
        return dist.irecv(
            tensor, self.numbers[source], group=self.choose_process_group(source, self.rank)
        )


class P2PQueue:
    """The messages of one pass through a schedule, as one rank sends and receives them.

    `specs`: of a stage's input, by (stage, microbatch).
    """

    def __init__(
        self,
        stage_group: PipelineProcessGroups,
        messages: RankMessages,
        rank_of_stage: Sequence[int],
        specs: Mapping[tuple[int, int], TensorSpec],
    ) -> None:
        self._stage_group, self._messages, self._rank_of_stage, self._specs = (
            stage_group,
            messages,
            rank_of_stage,
            specs,
        )
        self._coming = {
            source: list(messages_of_source)
            for source, messages_of_source in messages.coming.items()
        }
        self._places = {
            message: (source, at)
            for source, expected in self._coming.items()
            for at, message in enumerate(expected)
        }
        self._num_started = dict.fromkeys(self._coming, 0)
        self._receiving: dict[P2PMessage, tuple[Any, torch.Tensor]] = {}
        self._local: dict[P2PMessage, torch.Tensor] = {}
        self._sent: dict[int, list[tuple[P2PMessage, Any, torch.Tensor]]] = {}

    def send(self, message: P2PMessage, tensor: torch.Tensor) -> None:
        """Send to the message's stage. Within a rank nothing is copied."""
        target = self._rank_of_stage[message.stage]
        if target == self._stage_group.rank:
            self._local[message] = tensor
            return
        tensor = tensor.contiguous()
        self._sent.setdefault(target, []).append(
            (message, self._stage_group.start_send(tensor, target), tensor)
        )
        self._stage_group.sent_bytes += tensor.nbytes

    @property
    def num_unconfirmed_sends(self) -> int:
        """Messages whose tensors are still held: nobody can know yet that they have arrived."""
        return sum(map(len, self._sent.values()))

    def start_receives_for_action(self, index: int) -> None:
        """Begin to receive what is to be on its way when the own action at `index` is queued."""
        for source in self._messages.asks[index]:
            self._start_receive_from_rank(source)

    def _start_receive_from_rank(self, source: int) -> None:
        """Begin to receive the next message of `source`."""
        message = self._coming[source][self._num_started[source]]
        # A gradient has the form of what it is the gradient of: the next stage's input.
        spec = self._specs[message.stage + int(message.is_gradient), message.microbatch]
        buffer = spec.make_empty_tensor(self._stage_group.device)
        self._receiving[message] = self._stage_group.start_receive(buffer, source), buffer
        self._num_started[source] += 1

    def is_from_stage_of_this_rank(self, message: P2PMessage) -> bool:
        """True for what comes from a stage of this rank."""
        return message in self._local

    def receive(self, message: P2PMessage) -> torch.Tensor:
        """Wait until it has arrived."""
        if message in self._local:
            return self._local.pop(message)
        source, at = self._places[message]
        while self._num_started[source] <= at:
            self._start_receive_from_rank(source)
        work, buffer = self._receiving.pop(message)
        work.wait()
        self._release_arrived_messages(source, self._messages.made_at[message])
        return buffer

    def _release_arrived_messages(self, target: int, index: int) -> None:
        """`target` has made something at `index` of its row: what it needed until then has arrived.

        Without this a step would hold all that it ever sent, however few microbatches are in
        flight.
        """
        unfinished = []
        for message, work, tensor in self._sent.get(target, ()):
            if self._messages.needed_at[message] <= index:
                work.wait()
            else:
                unfinished.append((message, work, tensor))
        self._sent[target] = unfinished

    def wait_for_sends(self) -> None:
        """At the end: all that was sent has left."""
        for sent in self._sent.values():
            for _, work, _ in sent:
                work.wait()
        self._sent.clear()
        assert not self._receiving, "somebody sent what nobody took"
