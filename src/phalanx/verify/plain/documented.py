"""The documented defaults of a job, said a second time. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

DEFAULT_OF_KEY: Mapping[str, object] = {
    "run.seed": 0,
    "data.seq_len": 128,
    "data.document_masks": False,
    "data.held_out_fraction": 0.05,
    "train.steps": 500,
    "train.global_batch_size": 16,
    "train.micro_batch_size": None,
    "train.recompute": "none",
    "train.deterministic": False,
    "train.loss_chunk_tokens": 2048,
    "eval.tokens": 262144,
    "eval.metric": "loss",
    "optim.kind": "adamw",
    "optim.lr": "auto",
    "optim.lr_scaling": "none",
    "optim.reference_batch_size": None,
    "optim.momentum": 0.9,
    "optim.betas": (0.9, 0.95),
    "optim.eps": 1e-8,
    "optim.weight_decay": "auto",
    "optim.clip_norm": 1.0,
    "optim.schedule": "cosine",
    "optim.warmup_steps": None,
    "optim.min_lr_ratio": 0.1,
    "optim.decay_fraction": 0.2,
    "parallel.sync_batchnorm": True,
    "parallel.dropout": "global",
    "parallel.compress": "none",
    "parallel.compress_rank": 4,
    "parallel.compress_fraction": 0.01,
    "precision.compute": "auto",
    "precision.loss_scale": "dynamic",
    "precision.loss_scale_initial": 65536.0,
    "precision.loss_scale_growth_steps": 2000,
    "resilience.on_loss_spike": "warn",
    "resilience.on_corruption": "rollback",
    "resilience.max_skipped_steps": 100,
}
"""The keys of a job that decide numbers, with the defaults of docs/reference.md."""

DEFAULT_OF_SHAPE_KEY: Mapping[str, object] = {
    "activation": "swiglu",
    "norm": "rmsnorm",
    "norm_eps": 1e-5,
    "norm_plus_one": False,
    "post_norms": False,
    "bias": "none",
    "qk_norm": False,
    "tie_embeddings": False,
    "scale_embeddings": False,
    "positions": "rope",
    "rope_theta": 10000.0,
    "rope_scaling": "none",
    "rope_factor": 1.0,
    "rope_mscale": 1.0,
    "sliding_window": 0,
    "global_every": 0,
    "num_experts": 0,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
    "router_scores": "softmax",
    "router_normalize": True,
    "router_scale": 1.0,
    "expert_capacity": 0.0,
    "balance_loss": 0.0,
    "balance_bias": 0.0,
    "kv_rank": 0,
    "query_rank": 0,
}
"""The numbers of a model where neither its job nor its preset says one: those of docs/models.md."""

RANDOM_WEIGHTS_RATE = 3e-3
TRAINED_WEIGHTS_RATE_OF_OPTIMIZER = {"adamw": 2e-5, "sgd": 1e-3}
"""The peak learning rate of `optim.lr = "auto"`."""
