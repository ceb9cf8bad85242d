"""The commands of the pages for migrating users train on the texts that the other library trains on."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.data_collator import BaseDataCollator
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from embedtrain.config.compose import compose_recipes
from embedtrain.config.names import suggest
from embedtrain.config.recipe import Recipe
from embedtrain.data.cache.cache import Cache
from embedtrain.data.train_data import TrainData, load_recipe_data
from embedtrain.formats.source import open_model_source
from tests.conftest import ROOT
from tests.docs.commands import commands
from tests.docs.pages import blocks
from tests.small import save_small, small_model

Rendered = list[tuple[str, list[str]]]  # the query and the documents of each row

ROWS = [
    {"query": "q1", "pos": ["p1"], "neg": ["n1", "n2"], "prompt": "Given a question, find passages."},
    {"query": "q2", "pos": ["p2"], "neg": ["n3"], "prompt": "Find this.", "type": "symmetric_sts"},
    {"query": "q3", "pos": ["p3"], "neg": ["n4"], "prompt": "Find this.", "type": "symmetric_clustering"},
    {"query": "q4", "pos": ["p4"], "neg": ["n5"], "prompt": "", "type": "normal"},
    {"query": "q5", "pos": ["p5"], "neg": ["n6"]},
]


def flag_embedding(rows: list[dict[str, Any]], options: Mapping[str, str], instruction: str) -> Rendered:
    """FlagEmbedding 1.4, `AbsDataset.py`: embedders, with `--same_dataset_within_batch` and without, and rerankers."""
    query_format = options.get("query_instruction_format", "{}{}")
    passage_format = options.get("passage_instruction_format", "{}{}")
    passage_instruction = options.get(instruction.replace("query", "passage"))
    by_dataset = options.get("same_dataset_within_batch") == "True"
    prompt_key = "query_prompt" if instruction.endswith("rerank") else "prompt"

    def render(row: dict[str, Any]) -> tuple[str, list[str]]:
        query, documents = row["query"], [*row["pos"], *row["neg"]]
        prompt = row.get(prompt_key, options.get(instruction))
        if by_dataset or instruction in options:
            query = query_format.format(prompt, query)
        if by_dataset and row.get("type") in ("symmetric_sts", "symmetric_clustering"):
            documents = [query_format.format(prompt, document) for document in documents]
        elif passage_instruction is not None:
            documents = [passage_format.format(passage_instruction, document) for document in documents]
        return query, documents

    return [render(row) for row in rows]


def tevatron(rows: list[dict[str, Any]], options: Mapping[str, str]) -> Rendered:
    """Tevatron 2: `dataset.py`, rows with passages."""

    def passage(value: Mapping[str, str]) -> str:
        text = f"{value['title']} {value['text']}" if "title" in value else value["text"]
        return options.get("passage_prefix", "") + text

    return [
        (
            options.get("query_prefix", "") + row["query"],
            [passage(value) for value in (*row["positive_passages"], *row["negative_passages"])],
        )
        for row in rows
    ]


def theirs(page: str) -> Iterator[dict[str, str]]:
    """The options of each command of the other library, `--name value`."""
    for block in blocks(ROOT / "docs" / page):
        if block.language == "bash" and block.excused:
            words = shlex.split(block.text.replace("\\\n", " "), comments=True)
            names = [(index, word[2:]) for index, word in enumerate(words) if word.startswith("--")]
            yield {name: (words[index + 1] if index + 1 < len(words) else "") for index, name in names}


def ours(page: str, number: int, rows: list[dict[str, Any]], tmp_path: Path, *more: str) -> Rendered:
    """What the `number`th training of the page trains on, of these rows instead of its data."""
    shell = [block.text for block in blocks(ROOT / "docs" / page) if block.language == "bash" and not block.excused]
    trainings = [command for text in shell for command in commands(text) if command.name == "train"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = [re.sub(r"path: [^,}]+", f"path: {path}", word) for word in trainings[number].arguments]
    (recipe,) = compose_recipes([*arguments, *more])
    prompts = {"query": recipe.model.query_prompt or "", "document": recipe.model.document_prompt or ""}
    data, _ = load_recipe_data(recipe, prompts, Cache(directory=tmp_path / "cache"))
    return rendered(data)


def rendered(data: TrainData) -> Rendered:
    texts = []
    for example in data.stores[0]:
        query, document = data.settings[0].text_format.prompts(example)
        texts.append(
            (query(example.query), [document(text) for text in (*example.positives.texts, *example.negatives.texts)])
        )
    return texts


INSTRUCTION = "query_instruction_for_retrieval"
# Further options of theirs and ours: other formats, a passage's instruction, and none at all.
FLAG_OPTIONS: list[tuple[dict[str, str], list[str]]] = [
    ({}, []),
    (
        {"query_instruction_format": "Instruct: {}\nQuery: {}", INSTRUCTION: "Find."},
        [
            'data.instruction_format="Instruct: {instruction}\nQuery: {text}"',
            'model.query_prompt="Instruct: Find.\nQuery: "',
        ],
    ),
    ({"passage_instruction_for_retrieval": "passage: "}, ['model.document_prompt="passage: "']),
]


@pytest.mark.parametrize(("options", "more"), FLAG_OPTIONS)
def test_flagembedding_trains_embedders_on_the_same_texts(options, more, tmp_path):
    command = next(theirs("from-flagembedding.md"))
    assert command["same_dataset_within_batch"] == "True"
    rows = [row for row in ROWS if row.get("prompt") != "" or not options]  # an empty one is no instruction here
    expected = flag_embedding(rows, command | options, INSTRUCTION)
    assert expected[0][0].endswith("q1")
    assert ours("from-flagembedding.md", 0, rows, tmp_path, *more) == expected


def test_flagembedding_without_an_instruction_uses_no_prompt_of_a_row(tmp_path):
    expected = flag_embedding(ROWS, {}, INSTRUCTION)
    assert expected == [(row["query"], [*row["pos"], *row["neg"]]) for row in ROWS]
    more = ['data.instruction_format="{text}"', 'model.query_prompt=""']
    assert ours("from-flagembedding.md", 0, ROWS, tmp_path, *more) == expected


def test_flagembedding_trains_rerankers_on_the_same_texts(tmp_path):
    _, command, *_ = theirs("from-flagembedding.md")
    rows = [{**row, "pos_scores": [1], "neg_scores": [0] * len(row["neg"])} for row in ROWS]
    expected = flag_embedding(rows, command, "query_instruction_for_rerank")
    assert ours("from-flagembedding.md", 2, rows, tmp_path) == expected
    expected = flag_embedding(rows, {"query_instruction_for_rerank": "A: "}, "query_instruction_for_rerank")
    assert ours("from-flagembedding.md", 2, rows, tmp_path, 'model.query_prompt="A: "') == expected


def test_example_files_of_flagembedding_are_trained_on_with_the_same_texts(shared_data, tmp_path):
    command = next(theirs("from-flagembedding.md"))
    files = sorted((shared_data / "flagembedding-examples" / "embedder").rglob("*.jsonl"))
    assert len(files) == 8
    for path in files:
        rows = [json.loads(line) for line in path.open(encoding="utf-8")]
        for row in rows:  # a document that is listed twice, or is a positive, is no further negative here
            row["neg"] = [text for text in dict.fromkeys(row["neg"]) if text not in row["pos"]]
        assert ours("from-flagembedding.md", 0, rows, tmp_path) == flag_embedding(rows, command, INSTRUCTION), path


def test_tevatron_trains_on_the_same_texts(tmp_path):
    command = next(theirs("from-tevatron.md"))
    assert {"query_prefix", "passage_prefix"} <= command.keys()
    passages = [
        {"docid": "1", "title": "T", "text": "a"},
        {"docid": "2", "text": "b"},
        {"docid": "3", "text": "c d"},
    ]
    rows = [{"query_id": "1", "query": "q", "positive_passages": passages[:1], "negative_passages": passages[1:]}]
    expected = tevatron(rows, command)
    assert expected[0][1][0] == "Passage: T a"
    assert ours("from-tevatron.md", 0, rows, tmp_path) == expected


def test_the_trainer_of_sentence_transformers_uses_no_prompts_of_the_model(tmp_path):
    """Its collator passes on those of its arguments alone; embedtrain trains with those of the directory."""
    backbone = Transformer(str(save_small(small_model("bert"), tmp_path / "backbone")))
    modules = [backbone, Pooling(backbone.get_embedding_dimension(), "mean")]
    directory = tmp_path / "model"
    SentenceTransformer(modules=modules, prompts={"query": "alpha ", "document": "beta "}, device="cpu").save(
        str(directory)
    )
    seen: dict[str, str | None] = {}

    def preprocess(inputs: list[str], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        seen[inputs[0]] = prompt
        return {}

    features = [{"anchor": "gamma", "positive": "delta"}]
    BaseDataCollator(preprocess_fn=preprocess)(features)
    assert seen == {"gamma": None, "delta": None}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(features[0]) + "\n", encoding="utf-8")
    texts = {}
    for without in (False, True):
        more = ['model.query_prompt=""', 'model.document_prompt=""'] * without
        (recipe,) = compose_recipes([f"model.path={directory}", f"data.train=[{path}]", *more])
        source = open_model_source(recipe.model)
        data, _ = load_recipe_data(recipe, source.prompts, Cache(directory=tmp_path / "cache"))
        texts[without] = rendered(data)
    assert texts == {False: [("alpha gamma", ["beta delta"])], True: [("gamma", ["delta"])]}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("query_instruction_format", "{}{}", """'data.instruction_format="{instruction}{text}"'"""),
        ("query_instruction_format", "[{}] {}", """'data.instruction_format="[{instruction}] {text}"'"""),
        ("passage_instruction_format", "{}{}", "model.document_prompt"),
    ],
)
def test_formats_of_flagembedding_are_converted(name, value, expected):
    suggestion = suggest(name, Recipe, value)
    assert suggestion is not None
    assert expected in suggestion
