"""Dropout that is no layer: F.dropout in a user's forward, attention's and recurrent layers' own,
`bernoulli_`.

All of them fill a tensor by one operation of torch (`bernoulli_`; on GPUs also `native_dropout`),
which is seen to while a module that draws is running. Which do is found in a first microbatch, so
that the others pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.mesh.logical import full_name
from phalanx.parallel.dropout.rng import ReplayContext
from phalanx.parallel.dropout.transform import find_layers_with_batch_in_dim_1
from phalanx.parallel.pipeline.staged import PipelineOfRank
from phalanx.parallel.protocol import ParallelContext

BERNOULLI_OP = torch.ops.aten.bernoulli_.float
NATIVE_DROPOUT_OP = torch.ops.aten.native_dropout.default
_DROPOUT_PROBABILITY_ARGUMENT_INDEX = {
    "scaled_dot_product_attention": 4,
    "multi_head_attention_forward": 10,
}
"""Which argument of these functions is the probability."""


class RandomOpInterceptor:
    """Sees to what a module draws: for which rows, and what it draws besides its dropout layers."""

    def __init__(self, module: nn.Module, context: ParallelContext) -> None:
        self._module, self._dropout_rng, self._mesh = module, context.dropout_rng, context.mesh
        self._is_global = context.plan.parallel.dropout == "global"
        self._names = {part: full_name(name) for name, part in module.named_modules()}
        self._rows_second = find_layers_with_batch_in_dim_1(module)
        self.mesh_device = context.mesh.device
        self._calling: list[str | None] = [None]
        self._drawing: set[str] = set()
        self._mode = _PositionKeyedDrawsMode(self)
        # Modes and hooks would break the graph of a compiled module.
        self._can_look = self._is_global and not context.plan.compile
        # A module is watched in its first microbatch alone: modes cost time in every operation.
        self._must_look, self._served = self._can_look, ExitStack()
        self._looked: set[int] = set()
        self._state: torch.Tensor | None = None
        self._dropout_rng.replay_hooks.append(self._replay_context)
        staged = context.axes.find(PipelineOfRank)
        self._num_stages = 1 if staged is None else len(staged.stages_of_this_rank)

    def begin_step(self) -> None:
        known = not self._is_global or self._must_look or bool(self._dropout_rng.left_to_torch)
        self._state = None if known else self._read_torch_generator_state()

    def end_step(self) -> None:
        """If torch's generator moved, and nobody is known to do it, look for who."""
        if self._state is not None and not torch.equal(
            self._state, self._read_torch_generator_state()
        ):
            self._must_look = self._can_look
            self._looked.clear()
            if not self._can_look:
                self._dropout_rng.left_to_torch[""] = "compiled code draws random numbers"

    def drawing_in_microbatch(
        self, step: int, index: int, batch: Mapping[str, torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Around forward and backward of the microbatch number `index`, of which every rank has
        equally many rows."""
        num_rows = next((len(tensor) for tensor in batch.values() if tensor.ndim), 0)
        global_index = index * self._mesh.layout.data_parallel_size + self._mesh.data_parallel_rank
        return self._dropout_rng.drawing_in_microbatch(step, global_index * num_rows, num_rows)

    @contextmanager
    def intercepting_forward(self, stage: int = 0) -> Iterator[None]:
        """Around a forward: the first time (of each pipeline stage of this rank), everything
        that draws is found."""
        if not self._must_look or stage in self._looked:
            yield
            return
        self._looked.add(stage)
        self._must_look = len(self._looked) < self._num_stages
        self._served.close()
        with ExitStack() as looking:
            for part, name in self._names.items():
                looking.enter_context(self._watching_rng_of_module(part, name, watch=True))
            looking.enter_context(self._watching_rng_of_objective())
            with self._mode:
                yield
        self._intercept_only_modules_that_drew()

    @contextmanager
    def _watching_rng_of_objective(self) -> Iterator[None]:
        """Note that the objective draws, if the generator moves while no module runs."""
        before = self._read_torch_generator_state()
        yield
        if not self._dropout_rng.left_to_torch and not torch.equal(
            before, self._read_torch_generator_state()
        ):
            self._dropout_rng.left_to_torch["objective"] = "it draws random numbers"

    def _replay_context(self) -> ReplayContext:
        """The context of a recomputation: the module that is running, and whether its draws are
        intercepted."""
        return partial(self._marking_running_module, self._calling[-1], self._mode.depth > 0)

    @contextmanager
    def _marking_running_module(self, name: str | None, is_seen_to: bool) -> Iterator[None]:
        before = list(self._calling)
        self._calling.append(name)
        try:
            with self._mode if is_seen_to and not self._mode.depth else nullcontext():
                yield
        finally:
            self._calling[:] = before

    def _intercept_only_modules_that_drew(self) -> None:
        """From now on only modules that drew, and what is inside of them."""
        for part, name in self._names.items():
            if name in self._drawing:
                self._served.enter_context(self._intercepting_draws_of_module(part))
            if any(_is_same_or_submodule(name, other) for other in self._drawing):
                self._served.enter_context(self._watching_rng_of_module(part, name))

    @contextmanager
    def _watching_rng_of_module(
        self, part: nn.Module, name: str, *, watch: bool = False
    ) -> Iterator[None]:
        """Know that `part` is running; with `watch`, whether torch's generator moves meanwhile."""
        states: list[torch.Tensor] = []

        def enter(*_: object) -> None:
            self._calling.append(name)
            if watch:
                states.append(self._read_torch_generator_state())

        def leave(*_: object) -> None:
            self._calling.pop()
            if (
                watch
                and not torch.equal(states.pop(), self._read_torch_generator_state())
                and not self._contains_module_that_draws(name)
            ):
                self._dropout_rng.left_to_torch[name] = (
                    f"{type(part).__name__} draws random numbers"
                )

        hooks = (
            # Entered before the user's hooks, and left after an error, too (always_call): no module
            # must seem to run on.
            part.register_forward_pre_hook(enter, prepend=True),
            part.register_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _contains_module_that_draws(self, name: str) -> bool:
        return any(_is_same_or_submodule(other, name) for other in self._dropout_rng.left_to_torch)

    @contextmanager
    def _intercepting_draws_of_module(self, part: nn.Module) -> Iterator[None]:
        """The mode is on while `part` runs."""
        active: list[Any] = []

        def enter(*_: object) -> None:
            # Entered once: a mode that is on twice sees each operation twice.
            active.append(nullcontext() if self._mode.depth else self._mode)
            active[-1].__enter__()

        def leave(*_: object) -> None:
            active.pop().__exit__(None, None, None)

        hooks = (
            part.register_forward_pre_hook(enter, prepend=True),
            part.register_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def draw_mask(self, keep: float, like: torch.Tensor) -> torch.Tensor | None:
        """Mask for a draw of the module that is running; None if torch is to draw it."""
        name = self._calling[-1]
        if name is None:
            return None
        rows_dim = int(name in self._rows_second)
        mask = self._dropout_rng.draw_mask(name, keep, like.shape, like.device, rows_dim=rows_dim)
        if mask is not None:
            self._drawing.add(name)
        return mask

    def _read_torch_generator_state(self) -> torch.Tensor:
        if self._mesh.device.type == "cuda":
            return torch.cuda.get_rng_state(self._mesh.device)
        return torch.get_rng_state()


def _is_same_or_submodule(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


class _PositionKeyedDrawsMode(TorchDispatchMode):
    """Fills what torch would fill with draws of its generator."""

    def __init__(self, interceptor: RandomOpInterceptor) -> None:
        super().__init__()
        self._interceptor = interceptor
        # A CPU's attention kernels have no dropout: only a GPU pays for looking at each function.
        on_gpu = interceptor.mesh_device.type == "cuda"
        self._attention: AbstractContextManager[Any] = (
            _UnfusedDropoutAttentionMode() if on_gpu else nullcontext()
        )
        self.depth = 0

    def __enter__(self) -> Any:
        self.depth += 1
        self._attention.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        super().__exit__(*error)
        self._attention.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # With a generator of the user's own the numbers are the user's, too.
        if func is BERNOULLI_OP and kwargs.get("generator") is None:
            keep = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            mask = self._interceptor.draw_mask(keep, args[0]) if 0.0 < keep < 1.0 else None
            if mask is not None:
                return args[0].copy_(mask)
        if func is NATIVE_DROPOUT_OP and args[2] and 0.0 < args[1] < 1.0:
            keep = 1.0 - args[1]
            mask = self._interceptor.draw_mask(keep, args[0])
            if mask is not None:
                return (args[0] * mask).mul_(1.0 / keep), mask
        return func(*args, **kwargs)


class _UnfusedDropoutAttentionMode(TorchFunctionMode):
    """Attention with dropout by plain products: the fused kernels of a GPU draw inside of
    themselves, where nobody can fill in other numbers.

    Without dropout attention stays as it is. A CPU's kernels have no dropout.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _list_attention_functions():
            argument = _DROPOUT_PROBABILITY_ARGUMENT_INDEX.get(func.__name__)
        else:
            argument = None
        if argument is not None and args and args[0].device.type == "cuda":
            probability = args[argument] if len(args) > argument else kwargs.get("dropout_p", 0.0)
            if probability > 0.0:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _list_attention_functions() -> tuple[Any, ...]:
    """nn.MultiheadAttention's function calls the other one where no mode sees it."""
    return F.scaled_dot_product_attention, F.multi_head_attention_forward
