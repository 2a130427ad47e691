"""Records what the operators of a module's forward and backward make, keep and compute, on fake
tensors: no numbers, no memory for them.

A storage belongs to the part of the model that made it ("before", the number of a block, "after").
Of each it is known which layers' outputs it was computed from since the block began, so that a plan
can tell what tensor parallelism will divide.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

BEFORE, AFTER, LOSS = "before", "after", "loss"
# What a block got from the one before it, or from the embedding.
ENTERING = "entering"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
ATTENTION = "_scaled_dot_product_"
ACTIVATIONS = ("silu", "gelu", "relu", "sigmoid", "tanh", "mish", "elu", "leaky_relu", "softplus")


@dataclass(frozen=True)
class WeightProduct:
    """A product with a weight: of `rows` rows; `holder` is the module that holds the weight."""

    holder: str
    inputs: int
    outputs: int
    rows: int
    input_number: int
    """The storage that it reads; 0: one that no operator made."""
    input_bytes: int
    output_bytes: int
    input_sources: tuple[str, ...]


@dataclass(frozen=True)
class AttentionCall:
    """One call of a fused attention kernel, of one microbatch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_queries: int
    num_keys: int
    batch: int
    is_causal: bool


@dataclass
class TracedPartRecord:
    """Operations and saved storages (by number) of one part of the model in one microbatch."""

    saved: list[int] = field(default_factory=list)
    entering: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    """Storages that products and attention made."""
    products: list[WeightProduct] = field(default_factory=list)
    attention: list[AttentionCall] = field(default_factory=list)
    other_flops: int = 0
    """FLOPs of products of tokens with tokens: attention that is written out."""
    activation_elements: int = 0
    added_elements: int = 0
    backward_bytes: int = 0
    """The most bytes that were alive while its backward ran."""
    forward_bytes: int = 0
    """The most bytes that were alive while its forward ran."""


@dataclass(frozen=True)
class StorageFacts:
    """A storage that the forward made: its bytes, the part that made it, and what it comes from."""

    num_bytes: int
    part: str | int
    sources: frozenset[str]


class OperatorRecorder(TorchDispatchMode):
    """Watches every operator while it is entered; `part` says to which part of the model it
    belongs."""

    def __init__(self, weights: Mapping[int, str]) -> None:
        """`weights`: the module that holds a parameter, by the identity of its storage."""
        super().__init__()
        self.part: str | int = BEFORE
        self.is_backward = False
        self.parts: dict[str | int, TracedPartRecord] = defaultdict(TracedPartRecord)
        self.storages: dict[int, StorageFacts] = {}
        self._weights = dict(weights)
        # Of storages that are alive: their number, by identity. Numbers are never used twice.
        self._numbers: dict[int, int] = {}
        self._next_number = 0
        self._alive_bytes = 0

    # Storages

    def get_storage_number(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage of `tensor`; None for one that no operator here has made."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def is_weight(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._weights

    def get_storage_sources(self, tensor: torch.Tensor) -> frozenset[str]:
        number = self.get_storage_number(tensor)
        if number is None:
            return frozenset()
        return self.storages[number].sources

    def record_block_inputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that the block `part` begins with `tensors`."""
        for tensor in tensors:
            number = self.get_storage_number(tensor)
            # What has no gradient is a table that all blocks share: a mask, cosines and sines.
            if number is None or not tensor.requires_grad:
                continue
            self.parts[self.part].entering.add(number)
            facts = self.storages[number]
            self.storages[number] = StorageFacts(facts.num_bytes, facts.part, frozenset([ENTERING]))

    def record_saved_tensor(self, tensor: torch.Tensor) -> None:
        """Say that autograd keeps `tensor` for the backward."""
        number = self.get_storage_number(tensor)
        if number is None or self.is_weight(tensor):
            return
        record = self.parts[self.part]
        if number not in record.saved:
            record.saved.append(number)

    def _record_storage(self, tensor: torch.Tensor, sources: frozenset[str]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._weights:
            return
        number = self._numbers.get(key)
        if number is not None:
            # A view, or a result written into a tensor that was there.
            facts = self.storages[number]
            if not facts.sources >= sources and facts.sources != frozenset([ENTERING]):
                self.storages[number] = StorageFacts(
                    facts.num_bytes, facts.part, facts.sources | sources
                )
            return
        self._next_number += 1
        number, num_bytes = self._next_number, storage.nbytes()
        self._numbers[key] = number
        self.storages[number] = StorageFacts(num_bytes, self.part, sources)
        self._alive_bytes += num_bytes
        weakref.finalize(storage, self._forget_freed_storage, key, num_bytes)
        record = self.parts[self.part]
        if self.is_backward:
            record.backward_bytes = max(record.backward_bytes, self._alive_bytes)
        else:
            record.forward_bytes = max(record.forward_bytes, self._alive_bytes)

    def _forget_freed_storage(self, key: int, num_bytes: int) -> None:
        self._numbers.pop(key, None)
        self._alive_bytes -= num_bytes

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_PRODUCT:
            outputs = _make_result_of_grouped_product(*args, **(kwargs or {}))
        else:
            outputs = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        inputs = list(iterate_tensors_of_tree((args, kwargs or {})))
        results = list(iterate_tensors_of_tree(outputs))
        if self._is_cast_of_weight(name, inputs, results):
            return outputs
        sources, holder = self._find_result_sources(name, inputs)
        for result in results:
            self._record_storage(result, sources)
        if not self.is_backward:
            self._record_operator_work(
                name, func, args, kwargs or {}, holder, inputs, results, outputs
            )
        return outputs

    def _is_cast_of_weight(
        self, name: str, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> bool:
        """True for what autocast makes of a weight, which counts as one; it is noted as such."""
        if name not in ("_to_copy", "to") or len(inputs) != 1 or not self.is_weight(inputs[0]):
            return False
        holder = self._weights[inputs[0].untyped_storage()._cdata]
        for result in results:
            storage = result.untyped_storage()
            self._weights[storage._cdata] = holder
            weakref.finalize(storage, self._weights.pop, storage._cdata, None)
        return True

    def _find_result_sources(
        self, name: str, inputs: list[torch.Tensor]
    ) -> tuple[frozenset[str], str | None]:
        """Origins of an operator's results, and the module whose weight it multiplies by."""
        for tensor in inputs:
            if name in (*PRODUCTS, "embedding") and tensor.ndim > 1 and self.is_weight(tensor):
                holder = self._weights[tensor.untyped_storage()._cdata]
                return frozenset([holder]), holder
        sources: frozenset[str] = frozenset()
        for tensor in inputs:
            sources |= self.get_storage_sources(tensor)
        return sources, None

    def _record_operator_work(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        holder: str | None,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
        outputs: Any,
    ) -> None:
        record = self.parts[self.part]
        if name.startswith(ATTENTION):
            record.attention.append(_build_attention_call(args, kwargs, results))
            record.results |= self._get_storage_numbers(results)
        elif name in PRODUCTS:
            record.results |= self._get_storage_numbers(results)
            flops = count_operator_flops(func, args, kwargs, outputs)
            if holder is None:
                record.other_flops += flops
                return
            # A convolution's features come second, those of other products last.
            axis = 1 if name == "convolution" else -1
            self._record_weight_product(record, holder, flops, inputs, results, axis)
        elif name in ACTIVATIONS:
            record.activation_elements += results[0].numel()
        elif name == "add":
            is_sum = len(inputs) == 2 and inputs[0].shape == inputs[1].shape
            if is_sum and results[0].is_floating_point() and results[0].ndim > 1:
                record.added_elements += results[0].numel()

    def _record_weight_product(
        self,
        record: TracedPartRecord,
        holder: str,
        flops: int,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
        feature_axis: int,
    ) -> None:
        result = results[0]
        tokens = [tensor for tensor in inputs if tensor.ndim > 1 and not self.is_weight(tensor)]
        outputs = result.shape[feature_axis]
        rows = result.numel() // max(1, outputs)
        number, sources = 0, frozenset[str]()
        if tokens:
            number = self.get_storage_number(tokens[-1]) or 0
            sources = self.get_storage_sources(tokens[-1])
        record.products.append(
            WeightProduct(
                holder,
                round(flops / max(1, 2 * rows * outputs)),
                outputs,
                rows,
                number,
                self.storages[number].num_bytes if number else 0,
                result.numel() * result.element_size(),
                tuple(sorted(sources)),
            )
        )

    def _get_storage_numbers(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        numbers = {self.get_storage_number(tensor) for tensor in tensors}
        return {number for number in numbers if number is not None}


def _make_result_of_grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *rest: Any, **_: Any
) -> torch.Tensor:
    """The result of torch's product of groups of rows, without numbers: torch itself refuses it on
    fake tensors of another type than bf16, and computes it on a CPU in any."""
    if left.ndim == right.ndim == 2:
        # The groups are parts of what is summed over: a gradient of each group's weight.
        assert offs is not None
        return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])
    if left.ndim == right.ndim == 3:
        return left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    return left.new_empty(left.shape[-2], right.shape[-1])


def count_operator_flops(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    """FLOPs of one operator as torch counts them; 0 for one without a formula."""
    if func is GROUPED_PRODUCT:
        # Each row meets the weight of its own group alone.
        return 2 * int(outputs.numel()) * int(args[0].shape[-1])
    formula = flop_registry.get(func._overloadpacket)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=outputs))


def iterate_tensors_of_tree(tree: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def _build_attention_call(args: Any, kwargs: Any, results: list[torch.Tensor]) -> AttentionCall:
    queries, keys, values = args[:3]
    mask = kwargs.get("attn_mask")
    # A mask has no numbers here: one of all pairs is taken for causal where it may be.
    is_masked = mask is not None or (len(args) > 3 and isinstance(args[3], torch.Tensor))
    flags = [argument for argument in args[3:] if isinstance(argument, bool)]
    is_causal = bool(kwargs.get("is_causal", any(flags)))
    return AttentionCall(
        num_heads=queries.shape[1],
        num_kv_heads=keys.shape[1],
        head_dim=queries.shape[-1],
        value_dim=values.shape[-1],
        num_queries=queries.shape[2],
        num_keys=keys.shape[2],
        batch=math.prod(queries.shape[:1]),
        is_causal=is_causal or (is_masked and queries.shape[2] == keys.shape[2]),
    )
