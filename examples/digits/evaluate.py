"""How many of the held-out digits a trained run gets right: python evaluate.py RUN"""

from __future__ import annotations

import sys

import torch
from digits import build, dataset

import phalanx


@torch.no_grad()
def main(run_dir: str) -> float:
    model = build()
    step = phalanx.load_weights(model, run_dir)
    model.eval()  # BatchNorm now uses the running statistics, which are those of all ranks
    held_out = dataset("held_out")
    images, labels = torch.from_numpy(held_out.images), torch.from_numpy(held_out.labels)
    accuracy = (model(images).argmax(dim=1) == labels).double().mean().item()
    print(f"step {step}: {accuracy:.1%} of {len(labels)} held-out digits are right")
    return accuracy


if __name__ == "__main__":
    main(sys.argv[1])
