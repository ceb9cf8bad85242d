"""A pooling mode with weights, attention over the tokens of a text: docs/extending.md explains the class."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel

from embedtrain import evaluate, load_encoder
from embedtrain.errors import ConfigError
from embedtrain.models.pooling import PooledTokens
from tests.runs import losses, metric_rows, options, run
from tests.small import small_tokenizer, text

POOLING = "tests.extending.test_pooling:AttentionPooling"
TEXTS = [text(seed, length) for seed, length in enumerate((1, 9, 4))]


class AttentionPooling(nn.Module):
    """The mean of the tokens, with weights by a linear layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.score = nn.Linear(size, 1)

    def forward(self, hidden: Tensor, tokens: PooledTokens) -> Tensor:
        """Hidden states of tokens to a vector of each text, [N, size]."""
        weights = tokens.softmax(self.score(hidden).float())
        return tokens.sum(hidden.float() * weights)


def test_trained_on_any_number_of_ranks_exported_and_reopened(ranks, run_inputs, tmp_path):
    runs = {size: tmp_path / str(size) for size in (1, 2, 3)}
    for size, folder in runs.items():
        arguments = options(run_inputs, folder, "train.steps=3", "export.check=true", f"model.pooling={POOLING}")
        ranks(size, run, *arguments)
        assert losses(folder) == pytest.approx(losses(runs[1]), rel=1e-4)
    model = runs[2] / "model"
    with pytest.raises(ConfigError, match=rf"{POOLING}: a file cannot name code"):
        load_encoder(model)
    measured = evaluate(model, [str(run_inputs / "dev")], pooling=AttentionPooling, precision="fp32", quiet=True)
    assert measured["dev"]["ndcg@10"] == pytest.approx(metric_rows(runs[2])[-1]["ndcg@10"], abs=1e-6)

    backbone, weights = AutoModel.from_pretrained(model).eval(), load_file(model / "1_Pooling/model.safetensors")
    vectors = load_encoder(model, pooling=AttentionPooling, precision="fp32").encode(TEXTS)
    for vector, one in zip(torch.as_tensor(vectors), TEXTS, strict=True):
        with torch.no_grad():
            hidden = backbone(**small_tokenizer()(one, return_tensors="pt")).last_hidden_state[0]
        shares = (hidden @ weights["score.weight"].T + weights["score.bias"]).softmax(dim=0)
        torch.testing.assert_close(vector, nn.functional.normalize((hidden * shares).sum(dim=0), dim=0))
