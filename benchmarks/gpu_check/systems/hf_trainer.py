"""The same model in Hugging Face's Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import accelerate  # noqa: F401  Trainer needs it, and says so in another way
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from gpu_check.cases import Case
from gpu_check.training import BETAS, EPS, LR, MAX_NORM, ModelWithLoss, Say, Watch, build


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As many as a run reads: each step gets the one batch."""

    def __init__(self, case: Case, batch: Mapping[str, torch.Tensor]) -> None:
        self.case, self.batch = case, batch

    def __len__(self) -> int:
        return self.case.batch_size * self.case.steps

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: rows[index % self.case.batch_size] for key, rows in self.batch.items()}


class InOrder(Trainer):
    """Without shuffling: each step has every row of the batch once."""

    def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Named(nn.Module):
    """As this trainer reads outputs."""

    def __init__(self, inner: ModelWithLoss) -> None:
        super().__init__()
        self.inner, self.losses = inner, []

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.inner(inputs, targets)
        self.losses.append(loss.detach())
        return {"loss": loss}


def measure(case: Case, say: Say) -> None:
    watch = Watch(case, say)
    watch.start()
    inner, host = build(case)
    model = Named(inner)

    class Counted(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.after_step()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch_size,
            max_steps=case.steps,
            bf16=True,
            use_cpu=case.device == "cpu",
            optim="adamw_torch_fused",
            learning_rate=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_epsilon=EPS,
            weight_decay=0.0,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
        )
        rows = Rows(case, {key: value.clone() for key, value in host.items()})
        InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Counted()]).train()
    say({"losses": [model.losses[0].item(), model.losses[-1].item()]})
