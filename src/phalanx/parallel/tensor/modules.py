"""What tensor parallelism makes of single modules: rows that add up, embeddings of a part of the
vocabulary, hooks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from phalanx.core.errors import DataError, LayoutError
from phalanx.mesh.devices import is_on_cpu
from phalanx.mesh.gathered_input import RegionInput
from phalanx.mesh.linear import (
    find_input_dim_of_weight,
    find_output_dim_of_weight,
    is_transformers_conv1d,
)
from phalanx.mesh.tensor_group import (
    SEQUENCE_DIM,
    ShardedVocabularyLogits,
    TensorParallelGroup,
    VocabularyShard,
)
from phalanx.parallel.pipeline.weight_grads import (
    DEFERS_WEIGHT_GRADIENT_ATTRIBUTE,
    linear_with_deferred_gradient,
)
from phalanx.parallel.tensor.overlap import multiply_row_parallel_in_chunks
from phalanx.plan.rules import CountAttribute, ShardingRule


def count_output_features(part: nn.Module) -> int:
    return int(part.weight.shape[find_output_dim_of_weight(part)])


def count_input_features(part: nn.Module) -> int:
    return int(part.weight.shape[find_input_dim_of_weight(part)])


def set_output_features(part: nn.Module, size: int) -> None:
    setattr(part, "nf" if is_transformers_conv1d(part) else "out_features", size)


def make_row_parallel(part: nn.Module, name: str, group: TensorParallelGroup, size: int) -> None:
    """Each rank multiplies its features; the sum over ranks leaves the region, and the bias is
    added once."""
    if isinstance(part, nn.Linear):
        part.in_features = size

    # No partial: a compiler takes each for another function, and compiles each block anew.
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _row_parallel_forward(part, name, group, x)

    part.forward = forward  # type: ignore[method-assign]


def _row_parallel_forward(
    part: nn.Module, name: str, group: TensorParallelGroup, x: torch.Tensor
) -> torch.Tensor:
    weight = part.weight.T if is_transformers_conv1d(part) else part.weight
    if x.shape[-1] != weight.shape[1]:
        raise LayoutError(
            f"{name} gets {x.shape[-1]} features, and {weight.shape[1]} are this rank's",
            fix="a row follows columns that are cut alike",
        )
    if group.chunks > 1:
        out = multiply_row_parallel_in_chunks(x, weight, group)
    else:
        out = group.leave(_multiply_by_weight(part, x, weight))
    if part.bias is None:
        return out
    return out + part.bias.to(out.dtype)


def _multiply_by_weight(part: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply by a weight; in a pipeline that splits backwards its gradient can wait."""
    if getattr(part, DEFERS_WEIGHT_GRADIENT_ATTRIBUTE, False):
        return linear_with_deferred_gradient(x, weight)
    return F.linear(x, weight)


def make_row_parallel_without_sum(part: nn.Module, name: str, size: int) -> None:
    """Each rank multiplies its features, and a region around adds up what ranks have made."""
    if getattr(part, "bias", None) is not None:
        raise LayoutError(
            f"{name} has a bias, which every rank would add", fix="leave unsummed out of its rule"
        )
    part.in_features = size  # type: ignore[assignment]


def sum_region_output_over_ranks(part: nn.Module, group: TensorParallelGroup) -> None:
    """A region's output is a sum over ranks.

    Routers inside see the same tokens on all of them, and their gradients are added up, too: what a
    router adds to its own is a rank's share.
    """
    for inner in part.modules():
        if hasattr(inner, "num_alike"):
            inner.num_alike = group.size  # type: ignore[assignment]
    part.register_forward_hook(lambda module, args, output: group.leave(output))


# Embeddings


def make_vocabulary_parallel_embedding(
    part: nn.Embedding, name: str, vocabulary: VocabularyShard
) -> None:
    """A rank looks up the tokens that it holds; the sum over ranks has them all."""
    if part.max_norm is not None or part.sparse or part.scale_grad_by_freq:
        raise LayoutError(
            f"{name} has max_norm, sparse or scale_grad_by_freq, which are not built for a part"
            " of it"
        )
    size = vocabulary.sizes[vocabulary.group.rank]
    if part.padding_idx is not None:
        local_padding = part.padding_idx - vocabulary.first_vocabulary_row
        part.padding_idx = None
        if 0 <= local_padding < size:
            part.padding_idx = local_padding
    part.num_embeddings = size
    part.forward = functools.partial(_vocabulary_parallel_embedding_forward, part, vocabulary)  # type: ignore[method-assign]


def _vocabulary_parallel_embedding_forward(
    part: nn.Embedding, vocabulary: VocabularyShard, ids: torch.Tensor
) -> torch.Tensor:
    total, group = sum(vocabulary.sizes), vocabulary.group
    if is_on_cpu(ids) and not torch.compiler.is_compiling() and ids.numel():
        lowest, highest = (int(edge) for edge in ids.aminmax())
        if lowest < 0 or highest >= total:
            token = highest
            if highest < total:
                token = lowest
            raise DataError(f"token {token} is none of the {total} of the embedding")
    local_ids = ids - vocabulary.first_vocabulary_row
    is_elsewhere = (local_ids < 0) | (local_ids >= part.num_embeddings)
    # Tokens of other ranks look up any row, and what they get is taken out below.
    embedded = F.embedding(local_ids.masked_fill(is_elsewhere, 0), part.weight, part.padding_idx)
    # A sequence that is cut does not tell its length, and what gathers it asks for it.
    group.num_tokens = ids.shape[1] if ids.ndim > 1 else len(ids)
    return group.leave(embedded.masked_fill(is_elsewhere[..., None], 0))


# Hooks


def enter_region_before_forward(
    group: TensorParallelGroup | RegionInput, argument: str, part: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Before a region: of its arguments the named one, or the first that is a tensor of
    activations, is entered."""
    if argument:
        if argument not in kwargs:
            raise LayoutError(
                f"{type(part).__name__} is not called with {argument}=",
                fix="leave the argument out",
            )
        return args, {**kwargs, argument: group.enter(kwargs[argument])}
    for index, value in enumerate(args):
        if _is_activation_tensor(value):
            return (*args[:index], group.enter(value), *args[index + 1 :]), kwargs
    for key, value in kwargs.items():
        if _is_activation_tensor(value):
            return args, {**kwargs, key: group.enter(value)}
    raise LayoutError(
        f"{type(part).__name__} is called without activations, and a rule names it a region"
    )


def enter_expert_region_before_forward(
    group: TensorParallelGroup, part: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Before experts, whose rows and whose weights of rows both have a gradient."""
    entered = tuple(_enter_if_activations(group, value) for value in args)
    return entered, {key: _enter_if_activations(group, value) for key, value in kwargs.items()}


def _enter_if_activations(group: TensorParallelGroup, value: Any) -> Any:
    if _is_activation_tensor(value):
        return group.enter(value)
    return value


def _is_activation_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2


def gather_output_features_after_forward(
    group: TensorParallelGroup,
    sizes: tuple[int, ...],
    part: nn.Module,
    args: Any,
    output: torch.Tensor,
) -> Any:
    return group.all_gather_features(output, sizes)


def keep_own_tokens_of_output(
    group: TensorParallelGroup, part: nn.Module, args: Any, output: torch.Tensor
) -> Any:
    group.num_tokens = output.shape[SEQUENCE_DIM]
    return group.select_tokens_of_rank(output)


def divide_count_attribute_by_tp(
    part: nn.Module, name: str, count: CountAttribute, tp: int
) -> None:
    """An integer that a module counts heads or features by becomes that of one rank.

    It may be one of a settings object that modules share: this module then has a copy of its own.
    """
    *path, attribute = count.attribute.split(".")
    owner: Any = part
    for step in path:
        inner = getattr(owner, step, None)
        if inner is not None and not isinstance(inner, nn.Module):
            inner = copy.copy(inner)
            setattr(owner, step, inner)
        owner = inner
    value = getattr(owner, attribute, None)
    where = f"{name}.{count.attribute}"
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"{where} is {value!r}, not a number of heads or features to divide")
    share = count.divide_by_tp(value, tp)
    if share is None:
        of = f" of {count.heads} heads" if count.heads else ""
        raise LayoutError(f"tp {tp} does not divide {where}, which is {value}{of}")
    setattr(owner, attribute, share)


class ModelOutputTagger:
    """After the model: an output that needs the head's rows of other ranks says which rows this
    rank has."""

    def __init__(
        self,
        group: TensorParallelGroup,
        vocabularies: Sequence[tuple[nn.Module, VocabularyShard]],
        cut: Sequence[nn.Module],
        columns: Sequence[tuple[nn.Module, ShardingRule]],
    ) -> None:
        self._group, self._vocabularies, self._cut = group, vocabularies, cut
        self._logits: torch.Tensor | None = None
        self._last_of_column: tuple[torch.Tensor, ShardingRule] | None = None
        for part, rule in columns:
            part.register_forward_hook(functools.partial(self._remember_last_column_output, rule))
        for part, _ in vocabularies:
            if not isinstance(part, nn.Embedding):
                part.register_forward_hook(self._tag_output)

    def _tag_output(self, part: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._logits = output

    def _remember_last_column_output(
        self, rule: ShardingRule, part: nn.Module, args: Any, output: torch.Tensor
    ) -> None:
        self._last_of_column = output, rule

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> Any:
        logits, self._logits = self._logits, None
        last, self._last_of_column = self._last_of_column, None
        if last is not None and any(leaf is last[0] for leaf in tree_leaves(outputs)):
            raise LayoutError(
                f"{type(module).__name__} returns a part of the features on each rank",
                where=f'sharding rule "{last[1].pattern}" = "{last[1].text}"',
                fix='give a head of tokens "vocab"; "column gather" puts other features together',
            )
        if logits is not None:
            return self._tag_logits_with_vocabulary(module, logits, outputs)
        head = getattr(outputs, "head_VD", None)
        if head is None:
            if self._group.cuts_sequence and not self._has_all_tokens(outputs):
                raise LayoutError(
                    f"{type(module).__name__} returns a part of the sequence, and nobody puts it"
                    " together",
                    fix=(
                        'give its head "vocab" or "column gather", or set'
                        " parallel.sequence_parallel=false"
                    ),
                )
            return outputs
        for part, vocabulary in self._vocabularies:
            if part.weight is head:
                return outputs._replace(vocabulary=vocabulary)
        if self._group.cuts_sequence:
            raise LayoutError(
                f"no rule cuts the head of {type(module).__name__}", fix='give it "vocab"'
            )
        if any(getattr(part, "weight", None) is head for part in self._cut):
            raise LayoutError(
                f"the head of {type(module).__name__} is not cut by tokens", fix='give it "vocab"'
            )
        return outputs

    def _has_all_tokens(self, outputs: Any) -> bool:
        lengths = set()
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > SEQUENCE_DIM:
                lengths.add(leaf.shape[SEQUENCE_DIM])
        return lengths == {self._group.num_tokens}

    def _tag_logits_with_vocabulary(
        self, module: nn.Module, logits: torch.Tensor, outputs: Any
    ) -> ShardedVocabularyLogits:
        if outputs is not logits:
            raise LayoutError(
                f"{type(module).__name__} does not return its head's logits as they are",
                fix=(
                    'have the head put together: its rule is then "column gather" instead of'
                    ' "vocab"'
                ),
            )
        vocabulary = next(v for part, v in self._vocabularies if not isinstance(part, nn.Embedding))
        return ShardedVocabularyLogits(logits, vocabulary)
