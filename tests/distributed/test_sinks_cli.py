"""`phalanx train` with sinks, from the command line to what the tools read back; and no secret
in any file of it."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

from commands import TINY, environment, events, loss_curve, run, write_text
from phalanx.core.registry import import_object_of_kind, list_modules_of_registry
from phalanx.observe.events import RankFailed, RestartScheduled, SinkDropped
from sink_readers import CURVES, wandb_runs

PACKAGE = "phalanx.observe.sinks"
INSTALLED = [
    kind
    for kind in list_modules_of_registry(PACKAGE)
    if all(map(importlib.util.find_spec, import_object_of_kind(kind, PACKAGE, "REQUIRES")))
]
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": None}
SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_SECRET_TOKEN": 'tok"en/with+odd & <chars> 100%',
    "STORE_URL": "postgres://trainer:correct-horse@store/db",
    "CACHE_URL": "redis://:qx7@cache/0?token=tq7",
    "MYSQL_PWD": "no-folder-at-all",
    "BLOB_CONNECTION_STRING": "Endpoint=x;AccountKey=abc/def+012==",
}
SHORT = (":qx7@", "=tq7")  # found by their place only
PASSWORD = "correct-horse"
EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")


def sinks(kinds: list[str]) -> str:
    return f"observe.sinks={json.dumps(kinds)}"


@pytest.mark.long
def test_a_run_and_its_resumption_are_one_curve_in_every_sink(tmp_path: Path) -> None:
    kinds = ["tensorboard", "wandb"]
    write_text(tmp_path / "text")
    shutil.copy(EXAMPLES / "own_sink.py", tmp_path)
    job = [*TINY, "data.source=text", "parallel.ranks=2", sinks([*kinds, "own_sink:open_csv"])]
    env = environment(**OFFLINE)
    first = run("train", *job, "train.steps=6", "run.dir=run", cwd=tmp_path, env=env)
    assert first.code == 0, first.err
    again = run("train", "--resume", "run", "train.steps=12", cwd=tmp_path, env=env)
    assert again.code == 0, again.err
    run_dir = tmp_path / "run"
    assert not events(run_dir, SinkDropped)
    assert "wandb writes" in first.out
    losses = loss_curve(run_dir)
    assert list(losses) == list(range(1, 13))
    for kind in kinds:
        assert CURVES[kind](run_dir)["train/loss"] == pytest.approx(losses), kind
    rows = (run_dir / "steps.csv").read_text().splitlines()
    assert {int(number): float(loss) for number, loss, _ in csv.reader(rows)} == losses
    configs = [
        {item.key: item.value_json for item in record.config.update}
        for record in wandb_runs(run_dir)
    ]
    assert [json.loads(config["train"])["steps"] for config in configs] == [6, 12]
    assert len({record.run_id for record in wandb_runs(run_dir)}) == 1


@pytest.mark.long
def test_no_secret_of_the_environment_reaches_a_file_of_the_run(tmp_path: Path) -> None:
    """With every sink on, and a model that prints the token in every way there is and raises
    with it."""
    for name in ("user_code.py", "user_code_leaky.py"):
        shutil.copy(Path(__file__).parent / name, tmp_path)
    write_text(tmp_path / "text")
    job = [
        *TINY,
        "data.source=text",
        "parallel.ranks=2",
        "model.kind=user_code_leaky:leaky",
        sinks(INSTALLED),
    ]
    shape = ("model.num_layers", "model.dim", "model.num_heads")
    job = [override for override in job if not override.startswith(shape)]
    done = run("train", *job, "run.dir=run", cwd=tmp_path, env=environment(**OFFLINE, **SECRETS))
    assert done.code == 0, done.err
    run_dir = tmp_path / "run"
    assert events(run_dir, RestartScheduled), "the model raised"
    (failure,) = (envelope.event for envelope in events(run_dir, RankFailed))
    assert failure.detail == "RuntimeError: postgres://trainer:***@store/db refuses '***'"
    hidden = [
        *(value for name, value in SECRETS.items() if not name.endswith("_URL")),
        PASSWORD,
        *SHORT,
    ]
    written = [done.out.encode(), done.err.encode()]
    written += [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    for secret in hidden:
        for spelling in {secret, json.dumps(secret)[1:-1], secret.replace("&", "&amp;")}:
            assert not any(spelling.encode() in data for data in written), spelling
    log = "".join(path.read_text() for path in (run_dir / "logs").glob("rank-0001-*.log"))
    assert "logged in with ***" in log
    assert re.search(r"from C: \*{8,}", log)
    assert re.search(r"from a child: \*{8,}", log)


def test_a_job_that_carries_a_secret_is_refused(tmp_path: Path) -> None:
    """Whatever it is named, and without saying it; nothing is left behind."""
    refused = {
        f"model.args.where={SECRETS['WANDB_API_KEY']}": (
            "holds the secret of the environment variable WANDB_API_KEY"
        ),
        'model.args.api_key="anything"': "is named like a secret",
        f"data.source={SECRETS['STORE_URL']}": "is a URL with a password in it",
    }
    env = environment(WANDB_API_KEY=SECRETS["WANDB_API_KEY"])
    commands = [["train", "model.kind=a.b:c", "run.dir=run", override] for override in refused]
    dones = [run(*command, cwd=tmp_path, env=env) for command in commands]
    for done, why in zip(dones, refused.values(), strict=True):
        assert done.code == 3
        assert why in done.problem
        assert "give it through the environment" in done.problem
        assert SECRETS["WANDB_API_KEY"] not in done.problem
    assert not (tmp_path / "run").exists()
