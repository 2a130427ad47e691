"""`verify` of models with experts: layouts are equal, planted bugs are found and named, flips of
near-ties are told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from test_verify import Plant, Rows, rows_of

from phalanx.job.schema import Job
from phalanx.mesh.mesh import Mesh
from phalanx.nn import routing
from phalanx.parallel.context import transform as cp
from phalanx.parallel.expert import router_load
from phalanx.parallel.expert import transform as ep
from phalanx.parallel.tensor import sharder as tp
from phalanx.verify import layout_run
from phalanx.verify.combined_layouts import list_expert_layouts
from phalanx.verify.verified_job import shrink_job
from plants import some

MIXTRAL = {"preset": "small-mixtral", "num_experts": 4}
DEEPSEEK = {
    "preset": "small-deepseek",
    "num_experts": 8,
    "balance_loss": 0.05,
    "balance_bias": 0.01,
}


def rows_with(
    plant: Plant | None, num_ranks: int, only: tuple[str, ...], *dtypes: str, **model: Any
) -> Rows:
    """Two blocks of experts, and balance that weighs enough to be seen."""
    body = {"model": {**MIXTRAL, "balance_loss": 0.05, **model}, "data": {"seq_len": 16}}
    job = shrink_job(Job.model_validate(body))[0]
    return rows_of(job, plant, num_ranks, dtypes or ("float64",), only=only)


EVERY_2, EVERY_4 = (
    tuple(name for name, _ in list_expert_layouts(num_ranks)) for num_ranks in (2, 4)
)
OF_EACH_KIND = ("zero3-cp2-ep4", "pp2-zero3-ep2-zb-v", "pp2-ddp-ep2-zb-v")
PRODUCTS = (
    "pp2-zero3-tp2-ep2-zb-v",
    "pp2-zero3-cp2-ep4-1f1b",
    "zero3-tp2-cp2-ep4",
    "hsdp2x4-zero3-ep4",
)


@pytest.mark.parametrize(
    ("num_ranks", "names", "model"),
    [
        (4, ("zero3-cp2-ep4", "pp2-ddp-ep2-zb-v"), DEEPSEEK | {"expert_capacity": 1.0}),
        pytest.param(4, OF_EACH_KIND, DEEPSEEK | {"expert_capacity": 1.0}, marks=pytest.mark.long),
        pytest.param(2, (*EVERY_2, "ddp", "zero1", "tp2", "cp2"), MIXTRAL, marks=pytest.mark.long),
        pytest.param(4, (*EVERY_4, "tp4", "pp2-tp2-zb-v"), DEEPSEEK, marks=pytest.mark.long),
        pytest.param(8, PRODUCTS, DEEPSEEK | {"expert_capacity": 1.0}, marks=pytest.mark.long),
    ],
    ids=[
        "four ranks",
        "four ranks, with capacity",
        "two ranks, all",
        "four ranks, all",
        "products",
    ],
)
def test_layouts_equal_the_reference(
    num_ranks: int, names: tuple[str, ...], model: dict[str, Any]
) -> None:
    rows = rows_with(None, num_ranks, names, **model)
    assert set(rows) == {f"{name} float64" for name in names}
    assert {name: row["first"] for name, row in rows.items() if not row["ok"]} == {}
    assert all(row["errors"]["gradient"] > 0 and not row["flips"] for row in rows.values())


# Planted bugs


def rows_stay_in_the_order_of_experts() -> None:
    """What experts make goes back as it lies, expert by expert, not rank by rank."""
    call = ep.ExpertDispatchBetweenRanks.__call__

    def unsorted(
        self: Any, x_RD: torch.Tensor, counts_E: torch.Tensor, experts: Any
    ) -> torch.Tensor:
        def shuffled(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = experts(rows, counts)
            return made.roll(1, 0)

        return call(self, x_RD, counts_E, shuffled)

    ep.ExpertDispatchBetweenRanks.__call__ = unsorted  # type: ignore[method-assign]


def experts_not_divided_by_ep() -> None:
    """What is averaged over the ranks that hold the same experts is taken for the mean over all."""
    ep.rescale_expert_gradients_to_all_ranks = lambda *_: None  # type: ignore[assignment]


def experts_averaged_over_all() -> None:
    """Gradients of experts are averaged with those of other experts."""
    share = ep.rescale_expert_gradients_to_all_ranks

    def over_all(named: Any, names: Any, degree: int) -> None:
        named = list(named)
        share(named, names, degree)
        for name, parameter in named:
            if name in names and parameter.grad is not None:
                dist.all_reduce(ep.get_local_tensor(parameter.grad))

    ep.rescale_expert_gradients_to_all_ranks = over_all  # type: ignore[assignment]


def experts_never_averaged() -> None:
    """Ranks that hold the same experts keep gradients of their own."""
    from phalanx.parallel.data_parallel import replicate as dp_replicate

    average = dp_replicate.average_gradients_in_one_collective

    def of_the_rest(parameters: Any, *others: Any) -> None:
        some = list(parameters)
        if not any(p.ndim == 3 for p in some):
            average(some, *others)

    dp_replicate.average_gradients_in_one_collective = of_the_rest  # type: ignore[assignment]


def capacity_per_rank() -> None:
    """An expert takes as many tokens of a rank's part of a sequence as it has room for there."""
    sequences = cp.ContextParallelRouterSequences
    sequences.length = lambda self, num_tokens: num_tokens  # type: ignore[method-assign]
    sequences.earlier = lambda self, chosen_BTE: chosen_BTE.cumsum(1) - chosen_BTE  # type: ignore[method-assign]


def balance_of_own_tokens() -> None:
    """The balance loss is that of each rank's part of a sequence."""
    cp.ContextParallelRouterSequences.total = lambda self, counts_BE: counts_BE * self.group.size  # type: ignore[method-assign]


def balance_counted_by_each_rank_of_tp() -> None:
    """Every rank of tp adds the whole balance loss."""
    routing.Router.num_alike = property(lambda self: 1, lambda self, value: None)  # type: ignore[assignment]


def router_not_summed_over_tp() -> None:
    """A rank of tp keeps what its part of the experts' outputs owes to the router."""
    partial = tp.ModuleSharder.list_parameters_with_partial_gradients

    def without(self: Any) -> Any:
        return [(name, p) for name, p in partial(self) if "router" not in name]

    tp.ModuleSharder.list_parameters_with_partial_gradients = without  # type: ignore[method-assign]


def loads_of_one_rank() -> None:
    """Each rank moves biases by what its own tokens chose."""
    Mesh.stage_group = lambda self: None  # type: ignore[method-assign]


def one_rank_keeps_its_bias() -> None:
    """Rank 1 never moves biases."""
    move = router_load.ReducedRouterLoads.update_router_biases_once

    def some(self: Any) -> None:
        if dist.get_rank() != 1:
            move(self)

    router_load.ReducedRouterLoads.update_router_biases_once = some  # type: ignore[method-assign]


BIAS = {"balance_bias": 0.05}
EXPECTED: dict[Callable[[], None], tuple[int, str, dict[str, Any], str, str, str]] = {
    # bug: (ranks, layout, model; what differs first, a part of its name, of the cause)
    rows_stay_in_the_order_of_experts: (
        2,
        "zero3-ep2",
        {},
        "routing",
        "blocks.1.moe.router",
        "come back to other tokens",
    ),
    experts_not_divided_by_ep: (
        2,
        "zero3-ep2",
        {},
        "gradient",
        "blocks.1.moe.experts",
        "was not divided by ep 2",
    ),
    experts_averaged_over_all: (
        2,
        "ddp-ep2",
        {},
        "gradient",
        "blocks.1.moe.experts",
        "that hold other experts",
    ),
    experts_never_averaged: (
        4,
        "ddp-ep2",
        {},
        "gradient",
        "blocks.1.moe.experts",
        "not over all that hold the same",
    ),
    capacity_per_rank: (
        2,
        "cp2-ep2",
        {"expert_capacity": 0.7},
        "routing",
        "blocks.1.moe.router",
        "capacity is counted",
    ),
    balance_of_own_tokens: (2, "cp2-ep2", {}, "gradient", "", "made of a rank's own tokens"),
    balance_counted_by_each_rank_of_tp: (
        2,
        "tp2",
        {},
        "gradient",
        "",
        "counted by each rank of tp",
    ),
    router_not_summed_over_tp: (
        2,
        "tp2",
        {},
        "gradient",
        "blocks.1.moe.router.weight",
        "nobody added them up",
    ),
    loads_of_one_rank: (
        2,
        "zero3-ep2",
        BIAS,
        "load of experts",
        ".moe.router",
        "only those of one rank",
    ),
    one_rank_keeps_its_bias: (
        2,
        "zero3-ep2",
        BIAS,
        "buffer",
        ".moe.router",
        "its bias was moved by other counts",
    ),
}


@pytest.mark.parametrize("plant", some(EXPECTED, 5), ids=lambda plant: plant.__name__)
def test_planted_bugs_are_found_and_named(plant: Callable[[], None]) -> None:
    num_ranks, layout, model, what, name, cause = EXPECTED[plant]
    (row,) = rows_with(plant, num_ranks, (layout,), **model).values()
    first = row["first"]
    assert first is not None
    assert not row["flips"]
    assert (first["what"], name in first["name"], cause in first["cause"]) == (what, True, True), (
        first
    )


# Near-ties


def scores_that_tie() -> None:
    """The scores of the experts 0 and 1 are equal in one process; a layout rounds that of the
    second, up for one token and down for the next."""
    is_layout, run_layout = [False], layout_run.LayoutRun.run

    def linear(x_BTD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        first_BT, _, *rest = F.linear(x_BTD, weight_ED).unbind(-1)
        little = 8 * torch.finfo(first_BT.dtype).eps if is_layout[0] else 0.0
        up_T = 1 - 2 * (torch.arange(first_BT.shape[1]) % 2)
        return torch.stack((first_BT, first_BT + little * up_T, *rest), -1)

    def flagged(self: Any, *args: Any) -> Any:
        is_layout[0] = True
        try:
            return run_layout(self, *args)
        finally:
            is_layout[0] = False

    routing.F = SimpleNamespace(linear=linear)  # type: ignore[assignment]
    layout_run.LayoutRun.run = flagged  # type: ignore[method-assign]


def scores_that_tie_beside_a_bug() -> None:
    scores_that_tie()
    experts_not_divided_by_ep()


def scores_that_differ() -> None:
    """The layout prefers an expert by much more than rounding."""
    eps = torch.finfo
    torch.finfo = lambda dtype: SimpleNamespace(eps=eps(dtype).eps * 1e6)  # type: ignore[assignment, misc]
    scores_that_tie()


@pytest.mark.long
def test_a_near_tie_that_flips_is_no_mismatch() -> None:
    rows = rows_with(
        scores_that_tie, 2, ("zero3-ep2", "cp2-ep2"), "float64", "float32", balance_bias=0.01
    )
    assert len(rows) == 4
    for row in rows.values():
        assert (row["ok"], row["first"]) == (True, None)
        flip = row["flips"][0]
        assert {flip["expert"], flip["instead"]} == {0, 1}
        assert 0 <= flip["margin"] <= row["tolerance"]
        assert flip["router"] in flip["text"]
        assert row["errors"]["gradient"] <= row["tolerance"], "beside one process that routes alike"


def test_a_near_tie_hides_no_bug() -> None:
    (row,) = rows_with(scores_that_tie_beside_a_bug, 2, ("zero3-ep2",)).values()
    assert (row["ok"], row["first"]["what"]) == (False, "gradient")
    assert "was not divided by ep 2" in row["first"]["cause"]
    assert row["flips"]


def test_what_is_no_near_tie_is_a_mismatch() -> None:
    (row,) = rows_with(scores_that_differ, 2, ("zero3-ep2",), "float32").values()
    assert (row["ok"], row["first"]["what"], row["flips"]) == (False, "routing", [])
    assert row["first"]["error"] > row["tolerance"]
