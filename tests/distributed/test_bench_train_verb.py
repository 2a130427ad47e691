"""`phalanx bench train` as a user runs it: two contenders and ranks that never talk, in real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import TINY, run
from phalanx.bench.training.contenders import ALONE, Contender
from phalanx.bench.training.layouts import ComparedJob, make_compared_job
from phalanx.bench.training.payload import Turn
from phalanx.bench.training.processes import ContenderFailedError, ContenderServer, RankGroup
from phalanx.job.load import load_job


def test_two_contenders_train_the_same_in_turns(tmp_path: Path) -> None:
    """Losses of all are torch's DDP's, rows are kept, and each turn of each is there."""
    done = run(
        *("bench", "train", *TINY, "train.global_batch_size=8", "train.micro_batch_size=2"),
        *("--ranks", "2", "--with", "ddp", "--layouts", "zero3", "--turns", "2", "--steps", "2"),
        *("--out", "rows.jsonl", "--json"),
        cwd=tmp_path,
    )
    assert done.code == 0, done.err
    body = json.loads(done.out)
    assert body["schema"] == "phalanx.bench-train/1"
    standings = {standing["contender"]: standing for standing in body["standings"]}
    assert list(standings) == ["never talk", "torch ddp", "phalanx zero3"]
    assert standings["never talk"]["share"] == 1
    for standing in standings.values():
        assert standing["worst_loss_off"] <= 1e-5
        assert standing["tokens_per_s"] > 0
        assert standing["peak_bytes"] > 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert {row["schema"] for row in rows} == {"phalanx.bench-train-row/1"}
    assert all(contender["version"] for contender in rows[0]["contenders"])
    turns = [row for row in rows if row["row"] == "turn"]
    # Each warms up, and has two turns, in an order that rotates.
    assert [row["contender"] for row in turns[:3]] == list(standings)
    assert [row["turn"] for row in turns] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert turns[3]["contender"] != turns[6]["contender"]
    losses = {
        name: [rank["losses"] for row in turns if row["contender"] == name for rank in row["ranks"]]
        for name in standings
    }
    assert losses["torch ddp"] != losses["never talk"], "copies of their own learn other things"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ContenderServer]:
    with ContenderServer(tmp_path_factory.mktemp("server")) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def compared() -> ComparedJob:
    return make_compared_job(load_job(None, list(TINY)), 2)


def start_group(group: RankGroup, server: ContenderServer, compared: ComparedJob) -> None:
    group.start(server, compared.job, compared.plan, compared.num_ranks)


def test_a_contender_that_raises_is_told_by_rank_and_reason(
    server: ContenderServer, compared: ComparedJob, tmp_path: Path
) -> None:
    group = RankGroup(Contender("gone", "no_such_loop"), tmp_path / "gone")
    with pytest.raises(ContenderFailedError, match=r"rank 0: ModuleNotFoundError.*no_such_loop"):
        start_group(group, server, compared)
    group.close()


def test_a_rank_that_is_killed_is_named_and_the_others_end(
    server: ContenderServer, compared: ComparedJob, tmp_path: Path
) -> None:
    group = RankGroup(ALONE, tmp_path / "killed")
    start_group(group, server, compared)
    turns = group.take_turn(Turn(1, 2, 1), expected_s=0)
    assert [len(turn.losses) for turn in turns] == [2, 2]
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(ContenderFailedError, match="rank 1 ended early"):
        group.take_turn(Turn(3, 2, 1), expected_s=0)
    group.close()
    assert group.pids == ()
