"""Known metrics of a real model on real sets, on one and two ranks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoTokenizer

from embedtrain.config.evaluation import EvaluationSet
from embedtrain.data.tokens import TextTokenizer
from embedtrain.evaluation.evaluator import Evaluator
from embedtrain.evaluation.sets import load_sets
from embedtrain.inference.encode import SentenceEncoder


class MeanPooled(nn.Module):
    def __init__(self, directory):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(directory, add_pooling_layer=False)

    def forward(self, chunk):
        assert chunk.pooled is None, "every token counts"
        hidden = self.backbone(input_ids=chunk.ids, attention_mask=chunk.mask).last_hidden_state
        weights = chunk.mask.unsqueeze(-1).float()
        return (nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1),)


def evaluate(world, directory, paths):
    encoder = MeanPooled(directory)
    mesh = init_device_mesh("cpu", (world.size,))
    for layer in encoder.backbone.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(encoder, mesh=mesh)
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(directory), 256)
    sentences = SentenceEncoder(encoder, tokenizer, world, chunk_tokens=4096)
    torch.set_num_threads(2 // world.size)
    try:
        return Evaluator(load_sets([EvaluationSet(path=str(p)) for p in paths], world), sentences, world).evaluate()
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
def test_minilm_has_its_known_correlation(ranks, minilm_dir, shared_data):
    path = shared_data / "stsb" / "en" / "test.tsv"
    results = ranks(1, evaluate, minilm_dir, [path]) + ranks(2, evaluate, minilm_dir, [path])
    assert results[0] == results[1] == results[2]
    assert results[0]["test"]["spearman"] == pytest.approx(0.8203, abs=2e-4)
    assert results[0]["test"]["pearson"] == pytest.approx(0.8274, abs=2e-4)


@pytest.mark.slow
def test_minilm_has_its_known_retrieval_metrics(ranks, minilm_dir, shared_data):
    path = shared_data / "cranfield"
    results = ranks(1, evaluate, minilm_dir, [path], timeout=900) + ranks(2, evaluate, minilm_dir, [path], timeout=900)
    assert results[0] == results[1] == results[2]
    assert results[0]["cranfield"]["ndcg@10"] == pytest.approx(0.5090, abs=5e-4)
    assert results[0]["cranfield"]["recall@100"] == pytest.approx(0.7910, abs=5e-4)
    assert results[0]["cranfield"]["map@100"] == pytest.approx(0.4155, abs=5e-4)
