"""`phalanx checkpoint`: the verbs on checkpoints of a run, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_retention import damage, save
from torch import nn

from phalanx.checkpoint.best import record_best_step
from phalanx.checkpoint.manifest import compute_manifest_checksum, encode_canonical_manifest
from phalanx.checkpoint.ownership.run_lock import holding_run_lock
from phalanx.checkpoint.reading.choose import find_newest_or_best_checkpoint
from phalanx.checkpoint.reading.weights import load_weights
from phalanx.checkpoint.stores import find_newest_readable_step, open_store_of_run
from phalanx.cli._app import run_command_line
from phalanx.core.errors import CheckpointError


def phalanx(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run_command_line(["checkpoint", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path, step)
    record_best_step(tmp_path, step=10, loss=1.5, num_targets=100)
    return tmp_path


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = phalanx(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_ls(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(a_run / "checkpoints" / "step-20")  # not looked at: ls is quick
    (a_run / "checkpoints" / "step-30" / "manifest.json").write_text("{}")
    code, out, _ = phalanx(capsys, "ls", str(a_run))
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["step-10", "step-20", "step-30"]
    assert lines[0].endswith("best")
    assert "damaged" in lines[2]
    code, facts = as_json(capsys, "ls", str(a_run))
    assert (code, facts["schema"], facts["best"]) == (0, "phalanx.checkpoints/1", 10)
    assert [c["step"] for c in facts["checkpoints"]] == [10, 20, 30]
    assert "format None" in facts["checkpoints"][2]["error"]


def test_verify_reads_the_newest_or_all(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(a_run / "checkpoints" / "step-20")
    assert phalanx(capsys, "verify", str(a_run))[0] == 0
    code, out, err = phalanx(capsys, "verify", str(a_run), "--all")
    assert code == 5
    assert [line.split()[0] for line in out.splitlines()] == ["whole", "damaged", "whole"]
    assert "step-20/a.safetensors" in err
    code, facts = as_json(capsys, "verify", str(a_run / "checkpoints" / "step-20"))
    assert (code, facts["checkpoints"][0]["ok"]) == (5, False)


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_what_is_found_in_a_checkpoint_is_printed_without_secrets(
    a_run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    as_json: list[str],
) -> None:
    monkeypatch.setenv("MY_API_KEY", "SEKRET-1234567")
    newest = a_run / "checkpoints" / "step-30"
    body = json.loads((newest / "manifest.json").read_text())
    tensor = body["tensors"].pop("w")
    tensor["pieces"] *= 2
    body["tensors"] = {"https://me:hunter2hunter2@host/SEKRET-1234567": tensor}
    body["xxh3"] = compute_manifest_checksum(body)
    (newest / "manifest.json").write_bytes(encode_canonical_manifest(body))
    for verb in ("verify", "ls", "diff"):
        places = [str(a_run)] * (2 if verb == "diff" else 1)
        code, out, err = phalanx(capsys, verb, *places, *as_json)
        assert code == {"verify": 5, "ls": 0, "diff": 5}[verb], err
        assert "hunter2" not in out + err
        assert "SEKRET" not in out + err
        assert "https://me:***@host/***" in out + err or verb == "ls"


def test_a_checkpoint_without_its_manifest_is_damaged(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was renamed into place with one.

    The older ones are not taken for the newest in silence.
    """
    newest = a_run / "checkpoints" / "step-30"
    (newest / "manifest.json").unlink()
    for verb in (["verify", str(newest)], ["verify", str(a_run)], ["diff", str(a_run), str(a_run)]):
        code, _, err = phalanx(capsys, *verb)
        assert (code, f"{newest}: it is damaged (manifest.json is missing)" in err) == (5, True)
    code, out, _ = phalanx(capsys, "ls", str(a_run))
    assert (code, out.splitlines()[-1].split()[:2]) == (0, ["step-30", "damaged:"])
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load_weights(nn.ParameterDict({"w": nn.Parameter(torch.zeros(8))}), a_run)


def test_a_manifest_with_half_a_letter_is_damaged(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = a_run / "checkpoints" / "step-30"
    body = json.loads((newest / "manifest.json").read_text())
    body["facts"] = {"said": "\ud800"}
    body["xxh3"] = compute_manifest_checksum(body)
    (newest / "manifest.json").write_text(json.dumps(body))
    code, _, err = phalanx(capsys, "verify", str(newest))
    assert (code, "the manifest cannot be read" in err) == (5, True)


def test_a_file_that_was_cut_is_listed_as_damage(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = a_run / "checkpoints" / "step-30"
    (shard,) = newest.glob("*.safetensors")
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    code, out, _ = phalanx(capsys, "ls", str(a_run))
    last = out.splitlines()[-1]
    assert (code, last.split()[:2]) == (0, ["step-30", "damaged:"])
    assert f"{shard.name} has {size - 1:,} bytes instead of {size:,}" in last
    shard.unlink()
    assert f"{shard.name} is missing" in phalanx(capsys, "ls", str(a_run))[1].splitlines()[-1]


def test_a_file_that_is_a_link_is_as_long_as_what_it_leads_to(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a store that keeps equal files once leaves them: `ls` and `verify` say the same."""
    newest = a_run / "checkpoints" / "step-30"
    (shard,) = newest.glob("*.safetensors")
    elsewhere = tmp_path / "elsewhere"
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    assert "damaged" not in phalanx(capsys, "ls", str(newest))[1]
    assert phalanx(capsys, "verify", str(newest))[0] == 0
    elsewhere.unlink()
    assert f"{shard.name} is missing" in phalanx(capsys, "ls", str(newest))[1]
    code, _, err = phalanx(capsys, "verify", str(newest))
    assert (code, f"{shard.name} is missing" in err) == (5, True)


def test_what_is_saved_is_what_can_be_read(a_run: Path) -> None:
    """A damaged one beyond it is not called done."""
    (a_run / "checkpoints" / "step-90").mkdir()
    store = open_store_of_run(a_run, None)
    assert find_newest_readable_step(store) == 30
    (a_run / "checkpoints" / "step-30" / "manifest.json").unlink()
    assert find_newest_readable_step(store) == 20


def test_one_without_its_manifest_does_not_stand_for_the_last_good_one(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (a_run / "best.json").unlink()
    for path in (a_run / "checkpoints" / "step-30").iterdir():
        path.unlink()
    code, facts = as_json(capsys, "prune", str(a_run), "--keep-last", "1")
    assert (code, facts["removed"]) == (0, [])
    code, facts = as_json(capsys, "prune", str(a_run), "--keep-last", "2")
    assert (code, facts["removed"], facts["kept"]) == (0, ["step-10"], ["step-20", "step-30"])


def test_a_checkpoint_under_the_name_of_another_step_is_refused(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (a_run / "checkpoints" / "step-20").rename(a_run / "checkpoints" / "step-90")
    for verb in (["verify", str(a_run)], ["diff", str(a_run), str(a_run)]):
        code, _, err = phalanx(capsys, *verb)
        assert (code, "step-90 holds step 20; a copy can be removed" in err) == (5, True)
    code, out, _ = phalanx(capsys, "ls", str(a_run))
    assert (code, "step-90 holds step 20" in out.splitlines()[-1]) == (0, True)
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(8))})
    with pytest.raises(CheckpointError, match="step-90 holds step 20"):
        load_weights(module, a_run)
    (a_run / "checkpoints" / "step-90").rename(
        a_run / "a copy of step 20"
    )  # a name that says nothing of a step
    assert phalanx(capsys, "verify", str(a_run / "a copy of step 20"))[0] == 0
    assert load_weights(module, a_run / "a copy of step 20") == 20


def test_diff(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert phalanx(capsys, "diff", str(a_run), str(a_run / "checkpoints" / "step-30"))[0] == 0
    code, facts = as_json(capsys, "diff", str(a_run), str(a_run / "checkpoints" / "step-10"))
    assert (code, facts["tensors"][0]["max_abs"]) == (11, 20.0)


def test_prune_keeps_the_best_and_refuses_a_run_in_use(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("prune", str(a_run), "--keep-last", "1")
    code, out, _ = phalanx(capsys, *arguments, "--dry-run")
    assert (code, "would remove  step-20" in out, "would keep  step-10, step-30" in out) == (
        0,
        True,
        True,
    )
    with holding_run_lock(a_run):
        code, _, err = phalanx(capsys, *arguments)
        assert (code, "in use" in err) == (9, True)
    code, facts = as_json(capsys, *arguments)
    assert (code, facts["removed"], facts["kept"]) == (0, ["step-20"], ["step-10", "step-30"])
    assert not (a_run / "checkpoints" / "step-20").exists()


@pytest.mark.parametrize("form", ["{}", "{}/checkpoints", "file://{}", "file://{}/checkpoints"])
def test_a_run_may_be_named_by_its_folder_of_checkpoints_or_by_a_url(
    a_run: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """They are the same run: with its lock, and its best checkpoint."""
    (a_run / "job.json").write_text("{}")
    place = form.format(a_run)
    code, facts = as_json(capsys, "ls", place)
    assert (code, facts["best"], [found["step"] for found in facts["checkpoints"]]) == (
        0,
        10,
        [10, 20, 30],
    )
    assert phalanx(capsys, "verify", place, "--all")[0] == 0
    with holding_run_lock(a_run):
        assert phalanx(capsys, "prune", place, "--keep-last", "1")[0] == 9
    code, facts = as_json(capsys, "prune", place, "--keep-last", "1")
    assert (code, facts["removed"], facts["kept"]) == (0, ["step-20"], ["step-10", "step-30"])
    assert find_newest_or_best_checkpoint(place, best=True).step == 10


def test_prune_of_a_url_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would take no lock, and remove the best: only the run's directory knows of both."""
    url = f"file://{tmp_path}/store"
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoints").rename(tmp_path / "store")
    code, _, err = phalanx(capsys, "prune", url, "--keep-last", "1")
    assert (code, "phalanx checkpoint prune RUN" in err, len(err.splitlines())) == (2, True, 1)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["step-10", "step-20"]


def test_prune_removes_nothing_where_the_best_is_not_known(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (a_run / "best.json").write_text('{"step": 1')
    code, _, err = phalanx(capsys, "prune", str(a_run), "--keep-last", "1")
    assert (code, "best.json" in err) == (5, True)
    assert len(list((a_run / "checkpoints").iterdir())) == 3


@pytest.mark.parametrize("verb", ["ls", "verify", "prune"])
def test_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    more = ["--keep-last", "1"] if verb == "prune" else []
    assert phalanx(capsys, verb, str(tmp_path / "nowhere"), *more)[0] == 2
    code, out, err = phalanx(capsys, verb, str(tmp_path), *more)
    assert (code, out, "no checkpoint is there" in err) == (5, "", True)


def test_one_checkpoint_is_no_run_to_prune(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = phalanx(
        capsys, "prune", str(a_run / "checkpoints" / "step-20"), "--keep-last", "1"
    )
    assert (code, "give the run's directory" in err) == (2, True)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_ls_of_one_checkpoint_is_its_row(
    a_run: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    place = a_run / "checkpoints" / "step-20"
    of_run = phalanx(capsys, "ls", str(a_run))[1].splitlines()
    code, out, _ = phalanx(capsys, "ls", form.format(place))
    assert (code, out.splitlines()) == (0, of_run[1:2])
    (place / "manifest.json").unlink()
    assert "damaged: " in phalanx(capsys, "ls", form.format(place))[1]
    assert phalanx(capsys, "ls", form.format(a_run / "checkpoints" / "step-99"))[0] == 2


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As someone would who also knows how to write the checksum."""
    body = json.loads((checkpoint / "manifest.json").read_text())
    change(body)
    body["xxh3"] = compute_manifest_checksum(body)
    (checkpoint / "manifest.json").write_bytes(encode_canonical_manifest(body))


EVIL = "w\n\x1b[2J\x9b31m"


def rename_tensor(body: dict[str, Any], dtype: str = "float32") -> None:
    body["tensors"][EVIL] = body["tensors"].pop("w") | {"dtype": dtype}
    body["layout"] = {EVIL: 2}


def test_no_escape_sequence_of_a_checkpoint_reaches_the_terminal(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, newest = (a_run / "checkpoints" / f"step-{step}" for step in (10, 20, 30))
    edit(first, rename_tensor)
    edit(second, lambda body: rename_tensor(body, f"float32{EVIL}"))
    (newest / EVIL).write_text("")
    said = [
        phalanx(capsys, *verb)
        for verb in (
            ("ls", str(a_run)),
            ("ls", str(first)),
            ("verify", str(a_run), "--all"),
            ("diff", str(first), str(first)),
            ("diff", str(first), str(second)),
            ("diff", str(newest), str(newest)),
            ("export", str(first), "--out", str(a_run / "x")),
            ("prune", str(a_run), "--keep-last", "1"),
        )
    ]
    assert [code for code, _, _ in said] == [0, 0, 5, 0, 5, 5, 5, 0]
    for _, out, err in said:
        assert [line for line in (out + err).split("\n") if not line.isprintable()] == []


def resize(body: dict[str, Any], shape: list[int]) -> None:
    body["tensors"]["w"]["shape"] = shape


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a directory in it": ("more is in it", lambda d: (d / "more").mkdir()),
    "a pipe in it": ("more is in it", lambda d: os.mkfifo(d / "more")),
    "a type that nobody writes": (
        "of type int3",
        lambda d: edit(d, lambda b: b["tensors"]["w"].update(dtype="int3")),
    ),
    "a tie to no tensor": (
        "'v' is tied to 'u'",
        lambda d: edit(d, lambda b: b.update(aliases={"v": "u"})),
    ),
    "a negative length": ("-1 is no count", lambda d: edit(d, lambda b: resize(b, [-1]))),
    "a negative step": ("-6 is no count", lambda d: edit(d, lambda b: b.update(step=-6))),
    "more than the pieces make": (
        "the pieces of w do not",
        lambda d: edit(d, lambda b: resize(b, [9])),
    ),
    "no pieces": (
        "the pieces of w do not",
        lambda d: edit(d, lambda b: b["tensors"]["w"].update(pieces=[])),
    ),
    "another file's piece": (
        "is not the block of w",
        lambda d: edit(d, lambda b: b["tensors"]["w"]["pieces"][0].update(key="v#0")),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_verify_refuses_diff_refuses(
    a_run: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """Also where nothing is compared: of this tensor, the other side has none."""
    words, apply = DAMAGES[damage]
    whole, damaged = (a_run / "checkpoints" / f"step-{step}" for step in (10, 20))
    edit(whole, lambda body: rename_tensor(body))
    apply(damaged)
    for verb in (("verify", damaged), ("diff", whole, damaged), ("diff", damaged, whole)):
        code, _, err = phalanx(capsys, *map(str, verb))
        assert (code, words in err) == (5, True), err


def test_verify_names_all_that_is_missing_and_all_that_is_there_besides(
    a_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = a_run / "checkpoints" / "step-20"
    (checkpoint / "a.safetensors").rename(checkpoint / "b.safetensors")
    for name in "cdef":
        (checkpoint / name).write_text("")
    code, out, err = phalanx(capsys, "verify", str(checkpoint))
    assert (code, len(err.splitlines()), "2 problems" in out) == (5, 2, True)
    assert "a.safetensors is missing (a.safetensors holds w)" in err
    assert "b.safetensors, c, d, e, f (5 files) are in it that no save wrote" in err
