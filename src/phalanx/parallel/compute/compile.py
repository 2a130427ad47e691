"""torch.compile of each block: one compilation serves all blocks of a shape."""

from __future__ import annotations

from pathlib import Path

from phalanx.parallel.protocol import ParallelContext, TransformOrder
from phalanx.plan.plan import Plan


class CompileBlocks:
    order = TransformOrder.COMPILE

    def is_needed(self, plan: Plan) -> bool:
        return plan.compile

    def apply(self, context: ParallelContext) -> None:
        # Not above: half a second of imports.
        import torch._dynamo.config
        from torch._inductor.codecache import cache_dir

        from phalanx.mesh.compiled.cut_off_libraries import remove_cut_off_libraries

        # Of an earlier process that was killed: torch would fail to load them.
        remove_cut_off_libraries(Path(cache_dir()))
        # DDP reduces between blocks. Torch would cut these at buckets, too, into graphs that are
        # compiled one by one and that its cache takes only a part of.
        torch._dynamo.config.optimize_ddp = False
        # In place: `torch.compile(block)` would return a wrapper, whose name is put into all names
        # inside.
        for block in context.blocks:
            block.compile()


parallelism = CompileBlocks()
