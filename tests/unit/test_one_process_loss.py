"""The loss by which one process is judged is written a second time, beside the objectives that
training takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_zoo import write_config
from phalanx.job.load import load_job
from phalanx.nn import objective
from phalanx.run.one_process.job_loss import JobLoss

NAMED = "phalanx.nn.objective"


def make_batch(key: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(5, (6,), generator=generator)
    labels[1::3] = -100
    return logits, {key: labels}


@pytest.mark.parametrize("key", ["labels", "targets"])
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.preset=small-vit",),
        ("model.kind=hf:{config}",),
        ("model.preset=small-vit", f"model.objective={NAMED}:classification_cross_entropy"),
    ],
)
def test_labels_of_images_are_judged_by_a_loss_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], key: str
) -> None:
    config = write_config(tmp_path, "vit")
    job = load_job(None, [each.format(config=config) for each in overrides])
    logits, batch = make_batch(key)
    wanted = F.cross_entropy(logits, batch[key], reduction="sum")
    (gradient,) = torch.autograd.grad(wanted, logits)
    monkeypatch.setattr(objective, "IGNORE_INDEX", -1)
    loss, num_targets = JobLoss(job).sum_losses_of_outputs(logits, batch)
    assert int(num_targets) == 4
    torch.testing.assert_close(loss, wanted, rtol=1e-14, atol=0)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)


def test_rows_without_any_label_have_no_loss() -> None:
    logits, batch = make_batch("labels")
    batch["labels"][:] = -100
    job = load_job(None, ["model.preset=small-vit"])
    loss, num_targets = JobLoss(job).sum_losses_of_outputs(logits, batch)
    loss.backward()
    assert (loss.item(), int(num_targets)) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()
