"""What stages send each other: hidden states to the next one, their gradients back.

Between two ranks messages travel in the order in which the sender's actions make them; the receiver
knows the schedule, and asks for them in that order, a few before they are needed:
`plan.pipeline.messages` says when. So no message needs a tag, and no rank ever waits for a send
before it receives. Shapes and types are known beforehand (see `PipelineRun._learn_forms`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.plan.pipeline.messages import Messages, P2PMessage


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass
class StageGroup:
    """The ranks of a pipeline: their numbers among all, and the groups they talk through.

    `down` carries what goes to higher ranks and `up` what goes to lower ones: over NCCL the two
    ways of a pair would wait for each other in one.
    """

    rank: int
    numbers: tuple[int, ...]
    down: dist.ProcessGroup
    up: dist.ProcessGroup
    device: torch.device

    @property
    def is_one_queue(self) -> bool:
        """True where a receive that waits can keep other work of its device waiting."""
        return self.device.type != "cpu"

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        return self.down if target > source else self.up

    def send(self, tensor: torch.Tensor, target: int) -> Any:
        return dist.isend(tensor, self.numbers[target], group=self.group(self.rank, target))

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        return dist.irecv(tensor, self.numbers[source], group=self.group(source, self.rank))


class P2PQueue:
    """The messages of one pass through a schedule, as one rank sends and receives them.

    `forms`: of a stage's input, by (stage, microbatch).
    """

    def __init__(
        self,
        peers: StageGroup,
        messages: Messages,
        rank_of_stage: Sequence[int],
        forms: Mapping[tuple[int, int], TensorSpec],
    ) -> None:
        self._peers, self._messages, self._rank_of_stage, self._forms = (
            peers,
            messages,
            rank_of_stage,
            forms,
        )
        self._coming = {source: list(parcels) for source, parcels in messages.coming.items()}
        self._places = {
            parcel: (source, at)
            for source, all_ in self._coming.items()
            for at, parcel in enumerate(all_)
        }
        self._num_asked = dict.fromkeys(self._coming, 0)
        self._asked: dict[P2PMessage, tuple[Any, torch.Tensor]] = {}
        self._here: dict[P2PMessage, torch.Tensor] = {}
        self._sent: dict[int, list[tuple[P2PMessage, Any, torch.Tensor]]] = {}

    def hand_on(self, parcel: P2PMessage, tensor: torch.Tensor) -> int:
        """To its stage; returns the bytes that left this rank. Within a rank nothing is copied."""
        target = self._rank_of_stage[parcel.stage]
        if target == self._peers.rank:
            self._here[parcel] = tensor
            return 0
        tensor = tensor.contiguous()
        self._sent.setdefault(target, []).append((parcel, self._peers.send(tensor, target), tensor))
        return tensor.nbytes

    @property
    def num_sent(self) -> int:
        """Messages whose tensors are still held: nobody can know yet that they have arrived."""
        return sum(map(len, self._sent.values()))

    def ask_before(self, place: int) -> None:
        """Begin to receive what is to be on its way when the own action at `place` is queued."""
        for source in self._messages.asks[place]:
            self._ask(source)

    def _ask(self, source: int) -> None:
        """Begin to receive the next message of `source`."""
        wanted = self._coming[source][self._num_asked[source]]
        # A gradient has the form of what it is the gradient of: the next stage's input.
        form = self._forms[wanted.stage + int(wanted.is_gradient), wanted.microbatch]
        buffer = form.empty(self._peers.device)
        self._asked[wanted] = self._peers.receive(buffer, source), buffer
        self._num_asked[source] += 1

    def is_here(self, parcel: P2PMessage) -> bool:
        """True for what comes from a stage of this rank."""
        return parcel in self._here

    def take(self, parcel: P2PMessage) -> torch.Tensor:
        """Wait until it has arrived."""
        if parcel in self._here:
            return self._here.pop(parcel)
        source, at = self._places[parcel]
        while self._num_asked[source] <= at:
            self._ask(source)
        work, buffer = self._asked.pop(parcel)
        work.wait()
        self._let_go(source, self._messages.made_at[parcel])
        return buffer

    def _let_go(self, target: int, place: int) -> None:
        """`target` has made something at `place` of its row: what it needed until then has arrived.

        Without this a step would hold all that it ever sent, however few microbatches are in
        flight.
        """
        left = []
        for parcel, work, tensor in self._sent.get(target, ()):
            if self._messages.needed_at[parcel] <= place:
                work.wait()
            else:
                left.append((parcel, work, tensor))
        self._sent[target] = left

    def settle(self) -> None:
        """At the end: all that was sent has left."""
        for sent in self._sent.values():
            for _, work, _ in sent:
                work.wait()
        self._sent.clear()
        assert not self._asked, "somebody sent what nobody took"
