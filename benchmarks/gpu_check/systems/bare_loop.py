"""The same model in a loop written by hand, as short as one gets."""

from __future__ import annotations

import torch

from gpu_check.cases import Case
from gpu_check.training import MAX_NORM, Say, Watch, adamw, build


def measure(case: Case, say: Say) -> None:
    watch, losses = Watch(case, say), []
    watch.start()
    model, host = build(case)
    optimizer = adamw(model)
    for _ in watch.steps():
        batch = {key: value.to(case.device, non_blocking=True) for key, value in host.items()}
        with torch.autocast(case.device, torch.bfloat16):
            loss = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    say({"losses": [losses[0].item(), losses[-1].item()]})
