"""What other trainers call the keys of a job: Hugging Face Trainer and Accelerate, torchrun,
Lightning, DeepSpeed, torchtitan, Megatron-LM, nanoGPT.

Data for messages; standard library only, since errors of the command line read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KeyAlias:
    """The key of phalanx that says the same.

    `note`: what is otherwise about it. `keeps_value`: a value means the same.
    """

    key: str
    note: str = ""
    keeps_value: bool = True


# Each of our keys with what others call it.
_ALIASES_OF_KEY: tuple[tuple[KeyAlias, str], ...] = (
    # how long, and how much at once
    (
        KeyAlias("train.steps"),
        (
            "max_steps num_steps total_steps train_iters max_iters iters num_train_steps n_steps"
            " iterations training_steps max_train_steps train_steps"
        ),
    ),
    (
        KeyAlias(
            "train.steps",
            "a run counts updates: epochs x samples / global_batch_size",
            keeps_value=False,
        ),
        "epochs num_epochs num_train_epochs max_epochs n_epochs epoch",
    ),
    (
        KeyAlias("train.global_batch_size"),
        (
            "batch_size train_batch_size total_batch_size bs batchsize batch global_bs"
            " effective_batch_size global_batch"
        ),
    ),
    (
        KeyAlias("train.micro_batch_size"),
        (
            "per_device_train_batch_size per_device_batch_size local_batch_size micro_batch"
            " microbatch_size train_micro_batch_size_per_gpu per_gpu_train_batch_size"
            " device_batch_size micro_bs mbs"
        ),
    ),
    (
        KeyAlias(
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
        KeyAlias("train.recompute", '"full" or "selective"', keeps_value=False),
        (
            "gradient_checkpointing activation_checkpointing activation_checkpoint"
            " recompute_granularity recompute_activations checkpoint_activations ac_mode"
        ),
    ),
    (
        KeyAlias("train.compile"),
        "torch_compile use_compile compile_model",
    ),
    # the optimizer and its rate
    (
        KeyAlias("optim.lr"),
        "learning_rate max_lr peak_lr base_lr max_learning_rate",
    ),
    (
        KeyAlias("optim.kind", '"adamw" or "sgd"'),
        "optimizer optim optimizer_type optimizer_name opt",
    ),
    (
        KeyAlias("optim.warmup_steps"),
        "num_warmup_steps lr_warmup_steps warmup_iters lr_warmup_iters warmup warmup_num_steps",
    ),
    (
        KeyAlias("optim.warmup_steps", "in steps: ratio x train.steps", keeps_value=False),
        "warmup_ratio lr_warmup_fraction warmup_fraction",
    ),
    (
        KeyAlias("optim.schedule"),
        "lr_scheduler_type lr_decay_style lr_scheduler scheduler lr_schedule scheduler_type",
    ),
    (
        KeyAlias("optim.min_lr_ratio", "min_lr / lr", keeps_value=False),
        "min_lr min_learning_rate min_lr_factor",
    ),
    (
        KeyAlias("optim.decay_fraction"),
        "decay_ratio wsd_decay_fraction",
    ),
    (
        KeyAlias("optim.clip_norm"),
        (
            "max_grad_norm gradient_clipping gradient_clip_val clip_grad grad_clip max_norm"
            " grad_clip_norm"
        ),
    ),
    (
        KeyAlias("optim.weight_decay"),
        "wd decay l2",
    ),
    (
        KeyAlias("optim.betas", "both in one list: [0.9, 0.95]", keeps_value=False),
        "adam_beta1 adam_beta2 beta1 beta2",
    ),
    (
        KeyAlias("optim.eps"),
        "adam_epsilon adam_eps epsilon",
    ),
    # the model
    (
        KeyAlias(
            "model.preset",
            "a published shape (phalanx plan --models); a local directory is model.kind=hf:DIR",
        ),
        "model_name model_name_or_path flavor model_size arch architecture model_id",
    ),
    (
        KeyAlias("model.kind"),
        "model_type model_class",
    ),
    (
        KeyAlias("model.init_from"),
        "pretrained pretrained_model initial_load_path load_checkpoint finetune_from",
    ),
    (
        KeyAlias("model.dim"),
        "hidden_size n_embd d_model embed_dim hidden_dim embedding_dim width model_dim n_embed",
    ),
    (
        KeyAlias("model.num_layers"),
        "n_layer n_layers num_hidden_layers layers depth num_blocks",
    ),
    (
        KeyAlias("model.num_heads"),
        "n_head n_heads num_attention_heads heads attention_heads",
    ),
    (
        KeyAlias("model.num_kv_heads"),
        "num_key_value_heads n_kv_heads num_query_groups n_kv_head kv_heads",
    ),
    (
        KeyAlias("model.ffn_dim"),
        "intermediate_size ffn_hidden_size ffn_size mlp_dim d_ff",
    ),
    (
        KeyAlias("model.rope_theta"),
        "rotary_base rope_base",
    ),
    (
        KeyAlias("model.tie_embeddings"),
        "tie_word_embeddings weight_tying tie_weights",
    ),
    (
        KeyAlias("model.num_experts"),
        "n_experts num_local_experts n_routed_experts moe_num_experts",
    ),
    (
        KeyAlias("model.experts_per_token"),
        "num_experts_per_tok moe_router_topk moe_top_k num_active_experts",
    ),
    # the data
    (
        KeyAlias("data.source"),
        (
            "dataset dataset_name dataset_path data_path train_file train_data data_dir"
            " train_dataset path input"
        ),
    ),
    (
        KeyAlias("data.seq_len"),
        (
            "sequence_length seq_length max_seq_length max_seq_len block_size context_length"
            " max_length ctx_len context_size cutoff_len model_max_length n_ctx"
        ),
    ),
    (
        KeyAlias("data.tokenizer"),
        "tokenizer_path tokenizer_name tokenizer_model tokenizer_file vocab_file hf_assets_path",
    ),
    (
        KeyAlias("data.column"),
        "text_column dataset_text_field text_field text_key",
    ),
    (
        KeyAlias("data.workers"),
        "num_workers dataloader_num_workers num_dataloader_workers",
    ),
    (
        KeyAlias("data.held_out_fraction", "a part of the documents, 0 to 1"),
        "validation_split val_split eval_split test_size val_fraction",
    ),
    (
        KeyAlias("data.document_masks"),
        "reset_attention_mask document_mask packing",
    ),
    # ranks and layouts
    (
        KeyAlias(
            "parallel.ranks",
            "or leave it out; under torchrun, srun or mpirun it joins the ranks that are there",
        ),
        (
            "nproc_per_node nproc num_processes devices gpus num_gpus n_gpus world_size num_devices"
            " ngpu"
        ),
    ),
    (
        KeyAlias(
            "parallel.ranks",
            "the launcher says it: torchrun --nnodes, srun --nodes",
            keeps_value=False,
        ),
        "nnodes num_nodes num_machines",
    ),
    (
        KeyAlias("parallel.tp"),
        (
            "tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size"
            " tensor_parallel tp_degree"
        ),
    ),
    (
        KeyAlias("parallel.pp"),
        (
            "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size "
            "pipeline_parallel pp_degree"
        ),
    ),
    (
        KeyAlias("parallel.cp"),
        "context_parallel_size context_parallel_degree cp_size sequence_parallel_size ulysses_size",
    ),
    (
        KeyAlias("parallel.ep"),
        "expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size",
    ),
    (
        KeyAlias("parallel.dp_shard"),
        "data_parallel_shard_degree fsdp fsdp_size shard_degree num_shards sharding_size",
    ),
    (
        KeyAlias("parallel.dp_replicate", "or parallel.dp_shard for sharded data parallelism"),
        "data_parallel_size data_parallel_replicate_degree dp_size dp ddp data_parallel replicas",
    ),
    (
        KeyAlias(
            "parallel.zero_stage",
            "stages 1, 2 and 3; parallel.dp_shard says over how many ranks",
            keeps_value=False,
        ),
        "zero stage zero_optimization sharding_strategy zero_optimization_stage",
    ),
    (
        KeyAlias("parallel.schedule"),
        "pipeline_parallel_schedule pp_schedule pipeline_schedule",
    ),
    (
        KeyAlias("parallel.offload", '"optimizer" or "parameters"', keeps_value=False),
        "cpu_offload offload_optimizer offload_params offload_param",
    ),
    (
        KeyAlias("parallel.unused_parameters", '"allow"', keeps_value=False),
        "find_unused_parameters ddp_find_unused_parameters",
    ),
    (
        KeyAlias("cluster.device", '"cpu", "cuda" or "auto"', keeps_value=False),
        "accelerator use_cuda use_cpu no_cuda",
    ),
    # numbers
    (
        KeyAlias("precision.compute", '"auto", "fp32", "bf16", "fp16" or "fp8"'),
        "mixed_precision dtype torch_dtype amp params_dtype training_dtype precision compute_dtype",
    ),
    (
        KeyAlias("precision.compute", '"auto", "fp32", "bf16", "fp16" or "fp8"', keeps_value=False),
        "bf16 fp16 fp8 fp32",
    ),
    # evaluating, saving, recording
    (
        KeyAlias("eval.every_steps"),
        (
            "eval_steps eval_interval val_check_interval eval_every validation_steps eval_freq"
            " val_interval"
        ),
    ),
    (
        KeyAlias("eval.tokens", "in tokens", keeps_value=False),
        "eval_iters limit_val_batches max_eval_samples eval_tokens",
    ),
    (
        KeyAlias("eval.keep_best", '"true"', keeps_value=False),
        "load_best_model_at_end save_best",
    ),
    (
        KeyAlias("eval.metric"),
        "metric_for_best_model monitor",
    ),
    (
        KeyAlias("checkpoint.every_steps"),
        (
            "save_steps save_interval save_every checkpoint_interval save_freq every_n_train_steps"
            " ckpt_interval"
        ),
    ),
    (
        KeyAlias("checkpoint.keep_last"),
        "save_total_limit keep_latest_k save_top_k keep_last_n",
    ),
    (
        KeyAlias(
            "checkpoint.url",
            "the run's directory is run.dir, and holds them unless a URL is given",
            keeps_value=False,
        ),
        "save_dir checkpoint_dir ckpt_dir",
    ),
    (
        KeyAlias("run.dir"),
        (
            "output_dir out_dir default_root_dir dump_folder exp_dir save_path work_dir logging_dir"
            " log_dir out"
        ),
    ),
    (
        KeyAlias("run.name"),
        "run_name experiment_name job_name exp_name wandb_name",
    ),
    (
        KeyAlias("run.seed"),
        "random_seed manual_seed data_seed",
    ),
    (
        KeyAlias("observe.log_every"),
        "logging_steps log_interval log_freq log_every_n_steps log_every_steps print_freq",
    ),
    (
        KeyAlias("observe.sinks", 'a list: ["tensorboard"]', keeps_value=False),
        "report_to logger loggers wandb tensorboard use_wandb enable_tensorboard enable_wandb",
    ),
    (
        KeyAlias("resilience.max_restarts"),
        "restarts max_restart",
    ),
    (
        KeyAlias("resilience.collective_timeout_s", "in seconds"),
        "timeout nccl_timeout ddp_timeout comm_timeout_s",
    ),
)


def _index_keys_by_alias() -> dict[str, KeyAlias]:
    keys_by_name = {}
    for key, names in _ALIASES_OF_KEY:
        for name in names.split():
            keys_by_name[name] = key
    return keys_by_name


KEYS_OF_ALIAS: Mapping[str, KeyAlias] = _index_keys_by_alias()

# What is no key here but an option, or a verb.
OPTIONS_OF_ALIAS: Mapping[str, str] = {
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
