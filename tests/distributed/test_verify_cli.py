"""`phalanx verify` as a person calls it: rows, exit codes, JSON, refusals, and modules that are
not right."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import phalanx
from commands import TINY, environment, finish, run, run_all, start, survivors, wait_until
from compilers import needs_cpp_compiler
from phalanx.core.errors import ExitCode
from phalanx.plan.nvidia import list_visible_gpus
from phalanx.verify.cases import list_all_layouts, list_gradient_compression_layouts
from phalanx.verify.choose import select_layout_cases
from phalanx.verify.row import Row

OWN = """
import os
import resource

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, by_rank, dropout, crash, full):
        super().__init__()
        if full and "RANK" in os.environ:  # a disk that takes no more, as far as a rank can tell
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        self.embed = nn.Embedding(256, 16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 256)
        self.by_rank, self.crash = by_rank, crash

    def forward(self, tokens):
        hidden = self.drop(self.embed(tokens))
        rank = int(os.environ.get("RANK", "0"))
        if self.crash and rank == 1 and self.training and not hasattr(self, "ran"):
            os._exit(17)
        return self.head(hidden * (1 + 0.5 * rank * self.by_rank))


def build(by_rank=0, dropout=0.0, crash=0, full=0):
    return Model(by_rank, dropout, crash, full)
"""


def own(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)


def rows_of(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.long
def test_the_default_job_is_equal_and_says_so(tmp_path: Path) -> None:
    options = ("--shrink", "--ranks", "2", "--layouts", "all", "--steps", "2")
    done = run("verify", *options, cwd=tmp_path, deadline_s=1200)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    # 4 stages of the interleaved schedules, one of them the head.
    assert lines[0].startswith("shrunk  num_layers 4 -> 3")
    selection = select_layout_cases(phalanx.Job(), "all", ranks=2, steps=2, shrink=True)
    lossy = {name for name, _ in list_gradient_compression_layouts(2)} - {"ddp-bf16", "ddp-fp16"}
    expected = [(dtype, case.name) for dtype, case in selection.work]
    judged = [line.split()[:3] for line in lines if line.startswith(("equal", "lossy"))]
    assert sorted((dtype, name) for _, name, dtype in judged) == sorted(expected)
    assert {name for head, name, _ in judged if head == "lossy"} >= lossy
    assert lines[-1].startswith("verdict ")
    assert "differ" not in lines[-1]
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


@pytest.mark.long
@needs_cpp_compiler
def test_a_job_that_compiles_is_judged_compiled_and_what_is_not_judged_is_said(
    tmp_path: Path,
) -> None:
    layouts = ("--shrink", "--ranks", "2", "--layouts", "ddp,tp2,ddp,cp2", "--steps", "2", "--json")
    keys = ("train.compile=true", "precision.compute=bf16")
    done = run("verify", *layouts, *keys, cwd=tmp_path, deadline_s=1200)
    rows = rows_of(done.out)
    judged = [(row["layout"], row["dtype"], row["ok"]) for row in rows if row["ok"] is not None]
    assert judged == [
        (name, dtype, True) for dtype in ("float64", "float32") for name in ("ddp", "tp2")
    ], done.err
    assert {
        row["layout"]: "train.compile" in str(row["refused"]) for row in rows if row["ok"] is None
    } == {"cp2": True}
    said = "compression and compilers round otherwise than one process does"
    # First what is this row's own.
    left_out = f"precision.compute=bf16: {said}"
    assert [row["not_judged"][0] for row in rows if row["ok"]] == [left_out] * len(judged)
    assert all(f"not judged in bf16: ddp, tp2: {said}" in row["notes"] for row in rows)


def test_what_nobody_judged_of_a_job_is_said_beside_what_is_equal(tmp_path: Path) -> None:
    """A job in fp8 whose float64 is equal is not called equal without the rest of the sentence."""
    options = ("--shrink", "--ranks", "2", "--layouts", "ddp", "--steps", "2", "--no-resume")
    options = (*options, "--types", "float64", "precision.compute=fp8")
    done = run("verify", *options, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "not judged: precision.compute=fp8" in done.out.splitlines()[-1]
    (row,) = rows_of(run("verify", *options, "--json", cwd=tmp_path).out)
    assert row["ok"]
    own, *of_no_row = row["not_judged"]
    assert own == "precision.compute=fp8: layouts are judged in float64"
    assert of_no_row


def test_a_model_of_images_is_judged_beside_rows_of_shorter_sequences(tmp_path: Path) -> None:
    """Its sequences are of patches, whatever data.seq_len says."""
    options = ("--model", "small-vit", "--shrink", "--ranks", "2", "--steps", "1", "--json")
    done = run(
        "verify", *options, "--layouts", "tp2-odd-sequence,ddp", "--types", "float64", cwd=tmp_path
    )
    assert done.code == 0, done.err
    assert [(row["layout"], row["ok"]) for row in rows_of(done.out)] == [
        ("tp2-odd-sequence", True),
        ("ddp", True),
    ]


def test_a_module_that_computes_something_else_per_rank_is_exit_11_and_named(
    tmp_path: Path,
) -> None:
    own(tmp_path)
    done = run(
        "verify",
        "model.kind=own:build",
        "model.args={by_rank = 1}",
        "--ranks",
        "2",
        "--json",
        cwd=tmp_path,
    )
    assert done.code == 11, done.err
    rows = rows_of(done.out)
    assert {row["dtype"] for row in rows} == {"float64", "float32"}
    for row in rows:
        assert set(row) >= {"schema", "layout", "model", "ok", "errors", "first"}
        assert (row["ok"], row["model"], row["first"]["what"]) == (False, "own:build", "loss")  # type: ignore[index]


@pytest.mark.long
@pytest.mark.parametrize("by_rank", [0, 1])
def test_a_suspected_run_is_judged_at_its_own_layout(by_rank: int, tmp_path: Path) -> None:
    """Two ranks of ZeRO-3 trained; of one that computes something else the run itself said
    nothing."""
    own(tmp_path)
    model = ("model.kind=own:build", f"model.args={{by_rank = {by_rank}}}")
    layout = ("parallel.ranks=2", "parallel.dp_shard=2", "run.dir=suspected")
    trained = run(
        "train", *(key for key in TINY if "model." not in key), *model, *layout, cwd=tmp_path
    )
    assert trained.code == 0, trained.err
    done = run("verify", "--job", "suspected", "--json", cwd=tmp_path)
    assert done.code == (11 if by_rank else 0), done.err
    rows = rows_of(done.out)
    assert {row["layout"] for row in rows} == {"asked"}
    assert all(row["parallel"]["dp_shard"] == 2 for row in rows)  # type: ignore[index]
    assert {row["ok"] for row in rows} == {not by_rank}


def test_dropout_that_each_rank_draws_is_switched_off_and_said(tmp_path: Path) -> None:
    own(tmp_path)
    job = ("model.kind=own:build", "model.args={dropout = 0.5}", "parallel.dropout=local")
    done = run("verify", *job, "--ranks", "2", cwd=tmp_path)
    assert done.code == 0, done.out
    assert "1 dropout layer is switched off" in done.out


def test_a_crash_is_a_row_and_exit_11(tmp_path: Path) -> None:
    own(tmp_path)
    done = run(
        "verify",
        "model.kind=own:build",
        "model.args={crash = 1}",
        "--ranks",
        "2",
        "--json",
        cwd=tmp_path,
    )
    assert done.code == 11
    rows = rows_of(done.out)
    assert [row["ok"] for row in rows] == [False, False]
    first = str(rows[0]["crashed"]).splitlines()
    assert first[0].startswith("rank 1 exited with code 17 while judging layouts")
    assert not any("restart" in line for line in first)
    log = Path(first[-1].removeprefix("log: "))
    scratch = log.parents[1]
    left = {path.name for path in scratch.iterdir()}
    is_there = log.is_file()
    shutil.rmtree(scratch)
    assert (is_there, left) == (True, {"logs"})  # what is named is there, and nothing else


def test_a_disk_that_takes_no_more_is_exit_7_and_no_layout_is_blamed(tmp_path: Path) -> None:
    own(tmp_path)
    done = run(
        "verify", "model.kind=own:build", "model.args={full = 1}", "--ranks", "2", cwd=tmp_path
    )
    assert done.code == 7, done.out
    assert "refused" not in done.out
    assert "failed while writing the reference (File too large); raise the limit" in done.problem
    where = Path(done.problem.removeprefix("phalanx: ").partition(": ")[0])
    assert not where.parent.exists()  # nothing names it but this line: it is gone


def test_refusals(tmp_path: Path) -> None:
    """A layout that was asked for and cannot be is exit 3; among all it is a row and no error."""
    cases = {
        ("--ranks", "4", "parallel.dp_shard=3"): (3, "nearest: 2 or 4"),
        ("--model", "llama3-8b"): (3, "--shrink"),
        ("--model", "llama3-9b"): (3, "llama3-8b"),
        ("--layouts", "some"): (2, "'some' is no layout of 4 ranks"),
        ("--model", "own:build", "--shrink"): (3, "smaller model.args"),
        ("--device", "tpu"): (2, "'tpu' is no device; one of cpu, cuda"),
    }
    if not list_visible_gpus():
        cases[("--device", "cuda")] = (6, "--device=cpu judges the same layouts")
    for arguments, (code, text) in cases.items():
        done = run("verify", *arguments, cwd=tmp_path)
        assert (done.code, text in done.out + done.err) == (code, True), (arguments, done.err)
        assert "Traceback" not in done.err


def test_experts_of_one_process_are_judged(tmp_path: Path) -> None:
    """Nothing to reduce: there is no process group."""
    model = ("--model", "small-mixtral", "--shrink", "--ranks", "1", "--layouts", "one")
    done = run("verify", *model, "--steps", "2", "--types", "float64", cwd=tmp_path)
    assert (done.code, "1 of 1 rows equal" in done.out) == (0, True), done.out + done.err


def test_learned_positions_beside_a_tied_embedding_are_cut_in_every_stage(tmp_path: Path) -> None:
    """The last stage holds the embedding for its head, and the first one the positions."""
    model = ("--model", "gpt2", "--shrink", "--ranks", "4", "--layouts", "pp2-tp2-1f1b")
    done = run("verify", *model, "--steps", "1", "--types", "float64", cwd=tmp_path)
    assert (done.code, "1 of 1 rows equal" in done.out) == (0, True), done.out + done.err


ODD = """
import torch
import torch.nn.functional as F
from torch import nn


class Odd(nn.Module):
    def __init__(self, draws=False, rounds=False, names=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 16, padding_idx=0), nn.Linear(16, 256)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.draws, self.rounds, self.names = draws, rounds, names

    def forward(self, tokens):
        self.calls += 1
        hidden = self.frozen(self.embed(tokens)) * (1 + 0.1 * self.calls)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.draws:
            hidden = hidden + torch.rand_like(hidden)
        logits = self.head(hidden.float() if self.rounds else hidden).float()
        return {"logits": logits} if self.names else logits
"""
JUDGE_ODD = ("model.kind=odd:Odd", "data.seq_len=16", "--json")


@pytest.mark.long
def test_a_module_with_all_kinds_of_things_in_it_is_no_alarm(tmp_path: Path) -> None:
    """Dropout inside attention, a buffer that each forward moves, frozen weights, logits rounded
    to float32."""
    (tmp_path / "odd.py").write_text(ODD)
    layouts = ("--ranks", "2", "--layouts", "all")
    done = run("verify", *JUDGE_ODD, *layouts, cwd=tmp_path, deadline_s=1200)
    rows = rows_of(done.out)
    assert (done.code, [row["first"] for row in rows if row["ok"] is False]) == (0, [])
    axes_by_layout = dict(list_all_layouts(2))
    refused = {row["layout"] for row in rows if row["ok"] is None} & set(axes_by_layout)
    assert refused == {
        name for name, axes in axes_by_layout.items() if {"tp", "cp", "pp"} & set(axes)
    }
    assert next(row for row in rows if row["layout"] == "trainer-ddp")["ok"]
    assert "fewer digits than float64" in str(next(row for row in rows if row["ok"])["notes"])


@pytest.mark.long
def test_a_module_that_alone_cannot_be_judged_is_refused_and_no_layout_is_blamed(
    tmp_path: Path,
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    cases = {
        "draws = true": (3, "the forward of Odd draws random numbers"),
        "rounds = true": (0, "float64: RuntimeError"),  # and equal in float32
        "names = true": (3, "returned dict"),
    }
    commands = [("verify", *JUDGE_ODD, "--ranks", "1", f"model.args={{{args}}}") for args in cases]
    for done, (args, (code, words)) in zip(run_all(commands, tmp_path), cases.items(), strict=True):
        rows = rows_of(done.out)
        assert (done.code, done.err) == (code, ""), (args, rows)
        assert {row["ok"] for row in rows} == ({None, True} if code == 0 else {None})
        assert words in str(rows[0]["refused"])


def test_a_job_is_verified_from_python_outside_the_main_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    job = phalanx.load_job(None, ["model.kind=own:build", "model.args={by_rank = 1}"])
    rows: list[Row] = []
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(
            phalanx.verify_job, job, ["ddp", "tp2"], ranks=2, steps=1, on_row=rows.append
        )
        result = call.result()
    assert tuple(rows) == result.rows
    assert {(row.layout, row.dtype): row.ok for row in rows} == {
        ("tp2", ""): None,
        ("ddp", "float64"): False,
        ("ddp", "float32"): False,
    }
    assert (result.exit_code, result.is_equal) == (ExitCode.VERIFICATION, False)
    assert result.summary == "0 of 2 rows equal the reference, 1 layout refused"
    with pytest.raises(phalanx.PhalanxError, match="'dpp' is no layout"):
        phalanx.verify_job(job, "dpp", ranks=2)
    assert capfd.readouterr() == ("", "")


def test_a_module_of_ones_own_is_judged_as_it_is_in_all_layouts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    job = phalanx.load_job(None, ["model.kind=own:build"])
    chosen = select_layout_cases(job, "all", ranks=2, steps=1, shrink=None)
    assert "ddp" in {case.name for _, case in chosen.work}
    assert not any("shrunk" in note for note in chosen.notes)


def test_a_stopped_command_says_so_and_goes_on_with_the_rows_that_are_missing(
    tmp_path: Path,
) -> None:
    home = environment(HOME=str(tmp_path))
    own(tmp_path)
    asked = (
        *("verify", "--model", "own:build", "--ranks", "2", "--json"),
        *("--layouts", "ddp,zero1,zero2,zero3"),
    )
    kept = tmp_path / ".cache" / "phalanx" / "verify"
    process = start(*asked, cwd=tmp_path, env=home)
    wait_until(lambda: list(kept.glob("*/kept-rows.jsonl")))
    os.kill(process.pid, signal.SIGINT)
    stopped = finish(process)
    first = rows_of(stopped.out)
    assert stopped.code == ExitCode.INTERRUPTED
    assert "not judged" in stopped.err
    assert "The same command goes on from here" in stopped.err
    assert survivors(kept) == []

    # What a power cut tore is judged again.
    file = next(kept.glob("*/kept-rows.jsonl"))
    file.write_text(file.read_text() + '{"layout": "zero')
    done = run(*asked, cwd=tmp_path, env=home)
    rows = rows_of(done.out)
    assert done.code == ExitCode.OK, done.err
    note = "judged before the command was stopped"
    taken_over = [note in row["notes"] for row in rows]  # type: ignore[operator]
    assert taken_over == [True] * len(first) + [False] * (len(rows) - len(first))
    assert len(rows) == 8
    assert 0 < len(first) < 8
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, ExitCode.PREEMPTED, marks=pytest.mark.long),
        (signal.SIGINT, ExitCode.INTERRUPTED),
    ],
)
def test_a_stop_before_the_first_row_is_told(
    tmp_path: Path, number: signal.Signals, code: ExitCode
) -> None:
    asked = ("--shrink", "--ranks", "2", "--layouts", "ddp,zero3", "--no-resume")
    # As a process of its own, which writes each line at once.
    phalanx_itself = (sys.executable, "-u", "-m", "phalanx")
    process = start("verify", *asked, cwd=tmp_path, command=phalanx_itself)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("judged"):
            break
    os.kill(process.pid, number)
    stopped = finish(process)
    assert (stopped.code, stopped.err) == (code, "stopped 4 rows not judged; none was\n")


def test_rows_of_other_code_are_not_taken_over(tmp_path: Path) -> None:
    own(tmp_path)
    home = environment(HOME=str(tmp_path))
    asked = (
        *("verify", "--model", "own:build", "--ranks", "2", "--json"),
        *("--layouts", "ddp,zero1,zero2,zero3"),
    )
    kept = tmp_path / ".cache" / "phalanx" / "verify"
    process = start(*asked, cwd=tmp_path, env=home)
    wait_until(lambda: list(kept.glob("*/kept-rows.jsonl")))
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process).code == ExitCode.PREEMPTED
    (tmp_path / "own.py").write_text(OWN.replace("by_rank=0, dropout", "by_rank=1, dropout"))
    done = run(*asked, cwd=tmp_path, env=home)
    assert done.code == ExitCode.VERIFICATION, done.err
    assert all(row["ok"] is False for row in rows_of(done.out))
