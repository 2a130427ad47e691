"""What tensor parallelism says between ranks, counted twice; what it never holds; and what it
refuses on the way."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_tensor_parallel_zoo import SHAPE, zoo_job
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tp_zoo
from models import BATCH, CPU, SEQ_LEN, fill, global_batches, plan
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.mesh.mesh import open_mesh
from phalanx.mesh.tensor_group import TensorParallelGroup
from phalanx.nn.models.decoder import Decoder
from phalanx.nn.objective import causal_cross_entropy, token_cross_entropy
from phalanx.parallel.executor import Batch
from phalanx.parallel.loss_forward import MicrobatchLossForward
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.parallel.saved_tensors import SavedBytesCounter
from phalanx.parallel.tensor.gathered_input import keep_gathered_inputs_of
from phalanx.plan.planner import make_plan
from ranks import run_ranks

DIM, TP = 32, 2
WHOLE = BATCH * SEQ_LEN * DIM * 4  # bytes of the activations between blocks, of all tokens, in fp32


class Heard(TorchDispatchMode):
    """Counts what is asked of torch's process groups, on its own, and remembers the largest
    tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            kind = (
                func._schema.name.partition("::")[2]
                .removesuffix("_out")
                .removesuffix("_into_tensor")
                .removesuffix("_tensor")
            )
            self.counts[kind] += 1
            self.num_bytes[kind] += out.numel() * out.element_size()
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.shapes.add(tuple(out.shape))
        return out


def sums_of(rank: int, num_layers: int, cuts_sequence: bool, chunks: int) -> dict[str, Any]:
    """Forward and backward of a decoder of so many blocks: counts and bytes of each, as the
    group has counted them."""
    cases = plan(TP, tp=TP, sequence_parallel=cuts_sequence, tp_chunks=chunks)
    module = Decoder(DecoderShape(num_layers, DIM, 4, 2, 8, 40, 37, False))
    fill(module)
    with open_mesh(cases.layout, device="cpu") as mesh:
        model = parallelize(module, cases, mesh)
        group = model._context.axes.find(TensorParallelGroup)
        assert group is not None
        batch = global_batches(1)[0]
        found, seen = {}, []
        with Heard() as heard:
            loss, _ = MicrobatchLossForward(model._context)(batch, causal_cross_entropy(4096))
            seen.append(
                (
                    dict(group.counts),
                    dict(group.num_bytes),
                    dict(heard.counts),
                    dict(heard.num_bytes),
                )
            )
            loss.backward()
            seen.append(
                (
                    dict(group.counts),
                    dict(group.num_bytes),
                    dict(heard.counts),
                    dict(heard.num_bytes),
                )
            )
        for name, (counts, num_bytes, heard_counts, heard_bytes) in zip(
            ("forward", "both"), seen, strict=True
        ):
            assert (counts, num_bytes) == (heard_counts, heard_bytes), name
            found[name] = (counts, num_bytes)
        _require_told(model, batch)
    return found


def _require_told(model: ParallelModel, batch: Batch) -> None:
    """A step tells the bytes of what torch was asked for in it, and not those of an evaluation."""
    objective = causal_cross_entropy(4096)
    with Heard() as heard:
        sums = model.forward_backward([batch], objective)
        facts = model.reduce_and_clip(sums)
    model.evaluate([batch], objective)
    assert (
        model.reduce_and_clip(model.forward_backward([batch], objective)).sent_tp_bytes
        == facts.sent_tp_bytes
    )
    made = heard.num_bytes
    ring = 2 * made["all_reduce"] * (TP - 1) / TP
    ring += made["all_gather"] * (TP - 1) / TP + made["reduce_scatter"] * (TP - 1)
    assert facts.sent_tp_bytes == ring > 0


def per_block(two: dict[str, Any], three: dict[str, Any]) -> dict[str, Any]:
    """What a third block adds to two: {"forward": {kind: (number, bytes)}, "backward": ...}."""
    added = {
        name: {
            kind: (
                counts[kind] - two[name][0].get(kind, 0),
                num_bytes[kind] - two[name][1].get(kind, 0),
            )
            for kind in counts
        }
        for name, (counts, num_bytes) in three.items()
    }
    zero = (0, 0)
    backward = {
        kind: tuple(
            b - f
            for b, f in zip(added["both"][kind], added["forward"].get(kind, zero), strict=True)
        )
        for kind in added["both"]
    }
    kept = {"forward": added["forward"], "backward": backward}
    return {
        name: {kind: value for kind, value in kinds.items() if value != zero}
        for name, kinds in kept.items()
    }


def collectives(rank: int) -> dict[str, Any]:
    cases = {
        "whole": (False, 1),
        "sequence": (True, 1),
        "whole-chunks": (False, 2),
        "sequence-chunks": (True, 2),
    }
    return {
        name: per_block(*(sums_of(rank, n, *case) for n in (2, 3))) for name, case in cases.items()
    }


def test_collectives_of_a_block_and_their_bytes() -> None:
    """Reference: Korthikanti et al. 2022, and an independent count of what torch is asked for."""
    part = WHOLE // TP
    for found in run_ranks(TP, collectives):
        sums = {"all_reduce": (2, 2 * WHOLE)}
        assert found["whole"] == {"forward": sums, "backward": sums}
        # The backward gathers two gradients, and the inputs of the two regions again.
        gathers = {"all_gather": (2, 2 * WHOLE), "reduce_scatter": (2, 2 * part)}
        again = gathers | {"all_gather": (4, 4 * WHOLE)}
        assert found["sequence"] == {"forward": gathers, "backward": again}
        # In chunks: as many bytes in as many more pieces
        sums = {"all_reduce": (4, 2 * WHOLE)}
        assert found["whole-chunks"] == {"forward": sums, "backward": sums}
        gathers = {"all_gather": (4, 2 * WHOLE), "reduce_scatter": (4, 2 * part)}
        again = gathers | {"all_gather": (8, 4 * WHOLE)}
        assert found["sequence-chunks"] == {"forward": gathers, "backward": again}


SHAPES_OF_INPUTS = {
    "llama": (DecoderShape(2, DIM, 4, 2, 8, 40, 37, False), {}),
    "biases": (
        DecoderShape(
            2,
            DIM,
            4,
            4,
            8,
            40,
            37,
            False,
            norm="layernorm",
            bias="all",
            positions="learned",
            max_positions=64,
            activation="gelu",
        ),
        {},
    ),
    "bf16": (DecoderShape(2, DIM, 4, 2, 8, 40, 37, False), {"precision": "bf16"}),
    "chunks": (DecoderShape(2, DIM, 4, 2, 8, 40, 37, False), {"tp_chunks": 2}),
    "padded": (DecoderShape(2, DIM, 4, 2, 8, 40, 37, False), {}),
}


def gradients_and_saved_bytes(
    rank: int, name: str, keeps_gathered: bool
) -> tuple[dict[str, torch.Tensor], int]:
    shape, options = SHAPES_OF_INPUTS[name]
    case, module = plan(TP, tp=TP, sequence_parallel=True, **options), Decoder(shape)
    fill(module)
    with open_mesh(case.layout, device="cpu") as mesh:
        model = parallelize(module, case, mesh)
        if keeps_gathered:
            keep_gathered_inputs_of(module)
        batch = global_batches(1)[0]
        if name == "padded":
            batch = {key: value[:, :-1] for key, value in batch.items()}
        counter = SavedBytesCounter()
        with counter.counting_saved_tensors():
            loss, _ = MicrobatchLossForward(model._context)(batch, causal_cross_entropy(4096))
        loss.backward()
        return {key: p.grad for key, p in module.named_parameters()}, counter.num_bytes


def compare_kept_inputs(rank: int) -> dict[str, tuple[list[str], int]]:
    """By case: parameters whose gradients differ in any bit where regions keep what they gathered,
    and the bytes that this keeps more."""
    results = {}
    for name in SHAPES_OF_INPUTS:
        again, fewer = gradients_and_saved_bytes(rank, name, keeps_gathered=False)
        kept, more = gradients_and_saved_bytes(rank, name, keeps_gathered=True)
        results[name] = (
            [key for key in kept if not torch.equal(kept[key], again[key])],
            more - fewer,
        )
    return results


def test_inputs_that_are_gathered_again_give_the_same_bits() -> None:
    """Reference: the same ranks, which keep what they have gathered."""
    for by_case in run_ranks(TP, compare_kept_inputs):
        assert not any(different for different, _ in by_case.values()), by_case
        # Of two blocks with two regions each, half of the input.
        assert by_case["llama"][1] == 2 * 2 * WHOLE // TP


VOCAB = 2003  # a prime, and far more than anything else here is wide


def largest(rank: int, kind: str) -> set[tuple[int, ...]]:
    """Shapes of every tensor of a forward and a backward."""
    if kind == "decoder":
        module: nn.Module = Decoder(DecoderShape(1, DIM, 4, 2, 8, 40, VOCAB, True))
    else:
        tp_zoo.VOCAB = VOCAB
        module = tp_zoo.attention()
    fill(module)
    cases = plan(TP, tp=TP)
    with open_mesh(cases.layout, device="cpu") as mesh:
        model = parallelize(module, cases, mesh)
        batch = global_batches(1)[0]
        with Heard() as heard:
            objective = causal_cross_entropy(4096) if kind == "decoder" else token_cross_entropy
            MicrobatchLossForward(model._context)(batch, objective)[0].backward()
    return heard.shapes


@pytest.mark.parametrize("kind", ["decoder", "logits"])
def test_logits_of_the_vocabulary_are_never_put_together(kind: str) -> None:
    """The largest tensor that a rank sees is its own part of the logits."""
    for shapes in run_ranks(TP, largest, kind):
        widest = max((shape for shape in shapes if shape), key=lambda shape: max(shape))
        assert max(widest) <= BATCH * SEQ_LEN * -(-VOCAB // TP)
        assert not any(VOCAB in shape for shape in shapes)
        most = max(torch.Size(shape).numel() for shape in shapes)
        assert most in {BATCH * SEQ_LEN * (VOCAB // TP + rest) for rest in (0, 1)}


# Refusals that only a rank can make


class TiedElsewhere(tp_zoo.Lm):
    def __init__(self) -> None:
        super().__init__(
            lambda: tp_zoo.Residual(tp_zoo.MLP()), tp_zoo.MLP_RULES | {"embed": "vocab"}, tied=True
        )


class TiedOtherwise(tp_zoo.Lm):
    def __init__(self) -> None:
        rules = tp_zoo.MLP_RULES | {"embed": "vocab", "head": "row"}
        super().__init__(lambda: tp_zoo.Residual(tp_zoo.MLP()), rules, tied=True)


class Ints(nn.Module):
    """A region that is called with numbers of tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(251, 16), nn.Linear(16, 8), nn.Linear(8, 251)
        self.shard_rules = {"": "region", "up": "column", "down": "row"}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(self.embed(tokens)))
        return out


def lm(rules: dict[str, str], **options: Any) -> nn.Module:
    return tp_zoo.Lm(lambda: tp_zoo.Residual(tp_zoo.MLP()), rules, **options)


class DroppedBetween(tp_zoo.MLP):
    def __init__(self, layer: nn.Module | None) -> None:
        super().__init__()
        self.drop = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.fc1(x))
        return self.fc2(F.dropout(y, 0.1, self.training) if self.drop is None else self.drop(y))


class FreelyDropped(tp_zoo.Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def between(layer: nn.Module | None, rules: dict[str, str]) -> nn.Module:
    return tp_zoo.Lm(lambda: tp_zoo.Residual(DroppedBetween(layer)), tp_zoo.MLP_RULES | rules)


def with_dropout(**options: Any) -> nn.Module:
    module = lm(tp_zoo.MLP_RULES | {"layers.*.inner": "region"} | tp_zoo.ENDS, **options)
    owner: Any = module.layers[0]  # type: ignore[index, union-attr]
    owner.drop = nn.Dropout(0.1)
    return module


REFUSED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "tied, cut on one side": (
        TiedElsewhere,
        ("head.weight is tied", "no rule cuts it", "give its module the same"),
    ),
    "tied, cut otherwise": (
        TiedOtherwise,
        ("head.weight is tied", "cut otherwise", "cut both alike"),
    ),
    "a region of numbers": (Ints, ("Ints is called without activations",)),
    "an argument it lacks": (
        lambda: lm({**tp_zoo.MLP_RULES, "layers.*.inner": "region hidden"}),
        ("MLP is not called with hidden=", "leave the argument out"),
    ),
    "a row fed by nobody": (
        lambda: lm({"layers.*.inner.fc2": "row"}),
        ("layers.0.inner.fc2 gets 23 features", "a row follows columns that are cut alike"),
    ),
    "a column that a whole layer follows": (
        lambda: lm({"layers.*.inner.fc1": "column"}),
        (
            'rule "layers.*.inner.fc1" = "column"',
            "those of layers.0.inner.fc1, ",
            "of 23, meet what is whole: mat1 and mat2",
        ),
    ),
    "a column that is added to what is whole": (
        lambda: lm({"layers.*.inner.fc2": "column"}),
        (
            'rule "layers.*.inner.fc2" = "column"',
            "layers.0.inner.fc2, 8 of 16, meet what is whole: The size of tensor",
        ),
    ),
    "a head cut by features": (
        lambda: lm({**tp_zoo.MLP_RULES, "head": "column"}),
        ("returns a part of the features on each rank", 'give a head of tokens "vocab"'),
    ),
    "more ranks than features": (
        lambda: tp_zoo.Lm(lambda: tp_zoo.Residual(tp_zoo.MLP(width=1)), tp_zoo.MLP_RULES),
        ("layers.0.inner.fc1 has 1 features, too few for tp 2",),
    ),
    "a count that is none": (
        lambda: lm({**tp_zoo.MLP_RULES, "layers.*.inner": "region divide=num_heads"}),
        ("layers.0.inner.num_heads is None, not a number of heads",),
    ),
    "logits in a dict": (
        lambda: lm({**tp_zoo.MLP_RULES, "head": "vocab"}, in_a_dict=True),
        ("does not return its head's logits as they are", '"column gather"'),
    ),
    "nobody begins the sequence": (
        lambda: lm(tp_zoo.MLP_RULES, per_token=True),
        ("no rule cuts an embedding",),
    ),
    "nobody ends the sequence": (
        lambda: lm({**tp_zoo.MLP_RULES, "embed": "vocab"}, per_token=True),
        ("returns a part of the sequence", '"vocab" or "column gather"'),
    ),
    "no module": (
        lambda: lm({"layers.*.iner.fc1": "column"}),
        ("did you mean", "layers.*.inner.fc1"),
    ),
    "torch's attention": (
        lambda: _with_torch_attention(),
        ("self_attn.out_proj belongs to an nn.MultiheadAttention", "stays whole"),
    ),
    "dropout in a region": (
        lambda: between(nn.Dropout(0.1), {"layers.*.inner": "region"}),
        ("dropout of layers.0.inner.drop", "parts of the activations", "behind the row"),
    ),
    "dropout outside of one": (
        lambda: between(nn.Dropout(0.1), {}),
        ("dropout of layers.0.inner.drop",),
    ),
    "dropout in a forward": (lambda: between(None, {}), ("dropout of layers.0.inner is where",)),
    "dropout of a part": (
        lambda: with_dropout(per_token=True),
        ("dropout of layers.0.drop (0.1)",),
    ),
    "tokens dropped in a forward": (
        lambda: tp_zoo.Lm(
            lambda: FreelyDropped(tp_zoo.MLP()), tp_zoo.MLP_RULES | tp_zoo.ENDS, per_token=True
        ),
        ("dropout of layers.0 is where",),
    ),
}


def _with_torch_attention() -> nn.Module:
    module = lm(tp_zoo.MLP_RULES | {"encoder.self_attn.out_proj": "row"})
    module.encoder = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    return module


def refusals(rank: int) -> dict[str, str]:
    said = {}
    cases = make_plan(zoo_job("without_rules", ranks=2, tp=2), cluster=CPU, shape=SHAPE)
    batch = {"inputs": torch.arange(16).view(2, 8), "targets": torch.arange(16).view(2, 8)}
    with open_mesh(cases.layout, device="cpu") as mesh:
        for name, (build, _) in REFUSED.items():
            torch.manual_seed(3)
            try:
                model = parallelize(build(), cases, mesh)
                model.forward_backward([batch], token_cross_entropy)
            except LayoutError as error:
                said[name] = str(error)
        module = with_dropout()  # whole activations, masks by place: this may stay
        parallelize(module, cases, mesh)
    return said


def test_what_cannot_be_cut_is_refused_in_one_line_on_every_rank() -> None:
    for said in run_ranks(2, refusals):
        assert set(said) == set(REFUSED)
        for name, (_, words) in REFUSED.items():
            assert "\n" not in said[name]
            assert all(word in said[name] for word in words), (name, said[name])
