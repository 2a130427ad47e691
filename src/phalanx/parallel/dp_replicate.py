"""dp_replicate: every rank holds the whole model; gradients are averaged in buckets while the backward runs (DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.parallel import DistributedDataParallel

from phalanx.mesh.compat import ddp_buffer_option
from phalanx.parallel.protocol import Order, Workpiece
from phalanx.plan.planner import Plan


class DpReplicate:
    order = Order.DATA

    def wanted(self, plan: Plan) -> bool:
        return plan.layout.dp_replicate > 1 and plan.layout.dp_shard == 1

    def apply(self, piece: Workpiece) -> None:
        piece.materialize()
        has_buffers = any(True for _ in piece.root.buffers())
        ddp = DistributedDataParallel(
            piece.root,
            process_group=piece.mesh.submesh("dp_replicate").get_group(),
            gradient_as_bucket_view=True,
            bucket_cap_mb=piece.plan.bucket_mb,
            **ddp_buffer_option(has_buffers),
            init_sync=False,  # initial weights are the same by construction; the first step compares them
        )
        watch = _ExposedWait(piece)

        @contextmanager
        def sync(on: bool) -> Iterator[None]:
            if not on:
                with ddp.no_sync():
                    yield
                return
            watch.arm()
            yield

        piece.outer, piece.sync, piece.after_backward = ddp, sync, watch.disarm


class _ExposedWait:
    """Charges to "collective" what remains of the backward once the last gradient exists: pure waiting.

    DDP starts a bucket's all-reduce when its gradients are ready and waits for all of them at the end, inside C++.
    """

    def __init__(self, piece: Workpiece) -> None:
        self._phases = piece.phases
        self._trainable = [p for p in piece.root.parameters() if p.requires_grad]
        self._missing = 0
        self._armed = self._waiting = False
        for parameter in self._trainable:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, _: torch.Tensor) -> None:
        self._missing -= 1
        if self._armed and self._missing == 0 and self._phases.current == "backward":
            self._waiting = True
            self._phases.enter("collective", "all_reduce gradients")

    def arm(self) -> None:
        """Before a forward-backward whose gradients are reduced."""
        self._missing, self._armed, self._waiting = len(self._trainable), True, False

    def disarm(self) -> None:
        """When the backward has returned: every bucket has arrived."""
        self._armed = False
        if self._waiting:
            self._waiting = False
            self._phases.leave("collective")


parallelism = DpReplicate()
