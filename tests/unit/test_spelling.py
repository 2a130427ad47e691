"""Words of other trainers, keys without their section, folders and presets as arguments: each is
told what to write."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from phalanx.cli import _app
from phalanx.cli._spelling import VERB_ALIASES
from phalanx.cli._spelling import list_sections_by_key as sections_of_the_file
from phalanx.core.registry import list_modules_of_registry
from phalanx.job.findings import list_keys_by_section, list_sections_of_keys
from phalanx.job.key_aliases import _ALIASES_OF_KEY, KEYS_OF_ALIAS, OPTIONS_OF_ALIAS
from phalanx.job.key_suggestions import find_similar_keys
from phalanx.job.load import load_job


def told(capsys: pytest.CaptureFixture[str], line: str) -> str:
    """The one line of a command that is refused."""
    assert _app.run_command_line(shlex.split(line)) in (2, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    (said,) = captured.err.splitlines()
    return str(said)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train dim=192", 'did you mean "model.dim=192"?'),
        ("train lr=1e-3", 'did you mean "optim.lr=1e-3"?'),
        ("train batch_size=8", 'did you mean "train.global_batch_size=8"?'),
        ("train epochs=3", 'did you mean "train.steps"? (a run counts updates'),
        ("train num_layer=3", 'did you mean "model.num_layers=3"?'),
        ("train optimizer=sgd", 'did you mean "optim.kind=sgd"?'),
        ("train model=gpt2", "model.preset=gpt2"),
        ("train model=my_package.mine:build", "model.kind=my_package.mine:build"),
        ("train precision=bf16", "precision.compute=bf16"),
        ("train data=texts", "data.source=texts"),
        ("train trainer.max_steps=3", 'did you mean "train.steps"?'),
        ("train training.steps=3", "train"),
        (
            "train train.gradient_accumulation_steps=4",
            'did you mean "train.micro_batch_size"? (global_batch_size /',
        ),
        ("train train.batch_size=8", 'did you mean "train.global_batch_size"?'),
        ("train train.precision=bf16", "belongs in [precision]' or 'precision.compute"),
        ("train precision.dtype=bf16", 'did you mean "precision.compute"?'),
        ("train parallel.tensor_parallel_size=2", 'did you mean "parallel.tp"?'),
        ("train optim.learning_rate=1", 'did you mean "optim.lr"?'),
        ("train model.n_embd=3", 'did you mean "model.dim"?'),
        (
            "train model.kind=llama",
            'did you mean "model.preset=llama2-7b" or "model.preset=llama2-13b"? (',
        ),
        ("train model.kind=gpt2", 'did you mean "model.preset=gpt2"?'),
        ("train model.kind=LlamaForCausalLM", "model.preset=llama"),
        ("plan --mode gpt2", 'did you mean "--model"?'),
        ("train --steps 100", 'did you mean "train.steps=100"?'),
        ("train --steps=100", 'did you mean "train.steps=100"?'),
        ("train --nproc_per_node 2", 'did you mean "parallel.ranks=2"? (or leave it out'),
        ("train --nproc-per-node=2", 'did you mean "parallel.ranks=2"?'),
        ("train --epochs 3", 'did you mean "train.steps"?'),
        ("train --learning-rate 1e-4", 'did you mean "optim.lr=1e-4"?'),
        ("plan --tp 2", 'did you mean "parallel.tp=2"?'),
        ("verify --model.dim 64", 'did you mean "model.dim=64"?'),
        ("verify --job.toml 64", "see phalanx verify --help"),
        ("train --resum x", 'did you mean "--resume"?'),
        ("train --resume_from_checkpoint x", "did you mean --resume RUN?"),
        ("train --config job.toml", "did you mean JOB.toml"),
        ("report x --jsn", 'did you mean "--json"?'),
        ("sample runs/x", 'did you mean "generate"?'),
        ("evaluate runs/x", 'did you mean "eval"?'),
        ("job.toml", "did you mean phalanx train job.toml?"),
        ("train.steps=3", "did you mean phalanx train train.steps=3?"),
        ("train gpt2", "write model.preset=gpt2"),
        ("train steps", 'did you mean "train.steps"?'),
        ("train hf:some/dir", "write model.kind=hf:some/dir"),
        ("train my_package.mine:build", "write model.kind=my_package.mine:build"),
    ],
)
def test_the_right_spelling_is_shown(
    capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    said = told(capsys, line)
    assert any(part.strip("'") in said for part in words.split("' or '")), said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("texts", "'texts' is a folder, not a job file; write data.source=texts"),
        ("some.txt", "'some.txt' is data, not a job file; write data.source=some.txt"),
        ("ids.npy", "write data.source=ids.npy"),
        ("run", "'run' is a run, not a job file; phalanx train --resume run goes on with it"),
        ("model", "write model.kind=hf:model"),
        ("lone", "write model.init_from=lone"),
    ],
)
def test_what_stands_where_a_job_file_should_is_recognised(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    words: str,
) -> None:
    for file in (
        "texts/a.txt",
        "some.txt",
        "ids.npy",
        "run/job.json",
        "model/config.json",
        "lone/manifest.json",
    ):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for verb in ("train", "plan", "verify"):
        assert words in told(capsys, f"{verb} {name}")


def test_a_job_file_is_told_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        "[optimizer]\nlr = 1\n\n[train]\nmax_steps = 3\nper_device_train_batch_size = 2\n"
    )
    assert _app.run_command_line(["plan", str(job)]) == 3
    first, second, third = capsys.readouterr().err.splitlines()
    assert 'job.toml:1:2: optimizer: unknown section; did you mean "optim"?' in first
    assert 'train.max_steps: unknown key; did you mean "train.steps"?' in second
    assert 'did you mean "train.micro_batch_size"?' in third


def test_every_name_leads_to_a_key_that_there_is() -> None:
    known = {f"{section}.{key}" for section, keys in list_keys_by_section().items() for key in keys}
    assert {ours.key for ours, _ in _ALIASES_OF_KEY} <= known
    spelled = [name for _, words in _ALIASES_OF_KEY for name in words.split()]
    assert len(spelled) == len(set(spelled)), "a name has one meaning"
    assert not set(spelled) & set(list_sections_of_keys()), "our own names come first anyway"
    assert all(name == name.lower() and "-" not in name for name in (*spelled, *OPTIONS_OF_ALIAS))
    for name, ours in KEYS_OF_ALIAS.items():
        assert find_similar_keys(f"--{name.replace('_', '-')}", list_sections_of_keys()) == (ours,)


def test_values_that_are_kept_are_values_of_the_key() -> None:
    """What is shown to paste is a job: a number where others have a number."""
    for text in (
        "steps=7",
        "lr=0.1",
        "warmup=5",
        "gpus=2",
        "max_grad_norm=0.5",
        "mixed_precision=bf16",
        "logging_steps=3",
    ):
        name, _, value = text.partition("=")
        (ours,) = find_similar_keys(name, list_sections_of_keys())
        assert ours.keeps_value
        load_job(None, [f"{ours.key}={value}"])


def test_other_verbs_lead_to_verbs() -> None:
    assert {meant.split()[0] for meant in VERB_ALIASES.values()} <= set(
        list_modules_of_registry("phalanx.cli")
    )
    assert not set(VERB_ALIASES) & set(list_modules_of_registry("phalanx.cli"))


def test_the_schemas_file_knows_the_same_keys() -> None:
    assert {name: set(found) for name, found in sections_of_the_file().items()} == {
        name: set(found) for name, found in list_sections_of_keys().items()
    }


def test_a_wrong_option_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    ask = (
        "import sys; from phalanx.cli._app import run_command_line; run_command_line(['train', '--steps', '3']);"
        " print(*sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "numpy", "phalanx.job.schema"} & set(out.split())
    assert re.search(r"\bphalanx\.job\.key_aliases\b", out)
