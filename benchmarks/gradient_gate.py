"""What a gate on each rank's own gradients could see of a flipped bit: ranks train a small decoder
on the source of Python's standard library, and single elements of their gradients flip on the side,
before the reduction.

    python benchmarks/gradient_gate.py --steps 600

A gate compares the logarithm of a number of this rank's gradients with the median of its last 128
steps, in deviations (1.4826 times the median of absolute deviations). The numbers: the norm of all
gradients, and of each tensor the norm and the largest element. Prints for each gate the largest
deviation without a flip, the false alarms at 6 and 10 deviations, and how many flips exceed it, by
bit and by what the flip does to the reduced gradient.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from replica_replay import Block

NUM_PAST_STEPS, NUM_RANKS, SEQ_LEN, BATCH = 128, 2, 64, 4
VOCAB = 256
BITS = range(23, 30)
GATES = ("norm of all", "norms of tensors", "largest of tensors")


@dataclass(frozen=True)
class Flip:
    """A bit of an element of tensor `place` of `rank`. `change`: of the reduced gradient, relative
    to its norm. `norm_of_all`, `norm`, `largest`: with the flip."""

    step: int
    rank: int
    place: int
    bit: int
    change: float
    norm_of_all: float
    norm: float
    largest: float


class Deviations:
    """Robust deviations of the logarithms of `values` [steps, numbers] from their own past."""

    def __init__(self, values: NDArray[np.float64]) -> None:
        logs = np.log(values + 1e-30)
        windows = np.lib.stride_tricks.sliding_window_view(logs[:-1], NUM_PAST_STEPS, axis=0)
        self._median = np.median(windows, axis=-1)
        self._deviation = 1.4826 * np.median(np.abs(windows - self._median[..., None]), axis=-1)
        self.clean = (logs[NUM_PAST_STEPS:] - self._median) / self._deviation

    def deviation_of(self, step: int, place: int, value: float) -> float:
        row = step - NUM_PAST_STEPS
        distance = math.log(value + 1e-30) - self._median[row, place]
        return float(distance / self._deviation[row, place])


def read_tokens() -> NDArray[np.uint8]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)


def flip_elements(
    step: int, gradients: list[list[NDArray[np.float32]]], chance: np.random.Generator, count: int
) -> list[Flip]:
    """`count` flips of the gradients [ranks][tensors] of a step, each alone."""
    sizes = np.cumsum([len(each) for each in gradients[0]])
    squares = [
        [float(np.square(each, dtype=np.float64).sum()) for each in own] for own in gradients
    ]
    reduced = math.sqrt(
        sum(
            float(np.square(sum(each), dtype=np.float64).sum())
            for each in zip(*gradients, strict=True)
        )
    )
    flips = []
    for _ in range(count):
        rank, bit = int(chance.integers(NUM_RANKS)), int(chance.choice(BITS))
        place = int(np.searchsorted(sizes, chance.integers(sizes[-1]), side="right"))
        tensor = gradients[rank][place]
        index = int(chance.integers(len(tensor)))
        old = tensor[index]
        new = (np.array([old]).view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)[0]
        added = float(new) ** 2 - float(old) ** 2
        others = float(np.abs(np.delete(tensor, index)).max(initial=0.0))
        flips.append(
            Flip(
                step,
                rank,
                place,
                bit,
                abs(float(new) - float(old)) / reduced,
                math.sqrt(max(sum(squares[rank]) + added, 0.0)),
                math.sqrt(max(squares[rank][place] + added, 0.0)),
                max(others, abs(float(new))),
            )
        )
    return flips


def train(num_steps: int, flips_per_step: int, seed: int) -> tuple[NDArray[np.float64], list[Flip]]:
    """([steps, ranks, 1 + 2 x tensors]: norm of all, norms and largest of tensors; flips)."""
    tokens, chance = read_tokens(), np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = Block(VOCAB)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    rows, flips = [], []
    for step in range(num_steps):
        # One process computes what each rank would, one after another.
        gradients = [compute_gradients(model, draw_batch(tokens, chance)) for _ in range(NUM_RANKS)]
        rows.append([measure_gradients(own) for own in gradients])
        if step >= NUM_PAST_STEPS:
            flips += flip_elements(step, gradients, chance, flips_per_step)
        for parameter, *own in zip(model.parameters(), *gradients, strict=True):
            total = sum(own) / (BATCH * SEQ_LEN)
            parameter.grad = torch.from_numpy(total).reshape(parameter.shape)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return np.array(rows), flips


def compute_gradients(model: Block, tokens: torch.Tensor) -> list[NDArray[np.float32]]:
    """As ranks reduce them: of the sum of the losses, divided by the number of ranks."""
    model.zero_grad()
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
    (loss / NUM_RANKS).backward()
    return [each.grad.numpy().reshape(-1).copy() for each in model.parameters()]


def draw_batch(tokens: NDArray[np.uint8], chance: np.random.Generator) -> torch.Tensor:
    starts = chance.integers(len(tokens) - SEQ_LEN - 1, size=BATCH)
    rows = np.stack([tokens[start : start + SEQ_LEN + 1] for start in starts])
    return torch.from_numpy(rows.astype(np.int64))


def measure_gradients(own: list[NDArray[np.float32]]) -> list[float]:
    """Norm of all, norms of tensors, largest elements of tensors."""
    norms = [float(np.linalg.norm(each)) for each in own]
    return [float(np.linalg.norm(norms)), *norms, *(float(np.abs(each).max()) for each in own)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--flips", type=int, default=20, help="per step")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, flips = train(args.steps, args.flips, args.seed)
    num_tensors = (rows.shape[2] - 1) // 2
    deviations = [Deviations(rows[:, rank]) for rank in range(NUM_RANKS)]
    print(f"{len(flips)} flips in {args.steps - NUM_PAST_STEPS} steps of {NUM_RANKS} ranks")
    print_flips("all flips", flips, [True] * len(flips))
    for number, gate in enumerate(GATES):
        columns = (
            slice(0, 1)
            if number == 0
            else slice(1 + (number - 1) * num_tensors, 1 + number * num_tensors)
        )
        clean = np.stack([each.clean[:, columns] for each in deviations])
        highest = float(clean.max())
        alarms = {k: int((clean.max(axis=2) > k).sum()) for k in (6, 10)}
        num_steps = clean.shape[0] * clean.shape[1]
        print(f"\n{gate}: at most {highest:.1f} deviations without a flip; false alarms in")
        print(f"{num_steps} steps of a rank: {alarms[6]} at 6 deviations, {alarms[10]} at 10")
        for threshold in (6.0, highest):
            seen = [
                deviations[flip.rank].deviation_of(
                    flip.step,
                    0 if number == 0 else columns.start + flip.place,
                    (flip.norm_of_all, flip.norm, flip.largest)[number],
                )
                > threshold
                for flip in flips
            ]
            print_flips(f"above {threshold:.1f}", flips, seen)


def print_flips(title: str, flips: list[Flip], seen: list[bool]) -> None:
    """How many of the flips are seen, by bit and by what they change."""
    by_bit: dict[int, list[bool]] = defaultdict(list)
    by_change: dict[str, list[bool]] = defaultdict(list)
    for flip, is_seen in zip(flips, seen, strict=True):
        by_bit[flip.bit].append(is_seen)
        name = "< 0.1 %" if flip.change < 1e-3 else "< 1 %" if flip.change < 1e-2 else "< 10 %"
        by_change[name if flip.change < 0.1 else ">= 10 %"].append(is_seen)
    print(f"  {title}: {sum(seen)} of {len(seen)}")
    bits = (f"{bit}: {sum(by_bit[bit])}/{len(by_bit[bit])}" for bit in sorted(by_bit))
    print(f"    by bit {', '.join(bits)}")
    changes = (f"{name}: {sum(each)}/{len(each)}" for name, each in sorted(by_change.items()))
    print(f"    by change of the reduced gradient {', '.join(changes)}")


if __name__ == "__main__":
    main()
