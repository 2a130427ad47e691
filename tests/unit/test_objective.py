"""Chunked cross-entropy equals torch's, for any chunk, and never holds all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from alive import Alive
from phalanx.core.batch import IGNORE_INDEX
from phalanx.core.errors import LayoutError
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.nn.objective import CausalOutput, HeadOutput, causal_cross_entropy, token_cross_entropy
from phalanx.plan.workload import Workload

B, T, D, V = 3, 7, 6, 29
N = B * T
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def problem(
    dtype: torch.dtype, *, masked: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, D, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(V, (B, T), generator=generator)
    if masked:
        targets[torch.rand(B, T, generator=generator) < 0.4] = IGNORE_INDEX
        targets[1] = IGNORE_INDEX
    return hidden, head, targets


def reference(dtype: torch.dtype) -> Result:
    hidden, head, targets = problem(dtype)
    loss = F.cross_entropy(
        (hidden @ head.T).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss.detach(), *torch.autograd.grad(1.7 * loss, (hidden, head))


def chunked(dtype: torch.dtype, chunk: int) -> Result:
    hidden, head, targets = problem(dtype)
    loss, num_targets = causal_cross_entropy(chunk)(
        CausalOutput(hidden, head), {"targets": targets}
    )
    assert int(num_targets) == int((targets != -100).sum())
    return loss.detach(), *torch.autograd.grad(1.7 * loss, (hidden, head))


@pytest.mark.parametrize("chunk", [1, 7, N, N + 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients_equal_torchs(chunk: int, dtype: torch.dtype, tolerance: float) -> None:
    for found, wanted in zip(chunked(dtype, chunk), reference(dtype), strict=True):
        assert found.dtype == wanted.dtype
        assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_bf16_is_as_good_as_torchs_bf16() -> None:
    """Against fp64 of the same rounded inputs: no worse than 1.5 x what F.cross_entropy in bf16
    loses, or 1 %."""
    hidden, head, targets = problem(torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (hidden, head)]
    loss = F.cross_entropy(
        (wide[0] @ wide[1].T).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    exact = (loss.detach(), *torch.autograd.grad(1.7 * loss, wide))
    found = chunked(torch.bfloat16, 4)
    assert found[0].dtype == torch.float32  # the sum is never rounded to bf16
    for mine, torchs, wanted in zip(found, reference(torch.bfloat16), exact, strict=True):
        off, theirs = ((x.double() - wanted).norm() / wanted.norm() for x in (mine, torchs))
        assert off <= max(1.5 * theirs, 0.01)


class MadeShapes(TorchDispatchMode):
    """The shapes of all that operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.shapes.add(tuple(result.shape))
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [7, N])
def test_nobody_reads_a_head_that_was_freed(chunk: int, dtype: torch.dtype) -> None:
    """Bit for bit: the head's gradient is made without it, and so is the backward. Of one chunk
    that gradient is not there yet."""
    hidden, head, targets = problem(dtype)
    gradient_was_there: list[bool] = []

    def free_head() -> None:
        gradient_was_there.append((V, D) in made.shapes)
        head.data.fill_(torch.nan)

    with MadeShapes() as made:
        loss, _ = causal_cross_entropy(chunk)(
            CausalOutput(hidden, head, free_head=free_head), {"targets": targets}
        )
    found = loss.detach(), *torch.autograd.grad(1.7 * loss, (hidden, head))
    for freed, kept in zip(found, chunked(dtype, chunk), strict=True):
        assert torch.equal(freed, kept)
    assert gradient_was_there == [chunk < N]


def test_no_targets_give_zero_loss_and_zero_gradients() -> None:
    hidden, head, targets = problem(torch.float32)
    loss, num_targets = causal_cross_entropy(4)(
        CausalOutput(hidden, head), {"targets": torch.full_like(targets, -100)}
    )
    loss.backward()
    assert (loss.item(), int(num_targets)) == (0.0, 0)
    assert not hidden.grad.any()
    assert not head.grad.any()


@pytest.mark.parametrize("bad", [-1, V, -101])
def test_a_target_outside_the_vocabulary_is_refused_as_torch_does(bad: int) -> None:
    hidden, head, targets = problem(torch.float32)
    targets[0, 0] = bad
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten())
    with pytest.raises((IndexError, RuntimeError)):
        causal_cross_entropy(4)(CausalOutput(hidden, head), {"targets": targets})


def test_a_second_backward_is_refused() -> None:
    """The first scales the saved gradients in place."""
    hidden, head, targets = problem(torch.float32)
    loss, _ = causal_cross_entropy(4)(CausalOutput(hidden, head), {"targets": targets})
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (2 * loss).backward()


class Tallest(TorchDispatchMode):
    """The most rows of any tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == V:
                self.rows = max(self.rows, tensor.numel() // V)
        return result


@pytest.mark.parametrize("chunk", [2, 5])
def test_logits_never_exist_for_more_than_a_chunk(chunk: int) -> None:
    hidden, head, targets = problem(torch.float32)
    with Tallest() as seen:
        loss, _ = causal_cross_entropy(chunk)(CausalOutput(hidden, head), {"targets": targets})
        loss.backward()
    assert max(chunk, D) == max(seen.rows, D)  # the transposed head is [D, V]
    with Tallest() as seen:
        token_cross_entropy(hidden @ head.T, {"targets": targets})
    assert seen.rows == N  # what the mode would have seen


@pytest.mark.parametrize("output", [CausalOutput, HeadOutput], ids=["built in", "Hugging Face"])
@pytest.mark.parametrize("chunk", [64, 256, 1024])
@pytest.mark.parametrize("dim", [64, pytest.param(512, marks=pytest.mark.long)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_over_several_chunks_holds_one_of_them(
    output: type[CausalOutput], chunk: int, dim: int, precision: str
) -> None:
    """Neither logits of the chunk before nor a second gradient of the head are there; the plan
    counts the rest."""
    num_tokens, vocab = 1024, 2048
    hidden = torch.randn(1, num_tokens, dim).to(
        torch.float32 if precision == "fp32" else torch.bfloat16
    )
    head = torch.randn(vocab, dim, requires_grad=True)
    targets = torch.randint(vocab, (1, num_tokens))
    with Alive() as alive:
        loss, _ = causal_cross_entropy(chunk)(
            output(hidden.requires_grad_(), head), {"targets": targets}
        )
        loss.backward()
    shape = DecoderShape(1, dim, 1, 1, dim, dim, vocab, True)
    planned = shape.activations.count_loss_bytes(
        Workload(1, num_tokens, precision, "none", chunk)
    ).at_once
    # What went in: views of it are counted as made. In bf16 the head's cast counts as communication
    # in a plan.
    given = hidden.untyped_storage().nbytes() + vocab * dim * (4 if precision == "fp32" else 2)
    assert alive.most - given == pytest.approx(planned, rel=0.03)


def test_logits_of_a_users_model_are_read() -> None:
    hidden, head, targets = problem(torch.float64)
    logits = hidden @ head.T
    loss, num_targets = causal_cross_entropy(4)(logits, {"targets": targets})
    wanted = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    assert torch.equal(loss, wanted)
    assert int(num_targets) == int((targets != -100).sum())


def test_other_outputs_are_refused_with_what_to_return() -> None:
    with pytest.raises(LayoutError, match=r"dict.*logits"):
        causal_cross_entropy(4)(
            {"logits": torch.zeros(2, 3)}, {"targets": torch.zeros(2, dtype=torch.long)}
        )
