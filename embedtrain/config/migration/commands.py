"""Commands of other libraries, and their options of evaluation and mining."""

import re

from embedtrain.config.conversions import POOLING, PRECISIONS, Flag, Row, in_list, integer, same

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
