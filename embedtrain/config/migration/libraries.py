"""Options of sentence-transformers, FlagEmbedding and Tevatron for training."""

from embedtrain.config.conversions import (
    POOLING,
    Answer,
    Flag,
    Row,
    in_list,
    integer,
    integers,
    number,
    of_source,
    one_of,
    same,
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
    Row("", "not available", shown="images, audio, JAX"),
)
