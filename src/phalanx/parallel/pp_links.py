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

    @property
    def maker(self) -> int:
        """The stage it comes from."""
        return self.stage + (1 if self.is_gradient else -1)


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


def needed_by(action: Action, num_stages: int) -> Parcel | None:
    """What an action needs of another stage: F of the one before, B and I of the next one."""
    if action.kind == "F" and action.stage > 0:
        return Parcel(action.stage, action.microbatch, False)
    if action.kind in ("B", "I") and action.stage + 1 < num_stages:
        return Parcel(action.stage, action.microbatch, True)
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
        self._made_at: dict[Parcel, int] = {}  # where in its sender's row
        self._needed_at: dict[Parcel, int] = {}  # where in the row of the rank that it goes to
        for other, row in enumerate(rows):
            for place, action in enumerate(row) if other != peers.rank else ():
                made, needed = made_by(action, len(rank_of_stage)), needed_by(action, len(rank_of_stage))
                if made is not None and rank_of_stage[made.stage] == peers.rank:
                    self._coming.setdefault(other, []).append(made)
                    self._made_at[made] = place
                if needed is not None and rank_of_stage[needed.maker] == peers.rank:
                    self._needed_at[needed] = place
        self._places = {parcel: (source, at) for source, all_ in self._coming.items() for at, parcel in enumerate(all_)}
        self._num_asked = dict.fromkeys(self._coming, 0)
        self._asked: dict[Parcel, tuple[Any, torch.Tensor]] = {}
        self._here: dict[Parcel, torch.Tensor] = {}
        self._sent: dict[int, list[tuple[Parcel, Any, torch.Tensor]]] = {}

    def hand_on(self, parcel: Parcel, tensor: torch.Tensor) -> int:
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
        source, _ = self._places[parcel]
        self._let_go(source, self._made_at[parcel])
        return buffer

    def _let_go(self, target: int, place: int) -> None:
        """`target` has made something at `place` of its row: what it needed until then has arrived. Without this a
        step would hold all that it ever sent, however few microbatches are in flight."""
        left = []
        for parcel, work, tensor in self._sent.get(target, ()):
            if self._needed_at[parcel] <= place:
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
