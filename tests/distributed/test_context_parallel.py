"""What ranks of cp send, and calls of a model whose sequences are cut; for parity see
test_verify_cp.py."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import nn

from collectives import CountCollectives
from models import CPU, VOCAB, fill, shape
from phalanx.core.errors import LayoutError
from phalanx.core.phases import PhaseTimer
from phalanx.job.schema import Job, Parallel
from phalanx.mesh.mesh import Mesh, open_mesh
from phalanx.nn.models.decoder import Decoder, example_batch
from phalanx.nn.objective import causal_cross_entropy
from phalanx.parallel.context.attention import ATTENTION_FUNCTION_OF_CP_KIND
from phalanx.parallel.context.block_attention import BlockAttention
from phalanx.parallel.context.chunks import SequenceChunksOfRanks
from phalanx.parallel.context.group import GRADIENTS, KEYS, ContextGroup
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.parallelize import parallelize
from phalanx.plan.communication import cp_sent_bytes_per_step
from phalanx.plan.layout import Layout
from phalanx.plan.plan import Plan
from phalanx.plan.planner import make_plan
from phalanx.plan.workload import build_workload, shard_shape
from phalanx.train.generate import generate_tokens
from ranks import run_ranks

BATCH, SEQ_LEN = 4, 16
SHAPE = shape(num_kv_heads=4)


def job(num_ranks: int, precision: str = "fp32", **parallel: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 40},
            "data": {"seq_len": SEQ_LEN},
            "train": {"global_batch_size": BATCH},
            "parallel": {"ranks": num_ranks, **parallel},
            "precision": {"compute": precision},
        }
    )


def plan(num_ranks: int, precision: str = "fp32", **parallel: Any) -> Plan:
    return make_plan(job(num_ranks, precision, **parallel), cluster=CPU, vocab_size=VOCAB)


def parallel_model(a_plan: Plan, mesh: Mesh, **changed: Any) -> ParallelModel:
    module = Decoder(replace(SHAPE, **changed))
    fill(module)
    return parallelize(module, a_plan, mesh)


def batch() -> dict[str, torch.Tensor]:
    return example_batch(SHAPE, BATCH, SEQ_LEN, seed=3)


KINDS = tuple(ATTENTION_FUNCTION_OF_CP_KIND)
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_dim": 24, "expert_capacity": 0.75}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"cp2 {kind}": (2, {"cp": 2, "cp_attention": kind}) for kind in KINDS},
    **{f"cp4 {kind}": (4, {"cp": 4, "cp_attention": kind}) for kind in KINDS},
    "tp2 cp2 ring": (4, {"cp": 2, "tp": 2}),
    "cp4 ring bf16": (4, {"cp": 4, "precision": "bf16"}),
}


def test_the_table_is_what_a_job_can_name() -> None:
    assert get_args(Parallel.model_fields["cp_attention"].annotation) == KINDS


def count_sent(rank: int, num_ranks: int, parallel: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """What phalanx says, and what collectives and sends made."""
    a_plan = plan(num_ranks, **parallel)
    with open_mesh(a_plan.layout, device="cpu", collectives="gloo") as mesh:
        model = parallel_model(a_plan, mesh)
        with CountCollectives() as moved:
            sums = model.forward_backward([batch()], causal_cross_entropy(16))
        model.evaluate([batch()], causal_cross_entropy(16))  # which is no part of the step
        return model.reduce_and_clip(sums).sent_cp_bytes, moved.num_bytes


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * ("cp2 " in name[:4])) for name in LAYOUTS],
)
def test_bytes_of_a_step_equal_the_formula(name: str) -> None:
    num_ranks, parallel = LAYOUTS[name]
    a_plan, a_job = plan(num_ranks, **parallel), job(num_ranks, **parallel)
    work = build_workload(
        a_job,
        a_plan.model_shape,
        micro_batch_size=BATCH,
        num_microbatches=1,
        tp=a_plan.layout.tp,
        cp=a_plan.layout.cp,
    )
    here = shard_shape(a_plan.model_shape, work.tp)
    wanted = cp_sent_bytes_per_step(here, work)
    c, size = a_plan.layout.cp, 2 if a_plan.precision == "bf16" else 4
    heads = (
        BATCH * SEQ_LEN // c * SHAPE.head_dim * SHAPE.num_layers
    )  # numbers of one head in all layers
    kv, of_kv = 2 * heads * here.num_kv_heads * size, 2 * heads * here.num_kv_heads * 4
    queries = heads * here.num_heads * size
    # docs/strategies.md, by what it is that gloo does; of what is whole, a rank sends (c - 1) / c
    of_docs = {
        "ring": {"send": (c - 1) * kv + (c - 1) * (kv + of_kv)},
        "all-gather": {"broadcast_": 2 * c * kv, "reduce_": c * of_kv},
        "ulysses": {"alltoall_base_": 2 * (kv + 2 * queries)},
    }
    for told, moved in run_ranks(num_ranks, count_sent, num_ranks, parallel):
        really = {
            name: moved[name]
            for name in ("send", "broadcast_", "reduce_", "alltoall_base_")
            if name in moved
        }
        assert (
            told
            == wanted
            == sum(size * (1 if name == "send" else (c - 1) / c) for name, size in really.items())
        )
        assert really == of_docs.get(a_plan.parallel.cp_attention, really)


def events_of_a_ring(rank: int) -> tuple[list[tuple[str, int]], ...]:
    """What a rank does in forward and backward of one attention, in order: posts, waits (by tag)
    and computes."""
    seen: list[tuple[str, int]] = []
    post, forward, backward = (
        dist.batch_isend_irecv,
        BlockAttention.forward,
        BlockAttention.backward,
    )

    class Waited:
        def __init__(self, work: Any, tag: int) -> None:
            self.work, self.tag = work, tag

        def wait(self) -> None:
            seen.append(("wait", self.tag))
            self.work.wait()

    def posted(operations: list[Any]) -> list[Waited]:
        seen.append(("post", operations[0].tag))
        return [Waited(work, operations[0].tag) for work in post(operations)]

    def computed(of: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(("compute", 0))
            return of(*args)

        return run

    dist.batch_isend_irecv = posted
    BlockAttention.forward, BlockAttention.backward = computed(forward), computed(backward)  # type: ignore[method-assign]
    with open_mesh(Layout(cp=4), device="cpu") as mesh:
        group = ContextGroup(
            mesh.submesh("cp").get_group(), SequenceChunksOfRanks(4, "zigzag"), PhaseTimer()
        )
        q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))
        out = ATTENTION_FUNCTION_OF_CP_KIND["ring"](q, k, v, None, 0, group)
        in_forward = list(seen)
        seen.clear()
        out.sum().backward()
    return in_forward, seen


def test_a_ring_computes_a_block_while_the_next_is_on_its_way() -> None:
    """In forward and backward; and gradients of a block travel while those of the next are
    computed."""

    def places(seen: list[tuple[str, int]], what: str, tag: int = 0) -> list[int]:
        """Each once, though the two works of an exchange are waited for one after the other."""
        found = [at for at, event in enumerate(seen) if event == (what, tag)]
        return [at for at in found if at == 0 or seen[at - 1] != (what, tag)]

    for rank_saw in run_ranks(4, events_of_a_ring):
        for seen, is_backward in zip(rank_saw, (False, True), strict=True):
            blocks = places(seen, "compute")
            assert len(blocks) == 4
            posts, waits = places(seen, "post", KEYS), places(seen, "wait", KEYS)
            for posted, computed, waited in zip(posts, blocks[:-1], waits, strict=True):
                assert posted < computed < waited, seen
            posts, waits = places(seen, "post", GRADIENTS), places(seen, "wait", GRADIENTS)
            assert len(posts) == len(waits) == (3 if is_backward else 0)
            for posted, computed, waited in zip(
                posts[:-1], blocks[2:], waits[:-1], strict=is_backward
            ):
                assert posted < computed < waited, seen


def losses(rank: int, a_plan: Plan) -> list[float]:
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallel_model(a_plan, mesh)
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
        found = []
        for _ in range(3):
            facts = model.reduce_and_clip(
                model.forward_backward([batch()], causal_cross_entropy(16))
            )
            found += [facts.loss, facts.grad_norm]
            model.update(optimizer)
            optimizer.zero_grad()
        return found


@functools.cache
def losses_alone(precision: str) -> list[float]:
    return run_ranks(1, losses, plan(1, precision))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *((kind, "bf16") for kind in KINDS),
        # What a ring adds up itself.
        ("ring", "fp16"),
        *(pytest.param(kind, "fp16", marks=pytest.mark.long) for kind in KINDS if kind != "ring"),
    ],
)
def test_half_precision_stays_within_its_rounding(kind: str, precision: str) -> None:
    """Reference: one process in the same precision."""
    alone = losses_alone(precision)
    two = run_ranks(2, losses, plan(2, precision, cp=2, cp_attention=kind))[0]
    assert two == pytest.approx(alone, rel=2e-2)
    assert two[0] == pytest.approx(alone[0], rel=2e-3)


def sample(rank: int, a_plan: Plan, learned: bool) -> list[int]:
    changed: dict[str, Any] = (
        {"positions": "learned", "max_positions": SEQ_LEN} | EXPERTS if learned else {}
    )
    with open_mesh(a_plan.layout, device="cpu") as mesh:
        model = parallel_model(a_plan, mesh, **changed)
        return generate_tokens(model, [5, 6, 7], num_tokens=14, context=SEQ_LEN, seed=1)


def sample_each(rank: int, plans: dict[str, Plan], learned: bool) -> dict[str, list[int]]:
    return {name: sample(rank, a_plan, learned) for name, a_plan in plans.items()}


@pytest.mark.parametrize("learned", [False, True])
def test_text_of_any_length_is_that_of_one_process(learned: bool) -> None:
    (alone,) = run_ranks(1, sample, plan(1), learned)
    plans = {kind: plan(2, cp=2, cp_attention=kind) for kind in KINDS}
    for found in run_ranks(2, sample_each, plans, learned):
        assert found == dict.fromkeys(KINDS, alone)


class NoSeam(nn.Module):
    """Mixes tokens where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.mix = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(inputs).mT).mT @ self.embed.weight.T


def refusals(rank: int) -> list[str]:
    a_plan = plan(2, cp=2)
    said = []

    def told(call: Any) -> None:
        with pytest.raises(LayoutError) as caught:
            call()
        said.append(str(caught.value))

    with open_mesh(Layout(cp=2), device="cpu") as mesh:
        torch.manual_seed(0)
        told(lambda: parallelize(NoSeam(), a_plan, mesh))
        model = parallel_model(a_plan, mesh)
        objective = causal_cross_entropy(16)
        short = {key: t[:, :6] for key, t in batch().items()}
        told(lambda: model.forward_backward([short], objective))
        told(
            lambda: model.forward_backward(
                [batch() | {"weights": torch.ones(BATCH, SEQ_LEN)}], objective
            )
        )
        documents = torch.zeros(BATCH, SEQ_LEN // 2, dtype=torch.long)
        told(lambda: model.forward_backward([batch() | {"document_ids": documents}], objective))
        told(lambda: model(batch()["inputs"]))
    return said


def test_what_cannot_be_cut_is_refused_in_a_line() -> None:
    wanted = ("NoSeam has no such seam", "sequences of 6 tokens", "a batch has weights", "document_ids are of 8 tokens",
              "called through call_then")  # fmt: skip
    for said in run_ranks(2, refusals):
        assert [words in line for words, line in zip(wanted, said, strict=True)] == [True] * len(
            wanted
        ), said
        assert not any("\n" in line for line in said)
