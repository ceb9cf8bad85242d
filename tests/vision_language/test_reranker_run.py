"""Whole runs of rerankers of texts and pictures: trained, exported, opened again, and used by commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import transformer

from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.evaluate import run as evaluate
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.commands.mine import run as mine
from embedtrain.distributed.world import World
from embedtrain.formats.verify import probe_outputs
from embedtrain.kinds.dense import vision
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.commands import call
from tests.image_text.models import picture_item
from tests.image_text.test_search import found
from tests.runs import evaluation_metrics, losses, rewind_run, run_without_base
from tests.small import text
from tests.vision_language.models import save_vision_model
from tests.vision_language.rerankers import save_vision_reranker
from tests.vision_language.test_reranker import opened

SETTINGS = [
    "name=t", "model.kind=cross_encoder", "train.global_batch_size=8", "train.log_every=1", "train.chunk_tokens=800",
    "train.steps=2", "optim.lr=1e-3", "parallel.precision=fp32", "parallel.strategy=fsdp", "parallel.compile=false",
    "checkpoint.every=2", "evaluation.at_start=false", "evaluation.every=2", "tracking.report=false",
]  # fmt: skip


def item(folder: Path, number: int) -> Any:
    """A text, a picture, or a picture and a text, as a value of a row."""
    if number % 3 == 0:
        return text(number, 2 + number % 7)
    picture_item(folder, number)
    picture = {"image": f"picture_{number}.png"}
    return picture if number % 3 == 1 else picture | {"text": text(number, 3)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Rows whose queries or documents have a text, a picture or both, and a reranker."""
    folder = tmp_path_factory.mktemp("vision_reranker_runs")
    rows = [
        {"query": item(folder, i + i % 2), "pos": [item(folder, i)], "neg": [item(folder, i + 20)],
         "pos_scores": [0.9], "neg_scores": [0.1 * (i % 4)]}
        for i in range(16)
    ]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dev = [
        {"query": item(folder, i), "positive": [item(folder, i + 1)], "negative": [item(folder, i + 2), text(i, 4)]}
        for i in range(20, 26)
    ]
    (folder / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dev))
    save_vision_reranker("idefics3", folder)
    return folder


def run(world: World, inputs: Path, *arguments: str) -> None:
    """Train with the pictures of the inputs."""
    for path in inputs.glob("picture_*.png"):
        picture_item(inputs, int(path.stem.removeprefix("picture_")))
    run_without_base(world, *arguments)


def options(inputs: Path, output_dir: Path, model: Path, *more: str) -> list[str]:
    return [
        *SETTINGS, f"model.path={model}", f"data.train=[{inputs / 'train.jsonl'}]",
        f"evaluation.sets=[{inputs / 'dev.jsonl'}]", f"output_dir={output_dir}", *more,
    ]  # fmt: skip


def predicted(directory: Path, inputs: Path, pairs: list[tuple[Any, Any]]) -> list[float]:
    """Logits of pairs of values of rows, by sentence-transformers."""

    def opened_value(value: Any) -> Any:
        if isinstance(value, str):
            return value
        # A picture stands before the text, as in rows; sentence-transformers has the order of the keys.
        picture = {"image": Image.open(inputs / value["image"]).convert("RGB")}
        return picture | {name: value[name] for name in value.keys() - {"image"}}

    model = CrossEncoder(str(directory), device="cpu", activation_fn=torch.nn.Identity())
    scores = model.predict([tuple(map(opened_value, pair)) for pair in pairs], batch_size=2, show_progress_bar=False)
    return [float(score) for score in scores]


def test_an_export_is_opened_by_sentence_transformers(ranks, inputs, tmp_path):
    """A frozen tower and tied rows: the export has a vocabulary head of its own, whose rows give the trained score."""
    model = save_vision_reranker("idefics3", tmp_path, scorer=False, tied=True)
    more = ["loss=bce", "model.image.frozen=true", "model.pair_template=qwen3_vl"]
    ranks(1, run, inputs, *options(inputs, tmp_path / "run", model, *more))
    directory = tmp_path / "run/model"
    stored, before = load_file(directory / "model.safetensors"), load_file(model / "model.safetensors")
    changed = {name for name in before if not torch.equal(stored[name], before[name])}
    assert changed
    assert not any(".vision_model." in name or ".connector." in name for name in changed)
    head, tied = stored["lm_head.weight"], before["model.text_model.embed_tokens.weight"]
    (row,) = (head != tied).any(dim=1).nonzero().flatten().tolist()
    source, tokenizer = opened(directory)
    assert row == source.settings.tokens[0] == tokenizer.tokenizer.convert_tokens_to_ids("yes")
    assert not (directory / "1_LogitScore/model.safetensors").exists()
    settings = json.loads((directory / "sentence_bert_config.json").read_text())
    assert settings["transformer_task"] == "any-to-any"
    config = json.loads((directory / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    assert not config["text_config"]["tie_word_embeddings"]
    card = (directory / "README.md").read_text()
    assert "| sentence-transformers (6.2) | exactly |" in card
    assert "| transformers (5.23) | exactly |" in card
    assert "it documents no reranker of idefics3" in card
    assert "What others do with such a model is not known." in card
    weights = full_state_dict(source, 0)
    trained = weights["head.score.weight"][0]
    torch.testing.assert_close(trained, (head[row] - head[source.settings.tokens[1]]), atol=0, rtol=0)
    assert (trained - (tied[row] - tied[source.settings.tokens[1]])).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["softmax", "distill_scores"])
def test_trained_on_any_number_of_ranks(ranks, inputs, tmp_path, loss):
    """Listwise and distillation; a run resumes on another number of ranks."""
    model = save_vision_reranker("qwen3_vl", tmp_path)
    more = [f"loss={loss}", "train.steps=4", "model.lora={rank: 2, targets: all-linear}"]
    runs = {size: tmp_path / str(size) for size in (1, 3)}
    for size, output_dir in runs.items():
        ranks(size, run, inputs, *options(inputs, output_dir, model, *more), timeout=280)
        assert losses(output_dir) == pytest.approx(losses(runs[1]), rel=1e-4)
        assert evaluation_metrics(output_dir) == evaluation_metrics(runs[1])
    resumed = rewind_run(runs[3], tmp_path / "resumed", 2)
    ranks(2, run, inputs, *options(inputs, resumed, model, *more))
    assert losses(resumed) == pytest.approx(losses(runs[1]), rel=1e-4)
    stored, before = (load_file(path / "model.safetensors") for path in (runs[1] / "model", model))
    changed = {name for name in stored if not torch.equal(stored[name], before[name])}
    assert changed
    assert all("language_model." in name or name == "lm_head.weight" for name in changed)
    card = (runs[1] / "model/README.md").read_text()
    assert '"classifier_from_token": ["no", "yes"]' in card
    assert "/chat_template.jinja --dtype float32" in card
    call("export", f"run={runs[1]}", f"output_dir={tmp_path / 'exported'}")
    torch.testing.assert_close(load_file(tmp_path / "exported/model.safetensors"), stored, rtol=0, atol=0)


@pytest.mark.slow
def test_an_export_of_qwen_is_opened_by_sentence_transformers(inputs, tmp_path, monkeypatch):
    """Its processor of videos needs torchvision; the other parts are opened as they are."""
    directory = save_vision_reranker("qwen2_vl", tmp_path)
    source, tokenizer = opened(directory, 512)
    monkeypatch.setattr(
        transformer.AutoProcessor, "from_pretrained", lambda path, **_: vision.open_processor(Path(path), source)
    )
    files = source.kind.files
    monkeypatch.setattr(transformer.Transformer, "max_seq_length", 512)
    theirs = files.of_sentence_transformers(directory, source, source.prompts, 512)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, 0))
    compared = files.compared(tokenizer, source.prompts)
    torch.testing.assert_close(
        theirs[:, compared], probe_outputs(encoder, source, tokenizer)[:, compared], atol=1e-5, rtol=0
    )


def commanded(world: World, command: str, *arguments: str) -> Any:
    return evaluate(compose_evaluate(list(arguments))) if command == "evaluate" else mine(compose_mine(list(arguments)))


@pytest.mark.parametrize("sizes", [(2,), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_it_reranks_and_teaches(ranks, inputs, tmp_path, sizes):
    """Scores of `evaluate` and `mine` are those of sentence-transformers, pair by pair, on any number of ranks."""
    reranker = inputs / "idefics3"
    sets = [f"reranker={reranker}", f"sets=[{inputs / 'dev.jsonl'}]", "save_runs=true"]
    results = [ranks(n, commanded, "evaluate", *sets, f"output_dir={tmp_path / str(n)}")[0] for n in sizes]
    assert results[0] == results[-1]
    written = [line.split() for line in (tmp_path / "2/runs/dev+reranker.run").read_text().splitlines()]
    rows = [json.loads(line) for line in (inputs / "dev.jsonl").read_text().splitlines()]
    pairs = [(row["query"], document) for row in rows for document in (*row["positive"], *row["negative"])]
    expected = predicted(reranker, inputs, pairs)
    by_query = [sorted(expected[3 * n : 3 * n + 3], reverse=True) for n in range(len(rows))]
    found = [[float(line[4]) for line in written if line[0] == f"dev_query{n}"] for n in range(len(rows))]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(by_query), atol=1e-4, rtol=0)
    dense = save_vision_model("qwen2_vl", tmp_path)
    more = [f"model={dense}", "pooling=last", f"data={inputs / 'train.jsonl'}", f"teacher={reranker}", "negatives=2"]
    ranks(2, commanded, "mine", *more, "relative_margin=null", f"output_dir={tmp_path / 'mined'}")
    rows = [json.loads(line) for line in (tmp_path / "mined/train.jsonl").read_text().splitlines()]
    pairs = [(row["query"], document) for row in rows for document in (*row["pos"], *row["neg"])]
    scores = [score for row in rows for score in (*row["pos_scores"], *row["neg_scores"])]
    assert sum(isinstance(part, dict) for pair in pairs for part in pair) > 10
    assert scores == pytest.approx(predicted(reranker, tmp_path / "mined", pairs), abs=1e-4)


@pytest.mark.slow
def test_search_shows_pictures_in_its_order(inputs, tmp_path):
    """The documents that `search` finds by a picture have the scores of sentence-transformers."""
    documents = [item(inputs, number) for number in range(20, 29)]
    rows = [
        {"_id": f"d{n}"} | (value if isinstance(value, dict) else {"text": value}) for n, value in enumerate(documents)
    ]
    (inputs / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dense = save_vision_model("qwen2_vl", tmp_path)
    printed = call(
        "search", f"model={dense}", "pooling=last", f"corpus={inputs / 'corpus.jsonl'}", "top_k=9", "precision=fp32",
        f"image={inputs / 'picture_22.png'}", f"reranker={inputs / 'idefics3'}",
    )  # fmt: skip
    scores = predicted(inputs / "idefics3", inputs, [({"image": "picture_22.png"}, document) for document in documents])
    expected = {f"d{n}": score for n, score in enumerate(scores)}
    assert found(printed) == pytest.approx(expected, abs=2e-3)
    assert list(found(printed).values()) == sorted(found(printed).values(), reverse=True)
