"""How far a trained run is from the least-squares solution: python compare.py RUN"""

from __future__ import annotations

import sys

import numpy as np
from regression import build, table

import phalanx


def main(run_dir: str) -> float:
    model = build()
    phalanx.load_weights(model, run_dir)
    found = np.append(model.weight.detach().numpy(), model.bias.detach().numpy())
    x, y = table("train")
    wanted = np.linalg.lstsq(
        np.hstack([x, np.ones_like(y)]).astype(np.float64), y.astype(np.float64)
    )[0].ravel()
    distance = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    print("trained       ", np.round(found, 4))
    print("least squares ", np.round(wanted, 4))
    print(f"relative distance {distance:.1e}")
    return distance


if __name__ == "__main__":
    main(sys.argv[1])
