"""The job that layouts are judged with: the user's own, or a model in its proportions, with a batch
that any layout can divide. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.core.errors import LayoutError
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.model import build_model_shape
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.plan.leaf_tree import LAYOUT_FREE
from phalanx.plan.precision import detect_precision, replace_precision
from phalanx.verify import pipelines
from phalanx.verify.number_types import (
    COMPUTE_OF_NARROW_DTYPE,
    LAYOUT_LOSS_SCALE,
    activation_dtype_of_row,
)
from phalanx.verify.row import MAX_SEQ_LEN

NUM_MICROBATCHES = 3
ROWS_PER_RANK = 2  # of each microbatch
NUM_SHRUNK_EXPERTS = 8
# A prime: some rank has less of the embedding than the others.
SHRUNK_VOCAB_SIZE = 251


def make_verified_job(job: Job, num_ranks: int, *, max_seq_len: int = MAX_SEQ_LEN) -> Job:
    """The job as it is verified: in full precision, with a batch that any layout of the ranks
    can divide, and sequences of at most `max_seq_len` tokens, but for own modules."""
    body = job.to_json()
    rows_per_rank = NUM_MICROBATCHES * ROWS_PER_RANK
    is_layout_free = job.train.deterministic == LAYOUT_FREE
    body["train"] |= {
        "global_batch_size": rows_per_rank
        * num_ranks
        * pipelines.find_batch_multiple(job.parallel, rows_per_rank),
        # The leaves of its tree are microbatches of one size in every layout.
        "micro_batch_size": ROWS_PER_RANK if is_layout_free else None,
    }
    body["precision"]["compute"] = "fp32"
    if job.optim.reference_batch_size is not None:
        # The rate is scaled by the same factor, as near as a whole batch comes to it.
        body["optim"]["reference_batch_size"] = max(
            1,
            round(
                body["train"]["global_batch_size"]
                * job.optim.reference_batch_size
                / job.train.global_batch_size
            ),
        )
    body["parallel"]["ranks"] = num_ranks
    if not job.model.is_foreign or is_hugging_face(job.model.kind):
        # Zigzag cuts a sequence into 2 x cp parts, and cp is any divisor of the ranks.
        length, chunks = min(job.data.seq_len, max_seq_len), 2 * num_ranks
        body["data"]["seq_len"] = length - length % chunks if length >= chunks else length
    window = _find_window(job)
    if window >= body["data"]["seq_len"]:
        # Else no token is outside of it.
        body["model"]["sliding_window"] = max(1, body["data"]["seq_len"] // 4)
    return build_job_from_dict(body)


def _find_window(job: Job) -> int:
    """The sliding window of a built-in model; 0 without one, and where another model has its
    own."""
    if job.model.is_foreign:
        return 0
    shape = build_model_shape(job, SHRUNK_VOCAB_SIZE)
    return shape.sliding_window if isinstance(shape, DecoderShape) else 0


def make_narrow_dtype_job(job: Job, dtype: str) -> Job:
    """A job that is verified, in a narrow type: weights float32, forward and backward in `dtype`;
    fp16 with a fixed loss scale, so that no step is skipped. For fp8 that of its activations:
    `convert_case_to_fp8` does the rest."""
    narrow = replace_precision(job, COMPUTE_OF_NARROW_DTYPE[activation_dtype_of_row(dtype)])
    fixed = narrow.precision.model_copy(update={"loss_scale": LAYOUT_LOSS_SCALE})
    return narrow.model_copy(update={"precision": fixed})


def describe_job_changes(requested_job: Job, verified: Job) -> str:
    """Keys of a job that are changed to be judged, with both values; "" if there are none."""
    keys = (
        (
            "train.global_batch_size",
            requested_job.train.global_batch_size,
            verified.train.global_batch_size,
        ),
        ("data.seq_len", requested_job.data.seq_len, verified.data.seq_len),
        (
            "optim.reference_batch_size",
            requested_job.optim.reference_batch_size,
            verified.optim.reference_batch_size,
        ),
        ("model.sliding_window", _find_window(requested_job), _find_window(verified)),
    )
    changes = [f"{key} {before} -> {after}" for key, before, after in keys if before != after]
    if requested_job.train.micro_batch_size is not None:
        changes.append(
            f"train.micro_batch_size {requested_job.train.micro_batch_size} -> as layouts need"
        )
    changes.append("optim.lr: the first update moves the weights by 1 %")
    changes.append("weights that are constant at first: random")
    return ", ".join(changes)


def list_settings_not_judged(job: Job, types: Sequence[str]) -> list[str]:
    """The settings of a job that are left out where layouts are judged in `types`, in words."""
    compute = detect_precision(job)
    judged = [COMPUTE_OF_NARROW_DTYPE.get(dtype, dtype) for dtype in types]
    if compute == "fp32" or compute in judged:
        return []
    names = ", ".join(judged)
    return [f"precision.compute={compute}: layouts are judged in {names}"]


def shrink_job(job: Job, *, num_blocks: int = 2) -> tuple[Job, str]:
    """A built-in model of few blocks and small widths, in the proportions of the one asked for;
    and what changed."""
    if job.model.is_foreign:
        raise LayoutError(
            "only built-in models can be shrunk", fix="give your factory smaller model.args"
        )
    shape = build_model_shape(job, SHRUNK_VOCAB_SIZE)
    groups = max(1, shape.num_heads // max(1, shape.num_kv_heads))
    # About four heads, of which as many share a key-value head as in the model asked for.
    heads = groups * max(1, 4 // groups)
    small: dict[str, Any] = {
        "num_layers": min(shape.num_layers, max(2, num_blocks)),
        "num_heads": heads,
        "num_kv_heads": heads // groups,
        "head_dim": 8,
        # The heads divide it: modules of transformers ask for that.
        "dim": 32,
        # No multiple of four: uneven on four ranks and more.
        "ffn_dim": 90,
    }
    if isinstance(shape, DecoderShape):
        small |= _shrink_decoder(shape, num_blocks)
        if shape.has_latent_attention:
            del small["num_kv_heads"]
        # No block has such a width, and `phalanx train` refuses a key without effect.
        if shape.num_experts and not small["num_dense_layers"]:
            del small["ffn_dim"]
    body = job.to_json()
    changed = {key: value for key, value in small.items() if getattr(shape, key) != value}
    body["model"] |= changed
    changes = ", ".join(f"{key} {getattr(shape, key)} -> {value}" for key, value in changed.items())
    if "num_layers" in changed and job.parallel.stage_blocks:
        # They were said of other blocks.
        body["parallel"]["stage_blocks"] = ()
        changes += ", stage_blocks: cut anew"
    return build_job_from_dict(body), changes


def _shrink_decoder(shape: DecoderShape, num_blocks: int) -> dict[str, Any]:
    """Small numbers for what only decoders have: of each kind of block there is at least one."""
    least = max(2 + min(shape.num_dense_layers, 1), num_blocks, shape.global_every)
    small: dict[str, Any] = {"num_layers": min(shape.num_layers, least)}
    if shape.has_latent_attention:
        small |= {
            "kv_rank": 10,
            "query_rank": 14 if shape.query_rank else 0,
            "rope_head_dim": 4,
            "value_head_dim": 6,
        }
    if shape.vocab_size:
        small["vocab_size"] = min(shape.vocab_size, SHRUNK_VOCAB_SIZE)
    if shape.num_experts:
        small |= _shrink_experts(shape)
    if shape.sliding_window:
        small["sliding_window"] = min(shape.sliding_window, MAX_SEQ_LEN // 4)
    return small


def _shrink_experts(shape: DecoderShape) -> dict[str, Any]:
    """At least two blocks with them, and a width that no two ranks of tp halve evenly by four."""
    dense = min(shape.num_dense_layers, 1)
    return {
        "num_experts": min(shape.num_experts, NUM_SHRUNK_EXPERTS),
        "experts_per_token": min(shape.experts_per_token, 3),
        "num_shared_experts": min(shape.num_shared_experts, 2),
        "expert_ffn_dim": 22,
        "num_dense_layers": dense,
    }


def build_job_from_dict(body: Mapping[str, Any]) -> Job:
    return Job.model_validate_json(json.dumps(body))
