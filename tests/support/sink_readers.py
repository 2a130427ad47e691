"""What the sinks wrote, read back with the readers of the tools it was written for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curves = dict[str, dict[int, float]]  # by metric, by step


def tensorboard_curves(run_dir: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    curves: Curves = {}
    for tag in accumulator.Tags()["scalars"]:
        points = accumulator.Scalars(tag)
        assert len({point.step for point in points}) == len(points), f"{tag}: a step is drawn twice"
        curves[tag] = {point.step: point.value for point in points}
    return curves


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """The records of all sessions of a run, oldest first, in wandb's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run_dir / "wandb").glob("*run-*/*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def wandb_curves(run_dir: Path) -> Curves:
    """History rows; of a step that two sessions wrote, the first."""
    curves: Curves = {}
    for record in wandb_records(run_dir):
        if record.HasField("history"):
            row = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in row.items():
                if "/" in name:
                    curves.setdefault(name, {}).setdefault(row["step"], value)
    return curves


def wandb_runs(run_dir: Path) -> list[Any]:
    return [record.run for record in wandb_records(run_dir) if record.HasField("run")]


def mlflow_run(run_dir: Path) -> tuple[Any, Any]:
    """A client of the run's database, and its only run."""
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlflow's own use of sqlalchemy
        client = MlflowClient(f"sqlite:///{run_dir.resolve()}/mlflow/mlflow.db")
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        (run,) = client.search_runs(experiments)
    return client, run


def mlflow_curves(run_dir: Path) -> Curves:
    """Of a step with several values the latest."""
    client, run = mlflow_run(run_dir)
    curves: Curves = {}
    for name in run.data.metrics:
        points = sorted(
            client.get_metric_history(run.info.run_id, name), key=lambda point: point.timestamp
        )
        told = {(point.step, point.value) for point in points}
        assert len(told) == len(points), f"{name}: a value is there twice"
        curves[name] = {point.step: point.value for point in points}
    return curves


CURVES = {"tensorboard": tensorboard_curves, "wandb": wandb_curves, "mlflow": mlflow_curves}


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log, which a .wandb file is: blocks of 32 KiB, chunks of crc32 |
    length | type | bytes."""
    assert data.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # a header does not fit into the rest of the block
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if kind == 0:  # the rest is not written yet
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
