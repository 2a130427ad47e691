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
from phalanx.verify.forward_probe import describe_failure, probe
from phalanx.verify.pipelines import num_microbatches
from phalanx.verify.reference import Around, evaluate_alone, train_alone
from phalanx.verify.routes import Choices, Routes, are_alike, read_routes, write_routes
from phalanx.verify.trace import write_trace
from phalanx.verify.trace_facts import BUFFERS, TRACE, Trace, read_trace

NUDGE = 4  # roundings
CLIP, MOVE = (
    0.3,
    0.01,
)  # not one over a number of ranks or microbatches, so that its absence is told from theirs


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
        return (
            self._open(count, steps) if usual.mixes_rows or BUFFERS in usual.sizes else usual
        ), steps

    def _open(self, count: int, steps: list[list[Batch]]) -> Trace | str:
        if count not in self._traces:
            directory, failure = self.run_dir / f"reference-{self.dtype}-{count}", ""
            if self.mesh.rank == 0 and not (directory / TRACE).exists():
                failure, _ = _write_reference(directory, self.job, self.plan, self.dtype, steps)
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

    def build() -> nn.Module:
        module = build_original_module(job, plan, dtype, materialize=True)[0]
        if nudged:
            _nudge(module)
        return module

    loss_sum, reroutes = JobLoss(job, plan), list[Reroute]()
    try:
        with _repeatable():
            probed = probe(build, loss_sum, steps[0][0], job.run.seed)
            module, updated = build(), None
            routes, choices = Routes(module, forced), dict[str, torch.Tensor]()
            around = _around(DropoutMasks(module, job.run.seed), routes, train_step)
            alone = train_alone(module, loss_sum, steps, clip=CLIP, move=MOVE, around=around)
            if (
                dtype == "float64" and not probed.narrows
            ):  # else the root of a small second moment has few digits
                second = build()
                optimizer, second_routes = (
                    build_optimizer(second, job.optim),
                    Routes(second, forced),
                )
                around = _around(DropoutMasks(second, job.run.seed), second_routes, optimizer_step)
                by_optimizer = train_alone(
                    second,
                    loss_sum,
                    steps,
                    clip=CLIP,
                    move=MOVE,
                    optimizer=optimizer,
                    around=around,
                )
                updated = (second, by_optimizer)

            def evaluate(module: nn.Module) -> float:
                with routes.record(EVALUATION):
                    return evaluate_alone(module, loss_sum, steps[-1])

            def other() -> Path | None:
                if nudged:
                    return None
                exact = (
                    _find_float64(directory, job, plan, steps, routes.choices)
                    if dtype == "float32"
                    else None
                )
                nudged_dir = directory.parent / f"{directory.name}-nudged"
                if exact is None and (dtype == "float32" or probed.narrows):
                    failure, _ = _write_reference(
                        nudged_dir, job, plan, dtype, steps, routes.choices, nudged=True
                    )
                    return None if failure else nudged_dir
                return exact

            write_trace(
                directory,
                dtype,
                module,
                probed,
                alone,
                evaluate=evaluate,
                updated=updated,
                other=other,
            )
            choices |= routes.choices
            reroutes += routes.reroutes
            if updated is not None:
                choices |= second_routes.choices
                reroutes += second_routes.reroutes
            write_routes(directory, choices)
    except ResourceError:  # of a reference that this one needs
        raise
    except Exception as error:
        problem = disk_problem(
            error, "writing the reference", refusals=REFUSALS_THAT_LAST, where=directory
        )
        if problem is not None:
            raise problem from error
        traceback.print_exc()  # in the rank's log
        return describe_failure(error, dtype), []
    return "", reroutes


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
    return None if failure else alike


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
