"""What other trainers call the keys of a job: Hugging Face Trainer and Accelerate, torchrun,
Lightning, DeepSpeed, torchtitan, Megatron-LM, nanoGPT.

Data for messages; standard library only, since errors of the command line read it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OurName:
    """The key that says the same here.

    `note`: what is otherwise about it. `keeps_value`: a value means the same.
    """

    key: str
    note: str = ""
    keeps_value: bool = True


# Each of our keys with what others call it.
_ROWS: tuple[tuple[OurName, str], ...] = (
    # how long, and how much at once
    (
        OurName("train.steps"),
        (
            "max_steps num_steps total_steps train_iters max_iters iters num_train_steps n_steps"
            " iterations training_steps max_train_steps train_steps"
        ),
    ),
    (
        OurName(
            "train.steps",
            "a run counts updates: epochs x samples / global_batch_size",
            keeps_value=False,
        ),
        "epochs num_epochs num_train_epochs max_epochs n_epochs epoch",
    ),
    (
        OurName("train.global_batch_size"),
        (
            "batch_size train_batch_size total_batch_size bs batchsize batch global_bs"
            " effective_batch_size global_batch"
        ),
    ),
    (
        OurName("train.micro_batch_size"),
        (
            "per_device_train_batch_size per_device_batch_size local_batch_size micro_batch"
            " microbatch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size"
            " device_batch_size micro_bs mbs"
        ),
    ),
    (
        OurName(
            "train.micro_batch_size",
            "global_batch_size / (ranks x micro_batch_size) microbatches are accumulated",
            keeps_value=False,
        ),
        (
            "gradient_accumulation_steps accumulate_grad_batches grad_accumulation_steps"
            " grad_accum_steps grad_accum accumulation_steps gradient_accumulation num_microbatches"
        ),
    ),
    (
        OurName("train.recompute", '"full" or "selective"', keeps_value=False),
        (
            "gradient_checkpointing activation_checkpointing activation_checkpoint"
            " recompute_granularity recompute_activations checkpoint_activations ac_mode"
        ),
    ),
    (
        OurName("train.compile"),
        "torch_compile use_compile compile_model",
    ),
    # the optimizer and its rate
    (
        OurName("optim.lr"),
        "learning_rate max_lr peak_lr base_lr max_learning_rate",
    ),
    (
        OurName("optim.kind", '"adamw" or "sgd"'),
        "optimizer optim optimizer_type optimizer_name opt",
    ),
    (
        OurName("optim.warmup_steps"),
        "num_warmup_steps lr_warmup_steps warmup_iters lr_warmup_iters warmup warmup_num_steps",
    ),
    (
        OurName("optim.warmup_steps", "in steps: ratio x train.steps", keeps_value=False),
        "warmup_ratio lr_warmup_fraction warmup_fraction",
    ),
    (
        OurName("optim.schedule"),
        "lr_scheduler_type lr_decay_style lr_scheduler scheduler lr_schedule scheduler_type",
    ),
    (
        OurName("optim.min_lr_ratio", "min_lr / lr", keeps_value=False),
        "min_lr min_learning_rate min_lr_factor",
    ),
    (
        OurName("optim.decay_fraction"),
        "decay_ratio wsd_decay_fraction",
    ),
    (
        OurName("optim.clip_norm"),
        (
            "max_grad_norm gradient_clipping gradient_clip_val clip_grad grad_clip max_norm"
            " grad_clip_norm"
        ),
    ),
    (
        OurName("optim.weight_decay"),
        "wd decay l2",
    ),
    (
        OurName("optim.betas", "both in one list: [0.9, 0.95]", keeps_value=False),
        "adam_beta1 adam_beta2 beta1 beta2",
    ),
    (
        OurName("optim.eps"),
        "adam_epsilon adam_eps epsilon",
    ),
    # the model
    (
        OurName(
            "model.preset",
            "a published shape (phalanx plan --models); a local directory is model.kind=hf:DIR",
        ),
        "model_name model_name_or_path flavor model_size arch architecture model_id",
    ),
    (
        OurName("model.kind"),
        "model_type model_class",
    ),
    (
        OurName("model.init_from"),
        "pretrained pretrained_model initial_load_path load_checkpoint finetune_from",
    ),
    (
        OurName("model.dim"),
        "hidden_size n_embd d_model embed_dim hidden_dim embedding_dim width model_dim n_embed",
    ),
    (
        OurName("model.num_layers"),
        "n_layer n_layers num_hidden_layers layers depth num_blocks",
    ),
    (
        OurName("model.num_heads"),
        "n_head n_heads num_attention_heads heads attention_heads",
    ),
    (
        OurName("model.num_kv_heads"),
        "num_key_value_heads n_kv_heads num_query_groups n_kv_head kv_heads",
    ),
    (
        OurName("model.ffn_dim"),
        "intermediate_size ffn_hidden_size ffn_size mlp_dim d_ff",
    ),
    (
        OurName("model.rope_theta"),
        "rotary_base rope_base",
    ),
    (
        OurName("model.tie_embeddings"),
        "tie_word_embeddings weight_tying tie_weights",
    ),
    (
        OurName("model.num_experts"),
        "n_experts num_local_experts n_routed_experts moe_num_experts",
    ),
    (
        OurName("model.experts_per_token"),
        "num_experts_per_tok moe_router_topk moe_top_k num_active_experts",
    ),
    # the data
    (
        OurName("data.source"),
        (
            "dataset dataset_name dataset_path data_path train_file train_data data_dir"
            " train_dataset path input"
        ),
    ),
    (
        OurName("data.seq_len"),
        (
            "sequence_length seq_length max_seq_length max_seq_len block_size context_length"
            " max_length ctx_len context_size cutoff_len model_max_length n_ctx"
        ),
    ),
    (
        OurName("data.tokenizer"),
        "tokenizer_path tokenizer_name tokenizer_model tokenizer_file vocab_file hf_assets_path",
    ),
    (
        OurName("data.column"),
        "text_column dataset_text_field text_field text_key",
    ),
    (
        OurName("data.workers"),
        "num_workers dataloader_num_workers num_dataloader_workers",
    ),
    (
        OurName("data.held_out_fraction", "a part of the documents, 0 to 1"),
        "validation_split val_split eval_split test_size val_fraction",
    ),
    (
        OurName("data.document_masks"),
        "reset_attention_mask document_mask packing",
    ),
    # ranks and layouts
    (
        OurName(
            "parallel.ranks",
            "or leave it out; under torchrun, srun or mpirun it joins the ranks that are there",
        ),
        (
            "nproc_per_node nproc num_processes devices gpus num_gpus n_gpus world_size num_devices"
            " ngpu"
        ),
    ),
    (
        OurName(
            "parallel.ranks",
            "the launcher says it: torchrun --nnodes, srun --nodes",
            keeps_value=False,
        ),
        "nnodes num_nodes num_machines nodes",
    ),
    (
        OurName("parallel.tp"),
        (
            "tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size"
            " tensor_parallel tp_degree"
        ),
    ),
    (
        OurName("parallel.pp"),
        (
            "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size "
            "pipeline_parallel pp_degree"
        ),
    ),
    (
        OurName("parallel.cp"),
        "context_parallel_size context_parallel_degree cp_size sequence_parallel_size ulysses_size",
    ),
    (
        OurName("parallel.ep"),
        "expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size",
    ),
    (
        OurName("parallel.dp_shard"),
        "data_parallel_shard_degree fsdp fsdp_size shard_degree num_shards sharding_size",
    ),
    (
        OurName("parallel.dp_replicate", "or parallel.dp_shard for sharded data parallelism"),
        "data_parallel_size data_parallel_replicate_degree dp_size dp ddp data_parallel replicas",
    ),
    (
        OurName(
            "parallel.zero_stage",
            "stages 1, 2 and 3; parallel.dp_shard says over how many ranks",
            keeps_value=False,
        ),
        "zero stage zero_optimization sharding_strategy zero_optimization_stage",
    ),
    (
        OurName("parallel.schedule"),
        "pipeline_parallel_schedule pp_schedule pipeline_schedule",
    ),
    (
        OurName("parallel.offload", '"optimizer" or "parameters"', keeps_value=False),
        "cpu_offload offload_optimizer offload_params offload_param",
    ),
    (
        OurName("parallel.unused_parameters", '"allow"', keeps_value=False),
        "find_unused_parameters ddp_find_unused_parameters",
    ),
    (
        OurName("cluster.device", '"cpu", "cuda" or "auto"', keeps_value=False),
        "accelerator use_cuda use_cpu no_cuda",
    ),
    # numbers
    (
        OurName("precision.compute", '"auto", "fp32", "bf16", "fp16" or "fp8"'),
        "mixed_precision dtype torch_dtype amp params_dtype training_dtype precision compute_dtype",
    ),
    (
        OurName("precision.compute", '"auto", "fp32", "bf16", "fp16" or "fp8"', keeps_value=False),
        "bf16 fp16 fp8 fp32",
    ),
    # judging, saving, recording
    (
        OurName("eval.every_steps"),
        (
            "eval_steps eval_interval val_check_interval eval_every validation_steps eval_freq"
            " val_interval"
        ),
    ),
    (
        OurName("eval.tokens", "in tokens", keeps_value=False),
        "eval_iters limit_val_batches max_eval_samples eval_tokens",
    ),
    (
        OurName("eval.keep_best", '"true"', keeps_value=False),
        "load_best_model_at_end save_best",
    ),
    (
        OurName("eval.metric"),
        "metric_for_best_model monitor",
    ),
    (
        OurName("checkpoint.every_steps"),
        (
            "save_steps save_interval save_every checkpoint_interval save_freq every_n_train_steps"
            " ckpt_interval"
        ),
    ),
    (
        OurName("checkpoint.keep_last"),
        "save_total_limit keep_latest_k save_top_k keep_last_n",
    ),
    (
        OurName(
            "checkpoint.url",
            "the run's directory is run.dir, and holds them unless a URL is given",
            keeps_value=False,
        ),
        "save_dir checkpoint_dir ckpt_dir",
    ),
    (
        OurName("run.dir"),
        (
            "output_dir out_dir default_root_dir dump_folder exp_dir save_path work_dir logging_dir"
            " log_dir out"
        ),
    ),
    (
        OurName("run.name"),
        "run_name experiment_name job_name exp_name wandb_name",
    ),
    (
        OurName("run.seed"),
        "random_seed manual_seed data_seed",
    ),
    (
        OurName("observe.log_every"),
        "logging_steps log_interval log_freq log_every_n_steps log_every_steps print_freq",
    ),
    (
        OurName("observe.sinks", 'a list: ["tensorboard"]', keeps_value=False),
        "report_to logger loggers wandb tensorboard use_wandb enable_tensorboard enable_wandb",
    ),
    (
        OurName("resilience.max_restarts"),
        "restarts max_restart",
    ),
    (
        OurName("resilience.collective_timeout_s", "in seconds"),
        "timeout nccl_timeout ddp_timeout comm_timeout_s",
    ),
)

OTHER_NAMES: Mapping[str, OurName] = {name: ours for ours, names in _ROWS for name in names.split()}

# What is no key here but an option, or a verb.
OTHER_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("resume_from_checkpoint", "ckpt_path", "load", "restore", "continue", "resume_from"),
        "--resume RUN",
    ),
    **dict.fromkeys(
        ("config", "config_file", "deepspeed_config", "cfg", "job", "job_file"),
        "JOB.toml, without an option before it",
    ),
    **dict.fromkeys(("dry_run", "validate_only"), "the verb plan"),
}

Leaves = Mapping[str, tuple[str, ...]]


def our_names(word: str, leaves: Leaves) -> tuple[OurName, ...]:
    """The keys that `word` may mean: those of this name, what others call so, else the nearest of
    all names.

    `leaves`: the sections of each name of a key ("lr": ("optim",)). The word may have dashes, or a
    section before it.
    """
    name = word.lower().lstrip("-").replace("-", "_").rpartition(".")[2]
    if name in leaves:
        return tuple(OurName(f"{section}.{name}") for section in leaves[name])
    if name in OTHER_NAMES:
        return (OTHER_NAMES[name],)
    near = difflib.get_close_matches(name, [*leaves, *OTHER_NAMES], n=1, cutoff=0.75)
    return our_names(near[0], leaves) if near else ()


def advice(word: str, leaves: Leaves, raw: str = "") -> str:
    """'did you mean "optim.lr=1e-3"?' with what is otherwise about it; empty where nothing is near.

    `raw` is the value that was given.
    """
    found = our_names(word, leaves)
    if not found:
        return ""
    is_switch = (
        raw.lower() in ("true", "false") and word.lower() not in leaves
    )  # fsdp=true is no number of shards
    shown = [
        f'"{our.key}={raw}"' if raw and our.keeps_value and not is_switch else f'"{our.key}"'
        for our in found
    ]
    notes = [our.note for our in found if our.note]
    return f"did you mean {' or '.join(shown)}?" + (f" ({notes[0]})" if notes else "")
