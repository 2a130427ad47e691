"""train.deterministic = "layout-free": the tree along which a step's gradients are added.

Its leaves are the microbatches of a step over all ranks, numbered as their samples are. They fall
into classes, by the remainder of their number and the largest power of two that divides how many
there are. The leaves of a class are added in order; then two classes at a time, whose numbers
differ in the highest bit, until one is left. On 2, 4, ... ranks each has the leaves of some classes
as a whole: it adds along its own branches, and the rest of the tree is over ranks. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.errors import LayoutError
from phalanx.core.units import plural
from phalanx.job.costs import ModelCosts
from phalanx.job.schema import Job

LAYOUT_FREE = "layout-free"


@dataclass(frozen=True)
class LeafTree:
    """The tree of a step of `num_leaves` microbatches over all ranks."""

    num_leaves: int

    @classmethod
    def of_job(cls, job: Job) -> LeafTree:
        """The tree of a job that is allowed to be layout-free."""
        assert job.train.micro_batch_size is not None
        return cls(job.train.global_batch_size // job.train.micro_batch_size)

    @property
    def num_classes(self) -> int:
        """The largest power of two that divides the leaves: so many ranks can share them."""
        return self.num_leaves & -self.num_leaves

    @property
    def leaves_per_class(self) -> int:
        return self.num_leaves // self.num_classes

    def order_microbatches(self, num_microbatches: int) -> tuple[int, ...]:
        """The microbatches of a rank that has so many, in the order in which it takes them: class
        by class, neighbours in the tree one after the other."""
        num_classes = num_microbatches // self.leaves_per_class
        num_bits = num_classes.bit_length() - 1
        order = []
        for position in range(num_classes):
            # Classes that differ in the highest bit are added first.
            number = sum(1 << (num_bits - 1 - k) for k in range(num_bits) if position >> k & 1)
            order += [leaf * num_classes + number for leaf in range(self.leaves_per_class)]
        return tuple(order)

    def count_gradient_copies(self, num_microbatches: int) -> int:
        """The most sets of gradients that a rank holds at one time: one of each level of its
        branches, the sum of a class, and that of a microbatch."""
        levels = (num_microbatches // self.leaves_per_class).bit_length() - 1
        return levels + 1 + (self.leaves_per_class > 1)


def require_layouts_may_be_searched(job: Job) -> None:
    """Raise LayoutError for a job whose bits a search would change: it tries other microbatches and
    layouts."""
    if job.train.deterministic == LAYOUT_FREE:
        raise LayoutError(
            'train.deterministic = "layout-free" is for whole copies on CPUs and one size of'
            " microbatches: there is nothing to search",
            fix="set parallel.ranks, or leave it out",
        )


def require_layout_free_is_possible(
    job: Job, shape: ModelCosts, device: str, num_ranks: int
) -> None:
    """Raise LayoutError where bits are not known to be the same on other numbers of ranks."""
    tree = LeafTree.of_job(job)
    if device != "cpu":
        raise LayoutError(
            'train.deterministic = "layout-free" is proven on CPUs alone',
            fix="use cluster.device=cpu",
        )
    if shape.may_have_routers:
        raise LayoutError(
            'train.deterministic = "layout-free" is not proven with experts',
            fix="set train.deterministic=true, which holds for one layout",
        )
    if tree.num_classes % num_ranks:
        possible = ", ".join(str(1 << k) for k in range(tree.num_classes.bit_length()))
        leaves = plural(tree.num_leaves, "microbatch", "microbatches")
        raise LayoutError(
            f"{plural(num_ranks, 'rank')} cannot share the tree of {leaves} along which gradients"
            " are added",
            why="each needs whole branches: a power of two that divides the microbatches",
            fix=f"ranks: {possible}",
        )
