"""Predicted step times beside measured ones on this machine: `python benchmarks/planner_truth.py
run --rows 60 --seed 1 --to FILE.jsonl [--profile PROFILE.json]`, then `... page --from FILE.jsonl
--to docs/planner-truth.md`.

Configurations of every class are drawn from the seed before anything runs or is predicted. Each is
a run of `phalanx train` of a few steps; rounds go over all configurations in turn (a disturbance
hits no configuration alone), three by default. Measured are, without the first steps, the median
over steps of the slowest rank's seconds on the wall, and of the ranks' processor seconds. Predicted
is what `phalanx plan` says with the profile of `phalanx bench all`. What was run is not run
again: a stopped campaign goes on with the same command, and more rounds or rows can be added.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

STEPS, WARMUP = 9, 3
TIMEOUT_S = 900
FIRST_IN_LINE_S = 8.0
# From this share of the machine on, the wall tells whose turn it was.
BUSY = 0.85
COMMON = (
    f"train.steps={STEPS}",
    "train.sample_tokens=0",
    "eval.tokens=256",
    "observe.sinks=[]",
    "optim.warmup_steps=1",
    "optim.lr=1e-4",
)
CLASSES: dict[str, tuple[str, ...]] = {
    "ddp": ("parallel.ranks=2",),
    "zero3": ("parallel.dp_shard=2", "parallel.zero_stage=3"),
    "tp": ("parallel.tp=2", "parallel.ranks=2", "parallel.sequence_parallel=false"),
    "pp 1f1b": ("parallel.pp=2", "parallel.ranks=2", "parallel.schedule=1f1b"),
    "bf16": ("parallel.ranks=2", "precision.compute=bf16"),
    "hugging face": ("parallel.ranks=2",),
    "experts": ("parallel.ranks=2",),
    "recompute full": ("parallel.ranks=2", "train.recompute=full"),
    "cp ring": ("parallel.cp=2", "parallel.ranks=2"),
    "own": ("parallel.ranks=2",),
    "vit": ("parallel.ranks=2",),
    "zero1": ("parallel.dp_shard=2", "parallel.zero_stage=1"),
    "ep": ("parallel.ep=2", "parallel.dp_shard=2", "parallel.ranks=2"),
    "compile": ("parallel.ranks=2", "train.compile=true"),
    "pp gpipe": ("parallel.pp=2", "parallel.ranks=2", "parallel.schedule=gpipe"),
    "sp": ("parallel.tp=2", "parallel.ranks=2", "parallel.sequence_parallel=true"),
    "zero2 bf16": ("parallel.dp_shard=2", "parallel.zero_stage=2", "precision.compute=bf16"),
    "one rank": ("parallel.ranks=1",),
    "recompute selective": ("parallel.ranks=2", "train.recompute=selective"),
    "cp ulysses": ("parallel.cp=2", "parallel.ranks=2", "parallel.cp_attention=ulysses"),
    "pp zb-v": ("parallel.pp=2", "parallel.ranks=2", "parallel.schedule=zb-v"),
    "hsdp": ("parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.ranks=4"),
    "tp bf16": ("parallel.tp=2", "parallel.ranks=2", "precision.compute=bf16"),
    "hf zero3": ("parallel.dp_shard=2", "parallel.zero_stage=3"),
}


@dataclass(frozen=True)
class TruthCase:
    """A configuration: its class, and the overrides of its job. FOLDER in them stands for the
    folder of the run, with `config` in it as config.json."""

    number: int
    name: str
    overrides: tuple[str, ...]
    config: str = ""


def draw_cases(seed: int, rows: int) -> list[TruthCase]:
    """`rows` configurations, the classes in turn; nothing of them depends on a result."""
    rng = random.Random(seed)
    names = list(CLASSES)
    return [_draw_case(rng, number, names[number % len(names)]) for number in range(rows)]


def _draw_case(rng: random.Random, number: int, name: str) -> TruthCase:
    dim = rng.choice((128, 192, 256, 384))
    layers, heads = rng.choice((2, 4, 6)), dim // rng.choice((32, 64))
    vocab, length = rng.choice((512, 4096)), rng.choice((128, 256, 512))
    # Some 1,000 to 4,000 tokens a step: tenths of a second on one core.
    micro = max(1, rng.choice((512, 1024, 2048)) // length)
    microbatches = rng.choice((1, 2))
    if name.startswith("pp"):
        layers, microbatches, micro = rng.choice((4, 6)), rng.choice((2, 4)), max(1, micro // 2)
    readers = 2
    if name.startswith(("tp", "sp", "pp", "cp")) or name == "one rank":
        readers = 1
    elif name == "hsdp":
        readers = 4
    batch = [
        f"data.seq_len={length}",
        f"train.micro_batch_size={micro}",
        f"train.global_batch_size={micro * microbatches * readers}",
    ]
    model = [
        f"model.dim={dim}",
        f"model.num_layers={layers}",
        f"model.num_heads={heads}",
        f"model.vocab_size={vocab}",
    ]
    config = ""
    if name in ("hugging face", "hf zero3"):
        config, model = _draw_config(rng, dim, layers, heads, vocab), []
        model = ["model.kind=hf:FOLDER/config.json", "data.tokenizer=bytes"]
    elif name == "own":
        args = f"vocab={vocab}, dim={dim}, num_layers={layers}"
        model = ["model.kind=planner_truth_models:build_mixer", f"model.args={{{args}}}"]
    elif name == "vit":
        size = rng.choice((64, 96))
        model = [*model[:3], "model.preset=small-vit", f"model.image_size={size}"]
        model += ["model.patch_size=8", "model.num_classes=10", f"data.args={{size={size}}}"]
        model += ["data.source=planner_truth_models:images"]
        batch = batch[1:]
    elif name in ("experts", "ep"):
        experts = rng.choice((4, 8))
        model += ["model.preset=small-mixtral", f"model.num_kv_heads={heads}"]
        model += [f"model.num_experts={experts}", f"model.expert_ffn_dim={dim}"]
    return TruthCase(number, name, (*model, *batch, *CLASSES[name]), config)


def _draw_config(rng: random.Random, dim: int, layers: int, heads: int, vocab: int) -> str:
    """The config.json of a small model of transformers."""
    config = {
        "model_type": rng.choice(("llama", "qwen2")),
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": 3 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return json.dumps(config)


# Running


def run_campaign(
    cases: Sequence[TruthCase], rounds: int, path: Path, *, is_first_in_line: bool
) -> None:
    """Run each case `rounds` times, in turn, and append a row for each run to `path`; rows that
    are there stay."""
    done = {(row["number"], row["round"]) for row in load_row_file(path)}
    todo = []
    for number_of_round in range(rounds):
        for case in cases:
            if (case.number, number_of_round) not in done:
                todo.append((case, number_of_round))
    began = time.monotonic()
    for index, (case, number_of_round) in enumerate(todo):
        left_s = (time.monotonic() - began) / max(1, index) * (len(todo) - index)
        eta = f"{left_s / 60:.0f} min" if index else "?"
        print(f"{index}/{len(todo)}  eta {eta}  now {case.name}", file=sys.stderr, flush=True)
        measured = run_case(case, is_first_in_line=is_first_in_line)
        row = {**asdict(case), "round": number_of_round, **measured}
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def run_case(case: TruthCase, *, is_first_in_line: bool = False) -> dict[str, Any]:
    """What one run of a case took: medians over its steps, or why it failed."""
    busy_before, began = psutil.cpu_times(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planner-truth-") as folder:
        run_dir = Path(folder, "run")
        command = [sys.executable, "-m", "phalanx", "train", f"run.dir={run_dir}", *COMMON]
        command += prepare_overrides(case, folder)
        environment = os.environ | {"PYTHONPATH": _search_path()}
        with open(Path(folder, "errors"), "w+") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, env=environment
            )
            try:
                if is_first_in_line:
                    _put_first_in_line(process, run_dir)
                process.wait(TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return {"failed": f"took longer than {TIMEOUT_S} s"}
            finally:
                # Its ranks end with it.
                process.terminate()
                process.wait()
            errors.seek(0)
            last_words = errors.read().strip().splitlines()[-2:]
        if process.returncode != 0:
            return {"failed": " | ".join(last_words)[:400]}
        steps = list(_read_steps(run_dir))
    busy_s = _busy_seconds(psutil.cpu_times()) - _busy_seconds(busy_before)
    wall_s = time.monotonic() - began
    return {
        "wall_s": statistics.median(max(rank["step_s"] for rank in ranks) for ranks in steps),
        "cpu_s": statistics.median(
            statistics.mean(rank["cpu_s"] for rank in ranks) for ranks in steps
        ),
        "num_steps": len(steps),
        "first_in_line": is_first_in_line,
        # Ours among them: a whole run, with its start, takes one core and a half.
        "machine_busy": min(1.0, busy_s / (wall_s * (psutil.cpu_count() or 1))),
    }


def _put_first_in_line(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Give the ranks real-time priority once their first step is done, until they end, and for
    FIRST_IN_LINE_S seconds at most."""
    pids: list[int] = []
    while process.poll() is None and not pids:
        time.sleep(0.05)
        events = list(_read_events(run_dir))
        if any(event.get("event") == "step_finished" for event in events):
            for event in events:
                if event.get("event") == "ranks_started":
                    pids = event["pids"]
    _set_policy(pids, os.SCHED_RR, 1)
    deadline = time.monotonic() + FIRST_IN_LINE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        last = max((event.get("step", 0) for event in _read_events(run_dir)), default=0)
        if last >= STEPS:
            break
    _set_policy(pids, os.SCHED_OTHER, 0)


def _set_policy(pids: Sequence[int], policy: int, priority: int) -> None:
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            # Threads come and go.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def _read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    for path in run_dir.rglob("events/*.jsonl"):
        # What follows the last line end is an event that is being written.
        for line in path.read_text().split("\n")[:-1]:
            yield json.loads(line)


def prepare_overrides(case: TruthCase, folder: str) -> list[str]:
    """The overrides of a case whose files are written into `folder`."""
    if case.config:
        Path(folder, "config.json").write_text(case.config)
    return [override.replace("FOLDER", folder) for override in case.overrides]


def _search_path() -> str:
    """This folder, with the modules of someone's own, before what there is."""
    home = str(Path(__file__).parent)
    return os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH", "")]))


def _read_steps(run_dir: Path) -> Iterator[list[dict[str, Any]]]:
    """The events of all ranks, step by step, without the first WARMUP."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in _read_events(run_dir):
        if event.get("event") == "step_finished":
            by_step.setdefault(event["step"], []).append(event)
    for step in sorted(by_step)[WARMUP:]:
        yield by_step[step]


def _busy_seconds(times: Any) -> float:
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))


def load_row_file(path: Path) -> list[dict[str, Any]]:
    """The rows of a campaign so far; none without a file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


# Judging


@dataclass(frozen=True)
class Judged:
    """A case with its prediction: seconds on the wall and of a rank's processor, each beside the
    median of its runs; and the spread of these, (largest - least) / median."""

    name: str
    predicted_wall_s: float
    wall_s: float
    wall_spread: float
    predicted_cpu_s: float
    cpu_s: float
    cpu_spread: float
    num_runs: int
    busy: float
    is_first_in_line: bool

    @property
    def wall_error(self) -> float:
        return self.predicted_wall_s / self.wall_s - 1

    @property
    def cpu_error(self) -> float:
        return self.predicted_cpu_s / self.cpu_s - 1


def judge_rows(
    rows: Sequence[Mapping[str, Any]], profile_path: Path
) -> tuple[list[Judged], list[str]]:
    """The cases whose runs ended and that can be predicted; and why others cannot."""
    from phalanx.plan.profiles import load_profile

    profile = load_profile(profile_path)
    by_case: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["number"], []).append(row)
    judged, left_out = [], []
    for number, runs in sorted(by_case.items()):
        ended = [run for run in runs if "wall_s" in run]
        if not ended:
            left_out.append(f"{number} {runs[0]['name']}: {runs[0]['failed']}")
            continue
        try:
            wall_s, cpu_s = predict_case(ended[0], profile)
        except Exception as error:  # whatever a plan says: it is told, and the others are judged
            left_out.append(f"{number} {ended[0]['name']}: {error}")
            continue
        judged.append(_judge_case(ended, wall_s, cpu_s))
    return judged, left_out


def _judge_case(runs: Sequence[Mapping[str, Any]], wall_s: float, cpu_s: float) -> Judged:
    columns = {key: [run[key] for run in runs] for key in ("wall_s", "cpu_s", "machine_busy")}
    spread = {}
    for key, values in columns.items():
        spread[key] = (max(values) - min(values)) / statistics.median(values)
    return Judged(
        runs[0]["name"],
        wall_s,
        statistics.median(columns["wall_s"]),
        spread["wall_s"],
        cpu_s,
        statistics.median(columns["cpu_s"]),
        spread["cpu_s"],
        len(runs),
        statistics.median(columns["machine_busy"]),
        all(run.get("first_in_line", False) for run in runs),
    )


def predict_case(row: Mapping[str, Any], profile: Any) -> tuple[float, float]:
    """Seconds of a step on the wall of a quiet machine, and of a rank's processor."""
    from phalanx.job.load import load_job
    from phalanx.plan.calibrated.step import estimate_processor_seconds, estimate_step_from_profile
    from phalanx.run.plan_job import plan_job

    case = TruthCase(row["number"], row["name"], tuple(row["overrides"]), row["config"])
    with tempfile.TemporaryDirectory(prefix="planner-truth-") as folder:
        overrides = [*COMMON, *prepare_overrides(case, folder)]
        plan = plan_job(load_job(None, overrides)).plan
        return (
            estimate_step_from_profile(plan, profile).total_s,
            estimate_processor_seconds(plan, profile),
        )


# The page


def write_page(
    rows: Sequence[Mapping[str, Any]], profile_path: Path, page: Path, note: str
) -> None:
    """Write what a campaign found, worst rows and what is missing included."""
    from phalanx.plan.profiles import describe_calibration, load_profile

    judged, left_out = judge_rows(rows, profile_path)
    profile = load_profile(profile_path)
    lines = [
        "# Step times: predicted and measured",
        "",
        f"Written by `python benchmarks/planner_truth.py page` on {time.strftime('%Y-%m-%d')}:"
        f" {len(judged)} configurations of {len(CLASSES)} classes, drawn from a seed before any"
        f" result was seen, of `phalanx train` for {STEPS} steps on {profile.name} with"
        f" {profile.num_devices} cores, torch {profile.torch}; {describe_calibration(profile)}."
        f" Median over the steps from the {WARMUP + 1}th on and over up to"
        f" {max((each.num_runs for each in judged), default=0)} runs that took turns.",
        "",
    ]
    lines += _describe_machine_state(judged)
    if note:
        lines += [note, ""]
    lines += _summarize(judged)
    lines += ["", "| class | predicted ms | measured ms | error | spread | runs | "]
    lines[-1] += "processor: predicted ms | measured ms | error | spread |"
    lines.append("| --- |" + " ---: |" * 9)
    for each in sorted(judged, key=lambda each: -abs(each.wall_error)):
        lines.append(
            f"| {each.name} | {1e3 * each.predicted_wall_s:.0f} | {1e3 * each.wall_s:.0f} |"
            f" {100 * each.wall_error:+.0f} % | {100 * each.wall_spread:.0f} % | {each.num_runs} |"
            f" {1e3 * each.predicted_cpu_s:.0f} | {1e3 * each.cpu_s:.0f} |"
            f" {100 * each.cpu_error:+.0f} % | {100 * each.cpu_spread:.0f} % |"
        )
    if left_out:
        lines += ["", "Left out:", "", *(f"- {reason}" for reason in left_out)]
    page.write_text("\n".join(lines) + "\n")


def _describe_machine_state(judged: Sequence[Judged]) -> list[str]:
    """What was going on beside the runs, and what follows for these figures."""
    lines = []
    if judged and all(each.is_first_in_line for each in judged):
        lines += [
            "Other programs used all of the machine (load 30 to 50), so each run had real-time"
            " priority from the end of its first step on (`--first-in-line`): its steps are those"
            " of a machine that is nearly quiet. The kernel leaves 5 % of a core to others even"
            " then, which makes seconds on the wall up to 5 % longer, and caches were others'"
            " before. A campaign on a quiet machine is still to be run.",
            "",
        ]
    elif judged and statistics.median(each.busy for each in judged) > BUSY:
        lines += [
            "**The machine was not quiet**: other programs used nearly all of it. Seconds on the"
            " wall say whose turn it was, so the prediction is judged by the processor seconds of"
            " a rank, and the wall is shown beside it for completeness. A campaign on a quiet"
            " machine is still to be run.",
            "",
        ]
    if judged and max(each.num_runs for each in judged) < 3:
        lines += [
            "Each configuration ran fewer than three times: its spread is not judged, and the"
            " bar is 15 % alone.",
            "",
        ]
    return lines


def _summarize(judged: Sequence[Judged]) -> list[str]:
    """Errors over all cases: median, 90th percentile, largest and bias; and the bar: 15 % or twice
    the spread of the same job run again, whichever is more."""
    lines = ["| seconds | n | median | p90 | max | bias | within 15 % or twice the spread |"]
    lines.append("| --- |" + " ---: |" * 6)
    for name, errors, spreads in (
        ("wall", [each.wall_error for each in judged], [each.wall_spread for each in judged]),
        ("processor", [each.cpu_error for each in judged], [each.cpu_spread for each in judged]),
    ):
        if not errors:
            continue
        sizes = sorted(map(abs, errors))
        within = 0
        for error, spread in zip(errors, spreads, strict=True):
            within += abs(error) <= max(0.15, 2 * spread)
        lines.append(
            f"| {name} | {len(sizes)} | {100 * statistics.median(sizes):.0f} % |"
            f" {100 * sizes[int(0.9 * (len(sizes) - 1))]:.0f} % | {100 * sizes[-1]:.0f} % |"
            f" {100 * statistics.median(errors):+.0f} % | {within} of {len(sizes)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("--rows", type=int, default=60)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--seed", type=int, default=1)
    run.add_argument("--first-in-line", action="store_true")
    run.add_argument("--to", type=Path, required=True)
    page = verbs.add_parser("page")
    page.add_argument("--from", dest="source", type=Path, required=True)
    page.add_argument("--profile", type=Path, help="default: that of this machine")
    page.add_argument("--to", type=Path, default=Path("docs/planner-truth.md"))
    page.add_argument("--note", default="", help="a sentence about how this was measured")
    arguments = parser.parse_args()
    if arguments.verb == "run":
        try:
            run_campaign(
                draw_cases(arguments.seed, arguments.rows),
                arguments.rounds,
                arguments.to,
                is_first_in_line=arguments.first_in_line,
            )
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            raise SystemExit(130) from None
        return
    sys.path.insert(0, str(Path(__file__).parent))
    profile_path = arguments.profile or _find_own_profile()
    write_page(load_row_file(arguments.source), profile_path, arguments.to, arguments.note)


def _find_own_profile() -> Path:
    from phalanx.plan.cluster import detect_cluster
    from phalanx.plan.profiles import build_empty_profile, get_profile_path

    return get_profile_path(build_empty_profile(detect_cluster("cpu")))


if __name__ == "__main__":
    main()
