"""Any change of any value of a manifest, by somebody who knows its checksum, is refused on one
line, or harmless."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_retention import save

from hostile import EVIL
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE_NAME,
    Manifest,
    compute_manifest_checksum,
    encode_canonical_manifest,
    read_manifest,
)
from phalanx.checkpoint.reading.verify import find_checkpoint_problems
from phalanx.cli import _app
from phalanx.core.errors import CheckpointError, ExitCode

FACTS: dict[str, Any] = {
    "step": 10,
    "tokens_seen": 4096,
    "samples_seen": 128,
    "seed": 1,
    "tokenizer": "abc",
    "optimizer": {"kind": "AdamW", "numbers": {"state/w/step": 10.0}},
    "loss_scale": {"scale": 1024.0, "good_steps": 3},
}
ABSURD = [
    "x",
    [1],
    None,
    10**40,
    -5,
    48.5,
    True,
    {},
    [],
    "",
    {"a": {"b": 1}},
    2**63,
    1e308,
    EVIL[:-1],
    "y" * 10_000,
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save(tmp_path_factory.mktemp("run"), 10)
    body = json.loads((directory / MANIFEST_FILE_NAME).read_bytes()) | {"facts": FACTS}
    write(directory, body)
    assert find_checkpoint_problems(directory) == []
    return directory


def write(directory: Path, body: dict[str, Any]) -> None:
    body = {key: value for key, value in body.items() if key != "xxh3"}
    (directory / MANIFEST_FILE_NAME).write_bytes(
        encode_canonical_manifest({**body, "xxh3": compute_manifest_checksum(body)})
    )


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each value of a tree stands."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_of(item, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return body


def check_typed(manifest: Manifest) -> None:
    """What code computes with has its type: nothing is absurd that was let in."""
    facts = manifest.facts
    for name in ("step", "tokens_seen", "samples_seen"):
        assert type(facts.get(name, 0)) is int
        assert 0 <= facts.get(name, 0) <= 2**53
    assert type(facts.get("seed", 0)) is int
    assert isinstance(facts.get("tokenizer", ""), str)
    assert isinstance(facts.get("optimizer", {"kind": ""})["kind"], str)
    assert isinstance(facts.get("optimizer", {}).get("numbers", {}), dict)
    assert all(type(degree) is int and degree > 0 for degree in manifest.layout.values())
    assert all(isinstance(tensor.dtype, str) for tensor in manifest.tensors.values())


@pytest.mark.parametrize("name", FACTS)
@pytest.mark.parametrize("value", ABSURD, ids=lambda value: ascii(value)[:20])
def test_a_fact_that_is_absurd_is_named(whole: Path, tmp_path: Path, name: str, value: Any) -> None:
    body = changed(json.loads((whole / MANIFEST_FILE_NAME).read_bytes()), ("facts", name), value)
    write(tmp_path, body)
    if name == "tokenizer" and isinstance(value, str) and len(value) < 4000:
        assert read_manifest(tmp_path).facts[name] == value
        return
    with pytest.raises(CheckpointError, match=rf"(facts\.)?{name}") as refused:
        read_manifest(tmp_path)
    assert refused.value.exit_code == ExitCode.CHECKPOINT
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000


def test_every_value_replaced_by_everything_absurd(whole: Path, tmp_path: Path) -> None:
    body = json.loads((whole / MANIFEST_FILE_NAME).read_bytes())
    num_refused = 0
    for path in paths_of(body):
        for value in ABSURD:
            write(tmp_path, changed(body, path, value))
            try:
                check_typed(read_manifest(tmp_path))
            except CheckpointError as error:
                num_refused += "\n" not in str(error)
    assert num_refused > 300


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=JSON)
def test_any_change_is_refused_or_harmless(
    whole: Path, tmp_path: Path, data: st.DataObject, value: Any
) -> None:
    body = json.loads((whole / MANIFEST_FILE_NAME).read_bytes())
    path = data.draw(st.sampled_from(sorted(paths_of(body), key=repr)))
    try:
        write(tmp_path, changed(body, path, value))
    except UnicodeEncodeError:
        return  # half a letter: no file of it
    for name in (path.name for path in whole.iterdir() if path.name != MANIFEST_FILE_NAME):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    for problem in find_checkpoint_problems(tmp_path):  # CheckpointErrors, and nothing is raised
        assert "\n" not in str(problem)
        assert problem.exit_code == ExitCode.CHECKPOINT
    try:
        check_typed(read_manifest(tmp_path))
    except CheckpointError:
        pass


NO_MANIFESTS = {
    "lists": "[" * 100_000,
    "objects": '{"a":' * 100_000,
    "digits": '{"facts": ' + "9" * 5000 + "}",
    "not a number": '{"step": NaN}',
    "twice": '{"a": 1, "a": 2}',
    "nul": "\x00" * 50,
}


@pytest.mark.parametrize("text", NO_MANIFESTS.values(), ids=NO_MANIFESTS)
def test_what_is_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    directory = save(tmp_path, 10)
    (directory / MANIFEST_FILE_NAME).write_text(text)
    for verb in (["verify", str(tmp_path)], ["diff", str(directory), str(directory)]):
        assert _app.run_command_line(["checkpoint", *verb]) == ExitCode.CHECKPOINT
        assert len(capsys.readouterr().err.splitlines()) == 1
