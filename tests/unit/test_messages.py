"""Values that processes send each other: each type comes back as it was sent, and nothing else
is taken for one."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from phalanx.checkpoint.ownership.fence import RunOwnershipClaim
from phalanx.checkpoint.ownership.run_lock import LockHolder
from phalanx.core.typed_json import JsonObject, JsonRecord, TypedJsonError, from_json, to_json
from phalanx.job.load import load_job
from phalanx.launch.end_record import EndRecord
from phalanx.launch.messages import (
    SERVER_TO_SUPERVISOR_CODEC,
    SUPERVISOR_TO_SERVER_CODEC,
    SUPERVISOR_TO_TEMPLATE_CODEC,
    TEMPLATE_TO_SUPERVISOR_CODEC,
    EndRecorded,
    EventRefused,
    ForkFailed,
    ForkServer,
    ImportAhead,
    KillRanks,
    KillStore,
    PreloadBeginsCuda,
    PreloadFailed,
    PreloadFinished,
    PreloadModules,
    RankExited,
    RanksForked,
    RanksNotForked,
    RankWaits,
    SendSignalToRanks,
    ServerExited,
    ServerForked,
    ServerOrder,
    ServerReport,
    StartRanks,
    StoreExited,
    TemplateOrder,
    TemplateReport,
    WriteStacksToLogs,
)
from phalanx.launch.reports import ErrorReport
from phalanx.launch.wire import JsonLineCodec, MessageChannel
from phalanx.plan.cluster import Cluster
from phalanx.plan.planner import make_plan
from phalanx.run.decision import RankZeroDecision
from phalanx.run.rank_run import RankPayload
from phalanx.run.trained.payloads import (
    EvaluatePayload,
    GeneratePayload,
    ModelPayload,
    SamplingOptions,
)
from phalanx.suggest.suggestion import SuggestPayload
from phalanx.verify.payloads import VerifyCase, VerifyPayload

FAILED = ErrorReport(
    "ValueError", "boom", "Traceback\n", 1, False, "ValueError: boom", False, 1.5, "user.py:3"
)
ORDERS_TO_TEMPLATE: list[TemplateOrder] = [
    ImportAhead(("torch", "phalanx.run.rank"), ("/a", ""), None),
    PreloadModules(Path("/runs/é"), ("torch", "phalanx.run.rank"), ("/a", ""), None),
    ForkServer(),
]
REPORTS_OF_TEMPLATE: list[TemplateReport] = [
    PreloadFinished(1.25, 1),
    PreloadFailed(FAILED),
    PreloadBeginsCuda("cupy"),
    ServerForked(11),
    ForkFailed(FAILED),
    ServerExited(11, -9),
]
ORDERS_TO_SERVER: list[ServerOrder] = [
    StartRanks(
        2, 8, "package.module:main", {"job": {"steps": [1, 2.5, None]}, "run_dir": "/r"}, "training"
    ),
    StartRanks(3, 8, "package.module:main", {}, "training", kept=(0, 1), kept_from=(0, 2)),
    SendSignalToRanks(2, 15),
    WriteStacksToLogs(2, (0, 3)),
    KillRanks(2),
    KillRanks(2, (1, 3)),
    KillStore(2),
]
REPORTS_OF_SERVER: list[ServerReport] = [
    RanksForked(0, (11, 12)),
    RanksNotForked(0, FAILED),
    EndRecorded(1, 0, EndRecord(1, FAILED)),
    EndRecorded(1, 1, EndRecord(0)),
    EventRefused(0, '{"event": "note"}'),
    RankWaits(0, 2, 41),
    RankExited(0, 1, None, 9, True, 12.5),
    RankExited(0, 1, 75, None, False, 12.5),
    StoreExited(0, -6),
]


@pytest.mark.parametrize(
    ("codec", "messages", "kinds"),
    [
        (SUPERVISOR_TO_TEMPLATE_CODEC, ORDERS_TO_TEMPLATE, TemplateOrder),
        (TEMPLATE_TO_SUPERVISOR_CODEC, REPORTS_OF_TEMPLATE, TemplateReport),
        (SUPERVISOR_TO_SERVER_CODEC, ORDERS_TO_SERVER, ServerOrder),
        (SERVER_TO_SUPERVISOR_CODEC, REPORTS_OF_SERVER, ServerReport),
    ],
)
def test_every_message_comes_back_as_it_was_sent(
    codec: JsonLineCodec[Any], messages: list[Any], kinds: Any
) -> None:
    assert {type(message) for message in messages} == set(get_args(kinds))
    for message in messages:
        assert codec.encode(message).count(b"\n") == 1
        assert codec.decode(codec.encode(message)) == message


def test_descriptors_come_with_their_message() -> None:
    ours, theirs = socket.socketpair()
    supervisor = MessageChannel(ours, SUPERVISOR_TO_TEMPLATE_CODEC, TEMPLATE_TO_SUPERVISOR_CODEC)
    template = MessageChannel(theirs, TEMPLATE_TO_SUPERVISOR_CODEC, SUPERVISOR_TO_TEMPLATE_CODEC)
    read_end, write_end = os.pipe()
    supervisor.send(ForkServer(), (write_end,))
    os.close(write_end)
    assert template.receive() == [ForkServer()]
    [received] = template.descriptors
    assert not os.get_inheritable(received)
    os.write(received, b"here")
    assert os.read(read_end, 10) == b"here"
    for descriptor in (received, read_end):
        os.close(descriptor)
    supervisor.close()
    assert template.receive() == []
    assert template.closed
    template.close()


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"type": "Reboot"}, "'Reboot' is none of RanksForked, RanksNotForked"),
        ({"type": "KillRanks"}, "'KillRanks' is none of"),  # an order is no report
        ({"import_s": 1.0}, "None is none of"),
        ([], "None is none of"),
        ({"type": "StoreExited", "attempt": 1}, "StoreExited.code is missing"),
        (
            {"type": "StoreExited", "attempt": 1, "code": 1, "more": 0},
            "StoreExited has no field 'more'",
        ),
        (
            {"type": "StoreExited", "attempt": "1", "code": 1},
            "StoreExited.attempt must be int, not '1'",
        ),
        (
            {"type": "StoreExited", "attempt": True, "code": 1},
            "StoreExited.attempt must be int",
        ),
        (
            {"type": "RanksForked", "attempt": 0, "pids": [1, "2"]},
            r"RanksForked.pids\[1\] must be int",
        ),
        ({"type": "RanksForked", "attempt": 0, "pids": 1}, "RanksForked.pids must be a list"),
        (
            {"type": "EndRecorded", "attempt": 0, "rank": 0, "record": 5},
            "EndRecorded.record must be an object",
        ),
    ],
)
def test_what_is_no_report_is_refused(line: Any, problem: str) -> None:
    with pytest.raises(TypedJsonError, match=problem):
        SERVER_TO_SUPERVISOR_CODEC.decode(json.dumps(line).encode())


def test_a_message_of_another_direction_is_not_sent() -> None:
    with pytest.raises(TypeError, match="PreloadFinished is none of ImportAhead"):
        SUPERVISOR_TO_TEMPLATE_CODEC.encode(PreloadFinished(1.0, 1))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...]
    weights: dict[str, float]


@dataclass(frozen=True)
class Outer:
    where: Path
    inner: tuple[Inner, ...]
    unread: JsonObject
    split: Literal["train", "held_out"]
    note: str | None = None


def test_dataclasses_hold_dataclasses_paths_and_objects_that_are_not_read() -> None:
    value = Outer(Path("a/b"), (Inner((1, 2), {"x": 0.5}),), {"any": [{"thing": None}]}, "train")
    document = json.loads(json.dumps(to_json(value)))
    assert from_json(Outer, document) == value
    assert (
        from_json(Outer, {key: document[key] for key in ("where", "inner", "unread", "split")})
        == value
    )
    with pytest.raises(TypedJsonError, match=r"Outer.inner\[0\].weights.x must be float"):
        from_json(Outer, {**document, "inner": [{"sizes": [], "weights": {"x": "half"}}]})
    with pytest.raises(TypedJsonError, match=r"Outer\.split"):
        from_json(Outer, {**document, "split": "test"})
    with pytest.raises(TypeError, match="a set has no JSON"):
        to_json({"sizes": {1, 2}})


def test_payloads_of_ranks_come_back_as_they_were_sent() -> None:
    job = load_job(
        None, ["model.num_layers=1", "parallel.pp=1", "data.source=text", "cluster.device=cpu"]
    )
    plan = make_plan(job, cluster=Cluster("cpu", 2, 2**34))
    holder = LockHolder("host", 12, 100.5, "boot", 1.5e9, 3)
    model = ModelPayload(job, plan, Path("/run"), "s3://bucket/step-3", 3, True)
    payloads: list[JsonRecord] = [
        RankPayload(job, plan, Path("/run"), 2, 12.5, RunOwnershipClaim(3, holder)),
        RankPayload(job, plan, Path("/run"), 0, 12.5, RunOwnershipClaim()),
        RankZeroDecision(Path("/run"), plan, 1, 2),
        RankZeroDecision(Path("/run"), exit_code=4, error="no"),
        EvaluatePayload(model, Path("/data"), "held_out"),
        GeneratePayload(model, ((1, 2), (3,)), 8, 32, 0, None, SamplingOptions(0.5, top_k=3), 257),
        VerifyPayload(
            job, Path("/run"), None, 3, 2, "small", (VerifyCase("float64", "tp2", {"tp": 2}, plan),)
        ),
        VerifyPayload(job, Path("/run"), None, 3, 2, "small", (), asked_job=job),
        SuggestPayload(job, plan, Path("/run"), Path("/data")),
    ]
    for payload in payloads:
        assert type(payload).from_json(json.loads(json.dumps(payload.to_json()))) == payload
