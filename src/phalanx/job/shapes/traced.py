"""What a trace says of a module that planning cannot read: bytes, FLOPs and products of its parts.

A trace is one microbatch on fake tensors (phalanx.nn.module_trace). Traces of one and two samples
tell what belongs to a sample from what all samples share; traces at two lengths tell what grows
with tokens from what grows with their square. At the job's own length nothing is estimated.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.job.costs import Flops


@dataclass(frozen=True)
class BytesBySourceLayers:
    """Bytes of tensors that were computed from the outputs of the layers `sources` (names within
    the block) since the block began."""

    sources: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class TracedProduct:
    """A product of tokens with a layer's weight. `input_id` is the same for products that read one
    tensor."""

    holder: str
    inputs: int
    outputs: int
    rows: int
    input_id: int
    input_bytes: int
    output_bytes: int
    is_input_cut_with: tuple[str, ...]
    """Layers that the input was computed from."""


@dataclass(frozen=True)
class TracedPart:
    """One part of a module in one microbatch: a block, or what is before or after the blocks."""

    saved: tuple[BytesBySourceLayers, ...]
    entering: int
    results: tuple[BytesBySourceLayers, ...]
    """What products and attention put out."""
    results_saved: tuple[BytesBySourceLayers, ...]
    """The part of `results` that autograd saves, too."""
    products: tuple[TracedProduct, ...]
    attention: tuple[tuple[int, ...], ...]
    """Heads, key heads, features of a key and of a value, queries, keys, samples, is causal."""
    other_flops: int
    activation_elements: int
    added_elements: int
    passing: int
    """Bytes alive at the worst moment of its backward beside what is saved up to it."""

    @property
    def matmul_flops(self) -> int:
        return sum(2 * p.rows * p.inputs * p.outputs for p in self.products)

    @property
    def attention_flops(self) -> int:
        """FLOPs of attention; of a causal kernel, of the pairs that causality keeps."""
        flops = self.other_flops
        for heads, _, head_dim, value_dim, queries, keys, batch, is_causal in self.attention:
            pairs = queries * keys
            if is_causal:
                pairs = queries * (queries + 1) // 2
            flops += 2 * batch * heads * (head_dim + value_dim) * pairs
        return flops


@dataclass(frozen=True)
class TracePoint:
    """The trace of one microbatch of `batch` samples of `length` tokens."""

    batch: int
    length: int
    before: TracedPart
    shared: int
    """Bytes of tables that several blocks save: masks, cosines and sines."""
    after: TracedPart
    loss: TracedPart
    kinds: tuple[TracedPart, ...]
    blocks: tuple[int, ...]
    """Which of `kinds` each block is."""
    head: tuple[int, int] | None = None
    """Rows and features of a head that the objective multiplies by, a chunk at a time."""

    def block(self, layer: int) -> TracedPart:
        return self.kinds[self.blocks[layer]]


@dataclass(frozen=True)
class ModuleTrace:
    """The traces of a module in one precision, all of one length but the last."""

    precision: str
    points: tuple[TracePoint, ...]

    def estimate(
        self,
        count: Callable[[TracePoint], int],
        num_samples: int,
        length: int,
        num_keys: int | None = None,
    ) -> int:
        """The value of `count` at a point, for `num_samples` samples of `length` tokens.

        Of a number that grows with tokens and with pairs of tokens. `num_keys`: tokens that each
        is paired with, where these are more.
        """
        one, two = self.points[0], self.points[1]
        per_sample = count(two) - count(one)
        constant = count(one) - per_sample
        keys = num_keys or length
        if len(self.points) < 3:
            return max(0, constant + num_samples * per_sample)
        short = self.points[2]
        # What samples share are masks, which grow with pairs.
        shrunk = (short.length / one.length) ** 2
        short_sample = count(short) - constant * shrunk
        # per_sample = linear L + square L^2, at both lengths.
        square = (per_sample / one.length - short_sample / short.length) / (
            one.length - short.length
        )
        linear = per_sample / one.length - square * one.length
        grown = constant * (length * keys) / one.length**2
        return max(0, round(grown + num_samples * length * (linear + square * keys)))


def find_trace_of_precision(
    traces: Sequence[ModuleTrace], compute_bytes: int
) -> ModuleTrace | None:
    """The trace for elements of `compute_bytes` bytes; None if there is none."""
    for trace in traces:
        if (trace.precision == "fp32") == (compute_bytes == 4):
            return trace
    return None


def parse_traces(bodies: Sequence[Mapping[str, Any]]) -> tuple[ModuleTrace, ...]:
    """Traces from their JSON: of the probe, and of a stored shape."""
    traces = []
    for body in bodies:
        points = tuple(_parse_trace_point(point) for point in body["points"])
        traces.append(ModuleTrace(str(body["precision"]), points))
    return tuple(traces)


def _parse_trace_point(body: Mapping[str, Any]) -> TracePoint:
    head = body.get("head")
    return TracePoint(
        batch=int(body["batch"]),
        length=int(body["length"]),
        before=_parse_traced_part(body["before"]),
        shared=int(body["shared"]),
        after=_parse_traced_part(body["after"]),
        loss=_parse_traced_part(body["loss"]),
        kinds=tuple(map(_parse_traced_part, body["kinds"])),
        blocks=tuple(map(int, body["blocks"])),
        head=(int(head[0]), int(head[1])) if head else None,
    )


def _parse_traced_part(body: Mapping[str, Any]) -> TracedPart:
    products = []
    for product in body["products"]:
        holder, *numbers, sources = product
        sizes: list[int] = [int(number) for number in numbers]
        inputs, outputs, rows, input_id, input_bytes, output_bytes = sizes
        products.append(
            TracedProduct(
                str(holder),
                inputs,
                outputs,
                rows,
                input_id,
                input_bytes,
                output_bytes,
                tuple(map(str, sources)),
            )
        )
    return TracedPart(
        saved=_parse_byte_groups(body["saved"]),
        entering=int(body["entering"]),
        results=_parse_byte_groups(body["results"]),
        results_saved=_parse_byte_groups(body["results_saved"]),
        products=tuple(products),
        attention=tuple(tuple(map(int, call)) for call in body["attention"]),
        other_flops=int(body["other_flops"]),
        activation_elements=int(body["activation_elements"]),
        added_elements=int(body["added_elements"]),
        passing=int(body["passing"]),
    )


def _parse_byte_groups(bodies: Sequence[Any]) -> tuple[BytesBySourceLayers, ...]:
    return tuple(BytesBySourceLayers(tuple(map(str, names)), int(size)) for names, size in bodies)


def format_traces_json(traces: Sequence[ModuleTrace]) -> list[dict[str, Any]]:
    """The JSON that `parse_traces` reads."""
    return [
        {"precision": trace.precision, "points": [_point_to_json(p) for p in trace.points]}
        for trace in traces
    ]


def _point_to_json(point: TracePoint) -> dict[str, Any]:
    return {
        "batch": point.batch,
        "length": point.length,
        "before": _part_to_json(point.before),
        "shared": point.shared,
        "after": _part_to_json(point.after),
        "loss": _part_to_json(point.loss),
        "kinds": [_part_to_json(kind) for kind in point.kinds],
        "blocks": list(point.blocks),
        "head": list(point.head) if point.head else None,
    }


def _part_to_json(part: TracedPart) -> dict[str, Any]:
    products = []
    for p in part.products:
        numbers = (p.holder, p.inputs, p.outputs, p.rows, p.input_id, p.input_bytes)
        products.append([*numbers, p.output_bytes, list(p.is_input_cut_with)])
    return {
        "saved": _groups_to_json(part.saved),
        "entering": part.entering,
        "results": _groups_to_json(part.results),
        "results_saved": _groups_to_json(part.results_saved),
        "products": products,
        "attention": [list(call) for call in part.attention],
        "other_flops": part.other_flops,
        "activation_elements": part.activation_elements,
        "added_elements": part.added_elements,
        "passing": part.passing,
    }


def _groups_to_json(groups: Sequence[BytesBySourceLayers]) -> list[list[Any]]:
    return [[list(group.sources), group.num_bytes] for group in groups]


def count_part_flops(
    trace: ModuleTrace, part: Callable[[TracePoint], TracedPart], seq_len: int
) -> Flops:
    """FLOPs of the forward of one part for one sample of `seq_len` tokens."""
    return Flops(
        trace.estimate(lambda point: part(point).matmul_flops, 1, seq_len),
        trace.estimate(lambda point: part(point).attention_flops, 1, seq_len),
    )
