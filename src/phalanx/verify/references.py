"""The references of a group of ranks: what one process computes, written by rank 0 when a layout
first needs it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.disk_errors import PERMANENT_WRITE_ERRNOS, convert_disk_error
from phalanx.core.errors import ResourceError
from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.optim.build import build_optimizer
from phalanx.parallel.executor import Batch
from phalanx.plan.plan import Plan
from phalanx.run.one_process.dropout_masks import DropoutMasks
from phalanx.run.one_process.job_loss import JobLoss
from phalanx.run.one_process.original_module import build_original_module
from phalanx.verify.adapted_module import compare_adapted_module_once
from phalanx.verify.batches import (
    cast_steps_to_dtype,
    describe_targets_of_step,
    join_steps,
    resplit_steps_into_microbatches,
    truncate_sequences,
)
from phalanx.verify.begin import (
    load_leader_starting_weights,
    randomize_constant_parameters,
    replace_learning_rate,
)
from phalanx.verify.forward_probe import ForwardProbe, describe_reference_failure, probe_forward
from phalanx.verify.initial_weights import find_initial_faults
from phalanx.verify.narrow_reference import (
    NUM_NUDGED,
    AutocastLoss,
    perturb_images_by_rounding,
    perturb_weights_by_rounding,
)
from phalanx.verify.number_types import (
    FP8,
    REFERENCE_LOSS_SCALE,
    WIDE_DTYPES,
    activation_dtype_of_row,
    find_rounding_dtype,
    is_narrow_dtype,
    parameter_dtype_of_row,
)
from phalanx.verify.outputs import ReferenceOutputs
from phalanx.verify.plain.fp8 import use_fp8_products
from phalanx.verify.reference import ForwardContext, evaluate_in_one_process, train_in_one_process
from phalanx.verify.router_arithmetic import RouterArithmetic
from phalanx.verify.routes import (
    ChosenExperts,
    ReferenceRouting,
    have_same_choices,
    read_expert_choices,
    write_expert_choices,
)
from phalanx.verify.routing_differences import EVALUATION_KIND, RoutingChange, train_phase_of_step
from phalanx.verify.trace import AppliedTraceGradients, TraceWriter
from phalanx.verify.trace_facts import TRACE_FILE_NAME, Trace, read_trace

MAX_NUDGE_ROUNDINGS = 4  # roundings
JOINED_STEPS_SUFFIX = "-joined"  # in the name of a reference whose steps have several's rows
# Not one over a number of ranks or microbatches, so that a clip that is missing is told from them.
CLIP, MOVE = 0.3, 0.01


@dataclass
class ReferenceTraces:
    """The traces of one process, in as many microbatches as a layout has where that makes a
    difference, of sequences as long as a layout's."""

    mesh: Mesh
    run_dir: Path
    job: Job
    plan: Plan
    dtype: str
    steps: list[list[Batch]]
    _traces: dict[str, Trace | str] = field(default_factory=dict)
    _steps_of: dict[Path, list[list[Batch]]] = field(default_factory=dict)
    _num_replays: int = 0
    _filled_layouts: set[tuple[Any, ...]] = field(default_factory=set)

    def is_first_of_layout(self, plan: Plan) -> bool:
        """True for the first plan of its layout, its ZeRO stage and the place of its parameters:
        the others give each rank the same parts."""
        key = (plan.layout, plan.chosen.zero_stage, plan.parallel.has_parameters_on_host)
        is_first = key not in self._filled_layouts
        self._filled_layouts.add(key)
        return is_first

    def find_trace_for_plan(self, plan: Plan) -> tuple[Trace | str, list[list[Batch]]]:
        """(the trace, or why there is none; the microbatches of each step). Collective.

        A layout with a larger batch has the microbatches of several steps in one, and a reference
        of its own. Pipelines have more microbatches, of the same rows, and some layouts one. Only a
        module whose rows see each other, or that counts its calls, knows the difference: it then
        has a reference of its own.
        """
        usual_steps = self._select_steps_of_seq_len(plan.seq_len)
        if isinstance(usual_steps, str):
            return usual_steps, self.steps
        if plan.global_batch_size != self.plan.global_batch_size:
            steps = join_steps(usual_steps, plan.num_microbatches)
            return self._open_or_write_trace(
                plan.num_microbatches, plan.seq_len, steps, suffix=JOINED_STEPS_SUFFIX
            ), steps
        usual = self._open_or_write_trace(len(usual_steps[0]), plan.seq_len, usual_steps)
        count = plan.num_microbatches
        if isinstance(usual, str) or count == len(usual_steps[0]):
            return usual, usual_steps
        steps = resplit_steps_into_microbatches(usual_steps, count)
        if usual.mixes_rows or usual.has_buffers:
            return self._open_or_write_trace(count, plan.seq_len, steps), steps
        return usual, steps

    def _select_steps_of_seq_len(self, seq_len: int) -> list[list[Batch]] | str:
        """The steps with sequences of `seq_len`, or why there are none."""
        if seq_len == self.plan.seq_len:
            return self.steps
        steps = truncate_sequences(self.steps, self.plan.seq_len, seq_len)
        if not steps:
            return f"its data has no sequences of data.seq_len={self.plan.seq_len} to cut shorter"
        return steps

    def _open_or_write_trace(
        self, count: int, seq_len: int, steps: list[list[Batch]], *, suffix: str = ""
    ) -> Trace | str:
        name = self._name_reference_directory(self.dtype, count, seq_len, suffix)
        if name not in self._traces:
            directory, failure = self.run_dir / name, ""
            # A group that crashed may have left it; trace.json is written last.
            if self.mesh.rank == 0 and not (directory / TRACE_FILE_NAME).exists():
                leader = self._find_trace_to_follow(count, seq_len, suffix)
                failure, _ = _write_reference(
                    directory, self.job, self.plan, self.dtype, steps, leader=leader
                )
            # All ranks come here together, for each has opened the same traces before.
            failure = self.mesh.gather_json(failure)[0]
            self._traces[name] = failure or read_trace(directory)
            self._steps_of[directory] = steps
        return self._traces[name]

    def _find_trace_to_follow(self, count: int, seq_len: int, suffix: str) -> Trace | None:
        """The trace whose weights this type follows, so that they differ by rounding alone:
        float64's, or float32's for a narrow type; None where there is none."""
        for dtype in WIDE_DTYPES[: 2 if is_narrow_dtype(self.dtype) else 1]:
            name = self._name_reference_directory(dtype, count, seq_len, suffix)
            directory = self.run_dir / name
            if dtype != self.dtype and (directory / TRACE_FILE_NAME).exists():
                trace = read_trace(directory)
                if trace.leader is None:
                    return trace
                return read_trace(trace.leader)
        return None

    def _name_reference_directory(self, dtype: str, count: int, seq_len: int, suffix: str) -> str:
        length = "" if seq_len == self.plan.seq_len else f"-{seq_len}-tokens"
        return f"reference-{dtype}-{count}{length}{suffix}"

    def replay_trace_with_choices(
        self, trace: Trace, steps: list[list[Batch]], choices: ChosenExperts
    ) -> tuple[Trace | str, list[RoutingChange]]:
        """`trace` again, with routers that choose as `choices` say, or why there is none; and where
        they would have chosen something else.

        `steps`: those of the layout. Collective.
        """
        self._num_replays += 1
        directory = self.run_dir / f"reference-{self.dtype}-routed-{self._num_replays}"
        answer: tuple[str, list[dict[str, Any]]] = "", []
        if self.mesh.rank == 0:
            # What the usual trace was made of, whatever number of microbatches the layout has.
            steps = self._steps_of.get(trace.directory, steps)
            leader = read_trace(trace.applied_from)
            failure, reroutes = _write_reference(
                directory, self.job, self.plan, self.dtype, steps, choices, leader=leader
            )
            answer = failure, [asdict(reroute) for reroute in reroutes]
        failure, bodies = self.mesh.gather_json(answer)[0]
        return failure or read_trace(directory), [RoutingChange(**body) for body in bodies]


def _write_reference(
    directory: Path,
    job: Job,
    plan: Plan,
    dtype: str,
    steps: Sequence[Sequence[Batch]],
    forced: ChosenExperts | None = None,
    *,
    leader: Trace | None = None,
    nudged: int = 0,
) -> tuple[str, list[RoutingChange]]:
    """Write it, or return why there is none: what the module does in one process is no layout's
    fault.

    And what its routers would have chosen instead of `forced`. `leader`: whose gradients are
    applied; None: its own. `nudged`: of the module with weights that are rounded otherwise, by the
    generator with this seed; 0: as they are.

    Raises ResourceError where the disk refuses: that is not the module's fault either.
    """

    loss_sum = JobLoss(job)
    if is_narrow_dtype(dtype):
        activation_dtype = getattr(torch, activation_dtype_of_row(dtype))
        loss_sum = AutocastLoss(job, activation_dtype)
        if nudged:
            steps = perturb_images_by_rounding(steps, activation_dtype, nudged)
    writer = _ReferenceWriter(directory, job, plan, dtype, steps, forced, leader, nudged, loss_sum)
    try:
        with _use_one_thread():
            return "", writer.write()
    # Of a reference that this one needs: it has its words already.
    except ResourceError:
        raise
    except Exception as error:
        problem = convert_disk_error(
            error, "writing the reference", refusals=PERMANENT_WRITE_ERRNOS, where=directory
        )
        if problem is not None:
            raise problem from error
        traceback.print_exc()  # in the rank's log
        return describe_reference_failure(error, dtype), []


@dataclass(frozen=True)
class _ReferenceWriter:
    """Runs the steps of one reference and keeps what they show in `directory`."""

    directory: Path
    job: Job
    plan: Plan
    dtype: str
    steps: Sequence[Sequence[Batch]]
    forced: ChosenExperts | None
    leader: Trace | None
    nudged: int
    loss_sum: JobLoss

    def write(self) -> list[RoutingChange]:
        """Write it, and return what its routers would have chosen instead of `forced`."""
        # Not in a narrow type, whose rounding looks as if rows saw each other.
        wide_loss = JobLoss(self.job)
        probed = probe_forward(
            self._build_reference_module,
            wide_loss,
            self.steps[0][0],
            self.job.run.seed,
            is_users_own=self.job.model.is_foreign or self.job.model.objective is not None,
        )
        adapter = compare_adapted_module_once(self.job, self.plan, self.directory.parent)
        module = self._build_reference_module()
        if self.dtype == FP8:
            activation_dtype = getattr(torch, activation_dtype_of_row(self.dtype))
            use_fp8_products(module, activation_dtype, self.nudged)
        initial = {name: p.detach().clone() for name, p in module.named_parameters()}
        rounding_dtype = find_rounding_dtype(self.dtype, probed.narrows)
        randomized = self._set_starting_weights(module, rounding_dtype)
        routes, outputs = ReferenceRouting(module, self.forced), ReferenceOutputs(module)
        arithmetic = RouterArithmetic(module, self.job, self.plan, self.dtype)
        special = [describe_targets_of_step(step) for step in self.steps]
        writer = TraceWriter(self.directory, self.dtype, module, initial, randomized, special)
        train_in_one_process(
            module,
            self.loss_sum,
            self.steps,
            lambda lr: build_optimizer(module, replace_learning_rate(self.job.optim, lr)),
            writer,
            clip=CLIP,
            move=MOVE,
            around=_make_forward_context(DropoutMasks(module, self.job.run.seed), routes, outputs),
            applied=None if self.leader is None else AppliedTraceGradients(self.leader),
            loss_scale=REFERENCE_LOSS_SCALE if self.dtype == "float16" else 1.0,
        )
        with routes.recording_phase(EVALUATION_KIND):
            evaluation, num_evaluated = evaluate_in_one_process(
                module, self.loss_sum, self.steps[-1]
            )
        write_expert_choices(self.directory, routes.choices)
        outputs.write(self.directory)
        writer.finish(
            probed,
            evaluation=evaluation,
            num_evaluated=num_evaluated,
            leader=None if self.leader is None else self.leader.directory,
            loads=routes.count_loads(len(self.steps)),
            other_directories=self._find_traces_to_compare_with(probed, routes, writer),
            initial_faults=find_initial_faults(self.job, self.plan, initial),
            arithmetic_faults=arithmetic.faults,
            adapter=adapter,
            judges_lost_digits=not self.job.model.is_foreign,
        )
        return list(routes.reroutes)

    def _build_reference_module(self) -> nn.Module:
        return build_original_module(
            self.job, self.plan, parameter_dtype_of_row(self.dtype), materialize=True
        )[0]

    def _set_starting_weights(self, module: nn.Module, rounding_dtype: str) -> tuple[str, ...]:
        """Give it the weights of the first step, those of a nudged reference rounded to
        `rounding_dtype` (or float32); the names of those that are random since then."""
        if self.leader is None:
            randomized = randomize_constant_parameters(module)
        else:
            load_leader_starting_weights(module, self.leader)
            randomized = self.leader.randomized
        if self.nudged and rounding_dtype:
            activation_dtype = getattr(torch, activation_dtype_of_row(rounding_dtype))
            perturb_weights_by_rounding(module, activation_dtype, self.nudged)
        elif self.nudged:
            _perturb_weights_by_roundings(module)
        return randomized

    def _find_traces_to_compare_with(
        self, probed: ForwardProbe, routes: ReferenceRouting, writer: TraceWriter
    ) -> list[Path]:
        """The directories of the same steps in float64, or else from nudged weights; none where
        rounding is not judged, or there is neither."""
        if self.nudged:
            return []
        if find_rounding_dtype(self.dtype, probed.narrows):
            nudges = [
                self._write_trace_from_nudged_weights(routes, writer, seed)
                for seed in range(1, NUM_NUDGED + 1)
            ]
            # Without a band nothing can be judged.
            missing = [failure for failure, _ in nudges if failure]
            if missing:
                raise ArithmeticError(f"with weights rounded otherwise, {missing[0]}")
            if is_narrow_dtype(self.dtype):
                leader = self.leader or writer.trace
                wide = self._find_wide_trace_directory(routes.choices, leader)
            else:
                # Autocast leaves float64 as it is, and so float64's says what it costs.
                wide = self._find_float64_trace_directory(routes.choices)
            return [directory for _, directory in nudges] + wide
        if self.dtype == "float32":
            exact = self._find_float64_trace_directory(routes.choices)
            if exact:
                return exact
        elif not probed.narrows:
            return []
        failure, nudged = self._write_trace_from_nudged_weights(routes, writer, 1)
        return [] if failure else [nudged]

    def _write_trace_from_nudged_weights(
        self, routes: ReferenceRouting, writer: TraceWriter, seed: int
    ) -> tuple[str, Path]:
        """(why there is none, the directory) of the same steps from nudged weights."""
        nudged = self.directory.parent / f"{self.directory.name}-nudged-{seed}"
        leader = self.leader or writer.trace
        failure, _ = _write_reference(
            nudged,
            self.job,
            self.plan,
            self.dtype,
            self.steps,
            routes.choices,
            leader=leader,
            nudged=seed,
        )
        return failure, nudged

    def _find_float64_trace_directory(self, choices: ChosenExperts) -> list[Path]:
        """The directory of the same steps in float64, routed alike; none where float64 is not
        judged."""
        if self.leader is None or self.leader.dtype != "float64":
            return []
        return self._find_wide_trace_directory(choices, self.leader)

    def _find_wide_trace_directory(self, choices: ChosenExperts, leader: Trace) -> list[Path]:
        """The directory of the steps with the gradients of `leader`, routed alike, in its type, or
        in float32 if that is narrow; none where the module fails.

        Sums that cancel whatever the weights are (of a bias before keys) no nudge of weights moves,
        and rounding does.
        """
        dtype = "float32" if is_narrow_dtype(leader.dtype) else leader.dtype
        if dtype == leader.dtype and have_same_choices(
            choices, read_expert_choices(leader.directory)
        ):
            return [leader.directory]
        alike = self.directory.parent / f"{self.directory.name}-{dtype}"
        steps = cast_steps_to_dtype(self.steps, getattr(torch, dtype))
        failure, _ = _write_reference(
            alike, self.job, self.plan, dtype, steps, choices, leader=leader
        )
        return [] if failure else [alike]


def _make_forward_context(
    masks: DropoutMasks, routes: ReferenceRouting, outputs: ReferenceOutputs
) -> ForwardContext:
    """The context that each forward of the reference runs in: masks, routes and outputs of its
    step."""

    @contextmanager
    def around(step: int, first_row: int, num_rows: int) -> Iterator[None]:
        phase = train_phase_of_step(step - 1)
        with (
            masks.dropping_by_masks(step, first_row, num_rows),
            routes.recording_phase(phase),
            outputs.recording_phase(phase),
        ):
            yield

    return around


@torch.no_grad()
def _perturb_weights_by_roundings(module: nn.Module) -> None:
    """Every weight by up to a few roundings to float32, by chance: what that changes, no order
    of sums can promise."""
    generator = torch.Generator().manual_seed(0)
    for parameter in filter(torch.is_floating_point, module.parameters()):
        roundings = torch.randint(
            -MAX_NUDGE_ROUNDINGS, MAX_NUDGE_ROUNDINGS + 1, parameter.shape, generator=generator
        ).to(parameter.dtype)
        parameter.mul_(1 + torch.finfo(torch.float32).eps * roundings)


@contextmanager
def _use_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if os.environ.get("RANK") else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
