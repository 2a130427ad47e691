"""Which rank keeps the others waiting, from positions that are written by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli._app import run_command_line
from phalanx.core import black_box_format as layout
from phalanx.core.black_box import BlackBox, PostedCollective, format_ranks
from phalanx.core.black_box_reader import read_last_position
from phalanx.core.call_site import CallSite
from phalanx.launch.hang_kinds import find_unusual_callers
from phalanx.observe.process_status import ProcessStatus
from phalanx.observe.rank_waits import RankState, WaitVerdict, judge_ranks, parse_ranks
from phalanx.observe.where_words import build_where_json, describe_waits, format_rank_list


class Ranks:
    """Black boxes of ranks that post collectives in an order that the test chooses."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder = folder
        self._boxes = [BlackBox(folder / str(rank)) for rank in range(num_ranks)]
        self._counts: dict[tuple[int, str], int] = {}
        self._groups: dict[tuple[int, str], int] = {}
        self.processes = {rank: ProcessStatus("sleeping") for rank in range(num_ranks)}
        for box in self._boxes:
            box.write(7, "backward")

    def post(
        self,
        rank: int,
        group: str,
        members: list[int],
        *,
        op: str = "all_reduce",
        shape: tuple[int, ...] = (4,),
        ends: bool = False,
        peer: int = -1,
        tag: int = -1,
        is_queued: bool = False,
    ) -> None:
        key, box = (rank, group), self._boxes[rank]
        if key not in self._groups:
            self._groups[key] = box.add_group(group, group, len(members), format_ranks(members))
        self._counts[key] = self._counts.get(key, 0) + 1
        number = box.post_collective(
            PostedCollective(
                op=op,
                group=self._groups[key],
                sequence=self._counts[key],
                dtype="float32",
                shape=shape,
                num_tensors=1,
                num_bytes=16,
                peer=peer,
                tag=tag,
                site=CallSite("model.py", 88),
                state=layout.QUEUED if is_queued else layout.POSTED,
                is_foreground=True,
            )
        )
        if ends:
            box.end_collective(number)
        elif not is_queued:
            box.begin_wait(number)

    def enter(self, rank: int, phase: str, collective: str = "") -> None:
        self._boxes[rank].write(7, phase, collective)

    def states(self) -> dict[int, RankState]:
        states = {}
        for rank, process in self.processes.items():
            position = read_last_position(self._folder / str(rank))
            states[rank] = RankState(rank, position, process)
        return states

    def judge(self) -> WaitVerdict:
        return judge_ranks(self.states())


def test_a_chain_of_groups_ends_at_the_rank_that_waits_for_nobody(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 4)
    ranks.post(0, "dp", [0, 1])
    ranks.post(1, "tp", [1, 3])
    ranks.post(2, "other", [2, 3], ends=True)
    ranks.post(3, "other", [2, 3], ends=True)
    verdict = ranks.judge()
    assert (verdict.kind, verdict.culprits) == ("absent", (3,))
    (sentence,) = describe_waits(verdict, ranks.states())
    assert "before all_reduce #1 of tp (float32 [4], 16 B)" in sentence
    assert sentence.endswith("last seen at model.py:88; rank 1 waits in it")


def test_a_circle_is_named_with_what_each_waits_in(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.post(0, "dp", [0, 1])
    ranks.post(1, "tp", [0, 1], op="barrier")
    verdict = ranks.judge()
    assert (verdict.kind, verdict.culprits) == ("circle", (0, 1))
    (sentence,) = describe_waits(verdict, ranks.states())
    assert sentence.startswith("ranks 0 and 1 wait for each other: rank 0 in all_reduce #1 of dp")


def test_one_rank_with_another_shape_is_told_from_the_many(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    for rank in range(3):
        ranks.post(rank, "dp", [0, 1, 2], shape=(2, 2) if rank == 1 else (4,))
    verdict = ranks.judge()
    assert (verdict.kind, verdict.culprits) == ("differs", (1,))
    (sentence,) = describe_waits(verdict, ranks.states())
    assert "rank 1 posted all_reduce #1 of dp (float32 [2, 2], 16 B) at model.py:88" in sentence


def test_shapes_may_differ_where_each_rank_gives_its_own(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    for rank in range(2):
        ranks.post(rank, "ep", [0, 1], op="all_to_all", shape=(rank + 1,))
    assert ranks.judge().kind == "inside"


def test_nobody_says_that_a_rank_has_posted_which_was_not_seen(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.post(0, "pp", [0, 1], op="recv", peer=1)
    states = ranks.states()
    del states[1]
    (sentence,) = describe_waits(judge_ranks(states), states)
    assert "all ranks have posted" not in sentence
    assert "rank 1" in sentence


def test_of_calls_on_a_device_a_rank_waits_in_the_newest(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    for rank in range(3):
        for _ in range(3):
            ranks.post(rank, "dp", [0, 1, 2], is_queued=True)
    # None is ever written to have ended: nobody waits in those.
    assert ranks.judge().kind == "none"
    for rank in (0, 2):
        ranks.post(rank, "dp", [0, 1, 2], is_queued=True)
        ranks.enter(rank, "collective", "all_reduce step facts")
    verdict = ranks.judge()
    assert (verdict.kind, verdict.culprits) == ("absent", (1,))
    assert [wait.collective.sequence for wait in verdict.waits] == [4, 4]


def test_a_peer_that_was_never_seen_is_absent(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.post(0, "pp", [0, 1], op="recv", peer=1, tag=0)
    states = ranks.states()
    del states[1]
    verdict = judge_ranks(states)
    assert (verdict.kind, verdict.culprits) == ("absent", (1,))
    assert find_unusual_callers(states, verdict.culprits) == ()
    (sentence,) = describe_waits(verdict, states)
    assert "rank 1" in sentence


def test_a_receive_of_any_rank_names_none(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.post(0, "pp", [0, 1], op="recv", peer=-1, tag=0)
    assert ranks.judge().kind == "inside"


def test_a_stopped_rank_comes_before_one_that_is_only_absent(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3)
    ranks.post(0, "dp", [0, 1, 2])
    ranks.processes[2] = ProcessStatus("stopped")
    verdict = ranks.judge()
    assert (verdict.kind, verdict.culprits) == ("stopped", (2,))


def test_ranks_that_wait_for_a_moment_are_healthy(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.post(0, "dp", [0, 1])
    states = ranks.states()
    (wait,) = judge_ranks(states).waits
    assert judge_ranks(states, wait.began_s + 0.5).kind == "none"
    assert judge_ranks(states, wait.began_s + 1.5).kind == "absent"


def test_a_run_that_has_ended_waits_for_nobody(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    for rank in range(2):
        ranks.post(rank, "dp", [0, 1], ends=True)
        ranks.processes[rank] = ProcessStatus("gone")
    assert ranks.judge().kind == "none"


def test_the_json_has_waits_and_collectives(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2)
    ranks.post(0, "dp", [0, 1])
    facts = build_where_json(ranks.judge(), ranks.states(), None)
    facts = json.loads(json.dumps(facts))
    assert (facts["verdict"], facts["culprits"]) == ("absent", [1])
    assert facts["ranks"][0]["wait"] == {"number": 1, "absent": [1], "differing": []}
    (collective,) = facts["ranks"][0]["collectives"]
    assert (collective["group"], collective["group_ranks"]) == ("dp", "0,1")


@pytest.mark.parametrize("ranks", [[0], [0, 1], [0, 1, 2, 3], [1, 5, 9], [0, 1, 4, 5], [4, 2]])
def test_ranks_are_read_as_they_are_written(ranks: list[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    "text", ["0-999999999999", "0-9,0-999999999999999999999", "999999999999-0:-1", "0-9:0", "0-x"]
)
def test_a_damaged_text_of_ranks_names_none(text: str) -> None:
    assert parse_ranks(text) == ()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((2,), "rank 2"),
        ((0, 3), "ranks 0 and 3"),
        ((0, 1, 2, 5), "ranks 0-2 and 5"),
        ((0, 1), "ranks 0 and 1"),
        ((0, 1, 2, 3), "ranks 0-3"),
    ],
)
def test_a_list_of_ranks_in_words(ranks: tuple[int, ...], text: str) -> None:
    assert format_rank_list(ranks) == text


FINISHED_RANK = """
import sys
from pathlib import Path
from phalanx.core.black_box import BlackBox, RankIdentity
from phalanx.launch.paths import black_box_path
from phalanx.observe.bus import Bus
from phalanx.observe.events import RunFinished

run_dir = Path(sys.argv[1])
num_ranks = int(sys.argv[2])
box = BlackBox(black_box_path(run_dir, 0), RankIdentity(0, num_ranks, 0, "cpu"))
box.write(7, "evaluate")
bus = Bus(rank=-1, run_dir=run_dir)
bus.emit(RunFinished("finished", 0, 7, 1.0))
bus.close()
"""


def test_of_a_run_that_has_ended_its_end_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run([sys.executable, "-c", FINISHED_RANK, str(tmp_path), "1"], check=True)
    assert run_command_line(["where", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    first, second, *_ = shown.out.splitlines()
    assert (first, second[:30]) == ("finished at step 7", "the processes of all ranks hav")
    assert shown.err == ""


@pytest.mark.parametrize("box", [None, b"", bytes(26416)])
def test_a_rank_that_has_ended_is_no_culprit_where_nothing_is_known_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], box: bytes | None
) -> None:
    """The box of rank 1 was lost or damaged: rank 0 was called gone, for whom the others wait."""
    subprocess.run([sys.executable, "-c", FINISHED_RANK, str(tmp_path), "2"], check=True)
    if box is not None:
        (tmp_path / "blackbox" / "rank-0001").write_bytes(box)
    assert run_command_line(["where", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "finished at step 7"
    assert "is gone" not in shown.out
    assert "no position of rank 1 is there, or it cannot be read" in shown.err
    assert run_command_line(["where", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["verdict"], facts["culprits"], facts["silent_ranks"]) == ("none", [], [1])
