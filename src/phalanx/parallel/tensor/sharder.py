"""ModuleSharder: sharding rules applied to one module, for one rank of tensor parallelism."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from phalanx.core.errors import LayoutError
from phalanx.mesh.gathered_input import RegionInput
from phalanx.mesh.linear import (
    classify_parameter_holder,
    find_input_dim_of_weight,
    find_output_dim_of_weight,
    get_first_expert_parameter_name,
    is_linear_layer,
    is_transformers_conv1d,
)
from phalanx.mesh.logical import Box, TensorParallelCut, full_name
from phalanx.mesh.tensor_group import TensorParallelGroup, VocabularyShard
from phalanx.parallel.protocol import ParallelContext
from phalanx.parallel.tensor import modules as tp_modules
from phalanx.parallel.tensor.dropout import PartialTensorDropoutCheck, partial_dropout_error
from phalanx.parallel.tensor.gathered_input import keep_part_of_gathered_input
from phalanx.parallel.tensor.overlap import (
    REGION_INPUT_ATTRIBUTE,
    overlap_column_parallel_layers,
)
from phalanx.parallel.tensor.shape_errors import UngatheredColumnLayer
from phalanx.plan.rule_checks import require_cuttable_layer, require_fused_expert_parts
from phalanx.plan.rules import CUTTING_KINDS, DimSlice, ShardingRule, find_matching_rule


def shard_module_by_rules(
    module: nn.Module, group: TensorParallelGroup, rules: Sequence[ShardingRule]
) -> dict[str, TensorParallelCut]:
    """Cut a module in place, for one rank of `group`."""
    sharder = ModuleSharder(module, group, rules)
    sharder.shard()
    return sharder.cuts


@dataclass
class ModuleSharder:
    """Applies sharding rules to one module, in place.

    `cuts`: which blocks of each cut parameter this rank has, by full name.
    """

    module: nn.Module
    group: TensorParallelGroup
    rules: Sequence[ShardingRule]
    cuts: dict[str, TensorParallelCut] = field(default_factory=dict)
    # Modules of which another stage of a pipeline holds parameters.
    absent: frozenset[str] = frozenset()
    is_stage: bool = False
    _replaced: dict[nn.Parameter, tuple[nn.Parameter, TensorParallelCut]] = field(
        default_factory=dict
    )
    _vocabularies: list[tuple[nn.Module, VocabularyShard]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._modules = {full_name(name): part for name, part in self.module.named_modules()}
        self._rules: dict[str, ShardingRule] = {}
        for name in self._modules:
            rule = find_matching_rule(self.rules, name)
            if rule is not None and name in self.absent:
                self._split_sequence_after_absent_embedding(self._modules[name], rule)
            elif rule is not None:
                self._rules[name] = rule

    def _split_sequence_after_absent_embedding(self, part: nn.Module, rule: ShardingRule) -> None:
        """Cut the sequence behind an embedding whose parameters another stage holds: what this
        stage has beside it, tied to its head say, is cut there, and they are added."""
        is_embedding = rule.kind in ("vocab", "sequence") and isinstance(part, nn.Embedding)
        if self.group.cuts_sequence and is_embedding:
            part.register_forward_hook(
                functools.partial(tp_modules.keep_own_tokens_of_output, self.group)
            )

    def shard(self) -> None:
        """Cut what rules name, and check that what follows fits."""
        if not self.is_stage and not any(
            rule.kind in CUTTING_KINDS for rule in self._rules.values()
        ):
            raise LayoutError(f"no sharding rule cuts anything of {type(self.module).__name__}")
        for name, rule in self._rules.items():
            self._apply_shard_rule(name, self._modules[name], rule)
        # Last: only now all places of a tied tensor have met their rules.
        self._require_tied_parameters_cut_alike()
        self._require_module_that_splits_sequence()
        self._tag_model_outputs()

    def _apply_shard_rule(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        for count in rule.divide:
            tp_modules.divide_count_attribute_by_tp(part, name, count, self.group.size)
        if rule.kind in CUTTING_KINDS:
            kind = classify_parameter_holder(
                part, is_attention=self._is_inside_torch_attention(name)
            )
            require_cuttable_layer(rule, name, kind)
        apply_rule = {
            "column": self._shard_column_parallel,
            "row": self._shard_row_parallel,
            "experts": self._shard_experts,
            "vocab": self._shard_vocabulary,
            "region": self._hook_region_entry_and_exit,
            "sequence": self._hook_sequence_split,
        }.get(rule.kind)
        # "partial" and "replicate" cut nothing: they say later how gradients are summed.
        if apply_rule is not None:
            apply_rule(name, part, rule)

    def _require_module_that_splits_sequence(self) -> None:
        """Raises LayoutError where sequences are to be cut and nothing begins to: a stage of a
        pipeline gets its part from the one before."""
        if not self.group.cuts_sequence or self.is_stage:
            return
        is_cut = any(isinstance(part, nn.Embedding) for part, _ in self._vocabularies)
        if is_cut or any(rule.kind == "sequence" for rule in self._rules.values()):
            return
        raise LayoutError(
            f"no rule cuts an embedding of {type(self.module).__name__}, where its sequence"
            " would be cut",
            fix=(
                'give it "vocab" (or "sequence": it stays whole), or set'
                " parallel.sequence_parallel=false"
            ),
        )

    def _tag_model_outputs(self) -> None:
        """After each forward: say which rows of the vocabulary a rank has, or refuse a part of
        the features or of the sequence."""
        cut_modules = []
        for name in self.cuts:
            owner, _, key = name.rpartition(".")
            if key == "weight":
                cut_modules.append(self._modules[owner])
        last_columns = []
        for column in self.list_ungathered_column_layers():
            if not column.has_row and self._find_region_of_module(column.name) is None:
                last_columns.append((self._modules[column.name], column.rule))
        self.module.register_forward_hook(
            tp_modules.ModelOutputTagger(self.group, self._vocabularies, cut_modules, last_columns)
        )

    def require_dropout_of_full_tensors(self, context: ParallelContext) -> None:
        """Raises LayoutError for dropout of parts, now or in the first forward: masks by place
        are of the whole."""
        plan, cuts_sequence = context.plan, self.group.cuts_sequence
        for name, part in self._modules.items():
            if not isinstance(part, nn.modules.dropout._DropoutNd) or not part.p:
                continue
            is_unseen = plan.compile and self._find_region_of_module(f"{name}.p") is not None
            if plan.parallel.dropout != "global" or cuts_sequence or is_unseen:
                raise partial_dropout_error(f"{name} ({part.p:g})")
        if plan.parallel.dropout == "global" and not plan.compile:
            masks = PartialTensorDropoutCheck(
                self.module,
                self._modules,
                self._list_sharded_modules("column"),
                self._list_sharded_modules("row"),
                cuts_sequence=cuts_sequence,
            )
            context.dropout_rng.mask_checks.append(masks.refuse_active_dropout)

    def _list_sharded_modules(self, kind: str) -> list[str]:
        """Names of the modules under rules of `kind` whose features stay apart."""
        names = []
        for name, rule in self._rules.items():
            if rule.kind == kind and not rule.gather:
                names.append(name)
        return names

    def list_ungathered_column_layers(self) -> list[UngatheredColumnLayer]:
        """Columns whose features are not put together again by themselves."""
        rows = {name.rpartition(".")[0] for name, rule in self._rules.items() if rule.kind == "row"}
        columns = []
        for name, rule in self._rules.items():
            if rule.kind == "column" and not rule.gather:
                part, has_row = self._modules[name], name.rpartition(".")[0] in rows
                full_size = self.cuts[f"{name}.weight"].global_shape[
                    find_output_dim_of_weight(part)
                ]
                columns.append(
                    UngatheredColumnLayer(
                        name, rule, full_size, tp_modules.count_output_features(part), has_row
                    )
                )
        return columns

    def list_parameters_with_partial_gradients(self) -> list[tuple[str, nn.Parameter]]:
        """Whole parameters of which each rank sees a part of the tokens or of the features: by
        their full names."""
        parameters = []
        for name, parameter in self.module.named_parameters():
            full = full_name(name)
            if (
                full not in self.cuts
                and parameter.requires_grad
                and self._has_partial_gradient(full.rpartition(".")[0], full)
            ):
                parameters.append((full, parameter))
        return parameters

    def _has_partial_gradient(self, owner: str, name: str) -> bool:
        rule = self._rules.get(owner)
        if rule is not None and rule.kind in ("partial", "replicate"):
            return rule.kind == "partial" or self.group.cuts_sequence
        if self.group.cuts_sequence:
            return True
        is_row_bias = rule is not None and rule.kind == "row"
        return self._find_region_of_module(name) is not None and not is_row_bias

    def _is_inside_torch_attention(self, name: str) -> bool:
        """True within torch's own attention, which never calls the layers that it holds."""
        parent = self._modules[name.rpartition(".")[0]]
        return any(
            isinstance(part, nn.MultiheadAttention) for part in (self._modules[name], parent)
        )

    def _find_region_of_module(self, name: str) -> str | None:
        parents = name.split(".")[:-1]
        for count in range(len(parents), 0, -1):
            prefix = ".".join(parents[:count])
            if prefix in self._rules and self._rules[prefix].kind == "region":
                return prefix
        return None

    # Each kind of rule

    def _shard_column_parallel(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        spans = self._find_dim_slices_of_rank(rule, tp_modules.count_output_features(part), name)
        self._replace_by_parameter_shard(
            name, part, "weight", find_output_dim_of_weight(part), spans
        )
        self._replace_by_parameter_shard(name, part, "bias", 0, spans)
        tp_modules.set_output_features(part, _sum_slice_lengths(spans))
        # A region enters once for all columns in it.
        if self._find_region_of_module(name) is None:
            self._hook_entry(part, "", [part])
        if rule.gather:
            if len(spans) > 1 or spans[0].copies > 1:
                raise LayoutError(
                    f"{name} is fused, and its parts cannot be gathered", where=f'"{rule.pattern}"'
                )
            part.register_forward_hook(
                functools.partial(
                    tp_modules.gather_output_features_after_forward,
                    self.group,
                    self._list_output_sizes_by_rank(rule, name, part),
                )
            )

    def _list_output_sizes_by_rank(
        self, rule: ShardingRule, name: str, part: nn.Module
    ) -> tuple[int, ...]:
        total = self.cuts[f"{name}.weight"].global_shape[find_output_dim_of_weight(part)]
        return tuple(
            _sum_slice_lengths(rule.list_rank_slices(total, self.group.size, r, name=name))
            for r in range(self.group.size)
        )

    def _shard_row_parallel(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        spans = self._find_dim_slices_of_rank(rule, tp_modules.count_input_features(part), name)
        self._replace_by_parameter_shard(
            name, part, "weight", find_input_dim_of_weight(part), spans
        )
        if rule.unsummed:
            tp_modules.make_row_parallel_without_sum(part, name, _sum_slice_lengths(spans))
        else:
            tp_modules.make_row_parallel(part, name, self.group, _sum_slice_lengths(spans))

    def _shard_experts(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        if self.group.cuts_sequence:
            raise LayoutError(
                f"{name} gets rows of tokens, of which nobody knows the sequence",
                fix="parallel.sequence_parallel=false",
            )
        # Gate and up are fused in the first matrix (parts=2); `down` takes one product of both.
        first, hidden = get_first_expert_parameter_name(part), part.down_proj.shape[2]  # type: ignore[union-attr,index]
        require_fused_expert_parts(rule, name, classify_parameter_holder(part, is_attention=False))
        self._replace_by_parameter_shard(
            name,
            part,
            first,
            1,
            self._find_dim_slices_of_rank(rule, getattr(part, first).shape[1], name),
        )
        self._replace_by_parameter_shard(
            name,
            part,
            "down_proj",
            2,
            self._find_dim_slices_of_rank(replace(rule, parts=rule.parts[:1]), hidden, name),
        )
        part.register_forward_pre_hook(
            functools.partial(tp_modules.enter_expert_region_before_forward, self.group),
            with_kwargs=True,
        )
        # Each rank has a part of every expert's features: their sum is the experts' output.
        part.register_forward_hook(lambda module, args, output: self.group.leave(output))

    def _shard_vocabulary(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        is_embedding = isinstance(part, nn.Embedding)
        total = part.num_embeddings if is_embedding else tp_modules.count_output_features(part)
        spans = self._find_dim_slices_of_rank(rule, total, name)
        sizes = [
            _sum_slice_lengths(rule.list_rank_slices(total, self.group.size, r, name=name))
            for r in range(self.group.size)
        ]
        vocabulary = VocabularyShard(self.group, tuple(sizes))
        self._replace_by_parameter_shard(
            name, part, "weight", 0 if is_embedding else find_output_dim_of_weight(part), spans
        )
        self._replace_by_parameter_shard(name, part, "bias", 0, spans)
        if is_embedding:
            tp_modules.make_vocabulary_parallel_embedding(part, name, vocabulary)
        else:
            tp_modules.set_output_features(part, spans[0].size)
            part.register_forward_pre_hook(
                functools.partial(tp_modules.enter_region_before_forward, self.group, ""),
                with_kwargs=True,
            )
        self._vocabularies.append((part, vocabulary))

    def _hook_region_entry_and_exit(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        columns = []
        for inner in self._list_sharded_modules("column"):
            if self._find_region_of_module(inner) == name:
                columns.append(self._modules[inner])
        if rule.summed:
            tp_modules.sum_region_output_over_ranks(part, self.group)
        can_share = getattr(part, "input_goes_to_columns_alone", False) and not any(
            map(is_transformers_conv1d, columns)
        )
        if self.group.chunks > 1 and can_share:
            overlap_column_parallel_layers(part, columns, self.group)
            return
        if rule.summed or self._has_whole_linear_layer(name):
            # What reads the input besides columns keeps all of it.
            columns = []
        self._hook_entry(part, rule.argument, columns)

    def _has_whole_linear_layer(self, region: str) -> bool:
        """True if a linear layer inside is not cut: a router, or a down-projection to latents."""
        for name, part in self._modules.items():
            rule = self._rules.get(name)
            is_cut = rule is not None and rule.kind in CUTTING_KINDS
            if name.startswith(f"{region}.") and is_linear_layer(part) and not is_cut:
                return True
        return False

    def _hook_entry(self, part: nn.Module, argument: str, columns: Sequence[nn.Module]) -> None:
        """Enter before the forward of `part`. `columns`: layers that may get what is entered as it
        is, and need not keep all of it."""
        entry: TensorParallelGroup | RegionInput = self.group
        if self.group.gathers_input_again and columns:
            entry = RegionInput(self.group)
            setattr(part, REGION_INPUT_ATTRIBUTE, entry)
            for column in columns:
                keep_part_of_gathered_input(column, entry)
            part.register_forward_hook(functools.partial(_forget_region_input, entry))
        part.register_forward_pre_hook(
            functools.partial(tp_modules.enter_region_before_forward, entry, argument),
            with_kwargs=True,
        )

    def _hook_sequence_split(self, name: str, part: nn.Module, rule: ShardingRule) -> None:
        part.register_forward_hook(
            functools.partial(tp_modules.keep_own_tokens_of_output, self.group)
        )

    def _find_dim_slices_of_rank(self, rule: ShardingRule, size: int, name: str) -> list[DimSlice]:
        return rule.list_rank_slices(size, self.group.size, self.group.rank, name=name)

    # Parameters

    def _replace_by_parameter_shard(
        self, owner: str, part: nn.Module, key: str, dim: int, spans: Sequence[DimSlice]
    ) -> None:
        parameter = getattr(part, key, None)
        if parameter is None:
            return
        name = f"{owner}.{key}"
        cut = _build_boxes_of_slices(tuple(parameter.shape), dim, spans)
        replacement = next(
            (entry for old, entry in self._replaced.items() if old is parameter), None
        )
        if replacement is None:
            pieces = [parameter.detach().narrow(dim, span.start, span.size) for span in spans]
            local = nn.Parameter(torch.cat(pieces, dim=dim), requires_grad=parameter.requires_grad)
            # A user's code may have noted attributes on the parameter.
            local.__dict__.update(parameter.__dict__)
            replacement = self._replaced[parameter] = (local, cut)
        if replacement[1] != cut:
            raise LayoutError(
                f"{name} is tied to another parameter, which is cut otherwise", fix="cut both alike"
            )
        setattr(part, key, replacement[0])
        self.cuts[name] = cut

    def _require_tied_parameters_cut_alike(self) -> None:
        """A tied tensor must be cut wherever it stands: torch's own tools make two of it without
        a word."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if any(old is parameter for old in self._replaced):
                raise LayoutError(
                    f"{full_name(name)} is tied to a parameter that a rule cuts, and no rule"
                    " cuts it",
                    fix="give its module the same rule",
                )


def _forget_region_input(entry: RegionInput, *_: object) -> None:
    entry.forget()


def _sum_slice_lengths(spans: Sequence[DimSlice]) -> int:
    return sum(span.size for span in spans)


def _build_boxes_of_slices(
    shape: tuple[int, ...], dim: int, spans: Sequence[DimSlice]
) -> TensorParallelCut:
    return TensorParallelCut(shape, tuple(_list_boxes_with_local_offsets(shape, dim, spans)))


def _list_boxes_with_local_offsets(
    shape: tuple[int, ...], dim: int, spans: Sequence[DimSlice]
) -> Iterator[Box]:
    local_start = 0
    for span in spans:
        global_start, local, size = [0] * len(shape), [0] * len(shape), list(shape)
        global_start[dim], local[dim], size[dim] = span.start, local_start, span.size
        yield Box(tuple(global_start), tuple(local), tuple(size), span.copy, span.copies)
        local_start += span.size
