"""How often the steps that are done again name the wrong one of two replicas, by the bit that
flipped: two replicas of a small model in one process, which average their gradients as ranks do.

    python benchmarks/replica_replay.py --flips 320 [--of weights|exp_avg|exp_avg_sq]
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from phalanx.core.roll_back import UnequalSteps
from phalanx.mesh.bit_digest import compute_bit_digest
from phalanx.train.step_replay import MIN_LOSS_CHANGE, digest_rank_weights, find_wrong_rank

VOCAB, DIM, SEQ_LEN, BATCH = 64, 32, 32, 4
EQUAL_STEP, CHECK_STEP = 20, 25


@dataclass(frozen=True)
class Flip:
    """`element` of parameter `place` of `rank`, or of its state `slot`, gets another `bit` before
    `step`."""

    rank: int
    step: int
    place: int
    element: int
    bit: int
    slot: str = ""


class Block(nn.Module):
    """A decoder of one block."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab_size, DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, vocab_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        q, k, v = (each[:, None] for each in self.qkv(self.norm(hidden)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + attended[:, 0]
        hidden = hidden + self.down(functional.silu(self.up(self.norm(hidden))))
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


class Replicas:
    """Two replicas and their optimizers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = Block()
        self.models = [model, copy.deepcopy(model)]
        self.optimizers = [
            torch.optim.AdamW(each.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
            for each in self.models
        ]

    def train(self, first_step: int, last_step: int, flip: Flip | None = None) -> UnequalSteps:
        """Do these steps, with the bit that flips on the way."""
        losses: tuple[list[float], list[float]] = ([], [])
        for step in range(first_step, last_step + 1):
            if flip is not None and step == flip.step:
                self._flip(flip)
            for rank, own in enumerate(losses):
                own.append(self._compute_gradients(step, rank))
            self._average_and_update()
        digests = np.array([self._digest_replica(rank) for rank in range(2)])
        first, second = losses
        return UnequalSteps(
            first_step,
            last_step,
            (tuple(first), tuple(second)),
            tuple(digest_rank_weights(digests)),
        )

    def _digest_replica(self, rank: int) -> list[int]:
        tensors = list(self.models[rank].parameters())
        for parameter in self.models[rank].parameters():
            tensors += self.optimizers[rank].state[parameter].values()
        return [int(compute_bit_digest(tensor)) for tensor in tensors]

    def _flip(self, flip: Flip) -> None:
        tensor = list(self.models[flip.rank].parameters())[flip.place]
        if flip.slot:
            tensor = self.optimizers[flip.rank].state[tensor][flip.slot]
        tensor.detach().numpy().reshape(-1).view("uint32")[flip.element] ^= 1 << flip.bit

    def _compute_gradients(self, step: int, rank: int) -> float:
        tokens = make_batch(step, rank)
        self.optimizers[rank].zero_grad()
        logits = self.models[rank](tokens[:, :-1]).flatten(0, 1)
        loss = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
        (loss / (2 * BATCH * SEQ_LEN)).backward()
        return float(loss.detach())

    def _average_and_update(self) -> None:
        for own, other in zip(*(each.parameters() for each in self.models), strict=True):
            assert own.grad is not None
            assert other.grad is not None
            total = own.grad + other.grad
            own.grad.copy_(total)
            other.grad.copy_(total)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def make_batch(step: int, rank: int) -> torch.Tensor:
    """Tokens that follow from the ones before and a little chance: some are rare."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    columns = [torch.randint(0, 20, (BATCH, 1), generator=generator)]
    for _ in range(SEQ_LEN):
        chance = torch.randint(0, 3, (BATCH, 1), generator=generator)
        columns.append((7 * columns[-1] + 5 * chance + 1) % 60)
    return torch.cat(columns, 1)


def judge_flip(equal: Replicas, truth: UnequalSteps, flip: Flip, min_loss_change: float) -> str:
    """What the steps done again make of the flip."""
    before = copy.deepcopy(equal).train(EQUAL_STEP + 1, CHECK_STEP, flip)
    if not np.isfinite(before.losses).all():
        return "not finite"
    if before.digests[0] == before.digests[1]:
        return "equal again"
    rank, _ = find_wrong_rank(before, truth, losses_tell=True, min_loss_change=min_loss_change)
    if rank < 0:
        return "none"
    return "right" if rank == flip.rank else "wrong"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=320)
    parser.add_argument("--of", choices=("weights", "exp_avg", "exp_avg_sq"), default="weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-change", type=float, default=MIN_LOSS_CHANGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    equal = Replicas()
    equal.train(1, EQUAL_STEP)
    truth = copy.deepcopy(equal).train(EQUAL_STEP + 1, CHECK_STEP)
    sizes = [parameter.numel() for parameter in equal.models[0].parameters()]
    chance = np.random.default_rng(options.seed)
    counts: dict[str, Counter[str]] = {"0 to 11": Counter(), "12 to 19": Counter()}
    counts |= {"20 to 29 and 31": Counter(), "30": Counter()}
    for bit in itertools.islice(itertools.cycle(range(32)), options.flips):
        place = int(chance.integers(len(sizes)))
        step = int(chance.integers(EQUAL_STEP + 1, CHECK_STEP + 1))
        element = int(chance.integers(sizes[place]))
        slot = "" if options.of == "weights" else options.of
        flip = Flip(int(chance.integers(2)), step, place, element, bit, slot)
        counts[name_bits(bit)][judge_flip(equal, truth, flip, options.min_change)] += 1
    for bits, outcomes in counts.items():
        print(f"bits {bits}: " + ", ".join(f"{n} {name}" for name, n in outcomes.most_common()))


def name_bits(bit: int) -> str:
    if bit == 30:
        return "30"
    if bit < 12:
        return "0 to 11"
    return "12 to 19" if bit < 20 else "20 to 29 and 31"


if __name__ == "__main__":
    main()
