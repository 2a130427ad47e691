"""Train from Python, in a script or a notebook, with the same supervision as `phalanx train`.

python examples/train_from_python.py runs/from-python

Ranks are processes of their own: they are started again after a crash, and your process never
imports torch for them.
"""

from __future__ import annotations

import sys

import phalanx

SMALL = ["model.num_layers=2", "model.dim=64", "model.num_heads=2", "data.seq_len=64"]


def main(run_dir: str, overrides: list[str]) -> phalanx.RunResult:
    job = phalanx.load_job(None, [*SMALL, "train.steps=30", f"run.dir={run_dir}", *overrides])
    first = phalanx.train_job(job)
    if first.status != "finished":
        sys.exit(f"{first.status}: {first.error}")
    # A run goes on from its newest checkpoint, here for twice as many steps.
    longer = phalanx.resume_job(first.run_dir, ["train.steps=60"], quiet=True)
    loss, before = longer.metrics["loss"], first.metrics["loss"]
    print(
        f"{longer.plan.layout}: step {longer.last_step}, loss {before:.3f} -> {loss:.3f},"
        f" {longer.newest_checkpoint}"
    )
    return longer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/from-python", sys.argv[2:])
