"""Whole runs on mixtures, shards and own datasets: the ledger proves what they read, and bad
input is refused."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import TINY, Done, events, loss_curve, run, run_all, write_text
from models import plan, shape
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run
from phalanx.checkpoint.stores.local import LocalStore
from phalanx.core.errors import CheckpointError
from phalanx.core.phases import PhaseTimer
from phalanx.data.corpus import load_corpus
from phalanx.job.schema import Job, Optim
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.build import build_model
from phalanx.nn.models.decoder import Decoder
from phalanx.observe.events import (
    EvalFinished,
    Note,
    RankFailed,
    RanksStarted,
    RestartScheduled,
    RunStarted,
    StepSkipped,
    TextGenerated,
)
from phalanx.optim.build import build_optimizer
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.train.state import TrainState
from ranks import run_ranks

OWN = '''
"""A dataset, models and objectives as a user might write them."""
import os

import numpy as np
import torch


class Sums:
    """Eight numbers and their sum."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        inputs = np.sin(self.numbers[index] + np.arange(8, dtype=np.float32))
        if index == 17 and os.environ.get("SAMPLE_17") == "broken":
            raise ValueError("this picture cannot be decoded")
        return {"inputs": inputs, "targets": torch.tensor(inputs.sum())}


def sums(split):
    print("opened for", split)
    return Sums(np.arange(100.0)) if split == "train" else Sums(np.arange(7.0))


class Masked:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return {"inputs": np.full(8, index), "targets": np.full(8, -100)}


def masked(split):
    return Masked() if split == "train" else None


def linear():
    return torch.nn.Linear(8, 1)


def squared(outputs, batch):
    return (outputs[:, 0] - batch["targets"]).square().sum(), torch.tensor(len(outputs))


class Bigram(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lookup = torch.nn.Embedding(257, 257)

    def forward(self, inputs, **unread):
        return self.lookup(inputs)


def bigram():
    return Bigram()
'''
# A process that reads ahead imports it: without torch in a moment.
OWN_NUMBERS = """
import os

import numpy as np


class Sums:
    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        inputs = np.sin(self.numbers[index] + np.arange(8, dtype=np.float32))
        return {"inputs": inputs, "targets": np.array(inputs.sum())}


def shuffled_by_each_process(split):
    return Sums(np.random.default_rng().permutation(100)) if split == "train" else None


class Interrupted(Sums):
    # On a file server that does not answer once.

    def __getitem__(self, index):
        is_in_rank = "RANK" in os.environ
        if is_in_rank and index == 17 and not os.path.exists("has_failed"):
            open("has_failed", "w").close()
            raise OSError(5, "Input/output error", "/nfs/shard-17")
        return super().__getitem__(index)


def interrupted(split):
    return Interrupted(np.arange(100.0)) if split == "train" else None
"""
BASE = (
    "train",
    "observe.sinks=[]",
    "optim.warmup_steps=2",
    "train.sample_tokens=0",
    "parallel.ranks=1",
)
REGRESSION = (
    *BASE,
    "model.kind=own_code:linear",
    "model.objective=own_code:squared",
    "train.global_batch_size=8",
)

MIXED = """
[data]
seq_len = 32
document_masks = true
workers = 1
[[data.mixture]]
source = "text"
weight = 3.0
[[data.mixture]]
source = "shards"
[observe]
samples = true
sinks = []
"""


@dataclass(frozen=True)
class Runs:
    folder: Path

    def ledger(self, name: str, *options: str) -> Done:
        return run("data", "ledger", name, *options, cwd=self.folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    (folder / "own_code.py").write_text(OWN)
    (folder / "own_numbers.py").write_text(OWN_NUMBERS)
    (folder / "mixed.toml").write_text(MIXED)
    return Runs(folder)


@pytest.fixture(scope="module")
def mixed(runs: Runs) -> Path:
    """A run over text and shards of other text whose rank 1 is killed in step 8, and that starts
    again from step 5."""
    (runs.folder / "other").mkdir()
    for name in ("fnmatch", "sched", "string", "textwrap"):
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", runs.folder / "other")
    built = run("data", "build", "other", "--out", "shards", "--workers", "1", cwd=runs.folder)
    assert built.code == 0, built.err
    keys = [key for key in TINY if not key.startswith(("data.", "observe.", "train.steps"))]
    more = [
        "train.steps=10",
        "checkpoint.every_steps=5",
        "parallel.ranks=2",
        "run.dir=mixed",
        "eval.tokens=100000",
    ]
    more += ['resilience.inject=["kill:rank=1,step=8,phase=backward"]', "train.sample_tokens=8"]
    # From the checkpoint: both attempts are to have steps on record.
    more.append("resilience.keep_ranks=false")
    done = run("train", "mixed.toml", *keys, *more, cwd=runs.folder)
    assert done.code == 0, done.err
    assert re.search(
        r"text \(75.0% of the samples\): .* held out in 1 \(by the fraction alone a side", done.out
    )
    return runs.folder / "mixed"


def test_a_mixture_is_evaluated_by_source_and_asked_for_text(mixed: Path) -> None:
    (evaluation,) = [envelope.event for envelope in events(mixed, EvalFinished)]
    assert set(evaluation.loss_by_source) == {"text", "shards"}
    notes = [envelope.event for envelope in events(mixed, Note)]
    assert "no_baselines" in [note.code for note in notes]
    split = [note.facts["source"] for note in notes if note.code == "held_out_by_few_documents"]
    assert split == ["text", "shards"] * 2  # said by both attempts
    (text,) = [envelope.event for envelope in events(mixed, TextGenerated)]
    assert text.prompt


def _losses_by_hand(rank: int, run_dir: str) -> dict[str, tuple[float, int]]:
    """(loss per target, targets) of each source's held-out tokens under the newest checkpoint: one
    window at a time, in float64, documents told apart by their end tokens."""
    job = Job.model_validate_json((Path(run_dir) / "job.json").read_text())
    corpus = load_corpus(Path(run_dir) / "data")
    found = {}
    with open_mesh(Layout(), device="cpu") as mesh:
        planned = Plan.from_json(json.loads((Path(run_dir) / "plan.json").read_text()))
        model = parallelize(build_model(job, planned.model_shape), plan(1), mesh, seed=job.run.seed)
        state = TrainState(
            model, build_optimizer(model, job.optim), job.run.seed, corpus.tokenizer_digest
        )
        state.restore(list_checkpoint_paths_of_run(Path(run_dir))[-1], phases=PhaseTimer())
        module = model.module.double().eval()
        for name, sequence in zip(corpus.names, corpus.sequences("held_out"), strict=True):
            tokens = torch.tensor(np.asarray(sequence[:]).astype(np.int64))
            loss_sum = 0.0
            for start in range(0, len(tokens) - 1, job.data.seq_len):
                inputs = tokens[start : min(start + job.data.seq_len, len(tokens) - 1)]
                targets = tokens[start + 1 : start + 1 + len(inputs)]
                ids = torch.cat([torch.zeros(1, dtype=torch.int64), (inputs[:-1] == 256).cumsum(0)])
                positions = torch.cat(
                    [torch.arange(int(n)) for n in ids.unique_consecutive(return_counts=True)[1]]
                )
                with torch.no_grad():
                    out = module(inputs[None], positions=positions[None], document_ids=ids[None])
                logits = (out.hidden_BTD @ out.head_VD.T)[0]
                loss_sum += torch.nn.functional.cross_entropy(
                    logits, targets, reduction="sum"
                ).item()
            found[name] = (loss_sum / (len(tokens) - 1), len(tokens) - 1)
    return found


def test_the_loss_over_sources_is_that_of_the_mixture_whatever_their_tokens(mixed: Path) -> None:
    """Against each source's loss computed by hand from the checkpoint; weights are 3 to 1,
    tokens are not."""
    (evaluation,) = [envelope.event for envelope in events(mixed, EvalFinished)]
    (by_hand,) = run_ranks(1, _losses_by_hand, str(mixed))
    (text, num_text), (shards, num_shards) = by_hand["text"], by_hand["shards"]
    assert evaluation.num_targets == num_text + num_shards
    assert evaluation.loss_by_source == pytest.approx({"text": text, "shards": shards}, rel=1e-6)
    assert (
        evaluation.loss
        == (3 * evaluation.loss_by_source["text"] + evaluation.loss_by_source["shards"]) / 4
    )
    by_tokens = (text * num_text + shards * num_shards) / (num_text + num_shards)
    assert abs(by_tokens - evaluation.loss) > 100 * abs((3 * text + shards) / 4 - evaluation.loss)


def test_the_ledger_holds_over_a_crash_and_a_resume_with_other_ranks_and_batches(
    runs: Runs, mixed: Path
) -> None:
    done = runs.ledger("mixed")
    assert (done.code, done.out) == (
        0,
        "80 samples in 10 steps over 2 attempts, each exactly once (checksums as the tokens say)\n",
    )
    shutil.copytree(mixed, runs.folder / "longer")
    more = (
        "parallel.ranks=4",
        "train.global_batch_size=12",
        "train.steps=15",
        "data.workers=0",
        "resilience.inject=[]",
    )
    resumed = run("train", "--resume", "longer", *more, cwd=runs.folder)
    assert resumed.code == 0, resumed.err
    changed = [
        e.event.facts
        for e in events(runs.folder / "longer", Note)
        if e.event.code == "batch_size_changed"
    ]
    assert [(facts["step"], facts["samples_seen"]) for facts in changed] == [(10, 80)]
    facts = json.loads(runs.ledger("longer", "--json").out)
    assert (facts["num_samples"], facts["num_steps"], facts["ok"]) == (80 + 5 * 12, 15, True)
    assert len(loss_curve(runs.folder / "longer")) == 15


def test_the_ledger_finds_a_fault_in_a_runs_own_records(runs: Runs, mixed: Path) -> None:
    shutil.copytree(mixed, runs.folder / "faulty")
    (path,) = (runs.folder / "faulty" / "events").glob("rank-0001-attempt-01.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["event"] == "samples_read" and line["step"] == 7:
            line["ranges"] = [edge - 4 for edge in line["ranges"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = runs.ledger("faulty")
    assert done.code == 11
    assert "step 7: samples 48 to 51 are repeated" in done.out
    assert "step 8: samples 52 to 55 are missing" in done.out


def _flip(path: Path, at: int) -> None:
    """Change one bit; size and header stay what they were."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_named_by_its_shard_before_a_rank_starts(runs: Runs, mixed: Path) -> None:
    """In the run's own copy, and in shards that lie elsewhere."""
    shutil.copytree(mixed, runs.folder / "flipped")
    _flip(runs.folder / "flipped" / "data" / "source-0" / "shard-00000.tokens", 5_000)
    flipped = run("train", "--resume", "flipped", "train.steps=12", cwd=runs.folder)
    assert flipped.code == 4
    assert "flipped/data/source-0/shard-00000.tokens: bytes " in flipped.problem
    assert "shards/" not in flipped.problem

    shutil.copytree(mixed, runs.folder / "foreign")
    _flip(runs.folder / "shards" / "shard-00000.tokens", 5_000)
    try:
        foreign = run("train", "--resume", "foreign", "train.steps=12", cwd=runs.folder)
    finally:
        _flip(runs.folder / "shards" / "shard-00000.tokens", 5_000)
    assert foreign.code == 4
    assert f"{runs.folder / 'shards' / 'shard-00000.tokens'}: bytes " in foreign.problem
    for name in ("flipped", "foreign"):
        assert not list((runs.folder / name / "events").glob("rank-*-attempt-02.jsonl"))


def test_shards_that_are_gone_are_refused_before_a_rank_starts(runs: Runs, mixed: Path) -> None:
    shutil.copytree(mixed, runs.folder / "rebuilt")
    elsewhere = runs.folder / "elsewhere"
    (runs.folder / "shards").rename(elsewhere)
    try:
        gone = run("train", "--resume", "rebuilt", "train.steps=12", cwd=runs.folder)
    finally:
        elsewhere.rename(runs.folder / "shards")
    assert gone.code == 4
    assert "dataset.json" in gone.problem
    assert "changed since the run began" in gone.problem


def test_own_data_and_own_model_train_evaluate_and_prove_their_samples(runs: Runs) -> None:
    keys = ("data.source=own_code:sums", "train.steps=60", "observe.samples=true", "optim.lr=0.01")
    done = run(*REGRESSION, *keys, "eval.tokens=100", "run.dir=sums", cwd=runs.folder)
    assert done.code == 0, done.err
    assert "own_code:sums: 100 training samples, 7 held out" in done.out
    curve = loss_curve(runs.folder / "sums")
    assert curve[60] < curve[1] / 2
    (evaluation,) = [envelope.event for envelope in events(runs.folder / "sums", EvalFinished)]
    assert evaluation.num_targets == 7
    assert runs.ledger("sums").out.startswith("480 samples in 60 steps, each exactly once")
    log = runs.folder / "sums" / "logs" / "rank-0000-attempt-00-worker-0.log"
    assert (
        log.read_text() == "opened for train\n"
    )  # a worker read ahead though nobody asked for one
    assert "8 samples per step" in done.out


def test_what_cannot_be_trained_on_is_refused_or_skipped_and_said(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAMPLE_17", "broken")
    tokens = (
        *BASE,
        "data.source=text/abc.py",
        "model.kind=own_code:bigram",
        "eval.tokens=0",
        "data.seq_len=16",
    )
    broken, shuffled, masks, planned = run_all(
        [
            (
                *REGRESSION,
                "data.source=own_code:sums",
                "data.workers=0",
                "train.steps=20",
                "run.dir=broken",
            ),
            (*REGRESSION, "data.source=own_numbers:shuffled_by_each_process", "run.dir=shuffled"),
            (*tokens, "data.document_masks=true", "run.dir=masks"),
            ("plan", *REGRESSION[1:], "data.source=own_code:sums"),
        ],
        runs.folder,
    )
    assert broken.code == 10
    assert (
        "deterministic failure at step 5: "
        f"{runs.folder}/own_code.py:21, sample 17 of own_code:sums: ValueError: this picture cannot"
        " be decoded (3 times in a row; the batch of step 5 is samples 32 to 39)" in broken.err
    )
    assert shuffled.code == 4
    assert (
        "it has other samples (16 are compared): it changed since the run began, or each process"
        " shuffles" in shuffled.err
    )
    assert "8 samples per step" in planned.out  # before there is anything to read, too
    assert masks.code == 3
    assert (
        "'own_code:bigram' cannot keep documents apart: its forward names no document_ids (it"
        " takes any" in masks.err
    )
    assert masks.out == ""  # before anything is built


def test_a_file_server_that_is_away_once_costs_no_sample_and_no_step(runs: Runs) -> None:
    """Both ranks keep their processes, and between them they hold a state of which there is no
    second copy, and no checkpoint."""
    keys = (
        *("data.source=own_numbers:interrupted", "train.steps=8", "observe.samples=true"),
        *("parallel.ranks=2", "parallel.dp_shard=2", "parallel.zero_stage=3"),
    )
    done = run(*REGRESSION, *keys, "run.dir=interrupted", cwd=runs.folder)
    assert done.code == 0, done.err
    run_dir = runs.folder / "interrupted"
    (failed,) = [envelope.event for envelope in events(run_dir, RankFailed)]
    assert (failed.step, failed.phase, failed.cause) == (5, "data", "exception")
    assert "sample 17 of own_numbers:interrupted: OSError: [Errno 5]" in failed.detail
    (restart,) = [envelope.event for envelope in events(run_dir, RestartScheduled)]
    assert (restart.held_step, restart.pause_s) == (4, 0.0)
    assert "going on with what ranks 0 and 1 hold (restart 1 of 3)" in done.out
    first, second = [envelope.event for envelope in events(run_dir, RanksStarted)]
    assert (second.kept, second.pids) == ([0, 1], first.pids)
    _, continued = [envelope.event for envelope in events(run_dir, RunStarted)]
    assert continued.restored_from == "the memory of ranks 0 and 1"
    assert runs.ledger("interrupted").out.startswith(
        "64 samples in 8 steps over 2 attempts, each exactly once"
    )


@pytest.mark.long
def test_steps_whose_targets_are_all_masked_are_skipped_and_said(runs: Runs) -> None:
    model = (
        "model.num_layers=1",
        "model.dim=32",
        "model.num_heads=2",
        "model.vocab_size=64",
        "data.seq_len=8",
    )
    keys = (
        "data.source=own_code:masked",
        "train.steps=3",
        "train.global_batch_size=4",
        "run.dir=masked",
    )
    done = run(*BASE, *model, *keys, cwd=runs.folder)
    assert done.code == 0, done.err
    skipped = [envelope.event for envelope in events(runs.folder / "masked", StepSkipped)]
    assert [(event.step, event.reason, event.first_sample) for event in skipped] == [
        (1, "no_targets", 0),
        (2, "no_targets", 4),
        (3, "no_targets", 8),
    ]
    assert (
        "no step was applied, the weights are those it began with: each of the 3 steps had no"
        " targets" in done.out
    )
    facts = json.loads(run("report", "masked", "--json", cwd=runs.folder).out)
    assert facts["final_loss"] is None
    assert any("no step was applied" in warning for warning in facts["warnings"])
    given_up = run(
        *BASE,
        *model,
        *keys[:-1],
        "run.dir=no_targets",
        "resilience.max_skipped_steps=1",
        cwd=runs.folder,
    )
    assert given_up.code == 8
    assert "no targets in 2 steps in a row, up to step 2; look at what masks them" in given_up.err


def _restore_under_other_tokenizers(rank: int, folder: str) -> str:
    """What is said when a state of tokenizer "aaaa" is restored for "bbbb"; AssertionError if
    anything changed."""

    def state_of(mesh: Mesh, tokenizer: str) -> TrainState:
        with torch.device("meta"):
            module = Decoder(shape(num_layers=1))
        model = parallelize(module, plan(1), mesh, seed=0)
        return TrainState(model, build_optimizer(model, Optim()), 0, tokenizer)

    with open_mesh(Layout(), device="cpu") as mesh:
        saved = state_of(mesh, "aaaa").save(
            LocalStore(Path(folder)), job_digest="", phases=PhaseTimer()
        )
        other = state_of(mesh, "bbbb")
        before = {
            name: parameter.detach().clone() for name, parameter in other.model.named_parameters()
        }
        with pytest.raises(CheckpointError) as caught:
            other.restore(saved.folder, phases=PhaseTimer())
        assert all(
            torch.equal(before[name], parameter)
            for name, parameter in other.model.named_parameters()
        )
        for fitting in ("aaaa", ""):
            state_of(mesh, fitting).restore(saved.folder, phases=PhaseTimer())
        return str(caught.value)


def test_a_checkpoint_of_another_tokenizer_is_refused_untouched(tmp_path: Path) -> None:
    (said,) = run_ranks(1, _restore_under_other_tokenizers, str(tmp_path))
    assert "trained on tokens of tokenizer aaaa, and the data is of bbbb" in said
