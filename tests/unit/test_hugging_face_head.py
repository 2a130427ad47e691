"""Which models of transformers leave their head to the objective; the loss and all gradients are
those of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_zoo import WIDTHS, ZOO, write_config
from models import VOCAB, plan
from phalanx.mesh.mesh import Mesh
from phalanx.nn.hugging_face.adapter import build
from phalanx.nn.hugging_face.plain_head import find_plain_head
from phalanx.nn.objective import CausalOutput, causal_cross_entropy
from phalanx.parallel.parallelize import parallelize
from phalanx.train.generate import generate_tokens
from ranks import run_ranks

pytest.importorskip("transformers")
ZOO.setdefault("granite", dict(WIDTHS))
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
PLAIN = [
    ("llama", TIED),
    ("llama", UNTIED),
    ("gpt2", {}),
    ("qwen3", UNTIED),
    ("gemma2", {"final_logit_softcapping": None}),
]
OTHERS = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "phi": {},  # a head with a bias
}


def own_loss(
    kind: Any, module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """By the forward of transformers' class, which ours is derived from."""
    logits = type(module).__mro__[1].forward(module, input_ids=tokens, use_cache=False).logits  # type: ignore[attr-defined]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def compare(rank: int, kind: str, is_plain: bool) -> None:
    torch.manual_seed(0)
    module = build(kind).double().train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    theirs = copy.deepcopy(module)
    tokens, targets = torch.randint(96, (2, 16)), torch.randint(96, (2, 16))
    outputs = module(tokens)
    assert isinstance(outputs, CausalOutput) == is_plain
    loss, _ = causal_cross_entropy(5)(outputs, {"targets": targets})
    wanted = own_loss(kind, theirs, tokens, targets)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(
        loss, wanted, rtol=1e-6, atol=0
    )  # parts of some models are computed in float32
    references = dict(theirs.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(
            parameter.grad, references[name].grad, rtol=1e-4, atol=1e-6, msg=name
        )
    with torch.no_grad():
        logits = outputs.gather_logits() if is_plain else outputs
        own = type(module).__mro__[1].forward(theirs, input_ids=tokens, use_cache=False).logits  # type: ignore[attr-defined]
        assert torch.equal(logits, own)


@pytest.mark.parametrize(
    ("name", "settings"), PLAIN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_plain_head_is_left_to_the_objective(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    run_ranks(1, compare, f"hf:{write_config(tmp_path, name, **settings)}", True)


def test_the_head_of_a_mixture_is_left_to_the_objective(tmp_path: Path) -> None:
    """The kernel of its experts refuses tensors without numbers in fp32; for the proof, others
    compute them."""
    module = build(f"hf:{write_config(tmp_path, 'mixtral')}")
    assert module.config._experts_implementation == "grouped_mm"
    assert isinstance(module(torch.randint(96, (2, 16))), CausalOutput)


@pytest.mark.parametrize("name", OTHERS)
def test_other_logits_are_the_models_own(tmp_path: Path, name: str) -> None:
    run_ranks(1, compare, f"hf:{write_config(tmp_path, name, **OTHERS[name])}", False)


class Small(nn.Module):
    """`after` is what its forward does to what the head has made."""

    def __init__(self, after: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.inner, self.head = (
            nn.Embedding(8, 4),
            nn.Dropout(),
            nn.Linear(4, 8, bias=False),
        )
        self.after = after

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **settings: Any) -> Any:
        return SimpleNamespace(logits=self.after(self.head(self.inner(self.embed(input_ids)))))


@pytest.mark.parametrize(
    ("after", "name"),
    [
        (lambda logits: logits, "head"),
        (lambda logits: logits.float(), "head"),
        (lambda logits: logits / 2, ""),
        (lambda logits: logits.div_(2), ""),
        (lambda logits: logits[:, -1:], ""),
        (
            lambda logits: logits if logits.mean() > 0 else -logits,
            "",
        ),  # which the meta device cannot tell
    ],
    ids=["as it is", "float", "scaled", "in place", "cut", "by its numbers"],
)
def test_what_comes_after_the_head_is_seen(
    after: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    module = Small(after).eval()
    module.inner.train()
    before, state = dict(module._modules), torch.get_rng_state()
    assert find_plain_head(module) == name
    assert module._modules == before
    assert (module.training, module.inner.training) == (False, True)
    assert torch.equal(torch.get_rng_state(), state)


def with_own_objective(rank: int, kind: str) -> tuple[list[tuple[int, ...]], float, list[int]]:
    """What an objective of one's own sees, the largest difference to transformers' logits, and a
    sample."""
    torch.manual_seed(0)
    module = build(kind)
    theirs, seen = copy.deepcopy(module).eval(), []
    model = parallelize(module, plan(1), Mesh(plan(1).layout, 0, 0, torch.device("cpu")))
    tokens = torch.randint(VOCAB, (12, 16))  # what the plan knows

    def objective(outputs: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(outputs.shape))
        return outputs.logsumexp(-1).sum(), torch.tensor(outputs.shape[0])

    model.forward_backward([{"inputs": tokens, "targets": tokens}], objective)
    model.train(False)
    own = type(theirs).__mro__[1].forward(theirs, input_ids=tokens).logits  # type: ignore[attr-defined]
    off = float((model(tokens) - own).abs().max().detach())
    return seen, off, generate_tokens(model, [1, 2, 3], num_tokens=4, context=16, seed=0)


def test_an_objective_of_ones_own_sees_logits_and_samples_are_drawn(tmp_path: Path) -> None:
    ((seen, off, sample),) = run_ranks(
        1, with_own_objective, f"hf:{write_config(tmp_path, 'llama')}"
    )
    assert seen == [(12, 16, 96)]
    assert off == 0
    assert len(sample) == 4
