"""`ModelWork` of a traced module: its products and attention, for a time model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phalanx.job.module_names import matches_module
from phalanx.job.shapes.traced import TracedPart, TracedProduct, TracePoint
from phalanx.job.work import AttentionWork, BlockWork, Cut, Matmul, ModelWork

if TYPE_CHECKING:
    from phalanx.job.shapes.measured import MeasuredModule


def build_module_work(module: MeasuredModule, seq_len: int) -> ModelWork:
    """The work of one sample of `seq_len` tokens. Cuts are those of the rules that the module
    brings."""
    trace = module.traces[0]
    point, tokens = trace.points[0], module.count_sample_tokens(seq_len)
    params = module.count_part_params()
    # An image's length in a trace is 1: its tokens are its patches.
    traced_tokens = module.count_sample_tokens(point.length)
    blocks = []
    for layer, (name, num_params) in enumerate(module.blocks):
        part = point.block(layer)
        cuts = _find_layer_cuts(module, f"{name}.", part)
        work = build_block_work(point, layer, tokens, traced_tokens, num_params, cuts)
        blocks.append(_add_experts(work, part, _list_expert_params(module, f"{name}.", part)))
    dim, head = 0, Matmul("head", 0, 0)
    if point.head is not None:
        rows, dim = point.head
        head = Matmul("head", dim, rows, "column")
    elif point.after.products:
        last = point.after.products[-1]
        dim, head = last.inputs, Matmul("head", last.inputs, last.outputs)
    num_head_tokens = tokens
    if point.after.products and point.head is None:
        num_head_tokens = max(1, point.after.products[-1].rows // point.batch)
    embedding, num_embedding_tokens = None, 0
    if point.before.products:
        first = point.before.products[0]
        embedding = Matmul("embedding", first.inputs, first.outputs)
        num_embedding_tokens = first.rows // point.batch
    per_block = max((len(block.matmuls) for block in blocks), default=1)
    return ModelWork(
        num_tokens=tokens,
        dim=dim,
        blocks=tuple(blocks),
        head=head,
        num_head_tokens=num_head_tokens,
        embedding=embedding,
        num_embedding_tokens=num_embedding_tokens,
        num_embedding_params=params.before,
        num_head_params=params.after - params.both,
        num_tied_params=params.both,
        before_blocks=_build_outer_blocks(
            module, point.before, point.before.products[1:], point.batch, tokens, per_block
        ),
        after_blocks=_build_outer_blocks(
            module,
            point.after,
            point.after.products if point.head is not None else point.after.products[:-1],
            point.batch,
            tokens,
            per_block,
        ),
    )


def _build_outer_blocks(
    module: MeasuredModule,
    part: TracedPart,
    products: Sequence[TracedProduct],
    num_samples: int,
    num_tokens: int,
    products_per_block: int,
) -> tuple[BlockWork, ...]:
    """What is computed outside of the module's blocks for one sample, beside its embedding and its
    head: `products` of `part`, in blocks of as many products as the module's own have, and its
    attention. A trace of `num_samples`, each as long as those that are timed."""
    rows = num_samples * num_tokens
    cuts = _find_layer_cuts(module, "", part)
    matmuls = []
    for p in products:
        # Of other rows than the blocks have: as many outputs as make up the FLOPs.
        outputs = max(1, round(p.outputs * p.rows / rows))
        matmuls.append(Matmul(p.holder, p.inputs, outputs, cuts.get(p.holder, "none")))
    attention = None
    if part.attention_flops:
        attention = _build_attention_of_calls(part, num_samples, num_tokens)
    if not matmuls and attention is None:
        return ()
    blocks = [
        BlockWork(tuple(matmuls[start : start + products_per_block]), None, 0, 0, 0, 0, False, 0)
        for start in range(0, max(1, len(matmuls)), products_per_block)
    ]
    added = part.added_elements // rows
    blocks[0] = replace(
        blocks[0],
        attention=attention,
        norm_features=added,
        residual_features=added,
        activation_features=part.activation_elements // rows,
    )
    return tuple(blocks)


def _build_attention_of_calls(part: TracedPart, num_samples: int, num_tokens: int) -> AttentionWork:
    """All attention of `part` as one that has the heads of its first call, and as many pairs as
    make up the FLOPs of all calls."""
    flops = part.attention_flops / num_samples
    heads, kv_heads, head_dim, value_dim = 1, 1, 1, 1
    if part.attention:
        heads, kv_heads, head_dim, value_dim = part.attention[0][:4]
    num_pairs = max(1, round(flops / (2 * heads * (head_dim + value_dim))))
    return AttentionWork(
        heads,
        kv_heads,
        head_dim,
        value_dim,
        num_tokens,
        num_pairs,
        is_causal=False,
        is_computed_as_counted=True,
    )


def _find_layer_cuts(module: MeasuredModule, prefix: str, part: TracedPart) -> dict[str, Cut]:
    """The cut of each layer of a block by the module's own rules."""
    cuts: dict[str, Cut] = {}
    for product in part.products:
        for pattern, rule in module.shard_rules:
            kind = rule.split()[0]
            if kind in ("column", "row") and matches_module(f"{prefix}{product.holder}", [pattern]):
                cuts[product.holder] = "column" if kind == "column" else "row"
                break
    return cuts


def _list_expert_params(
    module: MeasuredModule, prefix: str, part: TracedPart
) -> dict[str, tuple[int, int]]:
    """(parameters, number of experts) of each layer of a block that holds several matrices in one:
    more elements than its products, one of each, multiply a row by."""
    elements: dict[str, int] = {}
    for product in part.products:
        elements[product.holder] = elements.get(product.holder, 0) + (
            product.inputs * product.outputs
        )
    num_params = {holder.name: holder.num_params for holder in module.holders}
    experts = {}
    for name, size in elements.items():
        num_elements = num_params.get(f"{prefix}{name}", 0)
        if size and num_elements >= 2 * size:
            experts[name] = (num_elements, num_elements // size)
    return experts


def _add_experts(
    work: BlockWork, part: TracedPart, experts: Mapping[str, tuple[int, int]]
) -> BlockWork:
    """`work` with the matrices of which a row meets one, where a row of tokens is several."""
    matmuls, visited = [], 0
    for matmul in work.matmuls:
        if matmul.name in experts and matmul.visited > 1:
            matmul = replace(matmul, num_experts=experts[matmul.name][1])
            visited = max(visited, matmul.visited)
        matmuls.append(matmul)
    if not visited:
        return work
    routed = next(product for product in part.products if product.holder in experts)
    return replace(
        work,
        matmuls=tuple(matmuls),
        num_routed_params=sum(num_params for num_params, _ in experts.values()),
        routed_dim=routed.inputs,
        num_experts=max(number for _, number in experts.values()),
        experts_per_token=visited,
    )


def build_block_work(
    point: TracePoint,
    layer: int,
    seq_len: int,
    traced_tokens: int,
    num_params: int,
    cuts: Mapping[str, Cut],
) -> BlockWork:
    """The work of one block for one sample of `seq_len` tokens, from a trace of samples of
    `traced_tokens` each; `cuts`: how tensor parallelism would cut its layers."""
    part, tokens = point.block(layer), point.batch * traced_tokens
    matmuls = []
    for p in part.products:
        # A product that sees other rows than there are tokens counts as often as it sees them.
        visited = max(1, round(p.rows / tokens))
        cut: Cut = cuts.get(p.holder, "none")
        matmuls.append(Matmul(p.holder, p.inputs, p.outputs, cut, visited, visited))
    attention = None
    for heads, kv_heads, head_dim, value_dim, _, _, _, is_causal in part.attention[:1]:
        pairs = seq_len * (seq_len + 1) // 2 if is_causal else seq_len**2
        attention = AttentionWork(
            heads, kv_heads, head_dim, value_dim, seq_len, pairs, bool(is_causal)
        )
    if attention is None and part.other_flops:
        pairs = point.batch * traced_tokens**2
        attention = _build_unfused_attention_work(part, pairs, seq_len)
    elif len(part.attention) > 1:
        # To itself and to an encoder, say.
        attention = _build_attention_of_calls(part, point.batch, seq_len)
    residual = part.added_elements // tokens
    width = part.activation_elements // tokens
    return BlockWork(
        matmuls=tuple(matmuls),
        attention=attention,
        norm_features=residual,
        residual_features=residual,
        head_features=0,
        activation_features=width,
        is_gated=_has_gated_feed_forward(part),
        num_params=num_params,
    )


def _build_unfused_attention_work(part: TracedPart, pairs: int, seq_len: int) -> AttentionWork:
    """Attention that is written out, as one head with as many FLOPs over all `pairs` of tokens that
    were traced."""
    width = max(1, round(part.other_flops / (4 * pairs)))
    return AttentionWork(1, 1, width, width, seq_len, seq_len**2, is_causal=False)


def _has_gated_feed_forward(part: TracedPart) -> bool:
    """True if a product reads what two layers made together: gate and up."""
    return any(len(p.is_input_cut_with) == 2 for p in part.products)
