"""torch.compile of each block: one compilation serves all blocks of a shape."""

from __future__ import annotations

from phalanx.parallel.protocol import Order, Workpiece
from phalanx.plan.plan import Plan


class Compile:
    order = Order.COMPILE

    def wanted(self, plan: Plan) -> bool:
        return plan.compile

    def apply(self, piece: Workpiece) -> None:
        for block in piece.blocks:
            block.compile()


parallelism = Compile()
