"""Documents of other rows as negatives of a cross-encoder: the same ones, loss and gradient on any number of ranks."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForSequenceClassification

from embedtrain.config.losses import BCEConfig, LossConfig, RankNetConfig, SoftmaxConfig
from embedtrain.config.recipe import TrainSource
from embedtrain.config.row_requirements import with_batch_negatives
from embedtrain.data.cache.cache import Cache
from embedtrain.data.rows import text_keys
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.train_data import TrainData, load_train_data
from embedtrain.distributed.world import World
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.build import build_loss
from embedtrain.losses.score import PairScore
from embedtrain.models.own_class import own_name
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.models.test_cross_encoder import save_reranker
from tests.small import model_options, parallel, text, text_tokenizer

COUNT = 3
LOSSES: dict[str, LossConfig] = {
    "softmax": SoftmaxConfig(temperature=0.5),
    "bce": BCEConfig(),
    "ranknet": RankNetConfig(),
}
WAYS = [ChunkOptions(10_000, pass_overhead_tokens=8), ChunkOptions(70, pass_overhead_tokens=8)]


def write_rows(path: Path) -> Path:
    """Seven rows, most without negatives; one document answers two queries, and a query occurs twice."""
    rows = [{"query": text(i, 1 + i % 4), "pos": [text(100 + i, 3 + i % 9)]} for i in range(7)]
    rows[1] |= {"neg": [text(200, 5), text(201, 3)], "pos_id": ["a"], "neg_id": ["b", "c"]}
    rows[2]["pos"] = [*rows[0]["pos"], text(300, 4)]
    rows[4]["query"] = rows[3]["query"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: str, cache: str, name: str, batch_size: int, tokenizer: TextTokenizer) -> TrainData:
    data = load_train_data(
        [TrainSource(path=path)],
        seed=3,
        global_batch_size=batch_size,
        needs=with_batch_negatives(LOSSES[name].row_requirements, COUNT),
    )
    data.prepare(tokenizer, Cache(directory=Path(cache)))
    return data


def lists(path: str, cache: str, name: str, batch_size: int) -> list[tuple[str, list[str], list[float]]]:
    """Query, documents and labels of each row of batch 1, texts found by their keys."""
    batch = load(path, cache, name, batch_size, text_tokenizer()).batch(1)
    assert batch.tokens is not None
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    texts = [document for row in rows for document in (*row["pos"], *row.get("neg", []))]
    by_key = dict(zip(text_keys(texts).tolist(), texts, strict=True))
    documents = [by_key[key] for key in batch.tokens.keys[len(batch.rows) :].tolist()]
    actual = []
    for row, number in zip(batch.rows, batch.tokens.num_documents.tolist(), strict=True):
        own, documents = documents[:number], documents[number:]
        assert own[: len(row.documents.texts)] == list(row.documents.texts)
        labels = [*(row.documents.scores or [1.0, *[0.0] * (len(row.documents.texts) - 1)])]
        actual.append((row.query, own, [*labels, *[0.0] * (number - len(labels))]))
    assert any(len(own) > 1 for _, own, _ in actual)
    return actual


@lru_cache
def plain(model: str, path: str, cache: str, name: str, batch_size: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient in one process in float64: transformers' class on one pair at a time, textbook losses."""
    reference = AutoModelForSequenceClassification.from_pretrained(model).double().eval()
    tokenizer = text_tokenizer().tokenizer
    terms = []
    for query, documents, labels in lists(path, cache, name, batch_size):
        pairs = [tokenizer(query, document, return_tensors="pt") for document in documents]
        s = torch.stack([reference(pair["input_ids"], pair["attention_mask"]).logits[0, 0] for pair in pairs])
        if name != "bce" and len(documents) == 1:
            continue  # nothing to compare
        if name == "softmax":
            terms.append([-F.log_softmax(s / 0.5, dim=0)[0]])
        elif name == "bce":
            terms.append([F.softplus(x) - y * x for x, y in zip(s, labels, strict=True)])
        else:
            order = [(i, j) for i, y in enumerate(labels) for j, z in enumerate(labels) if y > z]
            terms.append([sum(F.softplus(s[j] - s[i]) for i, j in order) / len(order)])
    flat = torch.stack([term for of_row in terms for term in of_row])
    flat.mean().backward()
    prefix = reference.base_model_prefix
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    return flat.mean().item(), {name.removeprefix(f"{prefix}."): grad for name, grad in gradients.items()}


def on_ranks(world: World, model: str, path: str, cache: str, name: str, batch_size: int) -> list[tuple]:
    loaded = load_model(model_options(path=model, kind="cross_encoder"), parallel(), world, seed=0)
    loaded.encoder.eval()
    data = load(path, cache, name, batch_size, loaded.tokenizer)
    loss = build_loss(LOSSES[name], dimension=1, seed=0, score=PairScore())
    answers = []
    for way in WAYS:
        loaded.encoder.zero_grad(set_to_none=True)
        backward = Backward(loaded.encoder, loss, world, seed=0, dummy=loaded.tokenizer.dummy())
        part = make_rank_batch(data.batch(1), world.rank, world.size, loaded.tokenizer, way)
        output, finite = backward(part)
        assert finite
        gradients = {
            own_name(n, "roberta").removeprefix("roberta."): p.grad.full_tensor().double()
            for n, p in loaded.encoder.named_parameters()
            if isinstance(p.grad, DTensor)
        }
        answers.append((sum(world.gather(output.local_loss.item())), gradients, len(part.batch_info.query_keys)))
    return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("negatives")
    save_reranker("xlm-roberta", folder / "model")
    write_rows(folder / "train.jsonl")
    return folder


@pytest.mark.quick("softmax-3-7", "ranknet-1-5")
@pytest.mark.parametrize(
    ("name", "size", "batch_size"),
    [("softmax", 3, 7), ("softmax", 3, 2), ("bce", 2, 7), ("ranknet", 1, 5)],
)
def test_loss_and_gradients_equal_one_process(ranks, folder, name, size, batch_size):
    inputs = str(folder / "model"), str(folder / "train.jsonl"), str(folder / "cache"), name, batch_size
    expected, expected_gradients = plain(*inputs)
    whole = torch.stack([grad.norm() for grad in expected_gradients.values()]).norm()
    answers = ranks(size, on_ranks, *inputs)
    assert sum(answer[0][2] for answer in answers) == len(lists(*inputs[1:]))
    assert any(answer[0][2] == 0 for answer in answers) == (batch_size == 2)
    for value, gradients, _ in answers[0]:
        assert value == pytest.approx(expected, rel=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        for parameter, grad in expected_gradients.items():
            # The gradient of a bias is 0 where all scores may be shifted.
            error = (gradients[parameter] - grad).norm() / max(grad.norm(), 0.03 * whole)
            assert error < 2e-5, parameter
