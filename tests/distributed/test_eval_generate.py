"""`phalanx eval` and `phalanx generate`: what they say is what a plain module in one process
computes."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import phalanx
from commands import TINY, Done, environment, events, nursery, run, write_text
from hf_zoo import write_config, write_tokenizer
from phalanx.cli import _app
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import CausalOutput
from phalanx.observe.events import EvalFinished
from phalanx.plan.plan import Plan

JOB = (
    *TINY,
    "data.source=text",
    "eval.tokens=512",
    "eval.every_steps=10",
    "checkpoint.every_steps=10",
)
OTHER = "class Queue:\n    '''Another text, which the run has never seen.'''\n" * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of two ranks, saved and evaluated at steps 10 and 20."""
    folder = tmp_path_factory.mktemp("subject")
    write_text(folder / "text")
    (folder / "other.txt").write_text(OTHER)
    done = run("train", *JOB, "parallel.ranks=2", "parallel.dp_shard=2", "run.dir=run", cwd=folder)
    assert done.code == 0, done.err
    return folder


def facts_of(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def plain_module(run_dir: Path, step: int = 20) -> torch.nn.Module:
    """The run's model without any layout, with the weights of one checkpoint."""
    plan = Plan.from_json(json.loads((run_dir / "plan.json").read_text()))
    module = Decoder(plan.model_shape)
    phalanx.load_weights(module, run_dir / "checkpoints" / f"step-{step}")
    return module.eval()


@torch.no_grad()
def logits_of(module: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    inputs = torch.tensor([ids])
    found = module(inputs=inputs, positions=torch.arange(len(ids))[None])
    return (
        F.linear(found.hidden_BTD, found.head_VD)[0]
        if isinstance(found, CausalOutput)
        else found[0]
    )


def plain_loss(module: torch.nn.Module, ids: list[int], seq_len: int) -> float:
    """Mean negative log-likelihood of every token but the first, in windows that do not overlap."""
    total = 0.0
    for start in range(0, len(ids) - 1, seq_len):
        window = ids[start : start + seq_len + 1]
        logits = logits_of(module, window[:-1]).double()
        total += float(F.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
    return total / (len(ids) - 1)


def plain_greedy(module: torch.nn.Module, prompt: list[int], count: int, context: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(module, ids[-context:])[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "step"),
    [("run", 20), pytest.param("run/checkpoints/step-10", 10, marks=pytest.mark.long)],
)
def test_an_evaluation_is_that_of_the_run(folder: Path, name: str, step: int) -> None:
    """To the last bit in the run's layout, of the newest checkpoint and of one that is named."""
    told = [e.event for e in events(folder / "run", EvalFinished)]
    (recorded,) = {e.loss for e in told if isinstance(e, EvalFinished) and e.step == step}
    facts = facts_of(run("eval", name, "--json", cwd=folder))
    assert facts["schema"] == "phalanx.eval/1"
    assert (facts["step"], facts["num_targets"], facts["world_size"]) == (step, 512, 2)
    assert facts["loss"] == recorded == facts["recorded_loss"]
    assert facts["perplexity"] == pytest.approx(math.exp(recorded))
    assert facts["unit"] == "nats/token"


@pytest.mark.long
def test_another_layout_gives_the_same_loss_and_says_so(folder: Path) -> None:
    done = run("eval", "run", "parallel.tp=2", cwd=folder)
    assert done.code == 0, done.err
    assert "2 cpu ranks" in done.out
    assert "tp=2" in done.out
    assert "as you asked" in done.out
    facts = facts_of(run("eval", "run", "parallel.ranks=1", "--json", cwd=folder))
    assert facts["world_size"] == 1
    assert facts["loss"] == pytest.approx(facts["recorded_loss"], rel=1e-5)


def test_the_next_line_of_a_run_works_as_it_is(folder: Path) -> None:
    """Pasted into a shell in the folder where the run was started."""
    shutil.copytree(folder / "run", folder / "my run")
    shutil.rmtree(folder / "my run" / "checkpoints" / "step-20")
    done = run("train", "--resume", "my run", cwd=folder)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("next    ")]
    verb, *arguments = shlex.split(line.removeprefix("next    phalanx "))
    assert verb == "generate"
    assert arguments[0] == "my run"
    again = run(verb, *arguments, "--tokens", "3", cwd=folder)
    assert again.code == 0, again.err
    assert again.out.startswith("The ")


@pytest.mark.long
def test_all_of_another_text_is_evaluated_with_the_runs_tokenizer(folder: Path) -> None:
    facts = facts_of(
        run("eval", "run", "data.source=other.txt", "parallel.ranks=1", "--json", cwd=folder)
    )
    ids = [*OTHER.encode(), 256]
    assert (facts["split"], facts["num_targets"], facts["recorded_loss"]) == (
        "all",
        len(ids) - 1,
        None,
    )
    assert facts["loss"] == pytest.approx(
        plain_loss(plain_module(folder / "run"), ids, 32), rel=1e-5
    )


def test_the_likeliest_tokens_are_those_of_a_plain_module(folder: Path) -> None:
    arguments = (
        "--prompt",
        "def f",
        "--prompt",
        "import",
        "--temperature",
        "0",
        "--tokens",
        "40",
        "--json",
    )
    facts = facts_of(run("generate", "run", *arguments, cwd=folder))
    assert facts["schema"] == "phalanx.generate/1"
    module = plain_module(folder / "run")
    for text, prompt in zip(facts["texts"], ("def f", "import"), strict=True):
        wanted = plain_greedy(module, list(prompt.encode()), 40, context=32)
        assert text["tokens"] == wanted
        assert text["text"] == bytes(wanted).decode("utf-8", "replace")
        assert (text["prompt"], text["prompt_tokens"], text["ended_by"]) == (
            prompt,
            list(prompt.encode()),
            "length",
        )


def test_a_text_is_streamed_after_its_prompt_and_is_a_function_of_the_seed(folder: Path) -> None:
    """The prompt comes from standard input; standard output has the text alone."""
    arguments = (
        "generate",
        "run",
        "--tokens",
        "30",
        "--top-k",
        "20",
        "--top-p",
        "0.95",
        "parallel.dp_shard=2",
    )
    done = []
    for seed in ("1", "1"):
        with open(folder / "prompt", "w+") as stdin:
            stdin.write("return x\n")
            stdin.seek(0)
            done.append(run(*arguments, "--seed", seed, cwd=folder, stdin=stdin))
    assert [d.code for d in done] == [0, 0], done[0].err
    assert done[0].out.startswith("return x")
    assert len(done[0].out) > len("return x") + 15
    assert done[0].out == done[1].out
    assert "speed   30 tokens in " in done[0].err
    assert "without a key-value cache" in done[0].err


@pytest.mark.long
def test_an_exported_directory_evaluates_and_generates_as_the_run(folder: Path) -> None:
    assert run("checkpoint", "export", "run", "--out", "exported", cwd=folder).code == 0
    wanted = facts_of(
        run("eval", "run", "data.source=other.txt", "parallel.ranks=1", "--json", cwd=folder)
    )
    found = facts_of(
        run("eval", "exported", "data.source=other.txt", "data.seq_len=32", "--json", cwd=folder)
    )
    assert found["num_targets"] == wanted["num_targets"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    arguments = ("--prompt", "def f", "--temperature", "0", "--tokens", "12", "--json")
    (text,) = facts_of(run("generate", "exported", *arguments, cwd=folder))["texts"]
    assert text["tokens"] == plain_greedy(
        plain_module(folder / "run"), list(b"def f"), 12, context=32
    )


@pytest.mark.long
def test_a_model_of_your_own_generates(folder: Path) -> None:
    shutil.copy(Path(__file__).parents[2] / "examples" / "own_model.py", folder)
    job = [key for key in JOB if not key.startswith(("model.", "train.steps"))]
    done = run(
        "train",
        *job,
        "model.kind=own_model:build",
        "train.steps=4",
        "parallel.ranks=1",
        "run.dir=own",
        cwd=folder,
    )
    assert done.code == 0, done.err
    (text,) = facts_of(
        run("generate", "own", "--prompt", "x", "--tokens", "5", "--json", cwd=folder)
    )["texts"]
    assert len(text["tokens"]) == 5
    assert facts_of(run("eval", "own", "--json", cwd=folder))["num_targets"] == 512
    with open(folder / "own_model.py", "a") as file:
        file.write(
            "\n\nimport os, signal\n\n\ndef build(made=build):\n    if os.environ.get('RANK'):\n"
        )
        file.write("        os.kill(os.getpid(), signal.SIGKILL)\n    return made()\n")
    for verb, doing in (
        (("eval", "own"), "evaluating"),
        (("generate", "own", "--prompt", "x"), "generating"),
    ):
        done = run(*verb, cwd=folder)
        assert done.code == 1
        said, log = [line for line in done.err.splitlines() if line.startswith(("rank", "log"))]
        assert said.startswith(f"rank 0 was killed by SIGKILL while {doing}")
        scratch = Path(log.removeprefix("log: ")).parents[1]
        left = [path.name for path in scratch.iterdir()]
        shutil.rmtree(scratch)
        assert left == ["logs"]


@pytest.fixture
def refuse(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """(exit code, the one line) of a command in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in nursery().variables().items():
        monkeypatch.setenv(name, value)

    def refuse(*arguments: str) -> tuple[int, str]:
        code = _app.run_command_line(arguments)
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        return code, line

    return refuse


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("eval", "nowhere"), 2, "nowhere: no such directory"),
        (("eval", "other.txt"), 2, "this is a file"),
        (("eval", "run", "data.source=nowhere"), 4, "nowhere"),
        (("eval", "run", "model.dim=64"), 2, "model.dim has no part in this"),
        (("eval", "run", "optim.lr=1"), 2, "optim.lr has no part in this"),
        (
            ("eval", "run", "eval.tokens=0", "eval.every_steps=none"),
            2,
            "eval.tokens=0 leaves nothing to evaluate",
        ),
        (("eval", "run", "--best"), 5, "no checkpoint was kept as the best"),
        (("eval", "run", "parallel.tp=3"), 3, "3"),
        (("eval", "text"), 5, "no checkpoint is there"),
        (("generate", "nowhere", "--prompt", "x"), 2, "no such directory"),
        (
            ("generate", "run", "--prompt", "x", "data.source=text"),
            2,
            "data.source has no part in this",
        ),
        (("generate", "run", "--prompt", "x", "--top-p", "2"), 2, "--top-p"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    refuse: Callable[..., tuple[int, str]], arguments: tuple[str, ...], code: int, words: str
) -> None:
    found, line = refuse(*arguments)
    assert found == code, line
    assert words in line


def test_a_checkpoint_without_its_run_needs_a_job(
    folder: Path, refuse: Callable[..., tuple[int, str]]
) -> None:
    shutil.copytree(folder / "run" / "checkpoints" / "step-20", folder / "lone", dirs_exist_ok=True)
    code, line = refuse("eval", "lone")
    assert (code, "add its job file: lone job.toml" in line) == (2, True)


def test_damage_is_exit_5_on_the_way(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "damaged")
    shard = next((folder / "damaged" / "checkpoints" / "step-20").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    done = run("eval", "damaged", cwd=folder)
    assert done.code == 5
    assert "damaged/checkpoints/step-20" in done.err.splitlines()[-1]
    assert "xxh3 of bytes" in done.err.splitlines()[-1]


@pytest.mark.long
def test_tokens_without_text_are_ids(folder: Path) -> None:
    import numpy as np

    np.save(folder / "ids.npy", (np.arange(4000) % 50).astype(np.uint16))
    job = [key for key in JOB if not key.startswith(("data.source", "train.steps"))]
    done = run(
        "train",
        *job,
        "data.source=ids.npy",
        "train.steps=4",
        "parallel.ranks=1",
        "run.dir=ids",
        cwd=folder,
    )
    assert done.code == 0, done.err
    done = run(
        "generate", "ids", "--prompt", "1 2, 3", "--tokens", "4", "--temperature", "0", cwd=folder
    )
    assert done.code == 0, done.err
    assert [int(word) for word in done.out.split()[-4:]] == plain_greedy(
        plain_module(folder / "ids", 4), [1, 2, 3], 4, context=32
    )
    done = run("generate", "ids", "--prompt", "text", cwd=folder)
    assert (done.code, "no list of token ids" in done.problem) == (2, True)
    done = run("generate", "ids", "--prompt", "50", cwd=folder)
    assert (done.code, "does not fit the model's vocabulary of 50" in done.problem) == (4, True)


@pytest.mark.parametrize("verb", [("eval", "run"), ("verify", "model.num_layers=1")])
def test_ranks_of_a_launcher_are_told_once_to_call_it_once(
    verb: tuple[str, ...], folder: Path
) -> None:
    place = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_NODELIST": "here",
    }
    done = run(*verb, cwd=folder, env=environment(SLURM_PROCID="0", **place))
    assert (done.code, "without the launcher" in done.problem) == (2, True)
    done = run(*verb, cwd=folder, env=environment(SLURM_PROCID="1", **place))
    assert (done.code, done.out, done.err) == (2, "", "")


@pytest.mark.long
def test_weights_that_do_not_know_the_tokens_are_warned_of(folder: Path) -> None:
    """Of a directory of Hugging Face: without a tokenizer, and with another one than the one
    that was asked for."""
    transformers = pytest.importorskip("transformers")
    model = folder / "llama"
    write_config(model, "llama", vocab_size=300, architectures=["LlamaForCausalLM"])
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(model)
    ).save_pretrained(model)
    asked = ("eval", "llama", "data.source=other.txt", "data.seq_len=32", "parallel.ranks=1")
    done = run(*asked, cwd=folder)
    assert done.code == 0, done.err
    assert "warning text becomes bytes, and nothing says which tokens the weights" in done.out
    write_tokenizer(model)
    (warning,) = facts_of(run(*asked, "data.tokenizer=bytes", "--json", cwd=folder))["warnings"]
    assert "the model's rows were trained for other tokens" in warning
    assert facts_of(run(*asked, "--json", cwd=folder))["warnings"] == []
