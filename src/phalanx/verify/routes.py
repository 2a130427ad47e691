"""What routers choose: noted in one process and on every rank of a layout, compared, and repeated
in one process.

In float32 a layout rounds a token's scores otherwise than one process does. Where the last expert
that is chosen and the first that is not are as good as equal, either choice is right, and all that
follows depends on it. So the reference is run again with the layout's choices: what it would have
chosen differently must then be a near-tie, and all else equal.

Choices: key -> [rows of the batch, T, K] int64, the numbers of a token's experts in ascending
order, -1 where nobody chose. A key is "PHASE/ROUTER", with the phases "step-0", ..., "evaluation"
Shape suffixes: B rows of a forward, T tokens of a sequence, K experts per
token, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from phalanx.mesh.logical import full_name
from phalanx.nn.routing import ExpertChooser, Router
from phalanx.parallel.model import ParallelModel
from phalanx.verify.plain.experts import count_dropped_choices
from phalanx.verify.routing_differences import EVALUATION_KIND, RoutingChange, train_phase_of_step

ChosenExperts = Mapping[str, torch.Tensor]
ROUTES_FILE_NAME = "routes.safetensors"


def find_routers(module: nn.Module) -> dict[str, Router]:
    return {
        full_name(name): part for name, part in module.named_modules() if isinstance(part, Router)
    }


class ForwardPhaseRecorder:
    """Knows which phase the forwards under way are of; "" where they are not noted."""

    _phase: str = ""

    @contextmanager
    def recording_phase(self, phase: str) -> Iterator[None]:
        """Inside, forwards are noted."""
        self._phase = phase
        try:
            yield
        finally:
            self._phase = ""


class ReferenceRouting(ForwardPhaseRecorder):
    """The choices of one process, whose forwards take the rows of a batch in their order.

    `forced`: what is chosen instead; `reroutes` then lists where the module's own choice is
    another.
    """

    def __init__(self, module: nn.Module, forced: ChosenExperts | None = None) -> None:
        self.reroutes: list[RoutingChange] = []
        self._forced = forced or {}
        self._parts = dict[str, list[torch.Tensor]]()
        self._routers = find_routers(module)
        for name, router in self._routers.items():
            router.choose = functools.partial(self._choose_and_record_experts, name, router.choose)

    @property
    def choices(self) -> dict[str, torch.Tensor]:
        return {key: torch.cat(parts) for key, parts in self._parts.items()}

    def count_loads(self, num_steps: int) -> list[dict[str, list[int]]]:
        """Loads of each step: router -> how many tokens chose each of its experts, and how many
        choices were dropped for want of room."""
        choices = self.choices
        loads: list[dict[str, list[int]]] = [{} for _ in range(num_steps)]
        for step, load_of in enumerate(loads):
            for name, router in self._routers.items():
                chosen = choices.get(f"{train_phase_of_step(step)}/{name}")
                if chosen is not None:
                    counts = chosen.flatten().bincount(minlength=router.num_experts)
                    dropped = count_dropped_choices(
                        chosen, router.num_experts, router.capacity_factor
                    )
                    load_of[name] = [*counts.tolist(), dropped]
        return loads

    def _choose_and_record_experts(
        self, name: str, choose: ExpertChooser, scores_BTE: torch.Tensor, per_token: int
    ) -> torch.Tensor:
        experts_BTK = choose(scores_BTE, per_token)
        if not self._phase:
            return experts_BTK
        key = f"{self._phase}/{name}"
        parts = self._parts.setdefault(key, [])
        # Rows come in their order: what is noted says where this call begins.
        # Sorted, for the same experts in another order are the same choice.
        first_row, chosen = sum(map(len, parts)), experts_BTK.sort(-1).values
        if key in self._forced:
            forced = self._forced[key][first_row : first_row + len(chosen)]
            differs_BT = (forced != chosen).any(-1)
            for row, token in differs_BT.nonzero().tolist():
                own_experts, forced_experts = (
                    set(chosen[row, token].tolist()),
                    set(forced[row, token].tolist()),
                )
                at = (self._phase, name, first_row + row, token)
                self.reroutes.append(
                    _make_routing_change(at, scores_BTE[row, token], own_experts, forced_experts)
                )
            chosen = forced
            # Where the choice is the same, its own order stays.
            experts_BTK = torch.where(differs_BT[..., None], forced, experts_BTK)
        parts.append(chosen)
        return experts_BTK


def _make_routing_change(
    at: tuple[str, str, int, int], scores_E: torch.Tensor, chosen: set[int], forced: set[int]
) -> RoutingChange:
    score = scores_E.tolist()
    # The widest gap of the swap: the best expert that was left against the worst that was taken.
    expert, instead = (
        max(chosen - forced, key=lambda e: score[e]),
        min(forced - chosen, key=lambda e: score[e]),
    )
    margin, size = score[expert] - score[instead], max(map(abs, score))
    phase, name, row, token = at
    return RoutingChange(name, phase, row, token, expert, instead, margin / size if size else 0.0)


class LayoutRouting:
    """The choices of a layout's modules, on the tokens of this rank."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, int], tuple[torch.Tensor, LocalSequenceTokens]] = {}

    def attach(self, model: ParallelModel) -> None:
        """Note its choices."""
        for name, router in find_routers(model.module).items():
            router.choose = functools.partial(
                self._choose_and_record_experts, model, name, router.choose
            )

    def _choose_and_record_experts(
        self,
        model: ParallelModel,
        name: str,
        choose: ExpertChooser,
        scores_BTE: torch.Tensor,
        per_token: int,
    ) -> torch.Tensor:
        experts_BTK = choose(scores_BTE, per_token)
        self._record_choices(model, name, experts_BTK)
        return experts_BTK

    def _record_choices(self, model: ParallelModel, name: str, experts_BTK: torch.Tensor) -> None:
        """The first of a forward: a block that is computed again, for its gradients, chooses
        again."""
        moment, num_rows = model.dropout_rng.current_forward, len(experts_BTK)
        # What stages compute to learn shapes is thrown away.
        if model.pipeline is not None and model.pipeline.is_inferring_shapes:
            return
        if moment is None and model.module.training:
            return
        if moment is not None:
            key, first_row = f"{train_phase_of_step(moment.step - 1)}/{name}", moment.first_row
        else:
            key = f"{EVALUATION_KIND}/{name}"
            # An evaluation has no moment: its microbatches are counted as they come.
            index = sum(other == key for other, _ in self._parts)
            first_row = (
                index * model.plan.layout.data_parallel_size + model.mesh.data_parallel_rank
            ) * num_rows
        self._parts.setdefault(
            (key, first_row),
            (experts_BTK.sort(-1).values.cpu(), LocalSequenceTokens.from_model(model)),
        )

    def has_chosen_for(self, key: str, row: int, token: int) -> bool:
        """True if this rank has chosen for the token."""
        for (other, first_row), (chosen, places) in self._parts.items():
            if other == key and first_row <= row < first_row + len(chosen):
                return token in places.find_token_indices(chosen.shape[1] * places.cp).tolist()
        return False

    def gather(self, like: ChosenExperts) -> dict[str, torch.Tensor]:
        """Choices of the keys and shapes of `like`, put together; -2 where ranks that have the same
        token chose differently.

        Collective.
        """
        gathered = {}
        # `like` is the trace's, the same on every rank: all reduce the same keys in the same order.
        for key, complete in like.items():
            most, least = torch.full_like(complete, -1), torch.full_like(complete, _NO_EXPERT)
            for (other, first_row), (chosen, places) in self._parts.items():
                if other == key:
                    for part in (most, least):
                        part[
                            first_row : first_row + len(chosen),
                            places.find_token_indices(complete.shape[1]),
                        ] = chosen
            most = all_reduce_on_group_device(most, dist.ReduceOp.MAX)
            least = all_reduce_on_group_device(least, dist.ReduceOp.MIN)
            # Maximum and minimum over ranks are equal where all that have the token choose alike.
            gathered[key] = most.masked_fill((most != least) & (most >= 0), -2)
        return gathered


@dataclass(frozen=True)
class LocalSequenceTokens:
    """The tokens of a sequence that a rank of `cp` has."""

    cp: int
    rank: int
    zigzag: bool

    @classmethod
    def from_model(cls, model: ParallelModel) -> LocalSequenceTokens:
        plan = model.plan
        is_zigzag = plan.parallel.cp_load_balance == "zigzag"
        return cls(plan.layout.cp, model.mesh.coordinates["cp"], is_zigzag)

    def find_token_indices(self, length: int) -> torch.Tensor:
        """The indices of this rank's tokens in a sequence of `length` tokens."""
        if self.cp == 1:
            return torch.arange(length)
        # Zigzag: each rank has an early and a late part, so that causal attention costs all alike.
        if self.zigzag:
            parts = torch.arange(length).chunk(2 * self.cp)
            return torch.cat((parts[self.rank], parts[-1 - self.rank]))
        return torch.arange(length).chunk(self.cp)[self.rank]


# Above any expert's number, so that the minimum over ranks is of one that chose.
_NO_EXPERT = 2**31


def all_reduce_on_group_device(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """The tensor on the CPU, reduced over all ranks on the device that their group is of."""
    if not dist.is_initialized():
        return tensor
    if dist.get_backend() == "nccl":
        tensor = tensor.cuda()
    dist.all_reduce(tensor, op=op)
    return tensor.cpu()


def write_expert_choices(directory: Path, choices: ChosenExperts) -> None:
    if choices:
        # safetensors refuses tensors that are not contiguous.
        save_file({key: t.contiguous() for key, t in choices.items()}, directory / ROUTES_FILE_NAME)


def read_expert_choices(directory: Path) -> dict[str, torch.Tensor]:
    """Empty where the module has no routers."""
    if not (directory / ROUTES_FILE_NAME).exists():
        return {}
    return load_file(directory / ROUTES_FILE_NAME)


def have_same_choices(first: ChosenExperts, second: ChosenExperts) -> bool:
    """True if what both have is the same."""
    return all(torch.equal(choice, second[key]) for key, choice in first.items() if key in second)


def find_disputed_token(choices: ChosenExperts) -> tuple[str, int, int] | None:
    """(key, row, token) of the first token that ranks route differently, or that nobody routes."""
    for key, choice in choices.items():
        misrouted = (choice < 0).any(-1).nonzero()
        if len(misrouted):
            row, token = misrouted[0].tolist()
            return key, row, token
    return None
