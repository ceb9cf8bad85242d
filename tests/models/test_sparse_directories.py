"""Published directories of sparse models, in the files that sentence-transformers, naver and OpenSearch write."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from torch import Tensor
from transformers import AutoModelForMaskedLM

from embedtrain.config.kind_settings import SparseQueries
from embedtrain.config.recipe import LoraConfig, ModelConfig, Precision
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model, open_encoder_source
from tests.small import model_options, save_language_model, save_small, small_model, small_tokenizer, text

TEXTS = [text(seed, length) for seed, length in enumerate((30, 19, 3, 1))] + ["", "alpha alpha beta", "[SEP] </s> x"]
WEIGHTS = torch.linspace(0.5, 6.0, len(small_tokenizer()))
IDF = {token: float(WEIGHTS[number]) for token, number in small_tokenizer().get_vocab().items()}
FIVE = "sentence_transformers.sparse_encoder.models."


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def language_model(directory: Path) -> Path:
    small = small_model("bert", kind="sparse", pooling=None)
    small.config["vocab_size"] = len(small_tokenizer())
    return save_language_model(small, directory)


def static_folder(directory: Path, *, frozen: bool = True) -> None:
    write(directory / "config.json", {"frozen": frozen})
    save_file({"weight": WEIGHTS}, directory / "model.safetensors")
    small_tokenizer().save_pretrained(directory)


def settings_of_five(directory: Path, modules: list[tuple[str, str]]) -> None:
    """What version 5 wrote beside the modules."""
    entries = [{"idx": n, "name": str(n), "path": path, "type": kind} for n, (path, kind) in enumerate(modules)]
    write(directory / "modules.json", entries)
    versions = {"sentence_transformers": "5.0.0", "transformers": "4.50.3", "pytorch": "2.6.0+cu124"}
    settings = {"model_type": "SparseEncoder", "__version__": versions, "prompts": {"query": "", "document": ""}}
    settings |= {"default_prompt_name": None, "similarity_fn_name": "dot"}
    write(directory / "config_sentence_transformers.json", settings)


def router(directory: Path, document: str, *, activation: str = "relu") -> None:
    """A Router of version 5 whose documents' transformer is in the folder `document`."""
    types = {
        "query_0_SparseStaticEmbedding": f"{FIVE}SparseStaticEmbedding",
        document: f"{FIVE}MLMTransformer",
        "document_1_SpladePooling": f"{FIVE}SpladePooling",
    }
    structure = {"query": ["query_0_SparseStaticEmbedding"], "document": [document, "document_1_SpladePooling"]}
    parameters = {"default_route": "document", "allow_empty_key": True}
    write(directory / "router_config.json", {"types": types, "structure": structure, "parameters": parameters})
    pooling = {"pooling_strategy": "max", "activation_function": activation, "word_embedding_dimension": len(WEIGHTS)}
    write(directory / "document_1_SpladePooling/config.json", pooling)
    settings_of_five(directory, [("", "sentence_transformers.models.Router")])


def version_six(directory: Path) -> None:
    documents = Transformer(str(language_model(directory.with_name("plain"))), transformer_task="fill-mask")
    queries = SparseStaticEmbedding(small_tokenizer(), WEIGHTS.clone())
    routes = Router.for_query_document([queries], [documents, SpladePooling("sum")])
    SparseEncoder(modules=[routes], similarity_fn_name="dot", device="cpu").save(str(directory))


def version_five(directory: Path) -> None:
    language_model(directory / "document_0_MLMTransformer")
    transformer = directory / "document_0_MLMTransformer/sentence_bert_config.json"
    write(transformer, {"max_seq_length": 24, "do_lower_case": False})
    static_folder(directory / "query_0_SparseStaticEmbedding", frozen=False)
    router(directory, "document_0_MLMTransformer")


def opensearch(directory: Path) -> None:
    """opensearch-neural-sparse-encoding-doc-v3-distill: the transformer at the root, two logarithms."""
    language_model(directory)
    static_folder(directory / "query_0_SparseStaticEmbedding")
    router(directory, "", activation="log1p_relu")
    write(directory / "idf.json", IDF)
    (directory / "query_token_weights.txt").write_text("\n".join(f"{token}\t{IDF[token]}" for token in IDF))


def naver(directory: Path) -> None:
    """splade-v3, with files of version 5."""
    language_model(directory)
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": len(WEIGHTS)}
    write(directory / "1_SpladePooling/config.json", pooling)
    write(directory / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": False})
    settings_of_five(directory, [("", f"{FIVE}MLMTransformer"), ("1_SpladePooling", f"{FIVE}SpladePooling")])


def naver_pickle(directory: Path) -> None:
    """splade-cocondenser-ensembledistil: a masked language model with its weights as a pickle, and nothing else."""
    language_model(directory)
    weights = AutoModelForMaskedLM.from_pretrained(directory).state_dict()
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")


LAYOUTS = {layout.__name__: layout for layout in (version_six, version_five, opensearch, naver, naver_pickle)}
STATIC = {"version_six", "version_five", "opensearch"}


def encode(world: World, model: ModelConfig) -> list[Tensor]:
    """Weights of words in TEXTS as documents and as queries."""
    loaded = load_encoder_model(model, Precision.fp32, world)
    encoder = SentenceEncoder.from_model(loaded, world, chunk_tokens=64)
    return [encoder.encode(TEXTS, role=role).values for role in (TextRole.document, TextRole.query)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_sentence_transformers(ranks, tmp_path, layout):
    LAYOUTS[layout](tmp_path / "model")
    model = model_options(path=str(tmp_path / "model"), kind="sparse")
    source = open_model_source(model)
    assert source.kind.name == "sparse"
    assert (source.settings.queries is not None) == (layout in STATIC)
    opened = SparseEncoder(str(tmp_path / "model"), device="cpu")
    arguments = {"convert_to_tensor": True, "convert_to_sparse_tensor": False}
    expected = [opened.encode_document(TEXTS, **arguments), opened.encode_query(TEXTS, **arguments)]
    for own, reference in zip(ranks(1, encode, model)[0], expected, strict=True):
        torch.testing.assert_close(own, reference.float(), rtol=1e-4, atol=1e-5)
    if layout in STATIC:
        assert not expected[1][TEXTS.index("")].any()
        for row, written in zip(expected[1], TEXTS, strict=True):
            words = set(small_tokenizer()(written, add_special_tokens=False)["input_ids"])
            assert set(row.nonzero()[:, 0].tolist()) == words


def test_idf_alone_makes_queries_static(ranks, tmp_path):
    """The older models of OpenSearch are a masked language model and idf.json."""
    language_model(tmp_path)
    write(tmp_path / "idf.json", IDF)
    source = open_encoder_source(model_options(path=str(tmp_path)))[1]
    assert source.kind.name == "sparse"
    assert source.settings.query_mode is SparseQueries.static
    _, queries = ranks(1, encode, model_options(path=str(tmp_path), kind="sparse"))[0]
    for row, written in zip(queries, TEXTS, strict=True):
        words = sorted(set(small_tokenizer()(written, add_special_tokens=False)["input_ids"]))
        assert row.nonzero()[:, 0].tolist() == words
        torch.testing.assert_close(row[words], WEIGHTS[words])
    encoded = model_options(path=str(tmp_path), kind="sparse", queries=SparseQueries.encoded)
    assert open_model_source(encoded).settings.queries is None


def change_router(**changes: object):
    def change(directory: Path) -> None:
        path = directory / "router_config.json"
        write(path, json.loads(path.read_text()) | changes)

    return change


def other_tokenizer(directory: Path) -> None:
    folder = directory / "query_0_SparseStaticEmbedding"
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"alpha"', '"omega"'))


def missing_weights(directory: Path) -> None:
    weights = directory / "query_0_SparseStaticEmbedding/model.safetensors"
    save_file({"weight": WEIGHTS[1:]}, weights)


BROKEN = {
    "router_config.json has the routes query: .*MLMTransformer": change_router(
        structure={"query": ["", "document_1_SpladePooling"], "document": ["", "document_1_SpladePooling"]}
    ),
    "structure.query=.*other": change_router(structure={"query": ["other"]}),
    r"router_config.json names .*outside": change_router(types={"../x": "y"}, structure={"query": ["../x"]}),
    "has another tokenizer": other_tokenizer,
    r"model.safetensors: weight \[52\]": missing_weights,
    "path='idf.json' names another file": lambda directory: write(
        directory / "query_0_SparseStaticEmbedding/config.json", {"path": "idf.json"}
    ),
}


@pytest.mark.parametrize("pattern", BROKEN)
def test_broken_directories_are_rejected(ranks, tmp_path, pattern):
    opensearch(tmp_path / "model")
    BROKEN[pattern](tmp_path / "model")
    model = model_options(path=str(tmp_path / "model"), kind="sparse")
    (message,) = ranks(1, rejection, model)
    with pytest.raises(ModelError, match=pattern):
        raise ModelError(message)


def rejection(world: World, model: ModelConfig) -> str:
    with pytest.raises(EmbedtrainError) as caught:
        load_encoder_model(model, Precision.fp32, world)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [({"omega": 1.0}, "idf.json has the token 'omega'"), ({"alpha": "x"}, "idf.json: the weight 'x' of 'alpha'")],
    ids=["unknown", "text"],
)
def test_broken_weights_of_tokens_are_rejected(ranks, tmp_path, content, pattern):
    language_model(tmp_path)
    write(tmp_path / "idf.json", content)
    (message,) = ranks(1, rejection, model_options(path=str(tmp_path), kind="sparse"))
    with pytest.raises(ModelError, match=pattern):
        raise ModelError(message)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"lora": LoraConfig(rank=2)}, r"model\.lora: .*static"),
        ({"query_weights": "none.json"}, r"model\.query_weights=none\.json"),
        ({"train_query_weights": True}, r"model\.train_query_weights=True: .*queries=static"),
    ],
    ids=["adapters", "file", "encoded"],
)
def test_options_that_do_not_fit_the_files(tmp_path, options, pattern):
    language_model(tmp_path)
    options = dict(options)
    lora = options.pop("lora", LoraConfig())
    queries = SparseQueries.static if "query_weights" in options or lora.on else None
    sparse = {"queries": queries, **options}
    with pytest.raises(ConfigError, match=pattern):
        open_model_source(model_options(path=str(tmp_path), kind="sparse", **sparse, lora=lora))


@pytest.mark.parametrize("architecture", ["bert", "modernbert"])
def test_an_embedding_model_has_no_head_that_weighs_words(ranks, tmp_path, architecture):
    save_small(small_model(architecture), tmp_path)
    (message,) = ranks(1, rejection, model_options(path=str(tmp_path), kind="sparse"))
    assert f"{tmp_path} lacks " in message
    assert "masked language model" in message


def test_a_vocabulary_of_another_size_is_rejected(ranks, tmp_path):
    """Sentence-transformers gives queries as many words as the tokenizer has tokens."""
    save_language_model(small_model("bert"), tmp_path)
    sparse = {"queries": SparseQueries.static}
    model = model_options(path=str(tmp_path), kind="sparse", **sparse)
    (message,) = ranks(1, rejection, model)
    assert message.startswith("model.queries=static: the tokenizer has 53 tokens")
