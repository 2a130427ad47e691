"""`write_run`: the event files of ranks that go in step, as the real writer's envelopes make them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from phalanx.observe.events import Event, StepFinished, wrap_event_in_envelope

COMPUTE_S, TRANSFER_S = 0.100, 0.004


def write_run(
    run_dir: Path,
    delays: dict[int, dict[str, float]],
    *,
    num_ranks: int = 4,
    num_steps: int = 40,
    transfer_s: float = TRANSFER_S,
    cpu_share: float = 1.0,
    cpu_share_of: dict[int, float] | None = None,
    communication: Any = None,
    delays_of_step: Any = None,
    more: tuple[Event, ...] = (),
) -> Path:
    """Ranks in step: each waits in the collective until the last has come; `delays` are seconds a
    rank has more of a phase (rank -1: every rank)."""
    noise = random.Random(5)
    (run_dir / "events").mkdir(parents=True)
    lines: dict[int, list[str]] = {rank: [] for rank in range(num_ranks)}
    for step in range(1, num_steps + 1):
        own: dict[int, dict[str, float]] = {}
        for rank in range(num_ranks):
            phases = {"data": 0.0005, "forward": COMPUTE_S / 3, "backward": COMPUTE_S * 2 / 3}
            phases["backward"] *= noise.uniform(0.98, 1.02)
            for key in (rank, -1):
                for phase, seconds in delays.get(key, {}).items():
                    phases[phase] = phases.get(phase, 0.0) + seconds
            if delays_of_step is not None:
                for phase, seconds in delays_of_step(rank, step).items():
                    phases[phase] = phases.get(phase, 0.0) + seconds
            own[rank] = phases
        latest_s = max(sum(phases.values()) for phases in own.values())
        for rank, phases in own.items():
            own_s = sum(phases.values())
            unaccounted_s = phases.pop("unaccounted", 0.0)
            collective_s = latest_s - own_s + transfer_s
            event = StepFinished(
                step=step,
                loss=2.0,
                num_targets=2048,
                tokens_seen=2048 * step,
                learning_rate=1e-3,
                grad_norm=1.0,
                step_s=latest_s + transfer_s,
                tokens_per_s=2048 / (latest_s + transfer_s),
                phases_s={**phases, "collective": collective_s},
                unaccounted_s=unaccounted_s,
                rss_bytes=1,
                sent_bytes=1000,
                cpu_s=own_s * (cpu_share_of or {}).get(rank, cpu_share),
                communication_s=communication(collective_s) if communication else {},
            )
            lines[rank].append(
                wrap_event_in_envelope(event, rank=rank, attempt=0, seq=step).to_line()
            )
    for number, event in enumerate(more):
        sealed = wrap_event_in_envelope(event, rank=0, attempt=0, seq=num_steps + number + 1)
        lines[0].append(sealed.to_line())
    for rank, of_rank in lines.items():
        path = run_dir / "events" / f"rank-{rank:04}-attempt-00.jsonl"
        path.write_text("\n".join(of_rank) + "\n")
    return run_dir
