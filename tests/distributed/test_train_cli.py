"""`phalanx train` from the command line to the last file, on every layout of two ranks."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import subprocess
import termios
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import (
    PHALANX,
    TINY,
    Done,
    environment,
    events,
    finish,
    loss_curve,
    run,
    run_all,
    snapshot,
    start,
    weights,
    write_text,
)
from compilers import needs_cpp_compiler
from phalanx.checkpoint.manifest import read_manifest
from phalanx.core.files import read_json
from phalanx.job.load import load_job_json
from phalanx.observe.events import (
    BaselineMeasured,
    BlockNormsMeasured,
    EvalFinished,
    MemoryMeasured,
    RunFinished,
    RunStarted,
    StepFinished,
)
from phalanx.plan.plan import compute_job_digest

JOB = """\
[run]
name = "first"
[model]
num_layers = 2
dim = 32
num_heads = 2
[data]
source = "my text"
seq_len = 32
[train]
steps = 10  # the command line says 20
global_batch_size = 8
sample_tokens = 16
[eval]
tokens = 2048
[optim]
warmup_steps = 4
[checkpoint]
every_steps = 10
"""
FILES = ("epoch", "job.json", "plan.json", "report.html")
# What changes how a step is computed, and not what it computes.
SAME_MATHS = {
    "zero3": ("parallel.dp_shard=2", "parallel.zero_stage=3"),
    "zero2 recompute accumulate": (
        "parallel.dp_shard=2",
        "parallel.zero_stage=2",
        "train.recompute=full",
        "train.micro_batch_size=2",
    ),
}
BF16 = ("parallel.dp_replicate=2", "precision.compute=bf16")
# What a run is asked to tell, besides, which must not change what it learns. A save that is still
# on its way would put off the next one.
ASKED = {
    "zero3": (
        "--json",
        "eval.every_steps=8",
        "eval.keep_best=true",
        "checkpoint.asynchronous=false",
    )
}


@dataclass(frozen=True)
class House:
    """A user's folder in which a few runs were done."""

    folder: Path
    before: set[str]
    after: set[str]
    done: dict[str, Done]

    def dir(self, name: str) -> Path:
        return self.folder / f"run {name}"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    """A job file and text of the user's own, in folders with spaces and letters beyond ASCII."""
    folder = tmp_path_factory.mktemp("home") / "größe und 目"
    folder.mkdir()
    write_text(folder / "my text")
    (folder / "job.toml").write_text(JOB)
    before = set(os.listdir(folder))
    layouts = {"ddp": ("parallel.ranks=2", "parallel.dp_replicate=2"), **SAME_MATHS, "bf16": BF16}
    commands = [
        [
            "train",
            "job.toml",
            "train.steps=20",
            "observe.sinks=[]",
            *more,
            *ASKED.get(name, ()),
            f"run.dir=run {name}",
        ]
        for name, more in layouts.items()
    ]
    done = run_all(commands[:2], folder) + run_all(commands[2:], folder)
    return House(folder, before, set(os.listdir(folder)), dict(zip(layouts, done, strict=True)))


def test_a_run_ends_well_and_says_where_it_is_first_and_last(house: House) -> None:
    done = house.done["ddp"]
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0] == lines[-1] == "run     run ddp"
    assert any(re.match(r"plan .* ddp \(dp_replicate=2\)", line) for line in lines)
    assert any(line.startswith("why ") for line in lines)


def test_a_pipe_gets_plain_lines(house: House) -> None:
    out = house.done["ddp"].out
    assert not [letter for letter in out if ord(letter) < 32 and letter != "\n"]
    steps = re.findall(
        r"^step (\d+)/20  loss [\d.]+  lr \S+  norm [\d.]+  (.+)  eta (.+)  mem ", out, re.MULTILINE
    )
    assert [step for step, _, _ in steps] == ["1", "10", "20"]
    (_, first, first_eta), *others = steps
    assert (first.endswith("for this step, warming up"), first_eta) == (True, "not known yet")
    assert all("tok/s" in pace and eta[0].isdigit() for _, pace, eta in others)


def test_the_held_out_loss_stands_beside_its_baselines(house: House) -> None:
    found = events(house.dir("ddp"))
    evaluation = next(e.event for e in found if isinstance(e.event, EvalFinished))
    baselines = {e.event.name: e.event for e in found if isinstance(e.event, BaselineMeasured)}
    assert set(baselines) == {"unigram", "trigram"}
    assert all(b.num_targets == evaluation.num_targets for b in baselines.values())
    line = next(line for line in house.done["ddp"].out.splitlines() if line.startswith("loss "))
    for name, loss in [("model", evaluation.loss), *((b.name, b.loss) for b in baselines.values())]:
        assert f"{name} {loss:.3f}" in line


def test_everything_is_inside_the_run_directory(house: House) -> None:
    assert house.after - house.before == {f"run {name}" for name in house.done}
    inside = {name.split("/")[0] for name in snapshot(house.dir("ddp"))}
    assert inside == {*FILES, "blackbox", "checkpoints", "data", "events", "logs"}
    assert not [
        name
        for name in snapshot(house.dir("ddp"))
        if "partial" in name or name.endswith(".error.json")
    ]


def test_the_facts_of_a_run_can_be_read_back(house: House) -> None:
    run_dir = house.dir("ddp")
    job = load_job_json(run_dir / "job.json")
    plan = read_json(run_dir / "plan.json")
    assert (job.run.name, job.train.steps, job.model.dim) == ("first", 20, 32)
    assert plan["job_digest"] == compute_job_digest(job)
    found = [envelope.event for envelope in events(run_dir)]
    assert [e.step for e in found if isinstance(e, RunStarted)] == [0]
    assert [(e.status, e.exit_code, e.step) for e in found if isinstance(e, RunFinished)] == [
        ("finished", 0, 20)
    ]
    assert len([e for e in found if isinstance(e, StepFinished)]) == 2 * 20
    assert {key for e in found if isinstance(e, MemoryMeasured) for key in e.measured_bytes} >= {
        "peak",
        "parameters",
    }
    # Of the first step; no 101st follows.
    (norms,) = [e for e in found if isinstance(e, BlockNormsMeasured)]
    (first,) = [e for e in found if isinstance(e, StepFinished) and e.step == 1][:1]
    assert norms.step == 1
    assert math.hypot(*norms.gradient_norms.values()) == pytest.approx(first.grad_norm, rel=1e-5)
    assert list(norms.gradient_norms) == list(norms.update_ratios) == list(norms.weight_norms)
    assert {"embed", "blocks.0", "blocks.1"} < set(norms.gradient_norms)


def test_the_seconds_of_a_step_are_accounted_for(house: House) -> None:
    for envelope in events(house.dir("ddp"), StepFinished):
        event = envelope.event
        assert isinstance(event, StepFinished)
        assert sum(event.phases_s.values()) + event.unaccounted_s == pytest.approx(
            event.step_s, abs=1e-4
        )
        assert {"data", "forward", "backward", "collective", "optimizer"} <= set(event.phases_s)
        assert ("ckpt_stage" in event.phases_s) == (event.step in (10, 20))


def test_checkpoints_hold_the_whole_state(house: House) -> None:
    for name in house.done:
        run_dir = house.dir(name)
        best = {"step-8", "step-16"} if name in ASKED else set()
        assert set(os.listdir(run_dir / "checkpoints")) == {"step-10", "step-20"} | best
        weights(run_dir, 10)
        weights(run_dir, 20)
        manifest = read_manifest(run_dir / "checkpoints" / "step-20")
        facts = {"step": 20, "tokens_seen": 20 * 8 * 32, "samples_seen": 160, "seed": 0}
        assert {key: manifest.facts[key] for key in facts} == facts
        trained = {tensor for tensor in manifest.tensors if not tensor.startswith("optim/")}
        for tensor in trained:
            assert {f"optim/{tensor}/exp_avg", f"optim/{tensor}/exp_avg_sq"} <= set(
                manifest.tensors
            )


def test_the_page_is_there_and_asks_nothing_of_the_network(house: House) -> None:
    page = (house.dir("ddp") / "report.html").read_text()
    assert "</html>" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?https?://""", page)


def test_json_is_all_that_standard_output_gets(house: House) -> None:
    """The facts on one line; words for people are on standard error, as they would be on
    standard output."""
    done, run_dir = house.done["zero3"], house.dir("zero3")
    (line,) = done.out.splitlines()
    facts = json.loads(line)
    assert facts["schema"] == "phalanx.run/1"
    assert (facts["run_dir"], facts["status"], facts["exit_code"]) == ("run zero3", "finished", 0)
    assert (facts["step"], facts["total_steps"], facts["world_size"]) == (20, 20, 2)
    assert facts["final_loss"] == loss_curve(run_dir)[20]
    assert facts["loss_unit"] == "nats/token"
    assert {baseline["name"] for baseline in facts["baselines"]} == {"unigram", "trigram"}
    assert [memory["rank"] for memory in facts["memory"]] == [0, 1]
    assert facts["memory"][0]["measured_bytes"]["peak"] > 0
    assert [saved["step"] for saved in facts["checkpoints"]] == [8, 10, 16, 20]
    assert facts["tokens_per_s"] > 0
    assert done.err.splitlines()[0] == done.err.splitlines()[-1] == "run     run zero3"
    assert "step 20/20  loss" in done.err
    again = run("report", "run zero3", "--json", cwd=house.folder)
    assert (again.code, json.loads(again.out)) == (0, facts)


def test_evaluations_on_the_way_and_the_best_of_them(house: House) -> None:
    run_dir = house.dir("zero3")
    facts = json.loads(house.done["zero3"].out)
    told = {e.event.step: e.event.loss for e in events(run_dir, EvalFinished)}
    assert {e["step"]: e["loss"] for e in facts["evaluations"]} == told
    assert list(told) == [8, 16, 20]
    loss, step = min((loss, step) for step, loss in told.items())
    place = f"checkpoints/step-{step}"
    assert facts["best"] == {
        "step": step,
        "loss": loss,
        "metric": "loss",
        "value": loss,
        "checkpoint": place,
    }
    assert (run_dir / facts["best"]["checkpoint"] / "manifest.json").is_file()
    (last,) = (e.event.loss for e in events(house.dir("ddp"), EvalFinished))
    assert told[20] == pytest.approx(last, rel=1e-5)  # of the same run without any of this
    err = house.done["zero3"].err
    assert f"held-out loss {told[8]:.4f} nats/token at step 8, the best so far" in err
    assert re.search(
        rf"^best    run zero3/checkpoints/step-{step} \(loss {loss:.4f} at step {step}\)$",
        err,
        re.M,
    )


def test_explaining_a_job_leaves_no_trace(house: House) -> None:
    done = run(
        "train", "job.toml", "--explain", "train.steps=20", "parallel.ranks=2", cwd=house.folder
    )
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^steps +20 +override +job.toml:11:1 says 10$", done.out, re.MULTILINE)
    assert "\033" not in done.out
    assert set(os.listdir(house.folder)) == house.after


@pytest.mark.parametrize("name", SAME_MATHS)
def test_every_layout_has_the_loss_curve_of_ddp(house: House, name: str) -> None:
    assert house.done[name].code == 0, house.done[name].err
    reference, curve = loss_curve(house.dir("ddp")), loss_curve(house.dir(name))
    assert list(curve) == list(reference) == list(range(1, 21))
    for step, loss in curve.items():
        assert loss == pytest.approx(reference[step], rel=1e-5), step
    assert min(curve.values()) < curve[1] - 0.3  # it learns


def test_bf16_learns_what_fp32_learns(house: House) -> None:
    assert house.done["bf16"].code == 0, house.done["bf16"].err
    reference, curve = loss_curve(house.dir("ddp")), loss_curve(house.dir("bf16"))
    assert curve != reference
    for step, loss in curve.items():
        assert loss == pytest.approx(reference[step], rel=2e-2), step


def test_a_terminal_shows_the_run_live(tmp_path: Path) -> None:
    """One rank, on a pseudo-terminal: two lines are redrawn, the cursor is given back."""
    text = write_text(tmp_path / "text")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    arguments = ["train", *TINY, f"data.source={text}", "parallel.ranks=1", "run.dir=run"]
    env = environment(TERM="xterm", NO_COLOR=None, COLUMNS=None)
    process = start(*arguments, cwd=tmp_path, env=env, stdout=theirs, stderr=subprocess.STDOUT)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 65536):
            shown += chunk
    except OSError:  # how Linux says that the other end is gone
        pass
    os.close(ours)
    assert finish(process).code == 0, shown
    screen = shown.decode()
    assert "\x1b[?25l" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    assert re.search(r"step +[1-9]/20\b", screen)
    assert re.search(r"step 20/20\b.*━", screen)
    assert "\x1b[1A" in screen  # redrawn in place
    assert "tok/s" in screen
    assert screen.rstrip().endswith("run     run")


@pytest.mark.long
@needs_cpp_compiler
def test_a_compiled_model_has_the_same_curve(house: House, tmp_path: Path) -> None:
    """Compiled kernels add in another order; anything more is a mistake.

    With nothing compiled before, as a user's.
    """
    env = environment(TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    arguments = [
        "job.toml",
        "train.steps=20",
        "observe.sinks=[]",
        "train.compile=true",
        "parallel.dp_shard=2",
    ]
    done = finish(
        start("train", *arguments, "run.dir=run compiled", cwd=house.folder, env=env),
        deadline_s=600,
    )
    assert done.code == 0, done.err
    reference = loss_curve(house.dir("ddp"))
    for step, loss in loss_curve(house.folder / "run compiled").items():
        assert loss == pytest.approx(reference[step], rel=1e-4), step


def test_the_default_job_is_trained_from_end_to_end(tmp_path: Path) -> None:
    """What `make train` does, in fewer steps: everything else is as nobody has chosen it."""
    done = run("train", "train.steps=20", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    (run_dir,) = (tmp_path / "runs").iterdir()
    name = re.escape(str(run_dir.relative_to(tmp_path)))
    losses = r"model ([\d.]+)  unigram [\d.]+  trigram [\d.]+   \([\d,]+ tokens\)"
    lines = (
        r"data    stdlib: [\d,]+ training tokens in \d+ documents, [\d,]+ held out in \d+",
        rf"loss    held out, nats per token: {losses}",
        r"sample  def .*",
        rf"next    .*phalanx.* generate {name} --prompt 'def '",
        rf"run     {name}",
    )
    found = [re.search(f"^{line}$", done.out, re.MULTILINE) for line in lines]
    assert None not in found, done.out
    # A step of chance has log(256) nats; a few steps learn which letters are frequent.
    assert found[1] is not None
    assert float(found[1][1]) < loss_curve(run_dir)[1] - 1.0
    assert (
        done.out.splitlines()[0]
        == done.out.splitlines()[-1]
        == f"run     {run_dir.relative_to(tmp_path)}"
    )


@pytest.mark.long
def test_no_arguments_train_the_default_job(tmp_path: Path) -> None:
    """The first thing anybody does.

    The model beats an interpolated trigram by 0.15 nats per byte, within minutes.
    """
    done = finish(start("train", cwd=tmp_path), deadline_s=900)
    assert done.code == 0, done.err
    (run_dir,) = (tmp_path / "runs").iterdir()
    found = [envelope.event for envelope in events(run_dir)]
    evaluation = next(e for e in found if isinstance(e, EvalFinished))
    trigram = next(e for e in found if isinstance(e, BaselineMeasured) and e.name == "trigram")
    assert evaluation.loss <= trigram.loss - 0.15
    assert re.search(r"^sample  def ", done.out, re.MULTILINE)
    assert done.out.splitlines()[-1] == f"run     {run_dir.relative_to(tmp_path)}"


def test_json_facts_of_a_plan_need_no_run(tmp_path: Path) -> None:
    done = finish(start("plan", "--json", "model.dim=64", cwd=tmp_path, command=PHALANX))
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["schema"] == "phalanx.plan/1"
    assert plan["memory"]["predicted_bytes"]["parameters"] > 0
    assert not list(tmp_path.iterdir())
