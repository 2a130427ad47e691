"""The references of a group of ranks: what one process computes, written by rank 0 when a layout
first needs it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import ResourceError
from phalanx.core.files import REFUSALS_THAT_LAST, disk_problem
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.optim.build import build_optimizer
from phalanx.parallel.executor import Batch
from phalanx.plan.plan import Plan
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.batches import cast_steps, split_again
from phalanx.verify.flips import EVALUATION, Reroute, optimizer_step, train_step
from phalanx.verify.forward_probe import Probe, describe_failure, probe
from phalanx.verify.pipelines import num_microbatches
from phalanx.verify.reference import AloneStep, Around, evaluate_alone, train_alone
from phalanx.verify.routes import Choices, Routes, are_alike, read_routes, write_routes
from phalanx.verify.trace import write_trace
from phalanx.verify.trace_facts import BUFFERS, TRACE, Trace, read_trace

NUDGE = 4  # roundings
# Not one over a number of ranks or microbatches, so that a clip that is missing is told from them.
CLIP, MOVE = 0.3, 0.01


@dataclass
class References:
    """The traces of one process, in as many microbatches as a layout has where that makes a
    difference."""

    mesh: Mesh
    run_dir: Path
    job: Job
    plan: Plan
    dtype: str
    steps: list[list[Batch]]
    _traces: dict[int, Trace | str] = field(default_factory=dict)
    _num_replays: int = 0

    def open_for(self, plan: Plan) -> tuple[Trace | str, list[list[Batch]]]:
        """(the trace, or why there is none; the microbatches of each step). Collective.

        Pipelines have more microbatches, of the same rows. Only a module whose rows see each other,
        or that counts its calls, knows the difference: it then has a reference of its own.
        """
        usual = self._open(len(self.steps[0]), self.steps)
        count = num_microbatches(plan)
        if isinstance(usual, str) or count in (0, len(self.steps[0])):
            return usual, self.steps
        steps = split_again(self.steps, count)
        if usual.mixes_rows or BUFFERS in usual.sizes:
            return self._open(count, steps), steps
        return usual, steps

    def _open(self, count: int, steps: list[list[Batch]]) -> Trace | str:
        if count not in self._traces:
            directory, failure = self.run_dir / f"reference-{self.dtype}-{count}", ""
            # A group that crashed may have left it; trace.json is written last.
            if self.mesh.rank == 0 and not (directory / TRACE).exists():
                failure, _ = _write_reference(directory, self.job, self.plan, self.dtype, steps)
            # All ranks come here together, for each has opened the same traces before.
            failure = self.mesh.gather_json(failure)[0]
            self._traces[count] = failure or read_trace(directory)
        return self._traces[count]

    def replay(
        self, trace: Trace, steps: list[list[Batch]], choices: Choices
    ) -> tuple[Trace | str, list[Reroute]]:
        """`trace` again, with routers that choose as `choices` say, or why there is none; and where
        they would have chosen something else.

        `steps`: those of the layout. Collective.
        """
        self._num_replays += 1
        directory = self.run_dir / f"reference-{self.dtype}-routed-{self._num_replays}"
        answer: tuple[str, list[dict[str, Any]]] = "", []
        if self.mesh.rank == 0:
            # What the usual trace was made of, whatever number of microbatches the layout has.
            steps = self.steps if trace is self._traces[len(self.steps[0])] else steps
            failure, reroutes = _write_reference(
                directory, self.job, self.plan, self.dtype, steps, choices
            )
            answer = failure, [asdict(reroute) for reroute in reroutes]
        failure, bodies = self.mesh.gather_json(answer)[0]
        return failure or read_trace(directory), [Reroute(**body) for body in bodies]


def _write_reference(
    directory: Path,
    job: Job,
    plan: Plan,
    dtype: str,
    steps: Sequence[Sequence[Batch]],
    forced: Choices | None = None,
    *,
    nudged: bool = False,
) -> tuple[str, list[Reroute]]:
    """Write it, or return why there is none: what the module does in one process is no layout's
    fault.

    And what its routers would have chosen instead of `forced`. `nudged`: of the module with weights
    that are rounded otherwise.

    Raises ResourceError where the disk refuses: that is not the module's fault either.
    """

    writer = _ReferenceWriter(
        directory, job, plan, dtype, steps, forced, nudged, loss_sum=JobLoss(job, plan)
    )
    try:
        with _repeatable():
            return "", writer.write()
    # Of a reference that this one needs: it has its words already.
    except ResourceError:
        raise
    except Exception as error:
        problem = disk_problem(
            error, "writing the reference", refusals=REFUSALS_THAT_LAST, where=directory
        )
        if problem is not None:
            raise problem from error
        traceback.print_exc()  # in the rank's log
        return describe_failure(error, dtype), []


@dataclass(frozen=True)
class _ReferenceWriter:
    """Runs the steps of one reference and keeps what they show in `directory`."""

    directory: Path
    job: Job
    plan: Plan
    dtype: str
    steps: Sequence[Sequence[Batch]]
    forced: Choices | None
    nudged: bool
    loss_sum: JobLoss

    def write(self) -> list[Reroute]:
        """Write it, and return what its routers would have chosen instead of `forced`."""
        probed = probe(self._build, self.loss_sum, self.steps[0][0], self.job.run.seed)
        module, routes, alone = self._prepare(train_step)
        by_optimizer = None
        # Else the root of a small second moment has few digits.
        if self.dtype == "float64" and not probed.narrows:
            by_optimizer = self._prepare(optimizer_step, by_optimizer=True)

        def evaluate(module: nn.Module) -> float:
            with routes.record(EVALUATION):
                return evaluate_alone(module, self.loss_sum, self.steps[-1])

        write_trace(
            self.directory,
            self.dtype,
            module,
            probed,
            alone,
            evaluate=evaluate,
            updated=None if by_optimizer is None else (by_optimizer[0], by_optimizer[2]),
            other=lambda: self._find_other(probed, routes),
        )
        choices, reroutes = dict(routes.choices), list(routes.reroutes)
        if by_optimizer is not None:
            choices |= by_optimizer[1].choices
            reroutes += by_optimizer[1].reroutes
        write_routes(self.directory, choices)
        return reroutes

    def _build(self) -> nn.Module:
        module = build_original_module(self.job, self.plan, self.dtype, materialize=True)[0]
        if self.nudged:
            _nudge(module)
        return module

    def _prepare(
        self, phase: Callable[[int], str], *, by_optimizer: bool = False
    ) -> tuple[nn.Module, Routes, Iterator[AloneStep]]:
        """(a module, the record of its routes, its steps), which run when they are asked for."""
        module, optimizer = self._build(), None
        if by_optimizer:
            optimizer = build_optimizer(module, self.job.optim)
        routes = Routes(module, self.forced)
        around = _around(DropoutMasks(module, self.job.run.seed), routes, phase)
        alone_steps = train_alone(
            module,
            self.loss_sum,
            self.steps,
            clip=CLIP,
            move=MOVE,
            optimizer=optimizer,
            around=around,
        )
        return module, routes, alone_steps

    def _find_other(self, probed: Probe, routes: Routes) -> Path | None:
        """The directory of the same steps in float64, or else from nudged weights; None where
        rounding is not judged, or there is neither."""
        if self.nudged:
            return None
        if self.dtype == "float32":
            exact = _find_float64(self.directory, self.job, self.plan, self.steps, routes.choices)
            if exact is not None:
                return exact
        elif not probed.narrows:
            return None
        nudged = self.directory.parent / f"{self.directory.name}-nudged"
        failure, _ = _write_reference(
            nudged, self.job, self.plan, self.dtype, self.steps, routes.choices, nudged=True
        )
        if failure:
            return None
        return nudged


def _around(masks: DropoutMasks, routes: Routes, phase: Callable[[int], str]) -> Around:
    """The context that each forward of the reference runs in: masks and routes of its step."""

    @contextmanager
    def around(step: int, first_row: int, num_rows: int) -> Iterator[None]:
        with masks.fill(step, first_row, num_rows), routes.record(phase(step - 1)):
            yield

    return around


def _find_float64(
    directory: Path, job: Job, plan: Plan, steps: Sequence[Sequence[Batch]], choices: Choices
) -> Path | None:
    """The directory of the same steps in float64, routed alike; None where float64 is not
    judged."""
    exact = directory.parent / f"reference-float64-{len(steps[0])}"
    if not (exact / TRACE).exists():
        return None
    if are_alike(choices, read_routes(exact)):
        return exact
    alike = directory.parent / f"{directory.name}-float64"
    failure, _ = _write_reference(
        alike, job, plan, "float64", cast_steps(steps, torch.float64), choices
    )
    if failure:
        return None
    return alike


@torch.no_grad()
def _nudge(module: nn.Module) -> None:
    """Every weight by up to a few roundings to float32, by chance: what that changes, no order
    of sums can promise."""
    generator = torch.Generator().manual_seed(0)
    for parameter in filter(torch.is_floating_point, module.parameters()):
        roundings = torch.randint(-NUDGE, NUDGE + 1, parameter.shape, generator=generator).to(
            parameter.dtype
        )
        parameter.mul_(1 + torch.finfo(torch.float32).eps * roundings)


@contextmanager
def _repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if os.environ.get("RANK") else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
