"""One rank of a contender: it lives through the whole comparison, trains in its turns, and sleeps
between them."""

from __future__ import annotations

import importlib
import os
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from phalanx.bench.training.contenders import LOOPS_PACKAGE
from phalanx.bench.training.payload import (
    BUILT,
    DONE,
    END,
    FAILURE,
    GO,
    PREPARED,
    REFUSAL,
    TURN,
    MessageLines,
    RankSetting,
    RankTurn,
    Turn,
)
from phalanx.core.errors import PhalanxError
from phalanx.core.launchers import (
    LAUNCHER_VARIABLE_PREFIXES,
    TORCHRUN_VARIABLES,
    find_loopback_interface_name,
)
from phalanx.core.parent import kill_this_process_with_parent
from phalanx.core.process_memory import ProcessMemoryReader
from phalanx.mesh.devices import choose_threads_per_rank
from phalanx.parallel.executor import Batch
from phalanx.plan.plan import Plan


class TrainingTurns:
    """The steps that a rank is asked for. Iterating yields the microbatches of each step, and waits
    in between as long as it is not this contender's turn.

    The time of a step is that from where its microbatches are handed out to where the next ones are
    asked for. `record_loss` is called once in each.
    """

    def __init__(self, setting: RankSetting, messages: MessageLines) -> None:
        self._setting, self._messages = setting, messages
        self._losses: list[float] = []
        self._memory = ProcessMemoryReader()
        self._is_first_turn = True

    def record_loss(self, loss: float) -> None:
        """Note the loss of this step: this rank's mean, or that of all ranks."""
        self._losses.append(loss)

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        self._messages.send({BUILT: True})
        while True:
            waited_from = time.process_time()
            message = self._messages.receive()
            if message is None or END in message:
                return
            turn = Turn.from_json(message[TURN])
            idle_cpu_s = time.process_time() - waited_from
            steps = range(turn.first_step, turn.first_step + turn.num_steps)
            batches = [select_rank_microbatches(self._setting, step) for step in steps]
            self._messages.send({PREPARED: True})
            message = self._messages.receive()
            if message is None or GO not in message:
                return
            yield from self._time_steps(batches, idle_cpu_s)

    def _time_steps(
        self, batches: Sequence[Sequence[Batch]], idle_cpu_s: float
    ) -> Iterator[Sequence[Batch]]:
        self._losses, step_s = [], []
        began_cpu = time.process_time()
        for microbatches in batches:
            began = time.perf_counter()
            yield microbatches
            step_s.append(time.perf_counter() - began)
        cpu_s = time.process_time() - began_cpu
        assert len(self._losses) == len(step_s), "each step has a loss"
        done = RankTurn(
            tuple(step_s), tuple(self._losses), cpu_s, idle_cpu_s, self._measure_peak_bytes()
        )
        self._messages.send({DONE: done.to_json()})

    def _measure_peak_bytes(self) -> int:
        """The most memory since the first turn, which makes what building the model took the mark
        no longer."""
        if self._is_first_turn:
            self._is_first_turn = False
            self._memory.reset_peak_resident_bytes()
        resident = self._memory.read()
        if resident is None:
            return 0
        of_others = self._memory.measure_bytes_of_others()
        return resident.peak_bytes - (of_others.all_bytes if of_others is not None else 0)


def select_rank_microbatches(setting: RankSetting, step: int) -> list[Batch]:
    """This rank's rows of `step`, in the plan's microbatches: the same rows of the same step for
    every contender, whatever its layout."""
    plan = setting.plan
    batch = make_step_batch(plan, setting.job.run.seed, step)
    number = plan.layout.data_parallel_rank(setting.rank)
    microbatches: list[Batch] = []
    for index in range(plan.num_microbatches):
        rows = {
            name: tensor.chunk(plan.num_microbatches)[index].chunk(plan.layout.data_parallel_size)
            for name, tensor in batch.items()
        }
        microbatches.append({name: parts[number].clone() for name, parts in rows.items()})
    return microbatches


def make_step_batch(plan: Plan, seed: int, step: int) -> dict[str, torch.Tensor]:
    """All rows of a step, drawn anew: random tokens, small ones more often, so that there is
    something to learn; or random images with labels."""
    generator = torch.Generator().manual_seed((seed << 32) + step)
    rows, shape = plan.global_batch_size, plan.model_shape
    if shape.reads_images:
        sides = (shape.num_channels, shape.image_size, shape.image_size)
        images = torch.randn(rows, *sides, generator=generator)
        labels = torch.randint(shape.num_classes, (rows,), generator=generator)
        return {"inputs": images, "targets": labels}
    uniform = torch.rand(rows, plan.seq_len + 1, generator=generator)
    tokens = (plan.vocab_size * uniform**4).long().clamp_(max=plan.vocab_size - 1)
    return {"inputs": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def run_rank_of_contender(connection: socket.socket, log_path: str) -> NoReturn:
    """Be the rank whose setting is the first message on `connection`; what it says besides goes to
    `log_path`."""
    os.setsid()
    kill_this_process_with_parent()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    messages = MessageLines(connection)
    code = 1
    try:
        first = messages.receive()
        assert first is not None, "the setting comes first"
        _train_in_turns(RankSetting.from_json(first), messages)
        code = 0
    except PhalanxError as error:
        _send_if_heard(messages, {REFUSAL: error.to_json()})
    except Exception as error:
        traceback.print_exc()
        _send_if_heard(messages, {FAILURE: f"{type(error).__name__}: {error}".splitlines()[0]})
    finally:
        # Without the libraries' teardown of groups that other ranks may have left.
        os._exit(code)


def _send_if_heard(messages: MessageLines, message: dict[str, object]) -> None:
    try:
        messages.send(message)
    except OSError:
        # Whoever would read it is gone, and so are we.
        pass


def _train_in_turns(setting: RankSetting, messages: MessageLines) -> None:
    _set_rank_variables(setting)
    torch.set_num_threads(choose_threads_per_rank(setting.num_ranks))
    loop = importlib.import_module(f"{LOOPS_PACKAGE}.{setting.contender.loop}")
    loop.train_in_turns(setting, TrainingTurns(setting, messages))


def _set_rank_variables(setting: RankSetting) -> None:
    """Say in the environment what torchrun would say of this rank, and nothing of another
    launcher's."""
    for name in list(os.environ):
        if name in TORCHRUN_VARIABLES or name.startswith(LAUNCHER_VARIABLE_PREFIXES):
            del os.environ[name]
    count = str(setting.num_ranks)
    threads = choose_threads_per_rank(setting.num_ranks)
    os.environ |= {
        "RANK": str(setting.rank),
        "LOCAL_RANK": str(setting.rank),
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(setting.port),
        "OMP_NUM_THREADS": str(threads),
    }
    os.environ.setdefault("GLOO_SOCKET_IFNAME", find_loopback_interface_name())
    Path(setting.run_dir).mkdir(parents=True, exist_ok=True)
