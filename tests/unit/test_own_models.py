"""A module and an objective that phalanx has never seen: what reaches them, and what is said of
mistakes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models import plan
from phalanx.core.errors import DataError, LayoutError, PhalanxError
from phalanx.job.module_probe import probe_foreign_shape
from phalanx.job.schema import Job, Model
from phalanx.mesh.mesh import Mesh
from phalanx.nn.attention import make_shared_attention_mask
from phalanx.nn.build import build_objective
from phalanx.nn.objective import classification_cross_entropy
from phalanx.nn.probe import describe_module_for_planner, report_os_exit_of_user_code
from phalanx.parallel.call.bind_batch import build_forward_arguments
from phalanx.parallel.call.check_indices import (
    require_targets_within_classes,
    require_token_ids_in_vocabulary,
)
from phalanx.parallel.data_parallel.replicate import BackwardCommunicationTimer
from phalanx.parallel.gradients import collect_gradients_and_sum_squares
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.layout import Layout

Batch = Mapping[str, torch.Tensor]
BATCH = {"inputs": torch.ones(3, 4), "mask": torch.zeros(3, 4), "labels": torch.tensor([0, 1, 1])}


class TwoInputs(nn.Module):
    """Returns a tuple; `mask` is needed, `scale` is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x + mask) * scale, mask


class Keywords(TwoInputs):
    def forward(self, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(batch["pixels"], batch["mask"])


class NeedsTargets(TwoInputs):
    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.linear(x) + targets


def cross_entropy(outputs: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(outputs[0], batch["labels"], reduction="sum"), len(outputs[0])


def parallel(module: nn.Module) -> ParallelModel:
    return parallelize(module, plan(1), Mesh(Layout(), 0, 0, torch.device("cpu")))


def test_inputs_come_first_and_what_forward_names_by_name() -> None:
    """What it does not name is for the objective."""
    args, kwargs = build_forward_arguments(TwoInputs(), BATCH)
    assert args == (BATCH["inputs"],)
    assert kwargs == {"mask": BATCH["mask"]}


def test_ids_are_those_of_the_module_not_of_the_model_that_a_plan_is_for() -> None:
    """A job of an own loop names no model: its plan is for one of 257 tokens."""
    table = nn.Embedding(1000, 2)
    model = parallel(table)
    batch = {"inputs": torch.tensor([[999]]), "labels": torch.tensor([0])}
    loss = model.reduce_and_clip(
        model.forward_backward([batch], lambda rows, _: (rows.sum(), torch.tensor(1)))
    ).loss
    assert loss == pytest.approx(table.weight[999].sum().item())
    batch["inputs"] += 1
    with pytest.raises(DataError, match="1000 rows of the embedding"):
        model.forward_backward([batch], lambda rows, _: (rows.sum(), torch.tensor(1)))


@pytest.mark.parametrize(("weight", "num_targets"), [(0.4, 1), (0.99999994, 1), (2.7, 3)])
def test_weights_that_add_up_to_less_than_one_target_are_some(
    weight: float, num_targets: int
) -> None:
    table = nn.Embedding(4, 2)
    model = parallel(table)
    batch = {"inputs": torch.tensor([[3]])}
    facts = model.reduce_and_clip(
        model.forward_backward([batch], lambda rows, _: (rows.sum(), torch.tensor(weight)))
    )
    assert (facts.num_targets, facts.should_apply) == (num_targets, True)
    assert facts.loss == pytest.approx(table.weight[3].sum().item() / weight)


def test_old_names_of_a_step_work_and_warn_until_0_2() -> None:
    model = parallel(TwoInputs())
    with pytest.warns(
        DeprecationWarning, match=r"finish_step is now reduce_and_clip.*0\.2"
    ) as warned:
        stats = model.finish_step(
            model.forward_backward([BATCH], cross_entropy), max_norm=1.0, votes=(2.0,)
        )
    assert warned[0].filename == __file__
    assert stats.flags == (2.0,)
    with pytest.warns(DeprecationWarning, match="usable is now should_apply"):
        assert stats.usable is stats.should_apply is True
    with pytest.warns(DeprecationWarning, match="votes is now flags"):
        assert stats.votes == stats.flags


def test_a_batch_without_inputs_goes_by_name() -> None:
    batch = {"pixels": BATCH["inputs"], "mask": BATCH["mask"], "targets": BATCH["labels"]}
    assert build_forward_arguments(Keywords(), batch) == (
        (),
        {"pixels": batch["pixels"], "mask": batch["mask"]},
    )


def test_several_inputs_and_a_tuple_of_outputs_train() -> None:
    """Against the loss that torch computes."""
    module = TwoInputs()
    wanted = F.cross_entropy(module.linear(BATCH["inputs"]), BATCH["labels"]).item()
    model = parallel(module)
    assert model.reduce_and_clip(
        model.forward_backward([BATCH], cross_entropy)
    ).loss == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("module", "batch", "words"),
    [
        (
            TwoInputs(),
            {"inputs": torch.ones(3, 4)},
            ["TwoInputs needs mask", "inputs float32 [3, 4]", "dataset"],
        ),
        (TwoInputs(), {"mask": torch.ones(3, 4)}, ["TwoInputs needs x", "mask float32 [3, 4]"]),
        (TwoInputs(), {"labels": torch.ones(3)}, ["names nothing of a batch with labels"]),
        (
            TwoInputs(),
            {"input_ids": torch.ones(3), "labels": torch.ones(3)},
            ["with input_ids, labels; call the tokens 'inputs'", "labels of transformers are not"],
        ),
        (TwoInputs(), {"pixel_values": torch.ones(3)}, ["call the images 'inputs'"]),
        (
            NeedsTargets(),
            BATCH | {"targets": torch.ones(3)},
            ["needs targets (targets are for the objective alone)"],
        ),
    ],
)
def test_what_forward_needs_and_a_batch_lacks_is_named(
    module: nn.Module, batch: Batch, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as refused:
        build_forward_arguments(module, batch)
    assert [word for word in words if word not in str(refused.value)] == []


def mean(outputs: Any, batch: Batch) -> Any:
    return F.cross_entropy(outputs[0], batch["labels"])


def three(outputs: Any, batch: Batch) -> Any:
    return mean(outputs, batch), 3, 3


def each(outputs: Any, batch: Batch) -> Any:
    return F.cross_entropy(outputs[0], batch["labels"], reduction="none"), 3


def counts(outputs: Any, batch: Batch) -> Any:
    return mean(outputs, batch), batch["labels"]


def number(outputs: Any, batch: Batch) -> Any:
    return mean(outputs, batch).item(), 3


def detached(outputs: Any, batch: Batch) -> Any:
    return mean(outputs, batch).detach(), 3


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (mean, ["a float32 tensor of shape []", "return (loss_sum, num_targets)"]),
        (three, ["a tuple of 3", "return (loss_sum, num_targets)"]),
        (each, ["loss_sum is a float32 tensor of shape [3]"]),
        (counts, ["num_targets is a int64 tensor of shape [3]"]),
        (number, ["loss_sum is a float"]),
        (detached, ["loss_sum has no gradient", "detach()"]),
    ],
)
def test_an_objective_that_returns_something_else_is_told_what_to_return(
    objective: Any, words: list[str]
) -> None:
    with pytest.raises(LayoutError) as refused:
        parallel(TwoInputs()).forward_backward([BATCH], objective)
    assert [word for word in words if word not in str(refused.value)] == []


@pytest.mark.parametrize("count", [math.nan, math.inf, -3, torch.tensor(math.nan)])
def test_a_number_of_targets_that_is_none_is_refused(count: Any) -> None:
    """What losses are divided by, said as that, and no error of ours or a step without targets."""

    def objective(outputs: Any, batch: Batch) -> Any:
        return F.cross_entropy(outputs[0], batch["labels"], reduction="sum"), count

    model = parallel(TwoInputs())
    sums = model.forward_backward([BATCH], objective)
    for reduce in (model.reduce_and_clip, model.reduce_sums):
        with pytest.raises(LayoutError, match=r"num_targets add up to (nan|inf|-3) .* a count"):
            reduce(sums)


def test_a_name_that_the_batch_lacks_is_told_with_those_it_has() -> None:
    def reads_targets(outputs: Any, batch: Batch) -> Any:
        return F.cross_entropy(outputs[0], batch["targets"], reduction="sum"), 3

    with pytest.raises(
        DataError, match=r"no 'targets' \(it has inputs float32 \[3, 4\], .*, labels int64 \[3\]\)"
    ):
        parallel(TwoInputs()).forward_backward([BATCH], reads_targets)


def test_the_users_own_error_carries_the_shapes_of_the_batch() -> None:
    wrong = BATCH | {"inputs": torch.ones(3, 5), "mask": torch.zeros(3, 5)}
    with pytest.raises(RuntimeError, match="mat1 and mat2") as raised:
        parallel(TwoInputs()).forward_backward([wrong], cross_entropy)
    assert raised.value.__notes__ == [
        "the batch: inputs float32 [3, 5], mask float32 [3, 5], labels int64 [3]"
    ]


class LooksUp(nn.Module):
    """Five ids to logits of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.rows(inputs)


def own_cross_entropy(outputs: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


@pytest.mark.parametrize("objective", [classification_cross_entropy, own_cross_entropy])
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"inputs": [0, 4], "labels": [1, 2]},
            "'labels' holds 2, which is none of the 2 classes (row 1 of",
        ),
        (
            {"inputs": [0, 4], "labels": [-1, 0]},
            "'labels' holds -1, which is none of the 2 classes (row 0 of",
        ),
        (
            {"inputs": [7, 4], "labels": [-100, 0]},
            "'inputs' holds 7, which is none of the 5 rows of the embedding",
        ),
    ],
)
def test_an_index_that_nothing_answers_to_is_told_with_its_key_value_and_row(
    objective: Any, batch: dict[str, list[int]], words: str
) -> None:
    """Whoever looks it up: phalanx's objective before it is called, or the user's own, whose
    error is explained."""
    model, tensors = (
        parallel(LooksUp()),
        {key: torch.tensor(values) for key, values in batch.items()},
    )
    with pytest.raises(DataError) as raised:
        model.forward_backward([tensors], objective)
    assert words in str(raised.value)


def test_a_target_that_counts_for_nothing_is_no_mistake() -> None:
    batch = {"inputs": torch.tensor([0, 4]), "labels": torch.tensor([-100, 1])}
    sums = parallel(LooksUp()).forward_backward([batch], classification_cross_entropy)
    assert sums.num_targets == 1


def test_a_lazy_module_is_refused_until_it_has_seen_a_sample() -> None:
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(
        LayoutError, match=r"0\.weight is not known yet.*call it once with a sample"
    ):
        parallel(lazy)
    lazy(torch.ones(1, 4))
    assert parallel(lazy).shards()["0.weight"].global_shape == (2, 4)


def reads_its_weights() -> nn.Module:
    module = TwoInputs()
    assert module.linear.weight.sum().item() < 100  # no meta tensor can tell
    return module


def test_a_factory_that_reads_its_weights_is_described_with_weights() -> None:
    assert describe_module_for_planner("test_own_models:reads_its_weights", {})["num_params"] == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_ids_of_a_type_that_is_not_looked_up_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(
        DataError, match=r"'inputs' are .* and the model looks up int64 or int32; h"
    ):
        require_token_ids_in_vocabulary({"inputs": torch.zeros(1, 2, dtype=dtype)}, 5)
    require_token_ids_in_vocabulary({"inputs": torch.zeros(1, 2, dtype=torch.int32)}, 5)
    require_token_ids_in_vocabulary({"inputs": torch.zeros(1, 2)}, 0)  # an image


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("key", ["labels", "targets"])
def test_targets_of_a_type_that_is_no_class_are_refused(key: str, dtype: torch.dtype) -> None:
    """Shares of classes were taken for a target each, so that the mean was too small."""
    shares = {key: torch.eye(2, dtype=dtype)}
    with pytest.raises(DataError, match=rf"'{key}' are .*, and the loss takes numbers of classes"):
        require_targets_within_classes(shares, torch.zeros(2, 2))
    require_targets_within_classes({key: torch.tensor([0, 1]).byte()}, torch.zeros(2, 2))


def is_traced() -> nn.Module:
    return torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
def test_a_module_of_torch_jit_is_refused_by_name() -> None:
    with pytest.raises(
        PhalanxError, match=r"is_traced returned a module of torch\.jit; return the"
    ):
        describe_module_for_planner("test_own_models:is_traced", {})


class Scaled(nn.Module):
    """A loss with a weight for each class, and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.ones(2))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, int]:
        return (outputs * self.temperature).sum(), 1


scaled = Scaled()


def test_an_objective_with_parameters_is_refused_and_one_without_is_not() -> None:
    """They stayed as they were, and nothing said so."""
    job = Job(model=Model(objective="test_own_models:scaled"))
    with pytest.raises(
        LayoutError, match=r"test_own_models:scaled: .* \(temperature\); make them a"
    ):
        build_objective(job)
    scaled.requires_grad_(False)
    assert build_objective(job) is scaled


@pytest.mark.parametrize(
    ("num_unused", "said"), [(1, "1 parameter had"), (3, "3 parameters had"), (5, "and 2 more;")]
)
def test_parameters_without_a_part_in_the_loss_are_counted_and_three_are_named(
    num_unused: int, said: str
) -> None:
    module = torch.nn.ParameterList(torch.zeros(1) for _ in range(num_unused))
    plan = SimpleNamespace(parallel=SimpleNamespace(unused_parameters="refuse"))
    piece: Any = SimpleNamespace(phases=None, plan=plan, root=SimpleNamespace(module=module))
    watch = BackwardCommunicationTimer(piece, None, "all_reduce gradients")
    watch.start_before_backward()
    with pytest.raises(LayoutError, match=said) as caught:
        watch.stop_after_backward()
    assert all(f" {name}" in caught.value.what for name in ("0", "1", "2")[:num_unused])


class LeftError(BaseException):
    """In place of the end of a process."""


def test_a_module_that_leaves_the_process_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(status: int) -> None:
        raise LeftError(status)

    monkeypatch.setattr(os, "_exit", leave)
    source = compile("import os\n\nos._exit(0)", tmp_path / "leaves.py", "exec")
    with report_os_exit_of_user_code(), pytest.raises(LeftError, match="1"):
        exec(source)
    assert (
        capsys.readouterr().err
        == "leaves.py:3: os._exit(0) was called before the model was built\n"
    )
    with report_os_exit_of_user_code():
        monkeypatch.setattr(os, "getpid", lambda: -1)  # a child, which ends so after a fork
        with pytest.raises(LeftError, match="0"):
            exec(source)
    assert capsys.readouterr().err == ""


@pytest.mark.long
def test_leaving_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text("import os\n\nos._exit(0)\n")
    with pytest.raises(
        LayoutError, match=r"leaves.py:3: os._exit\(0\) was called before the model was built"
    ):
        probe_foreign_shape("leaves:build", {})
    (tmp_path / "says_bye.py").write_text(
        "import atexit\nimport torch\n\natexit.register(print, 'bye')\nbuild = lambda:"
        " torch.nn.Linear(2, 3)\n"
    )
    assert probe_foreign_shape("says_bye:build", {}).num_params == 9


def test_the_old_name_of_the_shared_mask_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="make_shared_attention_mask"):
        from phalanx.nn.attention import shared_mask
    assert shared_mask is make_shared_attention_mask


def test_a_trained_parameter_without_elements_is_refused_by_name() -> None:
    module = nn.Linear(2, 3)
    module.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    two = Mesh(Layout(dp_replicate=2), 0, 0, torch.device("cpu"))
    with pytest.raises(LayoutError, match=r"nothing is a parameter without elements \(\[0, 4\]\)"):
        parallelize(module, plan(2, dp_replicate=2), two)
    assert parallelize(module, plan(1), Mesh(Layout(), 0, 0, torch.device("cpu")))


def test_a_trained_parameter_of_complex_numbers_is_refused_by_name() -> None:
    """Its first step ended in torch's error of a norm, three times over."""
    module, alone = nn.Linear(2, 3), Mesh(Layout(), 0, 0, torch.device("cpu"))
    module.register_parameter("turn", nn.Parameter(torch.zeros(4, dtype=torch.complex64)))
    with pytest.raises(
        LayoutError, match=r"turn is a parameter of complex64, .*view_as_real of it"
    ):
        parallelize(module, plan(1), alone)
    module.turn.requires_grad_(False)
    assert parallelize(module, plan(1), alone)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name_before_the_first_step(layer: Any) -> None:
    alone = Mesh(Layout(), 0, 0, torch.device("cpu"))
    sparse = nn.Sequential(layer(3, 2, sparse=True))
    with pytest.raises(LayoutError, match=r"the gradient of 0\.weight is sparse"):
        parallelize(sparse, plan(1), alone)
    sparse.requires_grad_(requires_grad=False)
    assert parallelize(sparse, plan(1), alone)


class _SparseLookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(3, 2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids, self.rows, sparse=True)


def test_a_sparse_gradient_of_a_call_is_refused_at_the_first_reduction() -> None:
    module = _SparseLookup()
    module(torch.tensor([0, 2])).sum().backward()
    with pytest.raises(LayoutError, match="the gradient of rows is sparse"):
        collect_gradients_and_sum_squares(module.named_parameters(), {})
