"""Arguments of the Trainer of transformers, which other libraries have as well, and settings of launchers."""

from embedtrain.config.conversions import PRECISIONS, Answer, Flag, Row, in_list, number, of_source, one_of, same

_PRECISION = "`parallel.precision=bf16` or `fp32`; fp16 is a type of exported models only (`export.dtype=fp16`)"
_STRATEGIES = one_of(
    {
        **dict.fromkeys(("fsdp", "fsdp1", "fsdp2", "full_shard", "full", "shard", "deepspeed", "zero"), "fsdp"),
        **dict.fromkeys(("zero1", "zero2", "zero3", "shard_grad_op", "fully_shard"), "fsdp"),
        **dict.fromkeys(("hsdp", "hybrid_shard", "hybrid"), "hsdp"),
        **dict.fromkeys(("ddp", "dp", "no_shard", "replicate", "data_parallel"), "ddp"),
        "auto": "auto",
    }
)


def _report_to(_: str, value: str) -> str | None:
    names = value.lower().strip("[]\"'").replace(" ", "").split(",")
    if names == ["none"]:
        return Answer("leave it out: runs are logged to their output_dir only, unless tracking.wandb=true is set")
    ours = [f"tracking.{name}=true" for name in names if name in ("wandb", "tensorboard")]
    return " ".join(ours) if len(ours) == len(names) else None


def _steps(option: str, value: str) -> str:
    if value.startswith("-"):
        return Answer("leave it out, and set train.epochs")
    return f"{option}={value}"


# The arguments of transformers' Trainer, which sentence-transformers, FlagEmbedding and Tevatron have as well.
TRAINER = (
    Row("output_dir", "`output_dir`", same, also="output_path logging_dir output out_dir outdir o"),
    Row("run_name", "`name`", same, also="experiment_name exp_name"),
    Row(
        "per_device_train_batch_size",
        "`train.global_batch_size`, the rows of all GPUs together, whatever their number",
        also="per_gpu_train_batch_size train_batch_size batch_size bs",
    ),
    Row(
        "gradient_accumulation_steps",
        "`train.gradient_accumulation_steps` (adds no negatives either); for more negatives increase "
        "`train.global_batch_size`: gradients are cached in chunks",
        same,
        also="accumulate_grad_batches grad_accum accumulation_steps",
    ),
    Row("num_train_epochs", "`train.epochs`", same, also="num_epochs max_epochs n_epochs"),
    Row("max_steps", "`train.steps`", _steps, also="max_train_steps num_train_steps total_steps"),
    Row("learning_rate", "`optim.lr`", same, also="lr"),
    Row(
        "lr_scheduler_type",
        "`optim.schedule=linear`, `cosine`, `constant`, `polynomial`, `inverse_sqrt` or `wsd`",
        one_of(
            {name: name for name in ("linear", "cosine", "constant", "polynomial", "inverse_sqrt")}
            | {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
        ),
        also="lr_scheduler scheduler",
    ),
    Row("warmup_ratio", "`optim.warmup`, below 1 a fraction of all steps", same),
    Row("warmup_steps", "`optim.warmup`, from 1 on a number of steps", same, also="num_warmup_steps"),
    Row("weight_decay", "`optim.weight_decay`", same),
    Row("adam_beta1 adam_beta2", "`optim.betas=[0.9,0.999]`", also="beta1 beta2"),
    Row("adam_epsilon", "`optim.eps`", same),
    Row("max_grad_norm", "`optim.max_grad_norm`", same, also="gradient_clip_val gradient_clipping grad_clip clip_grad"),
    Row(
        "optim",
        "`optim.name=adamw`, `stable_adamw`, `lion` or `muon`; their options are `optim.lr`, `optim.betas` and others",
        also="optimizer optim_name optim_type",
    ),
    Row("bf16", "`parallel.precision`", Flag("parallel.precision=bf16", "parallel.precision=fp32")),
    Row("fp16", _PRECISION),
    Row("torch_dtype", _PRECISION, PRECISIONS, also="mixed_precision dtype precision amp"),
    Row("tf32", "fp32 matrix products on GPUs are set by the framework; `parallel.precision` selects bf16 or fp32"),
    Row("bf16_full_eval fp16_full_eval", "not needed: a run evaluates in its `parallel.precision`"),
    Row(
        "gradient_checkpointing",
        "`parallel.activation_checkpointing`, with any strategy; null decides by memory",
        Flag("parallel.activation_checkpointing=true", "parallel.activation_checkpointing=false"),
        also="activation_checkpointing gradient_checkpointing_kwargs",
    ),
    Row(
        "torch_compile",
        "`parallel.compile=true`",
        Flag("parallel.compile=true", "parallel.compile=false"),
        also="torch_compile_backend torch_compile_mode torchdynamo use_liger_kernel",
    ),
    Row(
        "fsdp fsdp_config",
        "`parallel.strategy=fsdp`, `hsdp` or `auto`; `parallel.accelerate_config` reads a file of `accelerate config`",
        lambda option, value: _STRATEGIES(option, value.partition(" ")[0]),
        also="fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap use_fsdp",
    ),
    Row("accelerator_config", "`parallel.accelerate_config`, a file that `accelerate config` wrote"),
    Row(
        "deepspeed",
        "`parallel.strategy=fsdp` (weights are sharded as with ZeRO 3), `ddp`, `hsdp` or `auto`",
        also="zero_stage use_deepspeed deepspeed_config_file",
    ),
    Row("ddp_timeout", "`parallel.timeout`, and `parallel.step_timeout` within a step", same),
    Row(
        "ddp_find_unused_parameters ddp_backend",
        "not needed: set by the framework and the launcher",
        also="local_rank ddp_bucket_cap_mb ddp_broadcast_buffers",
    ),
    Row("eval_steps", "`evaluation.every`", same, also="evaluation_steps"),
    Row(
        "eval_strategy",
        "`evaluation.every`, a number of steps; 0 evaluates at the end only",
        one_of({"no": "0"}),
        also="evaluation_strategy do_eval",
    ),
    Row("eval_on_start", "`evaluation.at_start`", same),
    Row(
        "eval_dataset",
        "`evaluation.sets`",
        in_list,
        also="eval_data eval_file eval_set dev dev_data dev_set dev_file dev_path valid valid_data validation "
        "validation_data validation_file val val_data test test_data test_dataset evaluator evaluation",
    ),
    Row("compute_metrics", "`evaluation.function`, `module:function` of your own"),
    Row(
        "per_device_eval_batch_size",
        "`evaluation.chunk_tokens`: chunks are sized in tokens, not in rows",
        also="eval_batch_size evaluation_batch_size",
    ),
    Row("save_steps", "`checkpoint.every`", same),
    Row("save_strategy", "`checkpoint.every_minutes`; 0 saves at the end only", one_of({"no": "0"})),
    Row("save_total_limit", "`checkpoint.keep`", same),
    Row("save_only_model", "`checkpoint.contents`", Flag("checkpoint.contents=model", "checkpoint.contents=all")),
    Row(
        "save_safetensors save_on_each_node", "not needed: weights are safetensors, and all ranks write one checkpoint"
    ),
    Row(
        "load_best_model_at_end metric_for_best_model",
        "`checkpoint.best_metric`, a set and its metric such as dev/ndcg@10: that checkpoint is kept and exported",
        also="greater_is_better",
    ),
    Row("early_stopping_patience", "`evaluation.patience`", same),
    Row(
        "resume_from_checkpoint",
        "not needed: the same command resumes the run in its `output_dir`; to start from scratch, set another one",
        also="overwrite_output_dir ignore_data_skip resume_from resume_training resume_path continue ckpt_path",
    ),
    Row("logging_steps", "`train.log_every`", same),
    Row("logging_strategy logging_first_step", "`train.log_every`, a number of steps"),
    Row("", "`tracking.verbose=true`", Flag("tracking.verbose=true", "tracking.verbose=false"), also="verbose v debug"),
    Row(
        "disable_tqdm log_level",
        "not needed: there are lines of text only, and `tracking.verbose=true` prints more of them",
        also="quiet silent progress_bar",
    ),
    Row("report_to", "`tracking.wandb=true`, `tracking.tensorboard=true`", _report_to),
    Row("", "`tracking.wandb_init.project`", same, also="project project_name"),
    Row(
        "push_to_hub hub_model_id",
        "`export.push_to_hub=USER/NAME`, the id of the repository",
        lambda option, value: f"{option}={value}" if "/" in value else None,
        also="hub_repo_id",
    ),
    Row("hub_private_repo", "`export.private`", same),
    Row("hub_token", "not an option: `hf auth login` or the variable HF_TOKEN has the token"),
    Row("hub_strategy", "not needed: the exported model is uploaded at the end"),
    Row("data_seed", "`seed`", same),
    Row("full_determinism", "`parallel.deterministic`", same),
    Row("dataloader_num_workers", "`data.workers`, threads that prepare batches", same, also="num_workers"),
    Row(
        "dataloader_drop_last dataloader_pin_memory train_sampling_strategy",
        "not needed: batches are planned by tokens, and prepared ahead by `data.workers` threads",
        also="dataloader_prefetch_factor dataloader_persistent_workers group_by_length length_column_name "
        "auto_find_batch_size pad_to_multiple_of remove_unused_columns",
    ),
    Row("max_train_samples", "`max_rows` of a source in `data.train`", of_source("max_rows"), also="max_samples limit"),
    Row("do_train", "not needed: the command trains"),
    Row(
        "neftune_noise_alpha label_smoothing_factor callbacks",
        "not available",
    ),
    Row("", "`optim.ema=0.999`", number("optim.ema={}", lambda decay: decay), also="ema ema_decay use_ema"),
    Row("", "`optim.layer_decay`", same, also="layerwise_lr_decay llrd layer_lr_decay layerwise_learning_rate_decay"),
    Row(
        "",
        "`optim.groups=[{match: PATTERN, lr: 0}]`, by names of parameters, such as word_embeddings or "
        "'layer\\.[0-3]\\.'; freeze_until: 0.1 instead of lr trains them from a tenth of the steps on",
        also="freeze freeze_layers freeze_embeddings freeze_backbone freeze_encoder num_frozen_layers unfreeze_layers",
    ),
    Row("", "not needed: rows are shuffled, by `seed`", also="shuffle"),
    Row(
        "",
        "not an option: dropout is that of the model's configuration; adapters have `model.lora.dropout`",
        also="dropout hidden_dropout_prob attention_dropout classifier_dropout",
    ),
    Row(
        "",
        "`model.lora.load_in_4bit=true` with `model.lora.rank=16`",
        also="qlora use_qlora load_in_8bit quantization quantize quantization_config",
    ),
)

# Of torchrun, accelerate and others: for all commands.
LAUNCHERS = (
    Row(
        "use_cpu",
        "not needed: GPUs are used if there are any; CUDA_VISIBLE_DEVICES selects some, and none if it is empty",
        also="no_cuda cpu device gpu gpu_id gpu_ids cuda",
    ),
    Row(
        "",
        "a setting of the launcher: --gpus 8 (and --nodes, --node-rank, --master) after the command, or "
        "`torchrun --nproc-per-node 8 -m embedtrain`",
        also="nproc nproc_per_node nnodes n_gpu num_gpus gpus devices world_size num_processes num_machines "
        "machine_rank main_process_ip main_process_port master_addr master_port standalone rdzv_backend "
        "rdzv_endpoint rdzv_id multi_gpu num_nodes",
    ),
    Row(
        "",
        "settings of a job are options of `embedtrain submit`: `slurm.partition`, `slurm.time`, `slurm.nodes`, "
        "`slurm.gpus_per_node`",
        also="partition account qos time time_limit walltime gpus_per_node cpus_per_task ntasks_per_node nodes",
    ),
)
