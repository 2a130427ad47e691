"""What a step pays for being observed: seconds of `Bus.emit` per event with 0 to 3 sinks.

    python benchmarks/observe.py [--events N] [--repeats N]

Prints microseconds per event: the median over repeats of the mean, and the slowest single call.
`paced` waits between events as a training step would, so that sinks keep up; `burst` does not, and
sinks lose what their queues cannot hold.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from phalanx.observe.bus import Bus, OpenSink
from phalanx.observe.events import Envelope, StepFinished
from phalanx.observe.sinks.tensorboard import open_sink

STEP = StepFinished(
    7,
    2.5,
    4096,
    28672,
    1e-3,
    0.5,
    0.1,
    40960.0,
    {"data": 0.001, "forward": 0.03, "backward": 0.06},
    0.009,
    2**30,
)
PACE_S = 0.002  # a fast step


class Ignoring:
    """The least that a sink can do: what is left is the price of its queue and thread."""

    def write(self, envelope: Envelope) -> None:
        pass

    def close(self) -> None:
        pass


def measure(
    sinks: list[tuple[str, OpenSink]], run_dir: Path | None, num_events: int, pace_s: float
) -> list[float]:
    """Seconds of each call."""
    bus = Bus(rank=0, run_dir=run_dir, sinks=sinks)
    seconds = []
    for _ in range(num_events):
        began = time.perf_counter()
        bus.emit(STEP)
        seconds.append(time.perf_counter() - began)
        if pace_s:
            time.sleep(pace_s)
    bus.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{'sinks':<22}{'pace':<8}{'µs/event':>10}{'slowest':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, has_file, count) in enumerate(
            [("no file, no sinks", False, 0)]
            + [(f"file + {count} idle", True, count) for count in range(4)]
        ):
            for pace, pace_s in (("paced", PACE_S), ("burst", 0.0)):
                run_dir = Path(folder) / f"{number}-{pace}" if has_file else None
                runs = [
                    measure(_idle(count), run_dir, args.events, pace_s) for _ in range(args.repeats)
                ]
                _say(name, pace, runs)
        for pace, pace_s in (("paced", PACE_S), ("burst", 0.0)):
            runs = []
            for repeat in range(args.repeats):
                run_dir = Path(folder) / f"tensorboard-{pace}-{repeat}"
                run_dir.mkdir()
                sinks: list[tuple[str, OpenSink]] = [
                    ("tensorboard", lambda run_dir=run_dir: open_sink(run_dir))
                ]
                runs.append(measure(sinks, run_dir, args.events, pace_s))
            _say("file + tensorboard", pace, runs)


def _idle(count: int) -> list[tuple[str, OpenSink]]:
    return [(f"idle-{index}", Ignoring) for index in range(count)]


def _say(name: str, pace: str, runs: list[list[float]]) -> None:
    mean = statistics.median(statistics.mean(run) for run in runs)
    print(f"{name:<22}{pace:<8}{mean * 1e6:>10.1f}{max(map(max, runs)) * 1e6:>10.1f}", flush=True)


if __name__ == "__main__":
    main()
