"""A job that is wrong says everything that is wrong, where, and what to write instead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cpu_time import measure_cpu_s
from phalanx.core.errors import ExitCode, JobError, JobProblem
from phalanx.job.findings import list_keys_by_section
from phalanx.job.load import find_key_origins, load_job, load_job_json
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    """Writes job.toml into an empty current directory, so that messages begin with "job.toml:"."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "job.toml") -> str:
        Path(name).write_text(text, encoding="utf-8", newline="")
        return name

    return write


def refusal(path: str | None = None, *overrides: str) -> list[str]:
    """The lines of the JobError that loading raises."""
    with pytest.raises(JobError) as caught:
        load_job(path, overrides)
    assert caught.value.exit_code == ExitCode.JOB
    lines = str(caught.value).split("\n")
    assert len(lines) == len(caught.value.problems)
    assert "pydantic" not in str(caught.value)
    assert "http" not in str(caught.value)
    return lines


def only(path: str | None = None, *overrides: str) -> str:
    lines = refusal(path, *overrides)
    assert len(lines) == 1, lines
    return lines[0]


# What loads


def test_no_file_is_all_defaults():
    assert load_job() == Job()


def test_file_and_overrides(job_file):
    job = load_job(
        job_file("""
train.steps = 20                    # a dotted key
model = { dim = 256, num_heads = 8 } # an inline table
[optim]
lr = 1
betas = [0.9, 0.99]
clip_norm = "none"
"""),
        [
            "train.steps=30",
            "model.tie_embeddings=false",
            "optim.betas=[0.8, 0.9]",
            'observe.sinks=["tensorboard"]',
        ],
    )
    assert (job.train.steps, job.model.dim, job.model.num_heads) == (30, 256, 8)
    assert job.model.tie_embeddings is False
    assert job.optim.betas == (0.8, 0.9)
    assert job.optim.clip_norm is None
    assert isinstance(job.optim.lr, float)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("run.name=123", "123"),
        ("run.name=true", "true"),
        ('run.name="quoted"', "quoted"),
        ("run.name='quoted'", "quoted"),
        ("run.dir=/a b/ü#x=[y]", "/a b/ü#x=[y]"),
        ("run.dir=2024-01-01", "2024-01-01"),
        ("run.dir=none", None),
        ("run.dir=\"a\" and 'b'", "\"a\" and 'b'"),
        ("data.source=s3://bucket/*.npy", "s3://bucket/*.npy"),
        (" optim.schedule = wsd ", "wsd"),
        ("optim.clip_norm=none", None),
        ("optim.weight_decay=0.3", 0.3),
        ("optim.weight_decay=auto", "auto"),
        ("train.recompute=none", "none"),
        ("train.steps=1_000", 1000),
        ("model.kind=my.models:build", "my.models:build"),
    ],
)
def test_override_values(text, value):
    section, _, key = text.partition("=")[0].strip().partition(".")
    assert getattr(getattr(load_job(None, [text]), section), key) == value


def test_overrides_reach_into_args(job_file):
    path = job_file('[model]\nkind = "my.models:build"\nargs = { width = 3, deep = { a = 1 } }\n')
    job = load_job(path, ["model.args.deep.b=[1, 2]", "model.args.name=word", "model.args.width=4"])
    assert job.model.args == {"width": 4, "deep": {"a": 1, "b": [1, 2]}, "name": "word"}


def test_the_last_override_wins():
    assert load_job(None, ["train.steps=5", "train.steps=7"]).train.steps == 7


def test_byte_order_mark_and_windows_line_ends(job_file):
    assert load_job(job_file("\ufeff[train]\r\nsteps = 3\r\n")).train.steps == 3
    assert only(job_file('[train]\r\nsteps = "3"\r\n')).startswith("job.toml:2:9: train.steps:")


def test_short_runs_need_no_shorter_warmup():
    assert load_job(None, ["train.steps=5"]).train.steps == 5


def test_loading_is_fast_and_imports_no_torch(job_file):
    script = (
        "import sys; from phalanx.job.load import load_job; load_job(sys.argv[1],"
        " ['train.steps=5']);print([m for m in ('torch', 'numpy', 'tree_sitter') if m in"
        " sys.modules])"
    )
    command = [sys.executable, "-c", script, job_file("[train]\nsteps = 9\n")]

    def load_in_a_process() -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    assert measure_cpu_s(load_in_a_process) < 3
    began_s = time.process_time()
    load_job("job.toml")
    assert time.process_time() - began_s < 0.5


def test_origins(job_file):
    path = job_file("[model]\ndim = 256\n[train]\nsteps = 5\n")
    origins = find_key_origins(path, ["train.steps=6"])
    found = {key: origin.where or origin.kind for key, origin in origins.items()}
    assert found["model.dim"] == "job.toml:2:1"
    assert found["train.steps"] == "override"
    assert found["optim.lr"] == "default"
    assert set(found) == {
        f"{section}.{key}" for section, keys in list_keys_by_section().items() for key in keys
    }


# One wrong value or key

WRONG_IN_FILE = [
    ("[trian]\nsteps = 3", "2:2: trian: unknown section", 'did you mean "train"?'),
    ("[zzz]\na = 3", "2:2: zzz: unknown section", "sections are run, model"),
    ("steps = 3", "2:1: steps: stands outside every section", "belongs in [train]"),
    ("[train]\nstpes = 3", "3:1: train.stpes: unknown key", 'did you mean "steps"?'),
    ("[train]\n  lr = 3", "3:3: train.lr: unknown key", "belongs in [optim]"),
    ("[train]\nkind = 'x'", "3:1: train.kind: unknown key", "belongs in [model] or [optim]"),
    ("[train]\nwarmup_step = 3", "3:1: train.warmup_step: unknown key", 'did you mean "optim.warmup_steps"?'),
    ("[train]\nbatch_size = 3", "3:1: train.batch_size: unknown key", 'did you mean "train.global_batch_size"?'),
    ("[train]\nzzz = 3", "3:1: train.zzz: unknown key", "[train] has steps, global_batch_size"),
    ("[train.steps]\na = 3", "2:8: train.steps: wanted a whole number", "was given a table"),
    ("train = 3", "2:1: train: is a section, not 3", "write [train]"),
    ("[[train]]\nsteps = 3", "2:3: train: is a section, not", "write [train]"),
    ('[train]\nsteps = "3"', '3:9: train.steps: wanted a whole number of at least 1, was given "3"', "without quotes"),
    ("[train]\nsteps = 3.0", "3:9: train.steps: wanted a whole number", "was given 3.0; write 3"),
    ("[train]\nsteps = 3.5", "3:9: train.steps: wanted a whole number", "was given 3.5"),
    ("[train]\nsteps = true", "3:9: train.steps: wanted a whole number", "was given true"),
    ("[train]\nsteps = 0", "3:9: train.steps: wanted a whole number of at least 1, was given 0", ""),
    ("[train]\nsteps = 'none'", "3:9: train.steps: wanted a whole number", 'was given "none"'),
    ("[train]\nsteps = 9223372036854775808", "3:9: train.steps: is a whole number that does not fit", "64 bits"),
    ('[train]\ncompile = "False"', "3:11: train.compile: wanted true or false", "write false, without quotes"),
    ("[train]\ncompile = 1", "3:11: train.compile: wanted true or false, was given 1", ""),
    ("[optim]\nlr = nan", "3:6: optim.lr: wanted a finite number, was given nan", ""),
    ("[optim]\nlr = 0", "3:6: optim.lr: wanted a number above 0 or \"auto\", was given 0", ""),
    ("[optim]\nlr = true", "3:6: optim.lr: wanted a number above 0 or \"auto\", was given true", ""),
    ("[optim]\nclip_norm = 'None'", '3:13: optim.clip_norm: wanted a number above 0 or "none"', 'write "none"'),
    ("[optim]\nmin_lr_ratio = 2", "3:16: optim.min_lr_ratio: wanted a number from 0 to 1, was given 2", ""),
    ("[optim]\nbetas = [\n  0.9,\n  1.5]", "5:3: optim.betas[1]: wanted a number from 0 to 1, was given 1.5", ""),
    ("[optim]\nbetas = [0.9]", "3:9: optim.betas: wanted a list of 2, each a number from 0 to 1", "was given [0.9]"),
    ("[optim]\nbetas = [0, 0, 0]", "3:9: optim.betas: wanted a list of 2", ""),
    ("optim.betas = 0.9", "2:15: optim.betas: wanted a list of 2", ""),
    ("[optim]\nbetas = [0.9, 1]", "3:15: optim.betas[1]: wanted a number below 1", ""),
    ("[optim]\nschedule = 'cosin'", '3:12: optim.schedule: wanted one of "cosine", "linear"', 'did you mean "cosine"?'),
    ("[parallel]\nzero_stage = 4", "3:14: parallel.zero_stage: wanted one of 1, 2, 3 or \"none\", was given 4", ""),
    ("[parallel]\nzero_stage = 2.0", "3:14: parallel.zero_stage: wanted one of 1, 2, 3 or ", "was given 2.0; write 2"),
    ("[parallel]\nzero_stage = '2'", "3:14: parallel.zero_stage: wanted one of 1, 2, 3", "without quotes"),
    ("[run]\nname = 3", "3:8: run.name: wanted a name of 1 to 64 letters", "put it in quotes"),
    ("[run]\nname = 'a/b'", "3:8: run.name: wanted a name of 1 to 64 letters", 'was given "a/b"'),
    ("[run]\nname = 2024-01-01", "3:8: run.name: is a date or a time", "put it in quotes"),
    ("[run]\ndir = ''", "3:7: run.dir: wanted a string that is not empty", ""),
    ("[observe]\nsinks = 'tensorboard'", "3:9: observe.sinks: wanted a list, each a string", 'write ["tensorboard"]'),
    ("observe = { sinks = [ 'tensorboard', 3 ] }", "2:38: observe.sinks[1]: wanted a string, was given 3", ""),
    ("[observe]\nsinks = ['tensorbord']", "3:10: observe.sinks[0]: unknown sink", 'did you mean "tensorboard"?'),
    ("[observe]\nsinks = ['a.b:']", "3:10: observe.sinks[0]: 'a.b:' is not package.module:Class", ""),
    ("[model]\nkind = 'decodr'", "3:8: model.kind: unknown model 'decodr'", 'did you mean "decoder"?'),
    ("[model]\nkind = 'my-models:x'", "3:8: model.kind: 'my-models:x' is not package.module:factory", ""),
    ("[model]\nobjective = 'loss'", "3:13: model.objective: 'loss' is not package.module:function", ""),
    ("[model]\nargs = { a = 1 }", "3:8: model.args: is for your own factory", "model.kind"),
    ("[model]\nargs.a.b = 07:32:00", "3:12: model.args.a.b: is a date or a time", ""),
    ("[model.args]\n\"a b\" = [1, [inf]]", "3:14: model.args.a b[1][0]: wanted a finite number, was given inf", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "start", "inside"), WRONG_IN_FILE, ids=[text for text, _, _ in WRONG_IN_FILE]
)
def test_wrong_in_file(job_file, text, start, inside):
    line = only(job_file(f"# wärme is two bytes\n{text}\n"))
    assert line.startswith(f"job.toml:{start}")
    assert inside in line


def test_the_word_none_is_a_choice_where_it_is_one():
    """Elsewhere it stands for an absent key. Both survive a run's own job.json."""
    job = load_job(None, ["model.preset=qwen2.5-7b", "model.bias=none", "model.rope_theta=none"])
    assert (job.model.bias, job.model.rope_theta) == ("none", None)
    assert build_model_shape(job, 1).bias == "none"
    assert build_model_shape(load_job(None, ["model.preset=qwen2.5-7b"]), 1).bias == "qkv"
    assert Job.model_validate_json(json.dumps(job.to_json())) == job


def test_no_number_of_three_hundred_digits_is_proposed():
    assert only(None, "train.steps=1e300").endswith("was given 1e+300")


def test_columns_count_characters(job_file):
    lines = refusal(job_file('run = { name = "ü/ü", seed = "ü" }'))
    assert [line.split(" ")[0] for line in lines] == ["job.toml:1:16:", "job.toml:1:30:"]


@pytest.mark.parametrize(
    ("text", "start", "inside"),
    [
        ("[train]\nsteps = foo\n", "job.toml:2:9: syntax: invalid value", "in quotes"),
        ("[train]\nsteps = True\n", "job.toml:2:9: syntax: invalid value", "lower case"),
        ("[train\nsteps = 3\n", "job.toml:1:7: syntax: expected ']'", ""),
        (
            "[train]\n  steps = 3\n  steps = 4\n",
            "job.toml:3:3: syntax: a key or section is given twice",
            "",
        ),
        (
            "[train]\nsteps = 3\n[train]\n",
            "job.toml:3:1: syntax: a key or section is given twice",
            "",
        ),
        ("optim.betas = [1,\n\n", "job.toml:1:18: syntax: invalid value", ""),
        ("a = " + "[" * 5000, "job.toml: syntax: arrays or tables are nested too deeply", ""),
        ("a = " + "1" * 5000, "job.toml: syntax: a whole number has thousands of digits", ""),
    ],
)
def test_syntax(job_file, text, start, inside):
    line = only(job_file(text), "train.stpes=3")
    assert line.startswith(start)
    assert inside in line


# The command line

WRONG_OVERRIDES = [
    ("train.steps", "train.steps: has no \"=\"", "write section.key=value"),
    ("train.steps 3", "train.steps 3: has no \"=\"", "write section.key=value"),
    ("steps=3", "steps: is not section.key", 'did you mean "train.steps=3"?'),
    ("stpes=3", "stpes: is not section.key", 'did you mean "train.steps=3"?'),
    ("zzz=3", "zzz: is not section.key", "write section.key=value"),
    ("train={steps=3}", "train: is a whole section", "set its keys one by one: train.steps="),
    ("train..steps=3", "train..steps: is not a key", ""),
    ("=3", ": is not a key", ""),
    ("--train.steps=3", "--train: unknown section", 'did you mean "train"?'),
    ("trian.steps=3", "trian: unknown section", 'did you mean "train"?'),
    ("train.stpes=3", "train.stpes: unknown key", 'did you mean "steps"?'),
    ("train.lr=3", "train.lr: unknown key", "belongs in [optim]"),
    ("train.steps=", "train.steps: has no value", "write train.steps=VALUE"),
    ('train.steps="3"', "train.steps: wanted a whole number of at least 1", "without quotes"),
    ("train.steps=3.0", "train.steps: wanted a whole number", "write 3"),
    ("train.steps=3\nseed=4", "train.steps: wanted a whole number", r"3\nseed=4"),
    ("train.compile=False", "train.compile: wanted true or false", "write false"),
    ("optim.schedule=cosin", "optim.schedule: wanted one of", 'did you mean "cosine"?'),
    ("observe.sinks=[a]", "observe.sinks: the value [a] is not valid TOML", "the shell eats them"),
    ("optim.lr=inf", "optim.lr: wanted a finite number, was given inf", ""),
    ("train.steps.x=3", "train.steps: wanted a whole number", "a table"),
    ("run.name=a b", "run.name: wanted a name of 1 to 64 letters", 'was given "a b"'),
    ("run.dir=a\0b", "run.dir: holds a NUL character", ""),
    ("run.dir=a\udc80b", "run.dir: is not valid UTF-8", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "start", "inside"), WRONG_OVERRIDES, ids=[ascii(w[0]) for w in WRONG_OVERRIDES]
)
def test_wrong_override(text, start, inside):
    line = only(None, text)
    assert line.startswith(f"override: {start}")
    assert inside in line
    assert line.isprintable()


def test_a_name_that_python_took_for_ascii_is_told_what_to_set(monkeypatch) -> None:
    """UTF-8 of a command line under LC_ALL=C with PYTHONUTF8=0: it was said not to be UTF-8."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    line = only(None, "run.dir=lauf \udcc3\udcbc")
    assert "where Python takes names for ascii; set PYTHONUTF8=1" in line


def test_an_override_repairs_the_file(job_file):
    assert load_job(job_file("[train]\nsteps = 'x'\n"), ["train.steps=4"]).train.steps == 4


# Everything at once


def test_all_problems_in_order(job_file):
    path = job_file("""lr = 1
[model]
dim = 130
kind = "decodr"
[trian]
steps = 3
[train]
steps = "3"
[optim]
schedule = "cosin"
betas = [0.9, 2]
lr_peak = 3
""")
    lines = refusal(path, "train.compile=yes", "steps", "run.seed=-1", "parallel.dp_shrad=2")
    assert [": ".join(line.split(": ")[:2]) for line in lines] == [
        "job.toml:1:1: lr",
        "job.toml:3:7: model.dim",
        "job.toml:4:8: model.kind",
        "job.toml:5:2: trian",
        "job.toml:8:9: train.steps",
        "job.toml:10:12: optim.schedule",
        "job.toml:11:15: optim.betas[1]",
        "job.toml:12:1: optim.lr_peak",
        "override: train.compile",
        "override: steps",
        "override: run.seed",
        "override: parallel.dp_shrad",
    ]


def test_problems_are_data(job_file):
    with pytest.raises(JobError) as caught:
        load_job(job_file("[train]\nsteps = 0\n"))
    assert caught.value.to_json()["problems"] == [
        {
            "key": "train.steps",
            "what": "wanted a whole number of at least 1, was given 0",
            "where": "job.toml:2:9",
            "fix": "",
        }
    ]


def test_unknown_and_unusable_is_told_once(job_file):
    assert only(job_file("[train]\nfoo = [nan, 2024-01-01]\n")).startswith(
        "job.toml:2:1: train.foo: unknown key"
    )
    assert only(job_file("[foo]\na = nan\n")).startswith("job.toml:1:2: foo: unknown section")


# Files


def test_missing_file(job_file):
    job_file("", "pretrain.toml")
    assert (
        only("pretrian.toml")
        == 'pretrian.toml: job file: does not exist; did you mean "pretrain.toml"?'
    )
    assert (
        only("nowhere/job.toml")
        == "nowhere/job.toml: job file: does not exist; there is no directory 'nowhere'"
    )
    Path("job.toml").symlink_to("gone.toml")
    assert (
        only("job.toml")
        == "job.toml: job file: does not exist; it is a link to 'gone.toml', which is not there"
    )


def test_directory_binary_and_impossible_paths(job_file, tmp_path):
    job_file("")
    assert only(str(tmp_path)).endswith(
        f"job file: is a directory; did you mean '{tmp_path}/job.toml'?"
    )
    Path("job.bin").write_bytes(b"\x80\x02}q\x00.")
    assert only("job.bin") == "job.bin: job file: is not UTF-8 text (byte 0); save it as UTF-8"
    assert "is not a possible path" in only("job\0.toml")
    assert "File name too long" in only("j" * 5000)


def call_as_nobody(function: Callable[[], str]) -> str:
    """What `function` returns in a copy of this process that may not read everything."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            os.write(writing, function().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def test_unreadable_file(job_file):
    # pytest's own folders are for one user.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        os.chdir(folder)
        path = job_file("nonsense = 1")
        # Here first: what is imported meanwhile may be in folders of one user, too.
        assert only(path) == call_as_nobody(lambda: only(path))
        os.chmod(path, 0)
        refused = call_as_nobody(lambda: only(path))
        os.chdir("/")
    assert refused == "job.toml: job file: cannot be read (Permission denied)"


# Resolved jobs


def test_round_trip_through_json(job_file):
    job = load_job(
        None,
        [
            "model.kind=a.b:c",
            "model.args={x=[1, {y=0.1}]}",
            "optim.betas=[0.1, 0.3]",
            "train.steps=9",
        ],
    )
    path = job_file(json.dumps(job.to_json()), "job.json")
    assert load_job_json(path) == job
    assert load_job_json(path, ["train.steps=10"]).train.steps == 10


@given(st.floats(min_value=1e-300, max_value=1e300), st.integers(0, 2**63 - 1))
def test_numbers_survive_json(tmp_path_factory, lr, seed):
    job = load_job(None, [f"optim.lr={lr!r}", f"run.seed={seed}"])
    assert (job.optim.lr, job.run.seed) == (lr, seed)
    path = tmp_path_factory.getbasetemp() / "job.json"
    path.write_text(json.dumps(job.to_json()))
    assert load_job_json(path) == job


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"train": {"stpes": 3}}', 'job.json: train.stpes: unknown key; did you mean "steps"?'),
        ('{"train": {"steps": 1, ', "job.json:1:24: syntax: not JSON: Expecting property name"),
        ("[1]", "job.json: job file: is JSON, but not a job; give the job.json of a run"),
        ("[" * 100_000, "job.json: syntax: a number is too long, or the nesting too deep"),
        ('{"optim": {"lr": NaN}}', "job.json: optim.lr: wanted a finite number, was given nan"),
        ('{"train": {"steps": null}}', 'job.json: train.steps: wanted a whole number of at least 1, was given "none"'),
        ('{"run": {"dir": "\\ud800"}}', "job.json: run.dir: is not valid UTF-8"),
    ],
)  # fmt: skip
def test_wrong_json(job_file, text, line):
    with pytest.raises(JobError) as caught:
        load_job_json(job_file(text, "job.json"))
    assert str(caught.value).startswith(line)


def test_a_key_that_is_not_text_is_refused(job_file):
    with pytest.raises(JobError, match="unknown key"):
        load_job_json(job_file('{"train": {"\\ud800": 3}}', "job.json"))


# Whatever comes


def outcome(path: str | None, overrides: list[str]) -> tuple[Job | None, list[JobProblem]]:
    """The job or its problems; any other exception passes through and fails the test."""
    try:
        return load_job(path, overrides), []
    except JobError as error:
        return None, error.problems


_anything = st.text(st.characters(exclude_categories=()), max_size=20)
_keys = st.sampled_from(
    [f"{section}.{key}" for section, keys in list_keys_by_section().items() for key in keys]
)
_values = st.sampled_from(
    ["1", "0", "-1", "1e9", "nan", "true", "none", "[]", "[1]", "{}", "{a=1}", '"x"', "[[[", "a:b"]
)
_overrides = st.one_of(
    _anything, st.builds("{}={}".format, st.one_of(_keys, _anything), st.one_of(_values, _anything))
)


@settings(max_examples=400, deadline=None)
@example(["model.args=" + "[" * 500 + "]" * 500])
@example(["model.args.a=" + "[" * 200 + "]" * 200, "model.kind=a:b"])
@example(["train.global_batch_size=9223372036854775783", "parallel.ranks=9223372036854775629"])
@given(st.lists(_overrides, max_size=6))
def test_garbage_raises_only_job_errors(overrides):
    job, problems = outcome(None, overrides)
    assert (job is None) == bool(problems)
    assert all(str(problem).isprintable() for problem in problems)
    if job is not None:
        json.dumps(job.to_json(), allow_nan=False).encode()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(_keys, _values), max_size=8))
def test_garbage_files_raise_only_job_errors(job_file, pairs):
    path = job_file("".join(f"{key} = {value}\n" for key, value in pairs))
    _, problems = outcome(path, [])
    assert all(problem.where.startswith("job.toml:") for problem in problems)
