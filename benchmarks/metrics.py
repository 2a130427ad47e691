"""What serving a run's metrics costs: reading events, building a snapshot, answering a scrape.

    python benchmarks/metrics.py [--ranks N] [--steps N] [--out FILE.json]

Writes events of so many ranks and steps with phalanx's own writer, follows them as the observer of
a run does, and scrapes its endpoint. Prints processor microseconds for each event that is read,
milliseconds for a snapshot and for a scrape, its bytes and the number of its series. No rank waits
for any of it: what it takes is time of another process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from phalanx.observe.bus import build_event_file_path
from phalanx.observe.event_file import EventFile
from phalanx.observe.events import RunStarted, StepFinished, wrap_event_in_envelope
from phalanx.report.prometheus.http_server import open_metrics_server
from phalanx.run.observer.follower import RunFollower

NUM_SCRAPES = 9
PHASES_S = {
    "data": 0.01,
    "forward": 0.3,
    "backward": 0.5,
    "collective": 0.15,
    "optimizer": 0.03,
    "ckpt_stage": 0.001,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.ranks, args.steps)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def measure(run_dir: Path, num_ranks: int, num_steps: int) -> dict[str, object]:
    """The costs of following a run of `num_ranks` ranks and `num_steps` steps."""
    num_events = write_events(run_dir, num_ranks, num_steps)
    follower = RunFollower(run_dir)
    began_s = time.process_time()
    follower.read_all()
    read_s = time.process_time() - began_s
    began_s = time.process_time()
    follower.read_news()
    idle_s = time.process_time() - began_s
    began_s = time.process_time()
    snapshot = follower.build_snapshot()
    snapshot_s = time.process_time() - began_s
    server = open_metrics_server("127.0.0.1", 0)
    server.start()
    server.publish(snapshot)
    scrapes_s = []
    for _ in range(NUM_SCRAPES):
        began_s = time.perf_counter()
        with urllib.request.urlopen(server.url) as answer:
            body = answer.read()
        scrapes_s.append(time.perf_counter() - began_s)
    server.close()
    return {
        "ranks": num_ranks,
        "steps": num_steps,
        "read_us_per_event": round(read_s / num_events * 1e6, 1),
        "read_without_news_ms": round(idle_s * 1e3, 2),
        "snapshot_ms": round(snapshot_s * 1e3, 2),
        "scrape_ms": round(statistics.median(scrapes_s) * 1e3, 1),
        "scrape_kib": round(len(body) / 1024),
        "series": sum(1 for line in body.splitlines() if not line.startswith(b"#")),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def write_events(run_dir: Path, num_ranks: int, num_steps: int) -> int:
    """Write the events of one attempt; returns how many."""
    start = RunStarted("big", "digest", num_ranks, 0, num_steps, "cuda:0", {"dp_shard": num_ranks})
    for rank in range(num_ranks):
        file = EventFile(build_event_file_path(run_dir, rank, 0))
        told = [start] if rank == 0 else []
        told += [build_step(number) for number in range(1, num_steps + 1)]
        for seq, event in enumerate(told):
            file.append(wrap_event_in_envelope(event, rank=rank, attempt=0, seq=seq).to_line())
        file.close()
    return num_ranks * num_steps + 1


def build_step(number: int) -> StepFinished:
    return StepFinished(
        step=number,
        loss=2.5,
        num_targets=4_000_000,
        tokens_seen=4_000_000 * number,
        learning_rate=3e-4,
        grad_norm=0.4,
        step_s=1.0,
        tokens_per_s=4e6,
        phases_s=PHASES_S,
        unaccounted_s=0.009,
        rss_bytes=2**34,
        sent_bytes=2**32,
        peak_bytes=2**36,
        reserved_bytes=2**36,
        sent_tp_bytes=2**31,
        cpu_s=0.7,
    )


if __name__ == "__main__":
    main()
