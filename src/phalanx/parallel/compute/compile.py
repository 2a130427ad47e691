"""torch.compile of each block: one compilation serves all blocks of a shape."""

from __future__ import annotations

from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


class CompileBlocks:
    order = TransformOrder.COMPILE

    def is_needed(self, plan: Plan) -> bool:
        return plan.compile

    def apply(self, context: ParallelContext) -> None:
        # In place: `torch.compile(block)` would return a wrapper, whose name is put into all names
        # inside.
        for block in context.blocks:
            block.compile()


parallelism = CompileBlocks()
