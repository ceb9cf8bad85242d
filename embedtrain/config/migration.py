"""The options, arguments and loss classes of other libraries, and what embedtrain has instead.

One table: messages about unknown names are made from it (`config/names.py`), and `docs/hooks/reference.py` writes it
into the pages for migrating users, docs/from-*.md.
"""

import re

from embedtrain.config.conversions import Row, flag, in_list, integer, number, one_of, same

_POOLING = {
    "cls": "cls",
    "mean": "mean",
    "avg": "mean",
    "last": "last",
    "last_token": "last",
    "eos": "last",
    "lasttoken": "last",
}
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "fp32": "fp32", "float32": "fp32"}
_PRECISION = "`parallel.precision=bf16` or `fp32`; fp16 is a type of exported models only (`export.dtype=fp16`)"
_GROUP_SIZE = Row(
    "train_group_size",
    "`negatives` of a source in `data.train`: one less, because it does not count the positive",
    number("data.train=[{{path: ..., negatives: {}}}]", lambda size: size - 1),
    also="train_n_passages",
)

# The arguments of transformers' Trainer, which sentence-transformers, FlagEmbedding and Tevatron have as well.
TRAINER = (
    Row("output_dir", "`output_dir`", same, also="output_path logging_dir"),
    Row("run_name", "`name`", same),
    Row(
        "per_device_train_batch_size",
        "`train.global_batch_size`, the rows of all GPUs together, whatever their number",
        also="per_gpu_train_batch_size train_batch_size batch_size",
    ),
    Row(
        "gradient_accumulation_steps",
        "`train.gradient_accumulation_steps` (adds no negatives either); for more negatives increase "
        "`train.global_batch_size`: gradients are cached in chunks",
        same,
        also="accumulate_grad_batches grad_accum accumulation_steps",
    ),
    Row("num_train_epochs", "`train.epochs`", same, also="num_epochs max_epochs n_epochs"),
    Row("max_steps", "`train.steps`", same, also="max_train_steps num_train_steps total_steps"),
    Row("learning_rate", "`optim.lr`", same, also="lr"),
    Row("lr_scheduler_type", "`optim.schedule`", one_of(_SCHEDULES), also="lr_scheduler scheduler"),
    Row("warmup_ratio", "`optim.warmup`, below 1 a fraction of all steps", same),
    Row("warmup_steps", "`optim.warmup`, from 1 on a number of steps", same, also="num_warmup_steps"),
    Row("weight_decay", "`optim.weight_decay`", same),
    Row("adam_beta1 adam_beta2", "`optim.betas`, such as [0.9,0.999]"),
    Row("adam_epsilon", "`optim.eps`", same),
    Row("max_grad_norm", "`optim.max_grad_norm`", same, also="gradient_clip_val"),
    Row(
        "optim", "the optimizer is always AdamW; set its options `optim.lr`, `optim.betas` and others", also="optimizer"
    ),
    Row("bf16", "`parallel.precision`", flag("parallel.precision=bf16", "parallel.precision=fp32")),
    Row("fp16", _PRECISION),
    Row("torch_dtype", _PRECISION, one_of(_PRECISIONS), also="mixed_precision dtype"),
    Row("tf32", "fp32 matrix products on GPUs are set by the framework; `parallel.precision` selects bf16 or fp32"),
    Row(
        "gradient_checkpointing",
        "`parallel.activation_checkpointing`, with any strategy; null decides by memory",
        flag("parallel.activation_checkpointing=true", "parallel.activation_checkpointing=false"),
        also="activation_checkpointing gradient_checkpointing_kwargs",
    ),
    Row("torch_compile", "`parallel.compile`", same),
    Row(
        "fsdp fsdp_config",
        "`parallel.strategy=fsdp`, `hsdp` or `auto`; `parallel.accelerate_config` reads a file of `accelerate config`",
        also="fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap",
    ),
    Row(
        "deepspeed",
        "`parallel.strategy=fsdp` (weights are sharded as with ZeRO 3), `ddp`, `hsdp` or `auto`",
        also="zero_stage",
    ),
    Row("ddp_timeout", "`parallel.timeout`, and `parallel.step_timeout` within a step", same),
    Row(
        "ddp_find_unused_parameters ddp_backend", "not needed: set by the framework and the launcher", also="local_rank"
    ),
    Row("eval_steps", "`evaluation.every`", same, also="evaluation_steps"),
    Row(
        "eval_strategy",
        "`evaluation.every`, a number of steps; 0 evaluates at the end only",
        also="evaluation_strategy do_eval",
    ),
    Row("eval_on_start", "`evaluation.at_start`", same),
    Row(
        "eval_dataset",
        "`evaluation.sets`",
        in_list,
        also="eval_data dev_data validation_file evaluator",
    ),
    Row(
        "per_device_eval_batch_size",
        "`evaluation.chunk_tokens`: chunks are sized in tokens, not in rows",
        also="eval_batch_size evaluation_batch_size",
    ),
    Row("save_steps", "`checkpoint.every`", same),
    Row("save_strategy", "`checkpoint.every`, a number of steps; 0 saves at the end only"),
    Row("save_total_limit", "`checkpoint.keep`", same),
    Row("save_only_model", "`checkpoint.contents`", flag("checkpoint.contents=model", "checkpoint.contents=all")),
    Row(
        "load_best_model_at_end metric_for_best_model",
        "`checkpoint.best_metric`, a set and its metric such as dev/ndcg@10: that checkpoint is kept and exported",
        also="greater_is_better",
    ),
    Row("early_stopping_patience", "`evaluation.patience`", same),
    Row(
        "resume_from_checkpoint",
        "not needed: the same command resumes the run in its `output_dir`",
        also="overwrite_output_dir ignore_data_skip",
    ),
    Row("logging_steps", "`train.log_every`", same),
    Row(
        "report_to",
        "`tracking.wandb=true`, `tracking.tensorboard=true`",
        lambda _, value: f"tracking.{value}=true" if value in ("wandb", "tensorboard") else None,
    ),
    Row("push_to_hub hub_model_id", "`export.push_to_hub`, the id of the repository"),
    Row("hub_private_repo", "`export.private`", same),
    Row("data_seed", "`seed`", same),
    Row("full_determinism", "`parallel.deterministic`", same),
    Row(
        "dataloader_num_workers",
        "`data.workers`, threads that prepare batches",
        same,
        also="num_workers",
    ),
    Row(
        "dataloader_drop_last dataloader_pin_memory train_sampling_strategy",
        "not needed: batches are planned by tokens, and prepared ahead by `data.workers` threads",
        also="dataloader_prefetch_factor group_by_length remove_unused_columns",
    ),
    Row("use_cpu", "not needed: GPUs are used if there are any; hide them with CUDA_VISIBLE_DEVICES=", also="no_cuda"),
    Row(
        "",
        "a setting of the launcher: `torchrun --nproc-per-node 8 -m embedtrain`",
        also="nproc_per_node n_gpu num_gpus gpus devices world_size",
    ),
    Row("do_train", "not needed: the command trains"),
)

SENTENCE_TRANSFORMERS = (
    Row(
        "model_name_or_path",
        "`model.path`",
        same,
        also="model_name model_id base_model pretrained_model",
    ),
    Row("max_seq_length", "`model.max_length`", same, also="max_length"),
    Row(
        "train_dataset",
        "`data.train`, a list of files, folders and Hub ids",
        in_list,
        also="train_data train_file train_files dataset data_path data train",
    ),
    Row(
        "truncate_dim",
        "`loss.matryoshka_dims`, a list: the first dimensions are trained and evaluated as well; `export.truncate_dim` "
        "exports them",
    ),
    Row("prompts", "`model.query_prompt`, `model.document_prompt`, or those of a source"),
    Row(
        "multi_dataset_batch_sampler",
        "`data.batches=by_source`: all rows of a batch come from one source",
        one_of({"proportional": "by_source", "round_robin": "by_source"}),
    ),
    Row("batch_sampler", "not needed: duplicates are masked over all ranks (`loss.mask_duplicates`)"),
    Row("attn_implementation", "`model.attention`, packed or padded; the kernel is selected by the framework"),
    Row("peft_config", "`model.lora.rank`", also="use_peft"),
    Row("", "[`python -m embedtrain.mine`](mine.md)", shown="`mine_hard_negatives(...)`"),
    Row(
        "",
        "done at the end; [`python -m embedtrain.export`](export.md) exports any checkpoint",
        shown="`model.save_pretrained(dir)`",
    ),
)

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
    Row("dims", "`loss.matryoshka_dims`", in_list),
    Row("distance_metric", "`loss.distance`"),
)

FLAGEMBEDDING = (
    _GROUP_SIZE,
    Row("negatives_cross_device", "always on: a loss sees the batch of all GPUs"),
    Row("temperature", "`loss.temperature`", same),
    Row("normalize_embeddings", "`model.normalize`", same),
    Row("sentence_pooling_method", "`model.pooling` (last_token is `last`)", one_of(_POOLING)),
    Row(
        "query_max_len passage_max_len",
        "`query_max_length`, `document_max_length` of a source; `model.max_length` limits both",
    ),
    Row(
        "query_instruction_for_retrieval",
        "`model.query_prompt`; a `prompt` in a row replaces it, formatted with `data.instruction_format`",
        same,
    ),
    Row("passage_instruction_for_retrieval", "`model.document_prompt`", same),
    Row(
        "query_instruction_format passage_instruction_format",
        "`data.instruction_format`, with {instruction} and {text}",
    ),
    Row(
        "same_dataset_within_batch",
        "`data.batches=by_source`; with `each_file: true` every file is a source",
        flag("data.batches=by_source", "data.batches=mixed"),
    ),
    Row("max_example_num_per_dataset", "`max_rows` of a source"),
    Row("cache_path", "`data.cache_dir`", same),
    Row("knowledge_distillation kd_loss_type", "`loss=combined` of `infonce` and `distill_scores`"),
    Row("sub_batch_size", "not needed: gradients are cached in chunks of `train.chunk_tokens`"),
    Row("use_lora lora_rank", "`model.lora.rank`", integer),
    Row("tokenizer_name", "`model.tokenizer`", same),
    Row(
        "fix_position_embedding unified_finetuning use_self_distill",
        "not available",
        shown="`--fix_position_embedding`, BGE-M3's sparse and multi-vector heads",
    ),
)

TEVATRON = (
    _GROUP_SIZE,
    Row("grad_cache gc_q_chunk_size gc_p_chunk_size", "not needed: automatic, in chunks of `train.chunk_tokens`"),
    Row("", "`model.pooling=last`, `model.append_eos=true`", shown="`--pooling eos`, `--append_eos_token`"),
    Row("", "`model.append_eos`", same, also="append_eos_token"),
    Row("normalize", "`model.normalize` (true by default)", same),
    Row("query_prefix", "`model.query_prompt`", same),
    Row("passage_prefix", "`model.document_prompt`", same, also="document_prefix"),
    Row("lora lora_r", "`model.lora.rank`", integer),
    Row("lora_alpha", "`model.lora.alpha`", same),
    Row("lora_dropout", "`model.lora.dropout`", same),
    Row(
        "lora_target_modules",
        "`model.lora.targets`",
        in_list,
        also="target_modules",
    ),
    Row(
        "lora_name_or_path",
        "`model.lora.path` to continue training, `adapter=DIR` to evaluate",
        same,
    ),
    Row(
        "dataset_name dataset_path corpus_name corpus_path",
        "`path` and `documents` of a source in `data.train`",
    ),
    Row("dataset_config dataset_split", "`subset` and `split` of a source in `data.train`"),
    Row("train_yaml", "`data.train`, a list of sources"),
    Row(
        "positive_passage_no_shuffle negative_passage_no_shuffle",
        "not available: one positive and the negatives are selected by the seed and the position of the row",
    ),
    Row("", "not available", shown="images, audio, SPLADE, multi-vector, JAX"),
)

# Options of evaluation and mining of these libraries, for commands that have an option of the name.
COMMANDS = (
    Row("model_name_or_path embedder_name_or_path model_name model_path checkpoint", "`model`", same),
    Row("lora_name_or_path peft_model_path adapter_path", "`adapter`", same),
    Row(
        "batch_size eval_batch_size per_device_eval_batch_size embedder_batch_size encode_batch_size",
        "`chunk_tokens`: chunks are sized in tokens, not in texts",
    ),
    Row("datasets dataset_names eval_datasets eval_dataset dataset_dir data", "`sets`", in_list),
    Row("tasks task_names benchmark", "`mteb`", in_list),
    Row("max_seq_length embedder_passage_max_length query_max_len passage_max_len", "`max_length`", same),
    Row("query_instruction_for_retrieval query_prefix query_instruction", "`query_prompt`", same),
    Row(
        "passage_instruction_for_retrieval passage_prefix document_prefix",
        "`document_prompt`",
        same,
    ),
    Row("pooling_method sentence_pooling_method", "`pooling`", one_of(_POOLING)),
    Row("normalize_embeddings", "`normalize`", same),
    Row("use_fp16 fp16 bf16", "`precision`", flag("precision=bf16", "precision=fp32")),
    Row("search_top_k top_k depth", "`run_depth`", same),
    Row("corpus_embd_save_dir", "`vectors_dir`", same),
    Row("output_folder eval_output_path output_path output_file", "`output_dir`, a directory"),
    Row("input_file train_data dataset", "`data`", in_list),
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
    Row("fp16 dtype torch_dtype", "`dtype`", same),
    Row("num_gpus n_gpu n_gpus devices world_size nproc_per_node", "`gpus`", same),
)

# Loss classes of sentence-transformers and names from papers. All other classes of sentence-transformers that compute
# from embeddings are loss=sentence_transformers.
LOSSES = (
    Row(
        "MultipleNegativesRankingLoss",
        "`loss=infonce` with `loss.temperature`, which is 1 / scale",
        also="MNRL MNR InfoNCELoss NTXent NTXentLoss SimCSE in_batch_negatives",
    ),
    Row(
        "CachedMultipleNegativesRankingLoss",
        "`loss=infonce`: gradients are cached in chunks of `train.chunk_tokens`",
        also="CMNRL CachedMNRL GradCache",
    ),
    Row(
        "MultipleNegativesSymmetricRankingLoss CachedMultipleNegativesSymmetricRankingLoss",
        "`loss=infonce` with `loss.directions=[query_document,document_query]` and `loss.partition_mode=separate`",
    ),
    Row(
        "GISTEmbedLoss CachedGISTEmbedLoss",
        "`loss=infonce` with `loss.guide=DIR` and `loss.guide_margin`",
        also="GIST",
    ),
    Row("MatryoshkaLoss", "`loss.matryoshka_dims=[768,256,64]`, an option of every loss", also="MRL"),
    Row("CoSENTLoss", "`loss=cosent`"),
    Row("AnglELoss", "`loss=angle`"),
    Row("CosineSimilarityLoss", "`loss=cosine_mse`", also="CosineEmbeddingLoss"),
    Row("ContrastiveLoss", "`loss=contrastive`"),
    Row("OnlineContrastiveLoss", "`loss=online_contrastive`"),
    Row("TripletLoss", "`loss=triplet`", also="TripletMarginLoss"),
    Row(
        "BatchHardTripletLoss BatchAllTripletLoss BatchSemiHardTripletLoss BatchHardSoftMarginTripletLoss",
        "`loss=batch_triplet` with `loss.mining`",
    ),
    Row("MarginMSELoss", "`loss=margin_mse`"),
    Row("DistillKLDivLoss", "`loss=distill_scores`", also="KLDivLoss kl_div knowledge_distillation m3_kd_loss"),
    Row("MSELoss EmbedDistillLoss", "`loss=distill_embeddings`"),
    Row("GlobalOrthogonalRegularizationLoss", "`loss=orthogonal`, in `loss=combined`", also="GOR"),
    Row("", "`loss=siglip`", also="SigmoidLoss SigLIPLoss"),
    Row(
        "",
        "`loss=sentence_transformers loss.class_name=NAME loss.arguments={...}`",
        shown="any other loss class that computes from embeddings",
    ),
)
