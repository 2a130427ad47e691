"""StepHooks: what transforms have done at the moments of a step.

The two moments around the optimizer's update are lists of `OptimizerParameterMap` (`before_update`,
`after_update`), which makes that update reach the model; what dropout asks and replays are lists of
`DropoutRng`. Three things stay single slots, because a second one has no meaning:

- `ParallelContext.outer`: what is called. DDP sets it; there is one wrapper around the model, since
  a plan has DDP or FSDP.
- `ParallelContext.autocast`: FSDP turns it off where its own casts are enough, and nothing turns
  it on.
- `root.forward`: pipeline stages and activation offload each wrap the one that they find. Wrapping
  nests, in the order of transforms, and so loses none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

from torch import nn

from phalanx.core.errors import PhalanxError

NamedParameters = Sequence[tuple[str, nn.Parameter]]
MicrobatchHook = Callable[[bool], AbstractContextManager[None]]


@dataclass(frozen=True)
class StepHooks:
    """Lists of callbacks, which transforms append to and nobody can assign: two transforms that
    need one moment both have it, in the order in which they were applied.

    `around_microbatch`: contexts of forward and backward of a microbatch (in a pipeline: of all of
    them), which take if it is the last one of the step. `after_backward`: of each microbatch.
    `before_reduce`: all gradients of the step are there; called with the named parameters.
    `gather_weights`: weights are whole from here until `release_weights`. `after_weight_grads`: a
    pipeline made gradients of weights outside autograd. `explain_error`: an exception of the first
    forward -> the error to raise in its place, or None.
    """

    around_microbatch: list[MicrobatchHook] = field(default_factory=list)
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    before_reduce: list[Callable[[NamedParameters], None]] = field(default_factory=list)
    gather_weights: list[Callable[[], None]] = field(default_factory=list)
    release_weights: list[Callable[[], None]] = field(default_factory=list)
    after_weight_grads: list[Callable[[], None]] = field(default_factory=list)
    explain_error: list[Callable[[Exception], PhalanxError | None]] = field(default_factory=list)

    def open_microbatch_context(self, *, is_last: bool) -> AbstractContextManager[object]:
        """The contexts of a microbatch as one; the first that was appended is the outermost."""
        if not self.around_microbatch:
            return nullcontext()
        # As good as always there is one: no stack in a step's path.
        if len(self.around_microbatch) == 1:
            return self.around_microbatch[0](is_last)
        return self._open_all_microbatch_contexts(is_last)

    def _open_all_microbatch_contexts(self, is_last: bool) -> AbstractContextManager[object]:
        # If a later hook fails, those before it are left here; else the caller leaves all of them.
        with ExitStack() as stack:
            for hook in self.around_microbatch:
                stack.enter_context(hook(is_last))
            return stack.pop_all()

    def run_after_backward_hooks(self) -> None:
        for hook in self.after_backward:
            hook()

    def run_before_reduce_hooks(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        if not self.before_reduce:
            return
        # A list, because each hook walks over them.
        parameters = list(named_parameters)
        for hook in self.before_reduce:
            hook(parameters)

    def run_gather_weights_hooks(self) -> None:
        for hook in self.gather_weights:
            hook()

    def run_release_weights_hooks(self) -> None:
        for hook in self.release_weights:
            hook()

    def run_after_weight_grads_hooks(self) -> None:
        for hook in self.after_weight_grads:
            hook()

    def explain_error_by_hooks(self, error: Exception) -> PhalanxError | None:
        """The first answer of the hooks; None if no transform knows the error."""
        for explain in self.explain_error:
            explanation = explain(error)
            if explanation is not None:
                return explanation
        return None
