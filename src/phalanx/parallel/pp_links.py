"""What stages send each other: hidden states to the next one, their gradients back.

Between two ranks messages travel in the order in which the sender's actions make them; the receiver knows the schedule,
and asks for them in that order, a few before they are needed. So no message needs a tag, and no rank ever waits for a
send before it receives. Shapes and types are known beforehand (see `PipelineRun.rehearse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from phalanx.plan.pipeline.schedule import Action

AHEAD = 2  # messages from a rank that are asked for before the one that is needed


@dataclass(frozen=True)
class Parcel:
    """What reaches `stage` of a microbatch: its input, or with `is_gradient` the gradient of its output."""

    stage: int
    microbatch: int
    is_gradient: bool


@dataclass(frozen=True)
class Form:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tensor.dtype)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def made_by(action: Action, num_stages: int) -> Parcel | None:
    """What an action makes for another stage: F for the next one, B and I for the one before."""
    if action.kind == "F" and action.stage + 1 < num_stages:
        return Parcel(action.stage + 1, action.microbatch, False)
    if action.kind in ("B", "I") and action.stage > 0:
        return Parcel(action.stage - 1, action.microbatch, True)
    return None


@dataclass
class Peers:
    """The ranks of a pipeline: their numbers among all, and the groups they talk through.

    `down` carries what goes to higher ranks and `up` what goes to lower ones: over NCCL the two ways of a pair would
    wait for each other in one.
    """

    rank: int
    numbers: tuple[int, ...]
    down: dist.ProcessGroup
    up: dist.ProcessGroup
    device: torch.device

    def group(self, source: int, target: int) -> dist.ProcessGroup:
        return self.down if target > source else self.up

    def send(self, tensor: torch.Tensor, target: int) -> Any:
        return dist.isend(tensor, self.numbers[target], group=self.group(self.rank, target))

    def receive(self, tensor: torch.Tensor, source: int) -> Any:
        return dist.irecv(tensor, self.numbers[source], group=self.group(source, self.rank))


class Post:
    """The messages of one pass through a schedule, as one rank sees them.

    `rows`: what each rank does, in order. `forms`: of a stage's input, by (stage, microbatch).
    """

    def __init__(
        self,
        peers: Peers,
        rows: Sequence[Sequence[Action]],
        rank_of_stage: Sequence[int],
        forms: Mapping[tuple[int, int], Form],
    ) -> None:
        self._peers, self._rank_of_stage, self._forms = peers, rank_of_stage, forms
        self._coming: dict[int, list[Parcel]] = {}
        for source, row in enumerate(rows):
            if source != peers.rank:
                made = (made_by(action, len(rank_of_stage)) for action in row)
                mine = [p for p in made if p is not None and rank_of_stage[p.stage] == peers.rank]
                if mine:
                    self._coming[source] = mine
        self._places = {parcel: (source, at) for source, all_ in self._coming.items() for at, parcel in enumerate(all_)}
        self._num_asked = dict.fromkeys(self._coming, 0)
        self._asked: dict[Parcel, tuple[Any, torch.Tensor]] = {}
        self._here: dict[Parcel, torch.Tensor] = {}
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def hand_on(self, parcel: Parcel, tensor: torch.Tensor) -> int:
        """To its stage; returns the bytes that left this rank. Within a rank nothing is copied."""
        target = self._rank_of_stage[parcel.stage]
        if target == self._peers.rank:
            self._here[parcel] = tensor
            return 0
        tensor = tensor.contiguous()
        self._sent.append((self._peers.send(tensor, target), tensor))
        return tensor.nbytes

    def ask_ahead(self, parcel: Parcel) -> None:
        """Begin to receive it, with what its sender makes before, and a few more."""
        if parcel not in self._places:
            return
        source, at = self._places[parcel]
        coming = self._coming[source]
        for wanted in coming[self._num_asked[source] : at + 1 + AHEAD]:
            # A gradient has the form of what it is the gradient of: the next stage's input.
            form = self._forms[wanted.stage + int(wanted.is_gradient), wanted.microbatch]
            buffer = form.empty(self._peers.device)
            self._asked[wanted] = self._peers.receive(buffer, source), buffer
            self._num_asked[source] += 1

    def is_here(self, parcel: Parcel) -> bool:
        """True for what comes from a stage of this rank."""
        return parcel in self._here

    def take(self, parcel: Parcel) -> torch.Tensor:
        """Wait until it has arrived."""
        if parcel in self._here:
            return self._here.pop(parcel)
        self.ask_ahead(parcel)
        work, buffer = self._asked.pop(parcel)
        work.wait()
        return buffer

    def settle(self) -> None:
        """At the end: all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        assert not self._asked, "somebody sent what nobody took"
