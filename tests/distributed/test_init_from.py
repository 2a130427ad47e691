"""Training that starts from weights: `model.init_from`, at any layout, once, checked at the
door."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import TINY, Done, events, loss_curve, run, run_all, write_text
from phalanx.checkpoint.exchange.checkpoint_reader import CheckpointReader
from phalanx.checkpoint.manifest import list_checkpoint_paths_of_run, read_manifest
from phalanx.cli._app import run_command_line as phalanx
from phalanx.observe.events import RunStarted, WeightsTaken

HERE = Path(__file__).parent
KEYS = (*TINY, "optim.warmup_steps=0", "data.source=texts")
NOTHING_MOVES = (
    "optim.lr=1e-30"  # so that the weights after a step are those before it, to the last bit
)
LAYOUTS = {
    "one rank": ("parallel.ranks=1",),
    "ddp": ("parallel.ranks=2", "parallel.dp_replicate=2"),
    "zero3": ("parallel.ranks=2", "parallel.dp_shard=2"),
    "restarted": (
        "parallel.ranks=2",
        'resilience.inject=["kill:rank=1,step=1,phase=backward"]',
        "resilience.keep_ranks=false",
    ),
}


def tensors(place: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The weights of a checkpoint as bits, every byte verified."""
    with CheckpointReader(place) as reader:
        return {name: reader.load(name) for name in reader.tensors}


def same(a: Mapping[str, np.ndarray[Any, Any]], b: Mapping[str, np.ndarray[Any, Any]]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source run of two sharded ranks, and runs of every layout that start from it."""
    folder = tmp_path_factory.mktemp("init")
    shutil.copy(HERE / "user_code.py", folder)
    write_text(folder / "texts")
    source = run(
        "train",
        *KEYS,
        "train.steps=20",
        "parallel.dp_shard=2",
        "run.dir=source",
        "run.seed=5",
        cwd=folder,
    )
    assert source.code == 0, source.err
    return folder


@pytest.fixture(scope="module")
def started(place: Path) -> dict[str, Done]:
    chosen = ("train", *KEYS, "train.steps=1", NOTHING_MOVES, "model.init_from=source")
    commands = [
        [*chosen, f"run.dir={name.replace(' ', '-')}", *keys] for name, keys in LAYOUTS.items()
    ]
    return dict(zip(LAYOUTS, run_all(commands, place), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_of_any_layout_begins_with_the_weights_it_was_given(
    layout: str, place: Path, started: dict[str, Done]
) -> None:
    """The source's checkpoint is the reference, bit by bit; the optimizer began anew."""
    done, run_dir = started[layout], place / layout.replace(" ", "-")
    assert done.code == 0, done.err
    source = list_checkpoint_paths_of_run(place / "source")[-1]
    assert same(tensors(run_dir / "checkpoints" / "step-1"), tensors(source))
    assert f"from {source}, step 20" in done.out
    attempts = len(events(run_dir, RunStarted)) // 1
    told = [envelope.event for envelope in events(run_dir, WeightsTaken)]
    assert len(told) == attempts == (2 if layout == "restarted" else 1)
    assert all(
        isinstance(event, WeightsTaken) and event.checkpoint == str(source) for event in told
    )
    assert read_manifest(run_dir / "checkpoints" / "step-1").facts["tokens_seen"] == 8 * 32


def test_the_first_loss_is_that_of_the_weights_at_every_layout(
    place: Path, started: dict[str, Done]
) -> None:
    """One rank is the reference; random weights would begin at log(257)."""
    losses = {layout: loss_curve(place / layout.replace(" ", "-"))[1] for layout in LAYOUTS}
    assert losses["one rank"] < 5.3 < np.log(257)
    assert [loss for loss in losses.values() if abs(loss - losses["one rank"]) > 1e-5] == []


def test_a_run_that_continues_does_not_read_it(place: Path, started: dict[str, Done]) -> None:
    assert started["ddp"].code == 0
    shutil.copytree(place / "ddp", place / "continued")
    shutil.copytree(place / "ddp", place / "poisoned")
    trace = place / "trace"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (trace,))

    for file in (place / "poisoned" / "checkpoints" / "step-1").glob("rank-*"):
        file.write_bytes(pickle.dumps(Payload()))
    continued, poisoned = run_all(
        [["train", "--resume", name, "train.steps=2"] for name in ("continued", "poisoned")],
        place,
    )
    assert continued.code == 0, continued.err
    assert "model.init_from is not read" in continued.out
    assert len(events(place / "continued", WeightsTaken)) == 1
    assert len(events(place / "continued", RunStarted)) == 2
    assert poisoned.code == 5
    assert not trace.exists()


@pytest.mark.long
def test_a_users_own_module_is_asked_by_its_ranks(place: Path) -> None:
    """Its names are not known before: the ranks refuse, with the table."""
    done = run(
        "train",
        *KEYS[3:],
        "model.kind=user_code:bigram",
        "model.init_from=source",
        "run.dir=own",
        cwd=place,
    )
    assert done.code == 5
    lines = done.err.splitlines()
    header = next(
        number for number, line in enumerate(lines) if line.split() == ["tensor", "wanted", "found"]
    )
    assert "does not fit this model (3 missing, 11 not in this model)" in " ".join(lines)
    assert any(
        line.split() == ["lookup.weight", "float32", "[257,", "16]", "-"] for line in lines[header:]
    )


# At the door, in this process: nothing is written


def refused(capsys: pytest.CaptureFixture[str], place: Path, *keys: str, code: int = 5) -> str:
    run_dir = place / "never"
    assert (
        phalanx(["train", *KEYS, f"data.source={place / 'texts'}", f"run.dir={run_dir}", *keys])
        == code
    )
    assert not run_dir.exists()
    return capsys.readouterr().err


def test_weights_of_another_shape_are_refused_with_a_table(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = refused(
        capsys,
        place,
        f"model.init_from={place / 'source'}",
        "model.num_layers=2",
        "model.ffn_dim=64",
    )
    lines = err.splitlines()
    assert lines[0].startswith(f"phalanx: {list_checkpoint_paths_of_run(place / 'source')[-1]}: ")
    assert "9 missing, 3 of another shape" in lines[0]
    assert lines[1].split() == ["tensor", "wanted", "found"]
    assert any(
        "blocks.0.ffn.down.weight" in line and "[32, 64]" in line and "[32, 96]" in line
        for line in lines
    )
    assert not any("Traceback" in line for line in lines)


def test_places_that_hold_no_weights(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no checkpoint is there" in refused(
        capsys, place, f"model.init_from={tmp_path / 'nowhere'}"
    )
    (tmp_path / "config.json").write_text("{}")
    err = refused(capsys, place, f"model.init_from={tmp_path}")
    assert "phalanx checkpoint import" in err
    damaged = tmp_path / "damaged"
    shutil.copytree(list_checkpoint_paths_of_run(place / "source")[-1], damaged)
    (damaged / "manifest.json").write_text(
        (damaged / "manifest.json").read_text().replace('"seed": 5', '"seed": 6')
    )
    assert "its checksum differs" in refused(capsys, place, f"model.init_from={damaged}")
    assert "no weights to cast" in refused(capsys, place, "model.init_cast=true", code=3)


@pytest.mark.long
def test_another_type_is_rounded_only_when_asked(place: Path, tmp_path: Path) -> None:
    """Exported in bfloat16, imported, refused, and taken: the first half of each number's bits
    is the reference."""
    half = tmp_path / "half"
    done = run(
        "checkpoint",
        "export",
        "source",
        "--out",
        str(tmp_path / "hf"),
        "--dtype",
        "bf16",
        cwd=place,
    )
    assert done.code == 0, done.err
    assert phalanx(["checkpoint", "import", str(tmp_path / "hf"), "--out", str(half)]) == 0
    keys = (*KEYS, "train.steps=1", NOTHING_MOVES, f"model.init_from={half}", "parallel.dp_shard=2")
    without, taken = run_all(
        [
            ["train", *keys, "run.dir=no"],
            ["train", *keys, "run.dir=rounded", "model.init_cast=true"],
        ],
        place,
    )
    assert without.code == 5
    assert "model.init_cast=true rounds them" in without.err
    assert "11 of another type" in without.err
    assert not (place / "no").exists()
    assert taken.code == 0, taken.err
    assert "rounded to float32" in taken.out
    wanted = {
        name: bits.astype(np.uint32) << 16
        for name, bits in tensors(half / "checkpoints" / "step-0").items()
    }
    assert same(tensors(place / "rounded" / "checkpoints" / "step-1"), wanted)
    told = events(place / "rounded", WeightsTaken)[0].event
    assert isinstance(told, WeightsTaken)
    assert (told.num_cast, told.imported_from) == (11, str(tmp_path / "hf"))


def test_a_plan_says_where_training_starts_and_what_no_shape_shows(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another base of the rotary positions fits every tensor, and is another model."""
    monkeypatch.chdir(place)
    keys = ("plan", *KEYS, f"model.init_from={place / 'source'}")
    assert phalanx([*keys, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["initial"]
    assert (told["num_tensors"], told["dtypes"], told["differences"]) == (11, ["float32"], [])
    assert phalanx([*keys, "model.rope_theta=5e5"]) == 0
    assert (
        "warn    the weights were made for rope_theta 10000.0, and model.rope_theta is 500000.0"
        in (capsys.readouterr().out)
    )
