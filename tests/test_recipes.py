"""The recipes of the project: their commands compose, they name the sources of their values, and they train."""

import contextlib
import io
import json
import shlex
import string
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

from embedtrain.commands.plan import compose_plan
from embedtrain.commands.plan.compute import plan
from embedtrain.config.compose import compose_recipes
from embedtrain.config.kind_settings import PAIR_TEMPLATES
from embedtrain.config.recipe import Pooling, Recipe, Strategy
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.training.train import train
from tests.conftest import ROOT
from tests.image_text.models import row_value, save_image_text
from tests.marks import slow_but
from tests.runs import run_without_base
from tests.small import (
    batch,
    model_options,
    save_language_model,
    save_small,
    small_model,
    small_tokenizer,
    text,
    write_rows,
)
from tests.token_rerankers import save_causal
from tests.vision_language.models import save_vision_model
from tests.vision_language.rerankers import save_vision_reranker

PATHS = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.yaml"))}
MODELS = {
    "bce_xlmr": "xlm-roberta", "bge_m3_dense": "xlm-roberta", "e5_mistral_lora": "mistral", "llama_embedder": "llama",
    "minilm": "bert", "modernbert": "modernbert", "qwen3_embedder": "qwen3", "simcse": "bert",
    "reasonir": "llama",
}  # fmt: skip
RERANKERS = {
    "bce_reranker": "xlm-roberta", "bge_reranker": "xlm-roberta", "modernbert_reranker": "modernbert",
    "qwen3_reranker": "qwen3",
}  # fmt: skip
LATE_INTERACTION = {"modern_colbert": "modernbert", "colbert_xlmr": "xlm-roberta"}
M3 = {"bge_m3": "xlm-roberta"}
SPARSE = {"splade": "bert", "splade_doc": "distilbert"}
IMAGE_TEXT = {"clip": "clip", "siglip2": "siglip"}
VISION_RERANKERS = {"qwen3_vl_reranker": "qwen3_vl"}
VISION_LANGUAGE = {"qwen3_vl_embedding": "qwen3_vl", "gme": "qwen2_vl", "vlm2vec": "qwen2_vl"}
PAGES = {"colqwen2_5": "qwen2_5_vl", "colqwen3": "qwen3_vl", "colsmol": "idefics3", "colmodernvbert": "modernvbert"}
# Their published sizes, for no configuration can be fetched here.
_XLMR = {"model_type": "xlm-roberta", "vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}
_XLMR_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_XLMR_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_BERT_BASE = {"model_type": "bert", "vocab_size": 30522, **_XLMR_BASE}
_MODERNBERT = {
    "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "num_hidden_layers": 22,
    "num_attention_heads": 12, "intermediate_size": 1152, "max_position_embeddings": 8192,
}  # fmt: skip
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151669, "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072, "head_dim": 128,
}  # fmt: skip
SIZES: dict[str, tuple[dict[str, object], float]] = {
    "bce_xlmr": (_XLMR | _XLMR_BASE, 0.28),
    "bge_m3_dense": (_XLMR | _XLMR_LARGE | {"max_position_embeddings": 8194}, 0.57),
    "bge_m3": (_XLMR | _XLMR_LARGE | {"max_position_embeddings": 8194}, 0.57),
    "e5_mistral_lora": (
        {"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}, 7.15,
    ),
    "llama_embedder": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192, "head_dim": 64}, 1.24,
    ),
    "reasonir": (
        {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}, 7.5,
    ),
    "minilm": (
        {"model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6,
         "num_attention_heads": 12, "intermediate_size": 1536}, 0.0225,
    ),
    "modernbert": (_MODERNBERT, 0.149),
    "simcse": (_BERT_BASE, 0.1095),
    "qwen3_embedder": (_QWEN3, 0.595),
    "bce_reranker": (_XLMR | _XLMR_BASE, 0.28),
    "bge_reranker": (_XLMR | _XLMR_LARGE | {"max_position_embeddings": 8194}, 0.57),
    "modernbert_reranker": (_MODERNBERT, 0.149),
    "qwen3_reranker": (_QWEN3, 0.595),
    "modern_colbert": (_MODERNBERT, 0.149),
    "colbert_xlmr": (_XLMR | _XLMR_BASE, 0.28),
    "splade": (_BERT_BASE, 0.1095),
    "splade_doc": (
        {"model_type": "distilbert", "vocab_size": 30522, "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
        0.067,
    ),
    # The defaults of transformers' configurations are those of ViT-B/32, and of SigLIP base with another vocabulary.
    "clip": ({"model_type": "clip", "vocab_size": 49408}, 0.1513),
    "siglip2": ({"model_type": "siglip", "text_config": "{vocab_size: 256000}", "vocab_size": 256000}, 0.3752),
}  # fmt: skip
# Reopening costs a second or two: where adapters are merged, and one for each pooling.
CHECKED = ("bge_m3", "bge_m3_dense", "e5_mistral_lora", "llama_embedder", "qwen3_embedder")
# One of each architecture or kind; those of the others are slow tests.
PLANNED = {"bce_xlmr", "qwen3_reranker", "modern_colbert", "bge_m3", "siglip2"}
TRAINED = {"bce_xlmr", "e5_mistral_lora", "bce_reranker"}


def header(name: str) -> list[str]:
    """A recipe's comment above its `# @package`."""
    lines = PATHS[name].read_text().splitlines()
    return [line.removeprefix("#").strip() for line in lines[: lines.index("# @package _global_")]]


def compose_named(name: str, *arguments: str) -> Recipe:
    (recipe,) = compose_recipes([f"recipe={name}", *arguments])
    return recipe


@pytest.mark.parametrize("name", PATHS)
def test_the_first_line_is_the_command(name):
    words = shlex.split(header(name)[0])
    start = words.index("embedtrain") + 1
    assert words[start] == f"recipe={name}"
    (recipe,) = compose_recipes(words[start:])
    assert recipe.name == name
    assert recipe.data.train, "the command says where the rows go"


@pytest.mark.parametrize(
    "name",
    [*MODELS, *RERANKERS, *LATE_INTERACTION, *M3, *SPARSE, *IMAGE_TEXT, *VISION_LANGUAGE, *VISION_RERANKERS, *PAGES],
)
def test_the_sources_of_values_are_named(name):
    text = " ".join(header(name)[1:])
    assert "ublish" in text
    assert "our" in text.lower()
    recipe = compose_named(name, "data.train=[my.jsonl]")
    assert recipe.parallel.strategy is Strategy.auto
    assert recipe.parallel.block_class is None


@pytest.mark.quick("siglip2", "bge_m3")
@pytest.mark.parametrize("name", slow_but(PLANNED, [*MODELS, *RERANKERS, *LATE_INTERACTION, *M3, *SPARSE, *IMAGE_TEXT]))
def test_a_recipe_is_planned(name):
    """For one node of 80 GB GPUs, in the model's real size: it fits, and has as many parameters as published."""
    config, billions = SIZES[name]
    written = ", ".join(f"{key}: {value}" for key, value in config.items())
    arguments = [f"recipe={name}", "model.path=null", f"model.config={{{written}}}", "gpus=8", "gpu_memory=80"]
    arguments += [f"model.vocab_size={config['vocab_size']}", *(["model.pooling=mean"] if name in MODELS else [])]
    planned = plan(*compose_plan(arguments))
    assert planned.best.fits
    assert planned.model.weights.parameters == pytest.approx(billions * 1e9, rel=0.02)
    assert planned.largest_chunk is not None
    vectors = {"modern_colbert": (32, 300), "colbert_xlmr": (32, 256), "bge_m3": (512, 512)}.get(name, (1, 1))
    assert planned.model.vectors == vectors


def test_every_recipe_has_a_run():
    # `make demo` and its own tests run the quickstart, tests/test_demo_reranker.py the reranker of its data, and
    # tests/image_text/test_quickstart.py that of pictures.
    quickstarts = {"quickstart", "quickstart_reranker", "quickstart_colbert", "quickstart_images"}
    others = {*LATE_INTERACTION, *M3, *SPARSE, *IMAGE_TEXT, *VISION_LANGUAGE, *PAGES, *VISION_RERANKERS, *quickstarts}
    assert set(PATHS) == {*MODELS, *RERANKERS, *others}


@pytest.mark.parametrize("name", LATE_INTERACTION)
def test_skip_lists_have_all_punctuation(name):
    settings = compose_named(name, "data.train=[my.jsonl]").model
    assert settings.skiplist_words is not None
    assert sorted(settings.skiplist_words) == sorted(string.punctuation)


def test_the_larger_llama_is_an_override():
    """What is the recipe's stays the recipe's, whichever model is chosen."""
    small = compose_named("llama_embedder", "data.train=[my.jsonl]")
    large = compose_named("llama_embedder", "model=llama_3_1_8b", "optim.lr=2e-6", "data.train=[my.jsonl]")
    assert (small.model.path, large.model.path) == ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B")
    large.model.path, large.optim.lr = small.model.path, small.optim.lr
    assert large == small
    assert (small.model.pooling, small.model.bidirectional) == (Pooling.mean, True)
    assert (small.model.query_prompt, small.model.document_prompt) == ("query: ", "passage: ")


def test_the_trained_minilm_is_an_override(minilm_dir):
    recipe = compose_named("minilm", "model=minilm", "data.train=[my.jsonl]")
    assert recipe.model.path == "sentence-transformers/all-MiniLM-L6-v2"
    recipe.model.path = str(minilm_dir)
    assert open_model_source(recipe.model).vectors.pooling is Pooling.mean


@pytest.mark.parametrize(("name", "before"), [("qwen3_embedder", "Query:"), ("e5_mistral_lora", "Query: ")])
def test_instructions_are_those_of_the_model_cards(name, before):
    """One has a blank behind `Query:` and one has none; documents have no instruction."""
    recipe = compose_named(name, "data.train=[my.jsonl]")
    assert recipe.model.query_prompt.startswith("Instruct: Given a web search query, ")
    assert recipe.model.query_prompt.endswith(f"answer the query\n{before}")
    assert recipe.model.document_prompt == ""
    assert recipe.data.instruction_format == f"Instruct: {{instruction}}\n{before}{{text}}"
    assert (recipe.model.pooling, recipe.model.append_eos) == (Pooling.last, True)


@pytest.mark.parametrize("name", ["qwen3_reranker", "qwen3_vl_reranker"])
def test_the_rerankers_of_qwen3_have_their_instruction(name):
    """Rows replace the instruction of the template in its own words."""
    recipe = compose_named(name, "data.train=[my.jsonl]")
    template = PAIR_TEMPLATES[recipe.model.pair_template]
    assert recipe.data.instruction_format == template.instruction_format


def test_max_lengths_of_rerankers_are_those_of_their_models():
    """The positions of the models, of which XLM-R reserves two, and the length on the card of Qwen3-Reranker."""
    assert compose_named("qwen3_reranker", "data.train=[my.jsonl]").model.max_length == 8192
    for name in RERANKERS.keys() - {"qwen3_reranker"}:
        positions = SIZES[name][0]["max_position_embeddings"]
        expected = positions if name == "modernbert_reranker" else positions - 2
        assert compose_named(name, "data.train=[my.jsonl]").model.max_length == expected


def run(world: World, arguments: list[str]) -> str:
    (recipe,) = compose_recipes(arguments)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        train(recipe, world)
    return output.getvalue()


def shrink(name: str, folder: Path) -> Path:
    """A small random model of the kind that the recipe names; bge-m3 says itself how it pools."""
    architecture = (MODELS | M3)[name]
    model = small_model(architecture)
    window = {"sliding_window": 4} if architecture == "mistral" else {}  # less than the texts have
    directory = save_small(small_model(architecture, config=model.config | window), folder / "plain")
    if not name.startswith("bge_m3"):
        return directory
    from sentence_transformers.sentence_transformer import modules as parts

    modules = [parts.Transformer(str(directory)), parts.Pooling(32, pooling_mode="cls"), parts.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "whole"))
    return folder / "whole"


@pytest.mark.quick("e5_mistral_lora")
@pytest.mark.parametrize("name", slow_but(TRAINED, [*MODELS, *M3]))
def test_a_small_version_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included, but for the sizes of model and batch and the number of steps."""
    rows = write_rows(tmp_path / "train.jsonl", 16)
    arguments = [
        f"recipe={name}", f"model.path={shrink(name, tmp_path)}", f"data.train=[{rows}]", "model.max_length=48",
        "train.epochs=null", "train.steps=2", "train.global_batch_size=8", "train.chunk_tokens=128", "optim.warmup=0",
        "evaluation.sets=[]", f"output_dir={tmp_path / 'run'}", f"export.check={str(name in CHECKED).lower()}",
    ]  # fmt: skip
    output, _ = ranks(2, run, arguments)
    assert ("reopening the adapter with PEFT" in output) == (name == "e5_mistral_lora")
    opened = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    recipe = compose_named(name, *arguments[1:])
    assert opened.prompts["query"] == (recipe.model.query_prompt or "")
    assert opened.prompts["document"] == (recipe.model.document_prompt or "")
    vectors = opened.encode_query(["alpha beta gamma", "delta"])
    assert vectors.shape == (2, 32)
    assert np.isfinite(vectors).all()
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    adapter = tmp_path / "run" / "model" / "adapter"
    assert adapter.is_dir() == (name == "e5_mistral_lora")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", ", delete_words: 0.6"])
def test_texts_alone_train(ranks, tmp_path, more):
    """The recipe simcse as its comment shows it, but for the sizes of model and batch and the number of steps."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text(i, 9)}) + "\n" for i in range(32)))
    model = save_small(small_model("bert", dropout=0.3), tmp_path / "plain")
    arguments = [
        "recipe=simcse", f"data.train=[{{path: {tmp_path / 'texts.jsonl'}, text_as_positive: true{more}}}]",
        f"model.path={model}", "train.global_batch_size=8", f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    output = ranks(2, run, arguments)[0]
    assert "column text = query and positive" in output
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["hidden_dropout_prob"] == 0.3, "0.1 is that of training"
    vectors = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu").encode(["alpha beta", "delta"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)


@pytest.mark.parametrize("name", slow_but(TRAINED, [*RERANKERS, "quickstart_reranker"]))
def test_a_small_reranker_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included; some with what their comments show."""
    of_tokens = name == "qwen3_reranker"
    rows: list[dict[str, object]] = [
        {"query": row.query, "pos": [text(300 + i, 4)], "neg": [text(400 + i, 5), text(500 + i, 3 + i % 5)],
         "pos_scores": [2.5], "neg_scores": [-1.0, 0.5]}
        for i, row in enumerate(batch(16).rows)
    ]  # fmt: skip
    if of_tokens:  # with a loss of labels, and a template that takes most of a small tokenizer's tokens
        rows = [{key: row[key] for key in ("query", "pos", "neg")} for row in rows]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    directory = tmp_path / "plain"
    model = save_causal(directory) if of_tokens else save_small(small_model(RERANKERS.get(name, "bert")), directory)
    arguments = [
        f"recipe={name}", f"model.path={model}", f"data.train=[{tmp_path / 'train.jsonl'}]",
        f"model.max_length={320 if of_tokens else 48}", "train.epochs=null", "train.steps=2",
        "train.global_batch_size=8", f"train.chunk_tokens={2048 if of_tokens else 128}", "optim.warmup=0",
        f"output_dir={tmp_path / 'run'}", f"export.check={str(name == 'bge_reranker').lower()}",
    ]  # fmt: skip
    shown = {"bge_reranker": "loss=", "qwen3_reranker": "Adapters: "}
    if name in shown:
        (line,) = [line for line in header(name) if line.startswith(shown[name])]
        arguments += shlex.split(line.removeprefix("Adapters: "))
    output = ranks(2, run, arguments)[0]
    assert ("the score of a token" in output) == of_tokens
    opened = CrossEncoder(str(tmp_path / "run" / "model"), device="cpu")
    scores = opened.predict([(text(1, 3), text(2, 4)), (text(1, 3), text(3, 30))])
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("name", ["modern_colbert", pytest.param("colbert_xlmr", marks=pytest.mark.slow)])
def test_a_small_late_interaction_model_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included, but for the sizes of model and batch and the number of steps."""
    rows = write_rows(tmp_path / "train.jsonl", 16)
    model = save_small(small_model(LATE_INTERACTION[name]), tmp_path / "plain")
    arguments = [
        f"recipe={name}", f"model.path={model}", f"data.train=[{rows}]", "model.max_length=48",
        "train.epochs=null", "train.steps=2", "train.global_batch_size=8", "train.chunk_tokens=256", "optim.warmup=0",
        f"output_dir={tmp_path / 'run'}", f"export.check={str(name == 'modern_colbert').lower()}",
    ]  # fmt: skip
    output = ranks(2, run, arguments)[0]
    assert "a new projection of tokens to 128 dimensions" in output
    opened = MultiVectorEncoder(str(tmp_path / "run" / "model"), device="cpu")
    query, document = opened.encode_query("alpha beta"), opened.encode_document("alpha beta. gamma")
    assert query.shape == (32, 128)
    assert document.shape[1] == 128
    assert np.allclose(np.linalg.norm(query, axis=1), 1, atol=1e-3)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_recipes_train(ranks, tmp_path, name):
    small = small_model(SPARSE[name])
    small.config["vocab_size"] = len(small_tokenizer())  # as static queries need
    model = save_language_model(small, tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 12)
    ranks(1, run_recipe, name, tmp_path, model)
    folder = "document_1_SpladePooling" if name == "splade_doc" else "1_SpladePooling"
    assert (tmp_path / "run" / "model" / folder / "config.json").is_file()


@pytest.mark.parametrize("name", slow_but({"clip"}, IMAGE_TEXT))
def test_a_small_model_of_texts_and_pictures_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included, but for the sizes of model and batch and the number of steps."""
    model = save_image_text(IMAGE_TEXT[name], tmp_path)
    rows = [{"query": text(i, 2 + i % 5), "pos": [row_value(tmp_path, i)]} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"recipe={name}", f"model.path={model}", f"data.train=[{tmp_path / 'train.jsonl'}]", "parallel.precision=bf16",
        "train.epochs=null", "train.steps=2", "train.global_batch_size=8", "train.chunk_tokens=128", "optim.warmup=0",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    ranks(2, run_without_base, *arguments)
    opened = SentenceTransformer(str(tmp_path / "run" / "model"), device="cpu")
    vectors = opened.encode_query(["alpha beta gamma", "delta"])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)


@pytest.mark.parametrize("name", slow_but(set(), VISION_LANGUAGE))
def test_a_small_vision_language_model_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included, but for the sizes of model, pictures and batch."""
    model = save_vision_model(VISION_LANGUAGE[name], tmp_path)
    rows = [{"query": text(i, 2 + i % 5), "pos": [row_value(tmp_path, i)]} for i in range(16)]
    rows[0]["prompt"] = "Find a picture."
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"recipe={name}", f"model.path={model}", f"data.train=[{tmp_path / 'train.jsonl'}]", "parallel.precision=bf16",
        "model.max_length=400", "model.image.min_pixels=128", "model.image.max_pixels=1024", "train.epochs=null",
        "train.steps=2", "train.global_batch_size=8", "train.chunk_tokens=400", "optim.warmup=0", "checkpoint.every=2",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    ranks(2, run_without_base, *arguments)
    source = open_model_source(model_options(path=str(tmp_path / "run" / "model")))
    recipe = compose_named(name, *arguments[1:])
    assert source.prompts["query"] == (recipe.model.query_prompt or "")
    start, _, _ = recipe.model.item_template.partition("{item}")
    assert source.settings.template.starts[0] == start.replace("{prompt}", "")


@pytest.mark.parametrize("name", slow_but(set(), VISION_RERANKERS))
def test_a_small_vision_language_reranker_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included, but for the sizes of model, pictures and batch."""
    model = save_vision_reranker(VISION_RERANKERS[name], tmp_path, scorer=False)
    rows = [{"query": text(i, 2), "pos": [row_value(tmp_path, i)], "neg": [text(i + 4, 5)]} for i in range(16)]
    rows[0]["prompt"] = "Find a picture."
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"recipe={name}", f"model.path={model}", f"data.train=[{tmp_path / 'train.jsonl'}]", "parallel.precision=bf16",
        "model.max_length=500", "model.image.min_pixels=128", "model.image.max_pixels=1024", "train.epochs=null",
        "train.steps=2", "train.global_batch_size=8", "train.chunk_tokens=1000", "optim.warmup=0", "checkpoint.every=2",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    ranks(2, run_without_base, *arguments)
    source = open_model_source(model_options("cross_encoder", path=str(tmp_path / "run" / "model")))
    assert "".join(source.settings.template.prefix) + source.prompts["query"] == (
        PAIR_TEMPLATES["qwen3_vl"].prefix[0] + PAIR_TEMPLATES["qwen3_vl"].prompts["query"]
    )


def run_recipe(world: World, name: str, folder: Path, model: Path) -> None:
    recipe = compose_named(
        name, f"data.train=[{folder / 'train.jsonl'}]", f"model.path={model}", "model.max_length=48",
        "train.steps=1", "train.epochs=null", "train.global_batch_size=4", f"output_dir={folder / 'run'}",
        f"data.cache_dir={folder / 'cache'}", "parallel.precision=fp32",
    )  # fmt: skip
    train(recipe, world)


@pytest.mark.parametrize("name", slow_but(set(), PAGES))
def test_a_small_model_over_pages_trains(ranks, tmp_path, name):
    """As it is, bf16 and strategy auto included, but for the sizes of model, pictures and batch."""
    model = save_vision_model(PAGES[name], tmp_path)
    rows = [{"query": text(i, 2 + i % 5), "pos": [row_value(tmp_path, i)]} for i in range(16)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        f"recipe={name}", f"model.path={model}", f"data.train=[{tmp_path / 'train.jsonl'}]", "train.epochs=null",
        "train.steps=2", "train.global_batch_size=8", "train.chunk_tokens=256", "optim.warmup=0",
        f"output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    if name.startswith("colqwen"):
        arguments.append("model.image.max_pixels=1024")
    output = ranks(2, run, arguments)[0]
    dimension = 320 if name == "colqwen3" else 128
    assert f"a new projection of tokens to {dimension} dimensions, meanmaxsim" in output
    architecture = json.loads((tmp_path / "run/model/config.json").read_text())["architectures"]
    expected = {"colqwen2_5": "ColQwen2_5", "colqwen3": "ColQwen3", "colsmol": "ColIdefics3"}
    assert architecture == [expected.get(name, "ColModernVBertForRetrieval")]
    assert compose_named(name, "data.train=[my.jsonl]").loss.temperature == 0.02
