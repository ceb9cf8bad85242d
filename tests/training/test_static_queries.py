"""The gradient of documents and of the weights of queries, whatever the number of ranks and chunks.

The reference is the plain computation in one process, in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from embedtrain.config.kind_settings import SparseQueries, SparsityConfig
from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Strategy
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.sparse.model import WordHead
from embedtrain.kinds.sparse.score import WordScore
from embedtrain.losses.infonce import InfoNCE
from embedtrain.losses.sparsity import SparsityRegularized
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.models.sparse_head import QUERY_WEIGHTS
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.models.test_sparse_directories import WEIGHTS, opensearch
from tests.small import assert_same_gradient, batch, model_options, parallel, small_tokenizer, tokenised

TEMPERATURE = 5.0
SPARSITY = SparsityConfig(document_weight=0.2, ramp=0).resolved(SparseQueries.static)
ONE_CHUNK, CACHED = ChunkOptions(10_000, pass_overhead_tokens=10_000), ChunkOptions(40, pass_overhead_tokens=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("static") / "model"
    opensearch(directory)
    return directory


def plain_gradient(model: ModelConfig, num_rows: int) -> tuple[float, dict[str, torch.Tensor]]:
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    assert isinstance(encoder.output, WordHead)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    encoder.double().eval()
    rows, tokenizer = batch(num_rows).rows, small_tokenizer()
    weights = encoder.query_weights.weight
    torch.testing.assert_close(weights.float(), WEIGHTS)

    def query(text: str) -> torch.Tensor:
        presence = torch.zeros(len(weights), dtype=torch.float64)
        presence[tokenizer(text, add_special_tokens=False)["input_ids"]] = 1.0
        return presence * weights

    def document(text: str) -> torch.Tensor:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        hidden = encoder.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        hidden = encoder.head(input_ids=ids, inputs_embeds=hidden).logits[0]
        bias = next(p for n, p in encoder.named_parameters() if n.startswith("head.") and p.shape == weights.shape)
        logits = hidden @ encoder.backbone.get_input_embeddings().weight.T + bias
        return logits.amax(dim=0).relu().log1p().log1p()

    queries = torch.stack([query(row.query) for row in rows])
    texts = [text for row in rows for text in row.documents.texts]
    documents = torch.stack([document(text) for text in texts])
    answers = {(row.query, row.documents.texts[0]) for row in rows}
    loss, first = torch.zeros((), dtype=torch.float64), 0
    for i, row in enumerate(rows):
        positives = [other.documents.texts[0] for other in rows]
        right = {positive for positive in positives if (row.query, positive) in answers}
        kept = [j for j, text in enumerate(texts) if j == first or text not in right]
        loss = loss - F.log_softmax(documents[kept] @ queries[i] / TEMPERATURE, dim=0)[kept.index(first)]
        first += len(row.documents.texts)
    loss = loss / len(rows) + 0.2 * documents.mean(dim=0).square().sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def sharded_gradient(
    world: World, model: ModelConfig, options: ParallelConfig, chunks: ChunkOptions, num_rows: int
) -> tuple[float, dict[str, torch.Tensor], int]:
    loaded = load_model(model, options, world, seed=0)
    loaded.encoder.eval()
    loss = SparsityRegularized(InfoNCE(InfoNCEConfig(temperature=TEMPERATURE), WordScore()), SPARSITY, ramp=0)
    dummy = loaded.tokenizer.dummy()
    backward = Backward(loaded.encoder, loss, world, seed=0, dummy=dummy, reduce_per_step=chunks is ONE_CHUNK)
    rows = tokenised(batch(num_rows), loaded.tokenizer)
    local = make_rank_batch(rows, world.rank, world.size, loaded.tokenizer, chunks)
    output, finite = backward(local)
    assert finite
    grads = {n: p.grad.full_tensor() for n, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)}
    return output.local_loss.item(), grads, local.real_tokens


@pytest.mark.quick("3-fsdp-2-True", "2-fsdp-10-False")
@pytest.mark.parametrize(
    ("world_size", "strategy", "num_rows", "trained"),
    [
        (1, "fsdp", 10, True),
        (2, "fsdp", 10, True),
        (2, "fsdp", 10, False),
        (3, "fsdp", 2, True),
        pytest.param(2, "ddp", 10, True, marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_process(ranks, directory, world_size, strategy, num_rows, trained):
    """In one chunk, and in several that are encoded twice; on 3 ranks with 2 rows, one rank has none."""
    sparse = {"train_query_weights": trained}
    model = model_options(path=str(directory), kind="sparse", **sparse)
    loss, expected = plain_gradient(model, num_rows)
    assert (QUERY_WEIGHTS in expected) is trained
    encoded = sum(
        len(small_tokenizer()(text)["input_ids"]) for row in batch(num_rows).rows for text in row.documents.texts
    )
    for chunks in (ONE_CHUNK, CACHED):
        answers = ranks(world_size, sharded_gradient, model, parallel(Strategy(strategy)), chunks, num_rows)
        assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6)
        assert_same_gradient(answers[0][1], expected)
        # Queries are not encoded; a rank of which a chunk has queries alone encodes one short text for it.
        assert encoded <= sum(answer[2] for answer in answers) <= encoded + 3 * world_size * 4
