"""Messages of a pipeline, all ranks in one process: their order, and how long what was sent is
held."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from phalanx.parallel.pipeline.p2p import P2PQueue, TensorSpec
from phalanx.plan.pipeline.generate import generate_schedule
from phalanx.plan.pipeline.messages import input_of, output_of, plan_rank_messages
from phalanx.plan.pipeline.pipeline_plan import map_stages_to_ranks
from phalanx.plan.pipeline.schedule import Schedule
from phalanx.plan.pipeline.simulate import count_peak_in_flight

FORM = TensorSpec((2,), torch.float32)


@dataclass
class Message:
    tensor: torch.Tensor
    has_arrived: bool = False


@dataclass
class Ways:
    """What is on its way from rank to rank, in the order in which it was sent."""

    sent: dict[tuple[int, int], list[Message]] = field(default_factory=lambda: defaultdict(list))
    num_asked: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))


@dataclass
class Sent:
    message: Message

    def wait(self) -> None:
        assert self.message.has_arrived, (
            "a rank would wait for a send in the middle of its schedule"
        )


@dataclass
class Asked:
    ways: Ways
    way: tuple[int, int]
    place: int
    buffer: torch.Tensor

    def wait(self) -> None:
        message = self.ways.sent[self.way][self.place]
        self.buffer.copy_(message.tensor)
        message.has_arrived = True


@dataclass
class PipelineProcessGroups:
    rank: int
    ways: Ways
    device: str = "cpu"
    sent_bytes: int = 0

    def start_send(self, tensor: torch.Tensor, target: int) -> Any:
        message = Message(tensor.clone())
        self.ways.sent[self.rank, target].append(message)
        return Sent(message)

    def start_receive(self, tensor: torch.Tensor, source: int) -> Any:
        way = (source, self.rank)
        self.ways.num_asked[way] += 1
        return Asked(self.ways, way, self.ways.num_asked[way] - 1, tensor)


def most_sent(schedule: Schedule, in_one_queue: bool) -> list[int]:
    """By rank: how many messages it held at once, at most.

    All ranks do their rows as far as they can, in turn.
    """
    ways, last = Ways(), schedule.num_stages - 1
    forms = {(s, m): FORM for s in range(1, last + 1) for m in range(schedule.num_microbatches)}
    ranks = range(schedule.num_ranks)
    messages = [plan_rank_messages(schedule, r, in_one_queue=in_one_queue) for r in ranks]
    posts = [
        P2PQueue(PipelineProcessGroups(r, ways), messages[r], schedule.rank_of_stage, forms)
        for r in ranks
    ]  # type: ignore[arg-type]
    done, most, made_already = [0] * schedule.num_ranks, [0] * schedule.num_ranks, set()
    while any(done[r] < len(schedule.actions[r]) for r in ranks):
        before = list(done)
        for r in ranks:
            while done[r] < len(schedule.actions[r]):
                action = schedule.actions[r][done[r]]
                needed, made = (
                    input_of(action, schedule.num_stages),
                    output_of(action, schedule.num_stages),
                )
                if needed is not None and needed not in made_already:
                    break
                posts[r].start_receives_for_action(done[r])
                if needed is not None:
                    number = float(needed.stage * 1000 + needed.microbatch)
                    assert posts[r].receive(needed)[0] == (
                        -number if needed.is_gradient else number
                    )
                if made is not None:
                    number = float(made.stage * 1000 + made.microbatch)
                    posts[r].send(made, torch.full((2,), -number if made.is_gradient else number))
                    made_already.add(made)
                most[r], done[r] = max(most[r], posts[r].num_unconfirmed_sends), done[r] + 1
        assert done != before, "a rank waits for ever"
    for post in posts:
        post.wait_for_sends()
    return most


CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved-zero-bubble", 2),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


@pytest.mark.parametrize("in_one_queue", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("name", "per_rank"), CASES)
def test_what_was_sent_is_held_no_longer_than_microbatches_are(
    name: str, per_rank: int, num_ranks: int, in_one_queue: bool
) -> None:
    few, many = (
        generate_schedule(name, num_ranks, count, per_rank)
        for count in (4 * num_ranks, 16 * num_ranks)
    )
    assert many.rank_of_stage == map_stages_to_ranks(name, num_ranks, per_rank)
    held = count_peak_in_flight(many).per_rank
    for rank, count in enumerate(most_sent(many, in_one_queue)):
        assert count <= 2 * held[rank] + 2, (rank, count)
    if name != "gpipe":
        assert most_sent(many, in_one_queue) == most_sent(few, in_one_queue), (
            "however many microbatches there are"
        )
