"""Where a step's time for observation goes: microseconds of each part, on the thread that trains.

    python benchmarks/observation_parts.py [--against SRC] [--rounds N] [--steps N] [--ranks N]
                                           [--batch N] [--out FILE.json] [job.key=value ...]

Ranks train the default job as `benchmarks/observation.py` does, with all that observes a step. Each
part is timed where it runs, in the step, with the caches as the step has left them; what a part
calls of another part counts for that one. `--against`: the `src` folder of another checkout, whose
ranks train in turns with those of this one, N rounds of each.

Prints of rank 0, for a step: the sum over the calls of a part of the lower quartile of each over
steps, and apart from them what the steps that check and measure weights add: of these there are
three in a hundred, so that few rounds say little of them. The timing itself is taken off, as it
costs around an empty function. Not in it: what C++ pays to call a hook or a kernel in Python, and
that the code of a part drives the step's out of caches.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NUM_WARM_UP = 20
INTERVAL = 100  # observe.invariants_every and observe.norms_every
# (module, class or "" for a function of the module, names, part)
PARTS = (
    ("core.phases", "_PhaseSpan", ("__enter__", "__exit__"), "phases"),
    (
        "core.phases",
        "PhaseTimer",
        ("__call__", "enter", "leave", "take", "take_communication"),
        "phases",
    ),
    ("core.black_box", "BlackBox", ("write",), "positions in the black box"),
    ("train.memory", "MemoryMeter", ("begin_phase",), "memory's peak by phase"),
    (
        "parallel.data_parallel.replicate",
        "BackwardCommunicationTimer",
        ("_record_ready_gradient", "start_before_backward", "stop_after_backward"),
        "last gradient of a backward",
    ),
    (
        "mesh.collective_recorder",
        "CollectiveRecorder",
        ("handle", "wait_for_work", "wait_for_tensor", "update"),
        "collectives",
    ),
    (
        "train.invariants",
        "RunInvariants",
        (
            "hold_own_loss",
            "count_batch_for_reduction",
            "remove_counts_from_flags",
            "build_corruption_flags",
            "digest_before_update",
            "finish_step",
        ),
        "invariants",
    ),
    (
        "train.block_norms",
        "BlockNormRecorder",
        ("request_norms", "finish_step"),
        "norms by block",
    ),
    ("train.step_tracer", "StepTracer", ("begin_step", "end_step", "look_for_request"), "trace"),
    ("train.memory", "MemoryMeter", ("read_rank_memory",), "record: memory of the rank"),
    ("train.step_recorder", "", ("read_run_and_delay_s",), "record: seconds without a processor"),
    (
        "core.process_stat",
        "ProcessorDelayReader",
        ("read_delay_s",),
        "record: seconds without a processor",
    ),
    ("observe.bus", "Bus", ("emit",), "record: event into the file"),
    ("train.step_recorder", "StepRecorder", ("record_last_step", "hold_step_facts"), "record"),
)


class PartTimer:
    """Nanoseconds of each call of each part since the last `take`, less those of other timed calls
    in it."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, int]] = []
        self._inside_ns = self._own_ns = self._around_ns = 0

    def time(
        self,
        part: str,
        function: Callable[..., Any],
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> Callable[..., Any]:
        """`function`, timed as a part of the step; of "": what training does inside a part."""

        def timed(*args: Any, **options: Any) -> Any:
            before, self._inside_ns = self._inside_ns, 0
            began = clock()
            try:
                return function(*args, **options)
            finally:
                spent = clock() - began
                self._calls.append((part, spent - self._inside_ns - self._own_ns))
                self._inside_ns = before + spent + self._around_ns

        return timed

    def calibrate(self) -> None:
        """Measure what timing costs, inside and around a call."""
        timed = self.time("", _do_nothing)
        own, around = [], []
        for _ in range(2000):
            began = time.perf_counter_ns()
            timed()
            spent = time.perf_counter_ns() - began
            own.append(self._calls[-1][1])
            around.append(spent - own[-1])
        self._own_ns, self._around_ns = int(statistics.median(own)), int(statistics.median(around))
        self.take()

    def take(self) -> dict[str, list[int]]:
        """Nanoseconds of the calls of each part, in order."""
        calls_of_part: defaultdict[str, list[int]] = defaultdict(list)
        for part, ns in self._calls:
            calls_of_part[part].append(ns)
        self._calls.clear()
        return calls_of_part


def _do_nothing() -> None: ...


def time_parts(timer: PartTimer) -> None:
    """Replace what the parts consist of by functions that are timed."""
    from importlib import import_module

    for module_name, class_name, names, part in PARTS:
        module = import_module(f"phalanx.{module_name}")
        owner = getattr(module, class_name, None) if class_name else module
        for name in names:
            # Another checkout may do without.
            if owner is not None and hasattr(owner, name):
                setattr(owner, name, timer.time(part, getattr(owner, name)))
    _time_training_inside_of_parts(timer)


def _time_training_inside_of_parts(timer: PartTimer) -> None:
    """What a recorded call passes on to is no observation: the call itself, and the waiting."""
    from phalanx.mesh.collective_recorder import CollectiveRecorder

    for name, at in (("handle", 3), ("wait_for_work", 2), ("wait_for_tensor", 2)):
        function = getattr(CollectiveRecorder, name)

        def pass_on(*args: Any, _function: Any = function, _at: int = at) -> Any:
            arguments = list(args)
            arguments[_at] = timer.time("", arguments[_at])
            return _function(*arguments)

        setattr(CollectiveRecorder, name, pass_on)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train with the checkout that this process has imported; the parts of rank 0."""
    import torch

    import observation
    from forked_ranks import measure_in_forked_ranks

    torch.set_num_threads(1)
    timer = PartTimer()

    def alternate(rank: int, args: Any, trainer: Any, _: Any) -> list[Any]:
        steps = []
        with trainer.observing():
            for _ in range(NUM_WARM_UP):
                trainer.take_observed_step()
            timer.calibrate()
            for _ in range(args.steps):
                began = time.perf_counter()
                trainer.take_observed_step()
                seconds = time.perf_counter() - began
                steps.append((trainer._trainer.state.step, seconds, timer.take()))
        return steps

    def keep(steps: list[Any], *_: Any) -> dict[str, Any]:
        return {"steps": steps}

    observation._alternate, observation._summarise = alternate, keep  # type: ignore[assignment]
    time_parts(timer)
    args.tensorboard = False
    return measure_in_forked_ranks(
        args.ranks, lambda rank, folder: observation._measure(rank, args, folder)
    )


def measure_in_turns(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Steps of this checkout, "after", and of the other one, "before", in turns."""
    own = Path(__file__).resolve().parents[1] / "src"
    sources = {"before": args.against, "after": own} if args.against else {"after": own}
    steps: dict[str, list[Any]] = {name: [] for name in sources}
    for turn in range(args.rounds):
        for name in sources if turn % 2 == 0 else reversed(sources):
            with tempfile.NamedTemporaryFile() as file:
                subprocess.run(
                    [sys.executable, __file__, "--raw", file.name, *_pass_on(args)],
                    env={**os.environ, "PYTHONPATH": str(sources[name])},
                    check=True,
                )
                steps[name] += json.loads(Path(file.name).read_text())["steps"]
        print(f"round {turn + 1} of {args.rounds}", flush=True)
    return steps


def _pass_on(args: argparse.Namespace) -> list[str]:
    options = ["--steps", str(args.steps), "--ranks", str(args.ranks), "--batch", str(args.batch)]
    return [*options, *args.overrides]


def summarise(steps: list[Any]) -> dict[str, tuple[float, float, int]]:
    """By part: microseconds of a usual step, what steps with checks and norms add by the step, and
    calls."""
    by_kind: defaultdict[int, list[Any]] = defaultdict(list)
    for number, _, calls in steps:
        # Norms are of step 1, 101, ...; what the next one brings of them is there after it.
        by_kind[min(number % INTERVAL, 3)].append(calls)
    table = {}
    for part in dict.fromkeys(part for *_, part in PARTS):
        us, num_calls = _sum_medians(by_kind[3], part)
        extra = 0.0
        for kind in (0, 1, 2):
            if by_kind[kind]:
                extra += (_sum_medians(by_kind[kind], part)[0] - us) / INTERVAL
        table[part] = us, extra, num_calls
    return table


def _sum_medians(steps: list[dict[str, list[int]]], part: str) -> tuple[float, int]:
    """The sum over the calls of a part in a step of each one's lower quartile over steps, µs, and
    their number: calls that lost their processor, or waited for memory that other programs use,
    count little."""
    num_calls = statistics.mode(len(step.get(part, ())) for step in steps)
    alike = [step[part] for step in steps if len(step.get(part, ())) == num_calls > 0]
    return sum(map(_find_lower_quartile, zip(*alike, strict=True))) / 1e3, num_calls


def _find_lower_quartile(values: Sequence[int]) -> float:
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=4)[0]


def print_tables(steps: dict[str, list[Any]]) -> None:
    """A line for each part, and their sum; µs of a step, and calls."""
    tables = {name: summarise(each) for name, each in steps.items()}
    print(f"{'µs of a step':<38}" + "".join(f"{name:>10}{'calls':>8}" for name in tables))
    for part in next(iter(tables.values())):
        line = f"{part:<38}"
        for table in tables.values():
            us, _, calls = table[part]
            line += f"{us:>10.1f}{calls:>8.0f}"
        print(line)
    sums = {name: sum(us for us, _, _ in t.values()) for name, t in tables.items()}
    print(f"{'all':<38}" + "".join(f"{each:>10.1f}{'':>8}" for each in sums.values()))
    print(
        f"{'checks and norms, by the step':<38}"
        + "".join(f"{sum(x for _, x, _ in t.values()):>10.1f}{'':>8}" for t in tables.values())
    )
    print(
        f"{'a step, ms':<38}"
        + "".join(
            f"{1e3 * statistics.median(s[1] for s in each):>10.1f}{'':>8}"
            for each in steps.values()
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--against", type=Path, help="`src` of another checkout")
    parser.add_argument("--rounds", type=int, default=1, help="of each checkout")
    parser.add_argument("--steps", type=int, default=300, help="of a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--raw", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="keys of the job")
    args = parser.parse_args()
    if args.raw:
        args.raw.write_text(json.dumps(measure(args)))
        return
    steps = measure_in_turns(args)
    if args.out:
        args.out.write_text(json.dumps(steps) + "\n")
    print_tables(steps)


if __name__ == "__main__":
    main()
