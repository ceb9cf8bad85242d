"""Options, arguments, commands and loss classes of other libraries, and what embedtrain has instead.

Messages about unknown names are made from these tables (`config/names.py`), and `docs/hooks/reference.py` writes them
into the pages for migrating users, docs/from-*.md.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Answer(str):
    """What a conversion returns if the value needs no option: the sentence to show instead of an assignment."""


# From one of our options and a value of theirs to an assignment of ours; None if the value has no counterpart.
Convert = Callable[[str, str], str | None]


@dataclass(frozen=True)
class Row:
    """Names of another library, and what embedtrain has instead.

    Attributes:
        names: of the library, separated by blanks.
        ours: Markdown that begins with an option of embedtrain in backticks, or a sentence if there is none.
        convert: a value of theirs as an assignment of ours, which messages show instead of `ours`.
        also: other names that people type, separated by blanks; the pages do not list them.
        shown: how the pages write the names; default: each in backticks.
    """

    names: str
    ours: str
    convert: Convert | None = None
    also: str = ""
    shown: str = ""


@dataclass(frozen=True)
class Flag:
    """A conversion to assignments of a true and a false value; a flag without a value is true."""

    on: str
    off: str

    def __call__(self, option: str, value: str) -> str | None:
        """The assignment; None for another value."""
        return {"true": self.on, "1": self.on, "false": self.off, "0": self.off}.get(value.lower())


def same(option: str, value: str) -> str:
    """For an option that takes their values as they are."""
    return f"{option}={value}"


def in_list(option: str, value: str) -> str:
    """For an option that takes a list of their values."""
    return f"{option}={value}" if value.startswith("[") else f"{option}=[{value}]"


def integer(option: str, value: str) -> str | None:
    """For an option that takes their values if they are integers, and not if they are flags."""
    return f"{option}={value}" if value.isdecimal() else None


def integers(option: str, value: str) -> str | None:
    """For an option that takes a list of their values if they are integers, and not if they are flags."""
    return in_list(option, value) if any(map(str.isdecimal, value)) else None


def of_source(option: str) -> Convert:
    """For an option of a source in `data.train` that takes their values if they are integers."""
    return lambda _, value: f"data.train=[{{path: ..., {option}: {value}}}]" if value.isdecimal() else None


def one_of(values: Mapping[str, str]) -> Convert:
    """For an option whose values have other names; theirs are the keys, in lower case, without the class of an enum."""
    return lambda option, value: (
        f"{option}={values[name]}" if (name := value.lower().rpartition(".")[2]) in values else None
    )


def number(template: str, convert: Callable[[float], float]) -> Convert:
    """The template with a converted number in it."""

    def assignment(_: str, value: str) -> str | None:
        try:
            return template.format(f"{convert(float(value)):.10g}")
        except (ValueError, ArithmeticError):
            return None

    return assignment


POOLING = one_of(
    {
        **{name: name for name in ("cls", "mean", "last", "max", "weighted_mean")},
        "weightedmean": "weighted_mean",
        "avg": "mean",
        "average": "mean",
        "last_token": "last",
        "lasttoken": "last",
        "eos": "last",
    }
)
PRECISIONS = one_of(
    {
        **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half", "16", "16-mixed", "bf16-mixed"), "bf16"),
        **dict.fromkeys(("fp32", "float32", "float", "32", "32-true", "no"), "fp32"),
    }
)


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
    ours = [f"tracking.{name}=true" for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]
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
        "`parallel.activation_checkpointing`, with any strategy: true, selective or false; null decides by memory",
        Flag("parallel.activation_checkpointing=true", "parallel.activation_checkpointing=false"),
        also="activation_checkpointing gradient_checkpointing_kwargs",
    ),
    Row(
        "torch_compile",
        "`parallel.compile`; `auto` compiles on GPUs",
        Flag("parallel.compile=true", "parallel.compile=false"),
        also="torch_compile_backend torch_compile_mode torchdynamo",
    ),
    Row(
        "use_liger_kernel",
        "`parallel.fused_kernels`, of layers that are not compiled; `auto` uses them on GPUs",
        Flag("parallel.fused_kernels=true parallel.compile=false", "parallel.fused_kernels=false"),
        also="liger_kernel_config",
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
    Row(
        "report_to",
        "`tracking.wandb=true`, `tracking.tensorboard=true`, `tracking.mlflow=true`, `tracking.trackio=true`",
        _report_to,
    ),
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
        "`model.dropout`, for every dropout of the model; adapters have `model.lora.dropout`",
        same,
        also="dropout hidden_dropout_prob attention_dropout classifier_dropout",
    ),
    Row(
        "",
        "`model.lora.load_in_4bit=true` with `model.lora.rank=16`",
        also="qlora use_qlora load_in_8bit quantization quantize quantization_config",
    ),
    Row(
        "",
        "`model.adapter={type: TYPE, r: 16}`, with a type of PEFT such as dora, rslora, ia3 or vera",
        also="use_dora use_rslora dora rslora ia3 vera loha lokr oft boft peft peft_type adapter_type",
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
        "`slurm.gpus_per_node`; `plan` counts the GPUs of all nodes: `gpus=16`",
        also="partition account qos time time_limit walltime gpus_per_node cpus_per_task ntasks_per_node nodes",
    ),
)


_GROUP_SIZE = Row(
    "train_group_size",
    "`negatives` of a source in `data.train`: one less, because it does not count the positive",
    number("data.train=[{{path: ..., negatives: {}}}]", lambda size: size - 1),
    also="train_n_passages",
)


def _rank(option: str, value: str) -> str | None:
    if value.lower() == "false":
        return Answer("leave it out: all weights are trained, unless model.lora.rank is set")
    return integer(option, value)


def _instruction_format(option: str, value: str) -> str | None:
    return f"""'{option}="{value.format("{instruction}", "{text}")}"'""" if value.count("{}") == 2 else None


def _model(option: str, value: str) -> str:
    if "/" in value:
        return f"{option}={value}"
    return f"{option}={value}, or model={value} for a ready-made one of --help"


SENTENCE_TRANSFORMERS = (
    Row(
        "model_name_or_path",
        "`model.path`",
        same,
        also="model_name model_id base_model pretrained_model embedder_name_or_path",
    ),
    Row("", "`model.path`", _model, also="model"),
    Row("max_seq_length", "`model.max_length`", same, also="max_length max_len"),
    Row(
        "train_dataset",
        "`data.train`, a list of files, folders and Hub ids",
        in_list,
        also="train_data train_file train_files dataset data_path data train",
    ),
    Row(
        "truncate_dim",
        "`loss.matryoshka.dims`, a list: the first dimensions are trained and evaluated as well; `export.truncate_dim` "
        "exports them",
    ),
    Row("prompts", "`model.query_prompt`, `model.document_prompt`, or those of a source"),
    Row(
        "multi_dataset_batch_sampler",
        "`data.batches=by_source`: all rows of a batch come from one source, and sources are drawn by size, as "
        "`PROPORTIONAL` does; `ROUND_ROBIN` draws all sources alike, as `data.mixing_temperature=1e9` does, and stops "
        "at the end of the smallest",
        lambda option, value: (
            f"{option}=by_source"
            + (" data.mixing_temperature=1e9" if value.lower().rpartition(".")[2] == "round_robin" else "")
            if value.lower().rpartition(".")[2] in ("proportional", "round_robin")
            else None
        ),
    ),
    Row("batch_sampler", "not needed: duplicates are masked over all ranks (`loss.mask_duplicates`)"),
    Row(
        "attn_implementation",
        "`model.attention=packed` or `padded`; the kernel is selected by the framework",
        one_of({**dict.fromkeys(("flash_attention_2", "flash_attention_3", "flash"), "packed"), "true": "packed"}),
        also="use_flash_attention_2 use_flash_attention flash_attention use_flash_attn flash_attn",
    ),
    Row(
        "model_kwargs tokenizer_kwargs config_kwargs",
        "not passed on: the options of `model`, such as `model.attention` and `model.max_length`, replace them",
    ),
    Row("tokenizer processing_class", "`model.tokenizer`", same),
    Row(
        "pooling_mode",
        "`model.pooling=cls`, `mean`, `last`, `max` or `weighted_mean`",
        POOLING,
        also="pooling pooling_type pooling_method",
    ),
    Row("", "`model.pooling=mean`", also="pooling_mode_mean_tokens"),
    Row("", "`model.pooling=cls`", also="pooling_mode_cls_token"),
    Row("", "`model.pooling=last`", also="pooling_mode_lasttoken"),
    Row("", "`model.pooling=max`", also="pooling_mode_max_tokens"),
    Row("", "`model.pooling=weighted_mean`", also="pooling_mode_weightedmean_tokens"),
    Row("peft_config", "`model.lora.rank=16`, or another rank", _rank, also="use_peft"),
    Row("", "[`embedtrain mine`](mine.md)", shown="`mine_hard_negatives(...)`"),
    Row(
        "",
        "done at the end; [`embedtrain export`](export.md) exports any checkpoint",
        shown="`model.save_pretrained(dir)`",
    ),
    Row("router_mapping learning_rate_mapping", "`optim.groups=[{match: PATTERN, lr: 1e-4}]`, by names of parameters"),
)

FLAGEMBEDDING = (
    _GROUP_SIZE,
    Row("negatives_cross_device", "always on: a loss sees the batch of all GPUs"),
    Row("use_inbatch_neg", "`loss.in_batch_negatives`", same, also="in_batch_neg use_in_batch_negatives"),
    Row("temperature", "`loss.temperature`", same),
    Row("normalize_embeddings", "`model.normalize`", same, also="normlized normalized l2_normalize"),
    Row("sentence_pooling_method", "`model.pooling` (last_token is `last`)", POOLING),
    Row(
        "query_max_len passage_max_len",
        "`query_max_length`, `document_max_length` of a source; `model.max_length` limits both",
    ),
    Row(
        "query_instruction_for_retrieval",
        "`model.query_prompt`, as `--query_instruction_format` writes it before a query; a `prompt` in a row replaces "
        "it, formatted with `data.instruction_format`",
        same,
    ),
    Row("passage_instruction_for_retrieval", "`model.document_prompt`", same),
    Row("query_instruction_for_rerank", "`model.query_prompt`", same),
    Row("passage_instruction_for_rerank", "`model.document_prompt`", same),
    Row(
        "query_instruction_format",
        "`data.instruction_format`, with {instruction} and {text}; their default `{}{}` is `{instruction}{text}`",
        _instruction_format,
    ),
    Row("passage_instruction_format", "`model.document_prompt`, with all that it writes before a passage"),
    Row(
        "same_dataset_within_batch",
        "`data.batches=by_source`; with `each_file: true` every file is a source",
        Flag("data.batches=by_source", "data.batches=mixed"),
    ),
    Row("max_example_num_per_dataset", "`max_rows` of a source in `data.train`", of_source("max_rows")),
    Row(
        "",
        "`negatives` of a source in `data.train`",
        of_source("negatives"),
        also="negatives hard_negatives num_negatives n_negatives num_hard_negatives negative_number",
    ),
    Row("cache_path", "`data.cache_dir`", same),
    Row(
        "cache_dir",
        "not an option: the variable HF_HOME names the folder of downloaded models; `data.cache_dir` is that of rows",
    ),
    Row(
        "knowledge_distillation kd_loss_type",
        "`loss=combined` of `infonce` and `distill_scores`; with `loss=m3` `loss.kd_loss_type=m3_kd_loss`, or `kl_div`",
    ),
    Row("sub_batch_size", "not needed: gradients are cached in chunks of `train.chunk_tokens`"),
    Row("use_lora lora_rank", "`model.lora.rank=16`, or another rank", _rank),
    Row("tokenizer_name", "`model.tokenizer`", same),
    Row("use_mrl", "`loss.matryoshka.dims`, a list of dimensions", integers, also="mrl_dims"),
    Row("unified_finetuning", "`model.kind=m3 loss=m3`"),
    Row("", "`optim.groups=[{match: backbone, lr: 0}]`, which trains the new layers only", also="fix_encoder"),
    Row("use_self_distill", "`loss.self_distillation`", same),
    Row("self_distill_start_step", "`loss.self_distillation_start_step`", same),
    Row("colbert_dim", "`model.dimension`", same),
    Row("fix_position_embedding", "not available"),
)

TEVATRON = (
    _GROUP_SIZE,
    Row("grad_cache gc_q_chunk_size gc_p_chunk_size", "not needed: automatic, in chunks of `train.chunk_tokens`"),
    Row("", "`model.pooling=last`, `model.append_eos=true`", shown="`--pooling eos`, `--append_eos_token`"),
    Row("", "`model.append_eos`", same, also="append_eos_token"),
    Row("normalize", "`model.normalize` (true by default)", same),
    Row("query_prefix", "`model.query_prompt`", same),
    Row("passage_prefix", "`model.document_prompt`", same, also="document_prefix"),
    Row("lora lora_r", "`model.lora.rank=16`, or another rank", _rank),
    Row("lora_alpha", "`model.lora.alpha`", same),
    Row("lora_dropout", "`model.lora.dropout`", same),
    Row("lora_target_modules", "`model.lora.targets`", in_list, also="target_modules"),
    Row("lora_name_or_path", "`model.lora.path` to continue training, `adapter=DIR` to evaluate", same),
    Row("dataset_name dataset_path corpus_name corpus_path", "`path` and `documents` of a source in `data.train`"),
    Row("dataset_config dataset_split", "`subset` and `split` of a source in `data.train`"),
    Row("train_yaml", "`data.train`, a list of sources"),
    Row(
        "positive_passage_no_shuffle negative_passage_no_shuffle",
        "not available: one positive and the negatives are selected by the seed and the position of the row",
    ),
    Row(
        "untie_encoder",
        "not available: queries and documents have one encoder, without a projection of its own",
        also="tie_encoder add_pooler projection_in_dim projection_out_dim",
    ),
    Row("", "not available", shown="audio, JAX"),
)

# Of open_clip. Names that transformers' Trainer has as well are shown on the page, and answered above.
OPEN_CLIP = (
    Row(
        "model pretrained",
        "`model.path`, a Hub id or a directory of transformers, with `model.kind=image_text`; a file of open_clip is "
        "not read",
        also="pretrained_hf hf_model_name",
    ),
    Row("siglip", "`loss=siglip`"),
    Row(
        "",
        "`loss.directions=[query_document,document_query]`, `loss.partition_mode=separate`, "
        "`loss.learn_temperature=true`, `loss.temperature_bounds=[0.01,1]`",
        shown="without `--siglip`",
    ),
    Row(
        "local-loss gather-with-grad loss-dist-impl", "not needed: a loss sees the batch of all GPUs, with its gradient"
    ),
    Row("", "`train.global_batch_size`, the rows of all GPUs together", shown="`--batch-size`"),
    Row(
        "accum-freq",
        "not needed: every picture of `train.global_batch_size` is a candidate for every text, with gradients cached "
        "in chunks of `train.chunk_tokens`",
    ),
    Row("lock-image", "`model.image.frozen=true`"),
    Row("lock-text", "`model.text.frozen=true`"),
    Row(
        "lock-image-unlocked-groups lock-text-unlocked-layers",
        "`optim.groups=[{match: PATTERN, lr: 0}]`, by names of the weights that stay as they are",
    ),
    Row("image-layer-decay text-layer-decay", "`optim.layer_decay`, of both towers", same),
    Row(
        "train-num-samples", "not needed: rows are counted; `max_rows` of a source reads fewer", also="val_num_samples"
    ),
    Row("csv-img-key csv-caption-key", "`columns` of a source in `data.train`, the caption first: `[title, filepath]`"),
    Row("csv-separator dataset-type", "not needed: the file says it"),
    Row("train-data-upsampling-factors", "`weight` of a source in `data.train`"),
    Row("dataset-resampled", "not available: an epoch has every row as often as the `weight` of its source says"),
    Row("val-data", "`evaluation.sets`", in_list),
    Row("val-frequency zeroshot-frequency", "`evaluation.every`, a number of steps"),
    Row("wd", "`optim.weight_decay`", same),
    Row("warmup", "`optim.warmup`, from 1 on a number of steps", same),
    Row("grad-clip-norm", "`optim.max_grad_norm`, 1 by default; null does not clip", same),
    Row("", "`optim.schedule=cosine`, `constant` or, for `const-cooldown`, `wsd`", shown="`--lr-scheduler`"),
    Row("skip-scheduler", "`optim.schedule=constant`"),
    Row(
        "",
        "`train.epochs`, `optim.lr`, `optim.betas`, `optim.eps`, `seed`, `data.workers`",
        shown="`--epochs`, `--lr`, `--beta1`, `--beta2`, `--eps`, `--seed`, `--workers`",
    ),
    Row("", _PRECISION, shown="`--precision`"),
    Row("grad-checkpointing", "`parallel.activation_checkpointing`, which is decided by memory unless it is set"),
    Row("torchcompile", "`parallel.compile`, by default on GPUs"),
    Row("", "`parallel.strategy`, by default chosen by memory", shown="`--fsdp`"),
    Row("save-frequency", "`checkpoint.every`, a number of steps"),
    Row("save-most-recent delete-previous-checkpoint", "`checkpoint.keep`, a number of checkpoints"),
    Row("", "not needed: the same command resumes the run in its `output_dir`", shown="`--resume`"),
    Row("logs", "`output_dir`, that of a run", same),
    Row("log-every-n-steps", "`train.log_every`", same),
    Row("wandb-project-name", "`tracking.wandb_init.project`", same),
    Row(
        "image-mean image-std image-interpolation image-resize-mode force-image-size force-context-length",
        "not options: they are in the files of `model.path`",
    ),
    Row("use-naflex", "not needed: the files of SigLIP 2 NaFlex say it"),
    Row(
        "aug-cfg force-patch-dropout distill-model distill-pretrained use-bnb-linear coca-caption-loss-weight "
        "coca-contrastive-loss-weight",
        "not available",
    ),
)


_SCALE = "`loss.temperature=0.05`, which is 1 / its default scale of 20 and the default here"
_DISTANCES = {name: name for name in ("cosine", "euclidean", "manhattan")}

# Arguments of the losses of sentence-transformers.
LOSS_ARGUMENTS = (
    Row(
        "scale",
        "`loss.temperature`, which is 1 / scale",
        number("loss.temperature={}", lambda scale: 1 / scale),
    ),
    Row("mini_batch_size", "`train.chunk_tokens`: gradients are cached in chunks of tokens, not of rows"),
    Row("gather_across_devices", "not needed: a loss always sees the batch of all GPUs"),
    Row("hardness_mode", "`loss.hardness`, with `loss.hardness_strength`", same),
    Row(
        "",
        "`loss.directions=[query_document,document_query,...]`, `loss.partition_mode`",
        shown="`directions=...` (symmetric, GTE)",
    ),
    Row("similarity_fct", "`loss.similarity`", one_of({"cos_sim": "cosine", "dot_score": "dot"})),
    Row("guide", "`loss.guide`", same, also="guide_model"),
    Row("triplet_margin", "`loss.margin`", same),
    Row("matryoshka_dims", "`loss.matryoshka.dims`", integers, also="dims matryoshka matryoshka_dimensions"),
    Row("matryoshka_weights", "`loss.matryoshka.dim_weights`", same, also="dim_weights"),
    Row("n_dims_per_step", "`loss.matryoshka.dims_per_step`", same, also="dims_per_step"),
    Row("distance_metric", "`loss.distance`", one_of(_DISTANCES)),
)

# Losses of lists of documents, of a CrossEncoder and in other libraries.
_LISTWISE = (
    Row("BinaryCrossEntropyLoss", "`loss=bce`", also="BCEWithLogitsLoss BCELoss binary_cross_entropy pointwise"),
    Row("ListNetLoss", "`loss=listnet`"),
    Row("RankNetLoss", "`loss=ranknet` with `loss.mean_over=pairs`; its logarithms are binary"),
    Row(
        "LambdaLoss",
        "`loss=lambdaloss` with `loss.weighting`, `loss.top_k` and `loss.mean_over=pairs`; its logarithms are binary; "
        "`NDCGLoss1Scheme` is not available",
        also="LambdaRankLoss NDCGLoss NDCGLoss2PP",
    ),
    Row("ListMLELoss", "`loss=plistmle` with `loss.position_weights=false`"),
    Row("PListMLELoss", "`loss=plistmle`"),
    Row("ADRMSELoss", "`loss=adr_mse`"),
    Row("", "`loss=softmax`", also="CrossEntropyLoss LocalizedContrastiveEstimation LCE listwise"),
)

# Loss classes of sentence-transformers and names from papers. All other classes of sentence-transformers that compute
# from embeddings are loss=sentence_transformers.
LOSSES = (
    Row(
        "MultipleNegativesRankingLoss",
        f"`loss=infonce` with {_SCALE}",
        also="MNRL MNR InfoNCELoss NTXent NTXentLoss SimCSE in_batch_negatives",
    ),
    Row(
        "CachedMultipleNegativesRankingLoss",
        f"`loss=infonce` with {_SCALE}; gradients are cached in chunks of `train.chunk_tokens`",
        also="CMNRL CachedMNRL GradCache",
    ),
    Row(
        "MultipleNegativesSymmetricRankingLoss CachedMultipleNegativesSymmetricRankingLoss",
        "`loss=infonce` with `loss.directions=[query_document,document_query]`, `loss.partition_mode=separate` and "
        f"{_SCALE}",
    ),
    Row(
        "GISTEmbedLoss CachedGISTEmbedLoss",
        "`loss=infonce` with `loss.guide=DIR`, `loss.guide_margin` and `loss.temperature=0.01`, its default",
        also="GIST",
    ),
    Row("MatryoshkaLoss", "`loss.matryoshka.dims=[768,256,64]`, an option of every loss", also="MRL"),
    Row(
        "AdaptiveLayerLoss",
        "`loss.matryoshka.layers=[3,6]`, an option of every loss, with "
        "`loss.matryoshka.layers_per_step=1`; `loss.matryoshka.layer_kl` compares "
        "similarities of texts where theirs compares dimensions",
    ),
    Row(
        "Matryoshka2dLoss",
        "`loss.matryoshka.layers` and `loss.matryoshka.dims`, with `loss.matryoshka.layers_per_step=1`",
    ),
    Row("CoSENTLoss", "`loss=cosent`"),
    Row("AnglELoss", "`loss=angle`"),
    Row("CosineSimilarityLoss", "`loss=cosine_mse`", also="CosineEmbeddingLoss"),
    Row("ContrastiveLoss", "`loss=contrastive`"),
    Row("OnlineContrastiveLoss", "`loss=online_contrastive`"),
    Row(
        "TripletLoss",
        "`loss=triplet`; its defaults are `loss.distance=euclidean` and `loss.margin=5`",
        also="TripletMarginLoss",
    ),
    Row(
        "BatchHardTripletLoss BatchAllTripletLoss BatchSemiHardTripletLoss BatchHardSoftMarginTripletLoss",
        "`loss=batch_triplet` with `loss.mining`",
    ),
    Row("MarginMSELoss", "`loss=margin_mse`"),
    Row("DistillKLDivLoss", "`loss=distill_scores`", also="KLDivLoss kl_div knowledge_distillation"),
    Row(
        "MSELoss EmbedDistillLoss",
        "`loss=distill_embeddings`; `MSELoss` of a CrossEncoder, which takes scores, is `loss=mse`",
    ),
    *_LISTWISE,
    Row(
        "SpladeLoss CachedSpladeLoss",
        "`loss=infonce` with `model.kind=sparse`, whose regularizers are options of `sparsity`",
        also="SPLADE FlopsLoss SparseMultipleNegativesRankingLoss",
    ),
    Row("GlobalOrthogonalRegularizationLoss", "`loss=orthogonal`, in `loss=combined`", also="GOR"),
    Row("", "`loss=distill_similarities`", also="InfoNCEDistillLoss distill_infonce"),
    Row("", "`loss=siglip`", also="SigmoidLoss SigLIPLoss"),
    Row(
        "",
        "`loss=sentence_transformers loss.class_name=NAME loss.arguments={...}`",
        shown="any other loss class that computes from embeddings",
    ),
)

# Loss classes of a CrossEncoder of sentence-transformers, for model.kind=cross_encoder.
RERANKER_LOSSES = (
    Row(
        "MultipleNegativesRankingLoss CachedMultipleNegativesRankingLoss",
        "`loss=softmax` with `data.batch_negatives=4`, which draws from the batch of all GPUs; its scores are logits, "
        "where theirs are 10 times a sigmoid",
    ),
    Row("MarginMSELoss", "`loss=margin_mse`"),
    Row("MSELoss", "`loss=mse`"),
    Row("DistillKLDivLoss", "`loss=distill_scores`"),
    Row(
        "CrossEntropyLoss",
        "`loss=softmax`, a positive against negatives; a model of two classes is one of a score with "
        "`model.score_labels=[1,0]`, for which `loss=bce` is the same loss; more classes are not available",
    ),
    *_LISTWISE,
)

# Evaluators of sentence-transformers, and what else their kind of set is called.
EVALUATORS = (
    Row(
        "InformationRetrievalEvaluator",
        "`evaluation.sets=[{path: PATH, kind: retrieval}]`, a BEIR folder or a table of questions and answers",
        also="information_retrieval ir",
    ),
    Row(
        "NanoBEIREvaluator",
        "`evaluation.sets=[nanobeir]`, or `embedtrain evaluate model=runs/NAME/model suite=nanobeir`",
        also="NanoBEIR nano_beir",
    ),
    Row(
        "EmbeddingSimilarityEvaluator",
        "`evaluation.sets=[{path: PATH, kind: sts}]`: `sentence1`, `sentence2` and `score`",
        also="embedding_similarity similarity",
    ),
    Row(
        "BinaryClassificationEvaluator",
        "`evaluation.sets=[{path: PATH, kind: pair_classification}]`: `sentence1`, `sentence2` and `label`",
        also="binary_classification binary pairs",
    ),
    Row(
        "TripletEvaluator",
        "`evaluation.sets=[{path: PATH, kind: reranking}]`: `query`, `positive` and `negative`; with one negative in "
        "each row, `map` is (1 + accuracy) / 2",
        also="triplet triplets",
    ),
    Row(
        "RerankingEvaluator",
        "`evaluation.sets=[{path: PATH, kind: reranking}]`: `query`, `positive` and `negative`",
        also="rerank reranker",
    ),
    Row(
        "TranslationEvaluator",
        "`evaluation.sets=[{path: PATH, kind: bitext}]`, two columns of sentences",
        also="translation bitext_mining",
    ),
    Row(
        "LabelAccuracyEvaluator",
        "`evaluation.sets=[{path: PATH, kind: classification}]`, which fits a classifier to the vectors of `text`",
        also="label_accuracy",
    ),
    Row("SequentialEvaluator", "`evaluation.sets=[PATH,PATH,...]`, one row of metrics for each"),
    Row(
        "MSEEvaluator MSEEvaluatorFromDataFrame ParaphraseMiningEvaluator",
        "not available; `evaluation.function=module:function` calls a function of your own",
    ),
)


# The command that is meant by a word after `embedtrain`.
SUBCOMMANDS = {
    **dict.fromkeys(
        ("finetune", "fine-tune", "fine_tune", "fit", "tune", "run", "launch", "resume", "pretrain", "trainer"), "train"
    ),
    **dict.fromkeys(("eval", "test", "benchmark", "mteb", "validate", "score"), "evaluate"),
    **dict.fromkeys(("hard_negatives", "hard-negatives", "mine_hard_negatives", "hn_mine", "negatives"), "mine"),
    **dict.fromkeys(("convert", "save", "push", "upload", "onnx"), "export"),
    **dict.fromkeys(("query", "retrieve", "ask"), "search"),
    **dict.fromkeys(("stats", "data", "show", "preview"), "inspect"),
    **dict.fromkeys(("estimate", "memory", "dry-run", "estimate-memory"), "plan"),
    **dict.fromkeys(("compare", "plot", "summary", "dashboard"), "report"),
    **dict.fromkeys(("check", "env", "diagnose"), "doctor"),
    **dict.fromkeys(("slurm", "sbatch", "srun", "kubernetes"), "submit"),
    **dict.fromkeys(("hold-out", "holdout", "train_test_split"), "split"),
}
# Work that is done in Python.
IN_PYTHON = ("encode", "embed", "predict", "infer", "inference", "serve")

# Options of evaluation and mining of these libraries, for commands that have an option of the name.
COMMANDS = (
    Row("model_name_or_path embedder_name_or_path model_name model_path checkpoint", "`model`", same),
    Row("lora_name_or_path peft_model_path adapter_path", "`adapter`", same),
    Row(
        "batch_size eval_batch_size per_device_eval_batch_size embedder_batch_size encode_batch_size",
        "`chunk_tokens`: chunks are sized in tokens, not in texts",
    ),
    Row("datasets dataset_names eval_datasets eval_dataset dataset_dir data", "`sets`", in_list),
    Row(
        "kind evaluator task_type",
        "`sets=[{path: PATH, kind: ...}]`",
        lambda _, value: f"sets=[{{path: PATH, kind: {value}}}]",
    ),
    Row("tasks task_names benchmark", "`mteb`", in_list),
    Row("max_seq_length embedder_passage_max_length query_max_len passage_max_len", "`max_length`", same),
    Row("query_instruction_for_retrieval query_prefix query_instruction", "`query_prompt`", same),
    Row("passage_instruction_for_retrieval passage_prefix document_prefix", "`document_prompt`", same),
    Row("pooling_method sentence_pooling_method", "`pooling`", POOLING),
    Row("normalize_embeddings", "`normalize`", same),
    Row("use_fp16 fp16 bf16", "`precision`", Flag("precision=bf16", "precision=fp32")),
    Row("search_top_k top_k depth", "`run_depth`", same),
    Row("corpus_embd_save_dir", "`vectors_dir`", same),
    Row("output out o output_folder save_dir", "`output_dir`", same),
    Row("eval_output_path output_path output_file", "`output_dir`, a directory"),
    Row("input_file train_data dataset input train train_file data_path file path", "`data`", in_list),
    Row("candidate_pool corpus_file", "`corpus`", in_list),
    Row("negative_number num_negatives n_negatives", "`negatives`", same),
    Row("range_min", "`rank_min`", same),
    Row("range_max", "`rank_max`", same),
    Row(
        "range_for_sampling",
        "`rank_min` and `rank_max`",
        lambda _, value: re.sub(r"^(\d+)-(\d+)$", r"rank_min=\1 rank_max=\2", value) if "-" in value else None,
    ),
    Row("margin", "`absolute_margin`", same),
    Row("sampling_strategy", "`sampling`", same),
    Row("cross_encoder reranker_name_or_path", "`teacher`", same),
    Row("", "`teacher_document_windows`", same, also="document_windows"),
    Row(
        "",
        "`reranker={path: PATH, document_windows: ...}`",
        lambda _, value: f"reranker={{path: PATH, document_windows: {value}}}",
        also="document_windows",
    ),
    Row("fp16 dtype torch_dtype", "`dtype`", same),
    Row("dtype torch_dtype mixed_precision", "`precision=bf16` or `fp32`", PRECISIONS),
    Row("k_values cutoffs k main_score", "`metrics=[ndcg@10,recall@100]`"),
    Row("corpus queries qrels eval_name data_dir", "`sets=[PATH]`, a folder with corpus, queries and qrels"),
    Row(
        "split config subset_name",
        "`sets=[{path: PATH, split: test}]`",
        lambda _, value: f"sets=[{{path: PATH, split: {value}}}]",
    ),
    Row("prompt_name query_prompt_name prompt prompts", "`query_prompt`, a text; the default is the model's"),
    Row(
        "anchor_column_name positive_column_name columns",
        "`data=[{path: PATH, columns: [QUERY,POSITIVE]}]`",
    ),
    Row("checkpoint checkpoint_step", "`step=latest`, `best`, or the number of a step", same),
    Row("model model_name_or_path model_path run_dir path", "`run`, the output_dir of a run", same),
    Row("format to", "`formats`", in_list),
    Row("onnx", "`formats=[onnx]`"),
    Row("k top topk num_results", "`top_k`", same),
    Row("index documents docs", "`corpus`", same),
    Row("test_size val_size dev_size eval_size hold_out num_dev n", "`dev`, a number of queries", integer),
    Row("n num_examples num_rows", "`examples`", same),
    Row("gpu gpu_type device memory vram", "`gpu_memory=80`, in GB"),
    Row("num_gpus n_gpu n_gpus devices world_size nproc_per_node", "`gpus`", same),
)

# For all commands, if they have no option of the name.
ANY_COMMAND = (
    Row("use_faiss use_gpu_for_searching faiss", "not needed: the search is exact, on GPUs if there are any"),
    Row("show_progress_bar verbose v debug quiet", "not an option: every command prints its progress as lines of text"),
    Row(
        "similarity_fn_name score_function similarity",
        "`similarity` of `evaluate`, `mine`, `filter`; by default vectors are compared as the directory says",
    ),
    Row(
        "as_triplets output_format include_positives",
        "not an option: rows have `query`, `pos` and `neg`, which training reads with any number of negatives",
    ),
)

# What evaluators of sentence-transformers call metrics, after the name of the evaluator: `dev_cosine_ndcg@10`,
# `dev_spearman_cosine`, and `dev_ndcg@10` of a reranker.
_SIMILARITY = "(?:cosine|dot|euclidean|manhattan|max)"
_METRIC_NAMES = (
    re.compile(rf"(?:eval_)?(.*?)_?{_SIMILARITY}_((?:ndcg|mrr|map|accuracy|precision|recall)@\d+|ap|accuracy|f1)"),
    re.compile(rf"(?:eval_)?(.*?)_?(spearman|pearson)(?:_{_SIMILARITY})?"),
    re.compile(r"(?:eval_)?(.*?)_?((?:ndcg|mrr)@\d+|map)"),
)


def metric_of_evaluator(name: str) -> str | None:
    """`set/metric` for a metric's name of an evaluator; None for other names."""
    match = next((match for pattern in _METRIC_NAMES if (match := pattern.fullmatch(name))), None)
    if match is None:
        return None
    hits = re.sub(r"^accuracy@", "hit@", match[2])  # the share of queries with a relevant document among the first
    return f"{match[1] or 'SET'}/{hits}"
