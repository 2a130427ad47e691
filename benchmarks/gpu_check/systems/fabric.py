"""The same model in a loop of Lightning Fabric's."""

from __future__ import annotations

from gpu_check.cases import Case
from gpu_check.training import MAX_NORM, Say, Watch, adamw, build


def measure(case: Case, say: Say) -> None:
    try:
        from lightning.fabric import Fabric
    except ModuleNotFoundError:
        from lightning_fabric import Fabric
    watch, losses = Watch(case, say), []
    watch.start()
    fabric = Fabric(accelerator=case.device, devices=1, precision="bf16-mixed")
    module, host = build(case)
    model, optimizer = fabric.setup(module, adamw(module))
    for _ in watch.steps():
        loss = model(
            **{key: value.to(fabric.device, non_blocking=True) for key, value in host.items()}
        )
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    say({"losses": [losses[0].item(), losses[-1].item()]})
