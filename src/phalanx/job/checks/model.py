"""Questions about the [model] section that one key cannot answer: can its shape be, and does every
key count?

They look at the resolved shape: a key that is wrong beside a preset's value is as wrong as one
beside another key. What they say names the key: it may be told of the preset that was set last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from phalanx.core.errors import format_nearest_word_hint
from phalanx.job.findings import Finding
from phalanx.job.hugging_face import is_hugging_face
from phalanx.job.model import DEFAULT_PRESETS, SHAPE_KEYS, build_model_shape
from phalanx.job.nearest import format_nearest_divisors, format_nearest_multiples
from phalanx.job.presets import find_preset, list_preset_names
from phalanx.job.schema import Job
from phalanx.job.shapes.decoder import DecoderShape
from phalanx.job.shapes.stored import BuiltInShape
from phalanx.job.shapes.vit import VitShape

Question = Callable[[Job], list[Finding]]

EXPERT_KEYS = (
    *("experts_per_token", "expert_ffn_dim", "num_shared_experts", "num_dense_layers"),
    *(
        "router_scores",
        "router_normalize",
        "router_scale",
        "expert_capacity",
        "balance_loss",
        "balance_bias",
    ),
)
LATENT_KEYS = ("query_rank", "rope_head_dim", "value_head_dim")
PLAIN_ATTENTION_KEYS = ("num_kv_heads", "qk_norm", "bias")  # which latent attention does not read
IMAGE_KEYS = ("image_size", "patch_size", "num_channels", "num_classes", "pooling")
TEXT_KEYS = (
    *(
        "vocab_size",
        "tie_embeddings",
        "scale_embeddings",
        "positions",
        "max_positions",
        "rope_theta",
    ),
    *(
        "local_rope_theta",
        "rope_scaling",
        "rope_factor",
        "rope_original_len",
        "sliding_window",
        "global_every",
    ),
    *("num_experts", *EXPERT_KEYS, "kv_rank", *LATENT_KEYS, "rope_mscale"),
)


def check_preset_exists(job: Job) -> list[Finding]:
    name = job.model.preset
    if name is None or job.model.is_foreign or find_preset(name):
        return []
    fix = (
        format_nearest_word_hint(name, list_preset_names())
        or "docs/models.md and phalanx plan --models list them"
    )
    return [_make_model_finding("preset", f"unknown preset {name!r}", fix)]


def check_preset_is_of_model_kind(job: Job) -> list[Finding]:
    name, kind = job.model.preset, job.model.kind
    preset = find_preset(name or "")
    if preset is None or kind not in DEFAULT_PRESETS or kind == preset.kind:
        return []
    return [
        _make_model_finding(
            "kind", f"the preset {name} is a {preset.kind}, not a {kind}", "leave one of them out"
        )
    ]


# A key that nothing reads would be a wish that is silently not granted


def check_key_is_read_by_model(key: str, job: Job) -> list[Finding]:
    """A finding if the user set `key` and the model that they asked for does not read it."""
    value = getattr(job.model, key)
    if value is None or (
        key == "vocab_size" and job.model.is_foreign and not is_hugging_face(job.model.kind)
    ):
        return []
    if job.model.is_foreign:
        return [
            _make_model_finding(key, f"{key} is not read by your own model", "put it in model.args")
        ]
    shape = find_model_shape(job)
    if shape is None or job.model.kind not in (None, *DEFAULT_PRESETS):
        return []
    if key in (IMAGE_KEYS if isinstance(shape, DecoderShape) else TEXT_KEYS):
        return [_make_model_finding(key, f"{key} is not read by a {shape.kind}", "remove it")]
    fix = ""
    if isinstance(shape, DecoderShape):
        fix = _explain_how_decoder_reads_key(key, shape)
    if fix and value not in (0, "none"):
        return [_make_model_finding(key, f"{key} has no effect", fix)]
    return []


def _explain_how_decoder_reads_key(key: str, shape: DecoderShape) -> str:
    """The fix that makes a decoder read `key`; "" if it does."""
    missing = {
        "max_positions": (
            shape.positions != "learned" and "set model.positions=learned: positions are rotary"
        ),
        "rope_theta": (
            shape.positions != "rope" and "set model.positions=rope: positions are learned"
        ),
        "rope_scaling": (
            shape.positions != "rope" and "set model.positions=rope: positions are learned"
        ),
        "rope_factor": shape.rope_scaling == "none" and "set model.rope_scaling: nothing is scaled",
        "rope_original_len": (
            shape.rope_scaling not in ("llama3", "yarn")
            and "set model.rope_scaling to llama3 or yarn"
        ),
        "rope_mscale": shape.rope_scaling != "yarn" and "set model.rope_scaling to yarn",
        "local_rope_theta": (
            not shape.sliding_window and "set model.sliding_window: no block has one"
        ),
        "ffn_dim": (
            shape.num_expert_layers == shape.num_layers
            and "set model.expert_ffn_dim: every block has experts"
        ),
        "global_every": not shape.sliding_window and "set model.sliding_window: no block has one",
        **dict.fromkeys(
            PLAIN_ATTENTION_KEYS, shape.kv_rank and "leave it out: latent attention has its own"
        ),
        **dict.fromkeys(
            LATENT_KEYS, not shape.kv_rank and "set model.kv_rank: there is no latent attention"
        ),
        **dict.fromkeys(
            EXPERT_KEYS, not shape.num_experts and "set model.num_experts: there are none"
        ),
    }
    return missing.get(key) or ""


def check_rope_scaling_is_complete(job: Job) -> list[Finding]:
    shape = find_decoder_shape(job)
    if shape is None or shape.rope_scaling == "none":
        return []
    findings = []
    if shape.rope_factor <= 1:
        problem = (
            f"{shape.rope_scaling} scaling needs a factor above 1, and it is {shape.rope_factor:g}"
        )
        findings.append(
            _make_model_finding(
                "rope_factor", problem, "model.rope_factor=8 reads sequences 8 times as long"
            )
        )
    if shape.rope_scaling in ("llama3", "yarn") and not shape.rope_original_len:
        problem = f"{shape.rope_scaling} scaling needs the length that the positions were made for"
        findings.append(
            _make_model_finding("rope_original_len", problem, "set model.rope_original_len")
        )
    if shape.rope_scaling == "ntk" and shape.rotated_dim == 2:
        findings.append(
            _make_model_finding(
                "rope_scaling", "ntk scaling changes nothing in heads of width 2", "use linear"
            )
        )
    return findings


def check_heads_divide_dim(job: Job) -> list[Finding]:
    shape = find_model_shape(job)
    if shape is None:
        return []
    dim, heads = shape.dim, shape.num_heads
    rotary = isinstance(shape, DecoderShape) and shape.positions == "rope"
    derived = job.model.head_dim is None
    nearest_dims = format_nearest_multiples(dim, (2 if rotary else 1) * heads)
    nearest_dim = f"nearest dim for {heads} heads: {nearest_dims}"
    # A preset may bring heads of another width than dim / num_heads: nothing has to divide then.
    if derived and shape.head_dim == max(1, dim // heads) and dim % heads:
        return [
            _make_model_finding(
                "num_heads", f"dim {dim} cannot be divided among {heads} heads", nearest_dim
            )
        ]
    if not rotary or shape.head_dim % 2 == 0:
        return []
    if not derived:
        return [
            _make_model_finding(
                "head_dim", "rotary positions need an even width", f"try {shape.head_dim + 1}"
            )
        ]
    problem = (
        f"dim {dim} over {heads} heads makes heads of {shape.head_dim}, and rotary positions need"
        " an even width"
    )
    return [_make_model_finding("num_heads", problem, nearest_dim)]


def check_kv_heads_divide_heads(job: Job) -> list[Finding]:
    shape = find_model_shape(job)
    if shape is None or shape.num_heads % shape.num_kv_heads == 0:
        return []
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    problem = f"{kv_heads} key and value heads do not divide the {heads} query heads"
    return [
        _make_model_finding(
            "num_kv_heads", problem, f"nearest: {format_nearest_divisors(heads, kv_heads)}"
        )
    ]


def check_sequences_have_positions(job: Job) -> list[Finding]:
    shape, seq_len = find_decoder_shape(job), job.data.seq_len
    if shape is None or shape.positions != "learned" or seq_len <= shape.max_positions:
        return []
    problem = (
        f"sequences of {seq_len} tokens, and the model has {shape.max_positions} learned positions"
    )
    return [
        _make_model_finding(
            "max_positions",
            problem,
            f"data.seq_len at most {shape.max_positions}, or more positions",
        )
    ]


def check_patches_fill_image(job: Job) -> list[Finding]:
    shape = find_model_shape(job)
    if not isinstance(shape, VitShape) or shape.image_size % shape.patch_size == 0:
        return []
    problem = f"patches of {shape.patch_size} pixels do not fill an image of {shape.image_size}"
    return [
        _make_model_finding(
            "patch_size",
            problem,
            f"nearest: {format_nearest_divisors(shape.image_size, shape.patch_size)}",
        )
    ]


def check_experts_are_complete(job: Job) -> list[Finding]:
    shape = find_decoder_shape(job)
    if shape is None or not shape.num_experts:
        return []
    findings = []
    if not 1 <= shape.experts_per_token <= shape.num_experts:
        problem = f"a token visits {shape.experts_per_token} of {shape.num_experts} experts"
        findings.append(
            _make_model_finding("experts_per_token", problem, f"1 to {shape.num_experts}")
        )
    if not shape.expert_ffn_dim:
        findings.append(
            _make_model_finding(
                "expert_ffn_dim", "experts need a width", "set model.expert_ffn_dim"
            )
        )
    if shape.num_dense_layers >= shape.num_layers:
        problem = f"{shape.num_dense_layers} of {shape.num_layers} blocks have no experts"
        findings.append(
            _make_model_finding("num_dense_layers", problem, f"at most {shape.num_layers - 1}")
        )
    if shape.bias == "all":
        findings.append(
            _make_model_finding("bias", "experts have no biases", "model.bias=qkv or none")
        )
    return findings


def check_latent_attention_is_complete(job: Job) -> list[Finding]:
    shape = find_decoder_shape(job)
    if shape is None or not shape.kv_rank:
        return []
    findings, rotated = [], shape.rope_head_dim
    if shape.positions != "rope":
        findings.append(
            _make_model_finding(
                "positions", "latent attention has rotary positions", "leave it out"
            )
        )
    if not 0 < rotated < shape.head_dim or rotated % 2:
        problem = (
            f"latent attention rotates an even part of its heads of {shape.head_dim}, and"
            f" rope_head_dim is {rotated}"
        )
        findings.append(
            _make_model_finding("rope_head_dim", problem, f"try {max(2, shape.head_dim // 6 * 2)}")
        )
    elif shape.value_head_dim > shape.head_dim:
        problem = f"values of {shape.value_head_dim} are wider than heads of {shape.head_dim}"
        findings.append(_make_model_finding("value_head_dim", problem, f"at most {shape.head_dim}"))
    return findings


def check_init_cast_has_weights(job: Job) -> list[Finding]:
    if not job.model.init_cast or job.model.init_from is not None:
        return []
    return [
        _make_model_finding(
            "init_cast", "there are no weights to cast", "set model.init_from, or remove it"
        )
    ]


_MODEL_CHOICE_KEYS = ("model.kind", "model.preset")
_ENABLING_KEYS = {
    **dict.fromkeys(("max_positions", "rope_theta", "rope_scaling"), ("model.positions",)),
    **dict.fromkeys(("rope_factor", "rope_original_len"), ("model.rope_scaling",)),
    **dict.fromkeys(("local_rope_theta", "global_every"), ("model.sliding_window",)),
    **dict.fromkeys(EXPERT_KEYS, ("model.num_experts",)),
    **dict.fromkeys(LATENT_KEYS, ("model.kv_rank",)),
    "rope_mscale": ("model.rope_scaling",),
}
_WIDTH_KEYS = ("model.dim", "model.num_heads")
_FULL_EXPERT_KEYS = ("model.num_experts", *(f"model.{key}" for key in EXPERT_KEYS))
_FULL_LATENT_KEYS = (
    "model.kv_rank",
    "model.head_dim",
    "model.positions",
    *(f"model.{key}" for key in LATENT_KEYS),
)
_ROPE_SCALING_KEYS = ("model.rope_scaling", "model.rope_factor", "model.rope_original_len")

MODEL_CHECKS: list[tuple[Question, tuple[str, ...]]] = [
    (check_preset_exists, ("model.preset", "model.kind")),
    (check_preset_is_of_model_kind, ("model.kind", "model.preset")),
    *(
        (
            functools.partial(check_key_is_read_by_model, key),
            (f"model.{key}", *_ENABLING_KEYS.get(key, ()), *_MODEL_CHOICE_KEYS),
        )
        for key in ("preset", *SHAPE_KEYS)
    ),
    (check_init_cast_has_weights, ("model.init_cast", "model.init_from")),
    (check_latent_attention_is_complete, (*_FULL_LATENT_KEYS, *_MODEL_CHOICE_KEYS)),
    (check_rope_scaling_is_complete, (*_ROPE_SCALING_KEYS, *_MODEL_CHOICE_KEYS)),
    (
        check_heads_divide_dim,
        (*_WIDTH_KEYS, "model.head_dim", "model.positions", *_MODEL_CHOICE_KEYS),
    ),
    (check_kv_heads_divide_heads, ("model.num_heads", "model.num_kv_heads", *_MODEL_CHOICE_KEYS)),
    (
        check_sequences_have_positions,
        ("data.seq_len", "model.max_positions", "model.positions", *_MODEL_CHOICE_KEYS),
    ),
    (check_patches_fill_image, ("model.image_size", "model.patch_size", *_MODEL_CHOICE_KEYS)),
    (check_experts_are_complete, (*_FULL_EXPERT_KEYS, "model.num_layers", *_MODEL_CHOICE_KEYS)),
]
"""Each question, and the keys it reads: of those that the file gives, the first is told."""


def find_decoder_shape(job: Job) -> DecoderShape | None:
    """The shape of the job's model; None if it is no decoder, or has none that can be."""
    shape = find_model_shape(job)
    if isinstance(shape, DecoderShape):
        return shape
    return None


def find_model_shape(job: Job) -> BuiltInShape | None:
    """The shape that the section asks for, or None where another question already refuses it."""
    model = job.model
    if model.is_foreign or check_preset_exists(job) or check_preset_is_of_model_kind(job):
        return None
    # The vocabulary may be the data's, and decides none of these questions: 1 stands for it.
    return build_model_shape(job, 1)


def _make_model_finding(key: str, problem: str, fix: str = "") -> Finding:
    return Finding(("model", key), problem, fix)
