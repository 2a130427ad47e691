"""The job file that `phalanx init` writes, and the JSON Schema that editors read: both say what
`load_job` says."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli import _app
from phalanx.core.errors import JobError, ResourceError
from phalanx.core.files import write_json_atomically
from phalanx.job.findings import list_keys_by_section
from phalanx.job.job_file import write_job_file
from phalanx.job.json_schema import SCHEMA_FILE_NAME, build_job_json_schema
from phalanx.job.load import load_job, load_job_json
from phalanx.job.schema import Job
from phalanx.job.template import USUALLY_SET_KEYS, format_job_template
from phalanx.job.toml import format_toml_value

ROOT = Path(__file__).parents[2]
COMMENTED = re.compile(r"^#(?=[a-z_]+ = )", re.MULTILINE)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# TOML values

plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=8,
)


@given(plain)
def test_a_value_is_read_as_it_was_written(value: Any) -> None:
    """Against tomllib."""
    assert tomllib.loads(f"key = {format_toml_value(value)}") == {"key": value}


# The file


def test_a_fresh_job_file_is_the_default_job(tmp_path: Path) -> None:
    for minimal in (False, True):
        text = format_job_template(minimal=minimal)
        assert load_job(write(tmp_path / "job.toml", text)) == Job()
        assert set(re.findall(r"^([a-z_]+) = ", text, re.MULTILINE)) == {
            key.partition(".")[2] for key in USUALLY_SET_KEYS
        }


def test_every_key_is_in_it_once_with_its_words() -> None:
    text = format_job_template()
    for section, keys in list_keys_by_section().items():
        body = text.split(f"[{section}]\n")[1].split("\n[")[0]
        assert tuple(re.findall(r"^#?([a-z_]+) = ", body, re.MULTILINE)) == keys
        for line in re.findall(r"(.*)\n#?[a-z_]+ = ", body):
            assert line.startswith("# "), "words stand above each key"
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("section", list_keys_by_section())
def test_a_section_loads_with_every_key_switched_on(section: str, tmp_path: Path) -> None:
    head, body = format_job_template().split(f"\n[{section}]\n")
    body, _, tail = body.partition("\n\n")
    switched = COMMENTED.sub("", body)
    assert tomllib.loads(switched).keys() == set(list_keys_by_section()[section])
    job = load_job(write(tmp_path / "job.toml", f"{head}\n[{section}]\n{switched}\n\n{tail}"))
    if section != "model":  # where "none" is a choice, too: no biases, no stretched positions
        assert job == Job()


KEYS = {
    "run": {"name": "first.1", "seed": 7, "dir": "somewhere/else"},
    "model": {
        "kind": "own.models:net",
        "args": {"width": 3, "name": 'a "b" \\ ü', "deep": {"x y": [1, 2.5]}},
    },
    "data": {"mixture": [{"source": "a"}, {"source": "b*", "weight": 2.0}]},
    "optim": {"betas": [0.8, 0.99], "clip_norm": None},
    "observe": {"sinks": []},
    "resilience": {"inject": ["kill:rank=1,step=7"]},
}


def test_the_job_of_a_run_comes_back(tmp_path: Path) -> None:
    """All but its directory, which is taken."""
    write_json_atomically(
        tmp_path / "job.json", Job.model_validate_json(json.dumps(KEYS)).to_json()
    )
    job = load_job_json(tmp_path / "job.json")
    for minimal in (True, False):
        text = format_job_template(job, minimal=minimal)
        again = load_job(write(tmp_path / "job.toml", text))
        assert again.run.dir is None
        assert again.model_copy(update={"run": job.run}) == job
        assert (again.run.name, again.run.seed) == (job.run.name, job.run.seed)


# The verb


def test_init_writes_a_job_and_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _app.run_command_line(["init"]) == 0
    assert capsys.readouterr().out == "wrote   job.toml; next: phalanx train job.toml\n"
    assert load_job("job.toml") == Job()
    written = Path("job.toml").read_bytes()
    assert _app.run_command_line(["init", "--minimal"]) == 2
    assert "is there already; use --force" in capsys.readouterr().err
    assert Path("job.toml").read_bytes() == written
    assert _app.run_command_line(["init", "--minimal", "--force", "--editor"]) == 0
    assert Path("job.toml").read_text().startswith(f"#:schema ./{SCHEMA_FILE_NAME}\n")
    assert json.loads(Path(SCHEMA_FILE_NAME).read_text()) == build_job_json_schema()
    assert load_job("job.toml") == Job()
    assert sorted(path.name for path in tmp_path.iterdir()) == [SCHEMA_FILE_NAME, "job.toml"]
    os.mkfifo("pipe")
    assert _app.run_command_line(["init", "pipe", "--force"]) == 7
    assert "pipe: it is no file that can be replaced" in capsys.readouterr().err
    assert Path("pipe").is_fifo()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["."], "is a directory"),
        (["absent/job.toml"], "there is no directory 'absent'"),
        (["a\0b"], "not a possible path"),
        (["--from-run", "absent"], "absent: no run is there"),
        (["x" * 300], "File name too long"),
    ],
)
def test_init_refuses_in_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _app.run_command_line(["init", *arguments]) in (2, 7)
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_init_prints_what_it_would_write(capsys: pytest.CaptureFixture[str]) -> None:
    assert _app.run_command_line(["init", "-"]) == 0
    assert capsys.readouterr().out == format_job_template()
    assert _app.run_command_line(["init", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == build_job_json_schema()


# The schema


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft7Validator:
    schema = build_job_json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_the_schema_files_are_what_the_code_says() -> None:
    text = runpy.run_path(str(ROOT / "docs" / "generate.py"))["schema_text"]()
    assert (ROOT / "docs" / SCHEMA_FILE_NAME).read_text(encoding="utf-8") == text, "run make docs"
    assert files("phalanx.job").joinpath(SCHEMA_FILE_NAME).read_text(encoding="utf-8") == text, (
        "run make docs"
    )


def test_every_key_of_the_schema_has_words_and_a_default(
    validator: jsonschema.Draft7Validator,
) -> None:
    for section, body in validator.schema["properties"].items():
        assert body["description"], section
        assert tuple(body["properties"]) == list_keys_by_section()[section]
        for key, schema in body["properties"].items():
            assert schema["description"], f"{section}.{key}"
            assert "default" in schema or schema["type"] == "object", f"{section}.{key}"
            default = {section: {key: schema.get("default", {})}}
            assert validator.is_valid(default), f"{section}.{key}: its own default"


def test_an_editor_accepts_what_init_writes(validator: jsonschema.Draft7Validator) -> None:
    text = format_job_template()
    for job in (text, COMMENTED.sub("", text)):
        validator.validate(tomllib.loads(job))


GOOD = [
    "",
    "[train]\nsteps = 5",
    "[optim]\nlr = 1\nbetas = [0.9, 0]\nclip_norm = 'none'\nlr_scaling = 'none'",
    "[optim]\nbetas = [0, 0.5]\nschedule = 'wsd'",
    "[parallel]\nzero_stage = 2\nranks = 'none'",
    "[parallel]\nzero_stage = 'none'",
    "[model]\nkind = 'decoder'\npreset = 'llama3-8b'",
    "[model]\nkind = 'own.models:net'\nargs = { width = 3, deep = { names = ['a'] } }",
    "[observe]\nsinks = []",
    "[observe]\nsinks = ['tensorboard', 'own.sinks:Slack']",
    "[[data.mixture]]\nsource = 'a'\n[[data.mixture]]\nsource = 'b'\nweight = 2",
    "[eval]\nevery_steps = 10\nkeep_best = true\n[run]\nname = 'a.b-c_1'",
]
BAD = [
    "steps = 5",
    "[trian]\nsteps = 5",
    "train = 5",
    "[train]\nstep = 5",
    "[train]\nsteps = 0",
    "[train]\nsteps = 'none'",
    "[train]\nsteps = '5'",
    "[train]\nsteps = 5.5",
    "[train]\nsteps = true",
    "[train]\ncompile = 'true'",
    "[optim]\nlr = 0",
    "[optim]\nlr = -1.0",
    "[optim]\nlr = '0.1'",
    "[optim]\nbetas = [0.9]",
    "[optim]\nbetas = [0.9, 0.9, 0.9]",
    "[optim]\nbetas = [0.9, 1.5]",
    "[optim]\nschedule = 'Cosine'",
    "[parallel]\nzero_stage = 4",
    "[parallel]\nzero_stage = '3'",
    "[run]\nname = 'a/b'",
    "[run]\ndir = ''",
    "[model]\nkind = 'transformer'",
    "[model]\npreset = 'llama9-8b'",
    "[model]\nargs = 3",
    "[observe]\nsinks = ['tensorbored']",
    "[observe]\nsinks = 'tensorboard'",
    "[[data.mixture]]\nweight = 2",
    "[[data.mixture]]\nsource = 'a'\nweight = 0",
    "[[data.mixture]]\nsource = 'a'\nwieght = 1",
    "[data]\nheld_out_fraction = 1.0",
]


@pytest.mark.parametrize("text", [*GOOD, *BAD])
def test_the_schema_accepts_what_load_job_accepts(
    text: str, tmp_path: Path, validator: jsonschema.Draft7Validator
) -> None:
    try:
        load_job(write(tmp_path / "job.toml", text))
        is_good = True
    except JobError:
        is_good = False
    assert is_good == (text in GOOD), text
    assert validator.is_valid(tomllib.loads(text)) == is_good, text


def test_a_job_file_that_cannot_be_written_is_told_by_its_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`phalanx init` in a folder of somebody else's: it said to choose another run.dir."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("phalanx.job.job_file.write_bytes_atomically", refuse)
    with pytest.raises(ResourceError, match="choose another FILE"):
        write_job_file(str(tmp_path / "job.toml"), "", force=False)
