"""The gradient of two towers equals that of the same global batch in one process, on any number of ranks and chunks.

The reference is the plain computation: every text encoded alone by its own model, float64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from embedtrain.config.losses import InfoNCEConfig
from embedtrain.config.recipe import Attention, ModelConfig, ParallelConfig, Strategy
from embedtrain.data.types import GlobalBatch
from embedtrain.distributed.world import World
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.losses.infonce import InfoNCE
from embedtrain.models.build import assemble_encoder, full_state_dict
from embedtrain.training.backward import Backward
from embedtrain.training.rank_batch import ChunkOptions, make_rank_batch
from tests.dual_encoder.towers import DOCUMENT_LENGTH, QUERY_LENGTH, dual_options, other_tokenizer, save_towers
from tests.small import assert_same_gradient, batch, parallel, small_tokenizer, tokenised

TEMPERATURE = 0.2
# One chunk of each tower, several whose graphs are all kept, and chunks that are encoded twice.
WAYS = [
    ChunkOptions(10_000, pass_overhead_tokens=10_000),
    ChunkOptions(24, 10_000, pass_overhead_tokens=4),
    ChunkOptions(24, 40, pass_overhead_tokens=4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("towers")
    save_towers(folder)
    return folder


def plain_gradient(model: ModelConfig, rows: GlobalBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Textbook InfoNCE of the vectors of two models."""
    source = open_model_source(model)
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    encoder.double().eval()

    def query(text: str) -> torch.Tensor:
        ids = small_tokenizer()(text, truncation=True, max_length=QUERY_LENGTH, return_tensors="pt")["input_ids"]
        hidden = encoder.query.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        return F.normalize(hidden.mean(0), dim=0)

    def document(text: str) -> torch.Tensor:
        ids = other_tokenizer()(text, truncation=True, max_length=DOCUMENT_LENGTH, return_tensors="pt")["input_ids"]
        hidden = encoder.document.backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        return F.normalize(encoder.document.dense[0].linear(hidden[0]), dim=0)

    queries = torch.stack([query(row.query) for row in rows.rows])
    texts = [text for row in rows.rows for text in row.documents.texts]
    documents = torch.stack([document(text) for text in texts])
    answers = {(row.query, row.documents.texts[0]) for row in rows.rows}
    total, first = torch.zeros((), dtype=torch.float64), 0
    for i, row in enumerate(rows.rows):
        right = {other.documents.texts[0] for other in rows.rows if (row.query, other.documents.texts[0]) in answers}
        kept = [j for j, text in enumerate(texts) if j == first or text not in right]
        total = total - F.log_softmax(documents[kept] @ queries[i] / TEMPERATURE, dim=0)[kept.index(first)]
        first += len(row.documents.texts)
    loss = total / len(rows.rows)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def sharded_gradient(
    world: World,
    model: ModelConfig,
    options: ParallelConfig,
    cutting: ChunkOptions,
    num_rows: int,
    reduce_per_step: bool = True,
) -> tuple[float, dict[str, torch.Tensor], list[list[int]]]:
    loaded = load_model(model, options, world, seed=0)
    loaded.encoder.eval()
    backward = Backward(
        loaded.encoder,
        InfoNCE(InfoNCEConfig(temperature=TEMPERATURE)),
        world,
        seed=0,
        dummy=loaded.tokenizer.dummy(),
        reduce_per_step=reduce_per_step,
    )
    rows = tokenised(batch(num_rows), loaded.tokenizer)
    local = make_rank_batch(rows, world.rank, world.size, loaded.tokenizer, cutting)
    output, finite = backward(local)
    assert finite
    assert loaded.tokenizer.packed is (model.attention is Attention.auto)
    grads = {n: p.grad.full_tensor() for n, p in loaded.encoder.named_parameters() if isinstance(p.grad, DTensor)}
    return output.local_loss.item(), grads, [[chunk.tower, not chunk.is_dummy] for chunk in local.chunks]


@pytest.mark.quick("4-hsdp-9-auto", "3-fsdp-2-auto")
@pytest.mark.parametrize(
    ("world_size", "strategy", "num_rows", "attention"),
    [
        pytest.param(1, "fsdp", 9, "auto", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", 9, "auto", marks=pytest.mark.slow),
        (3, "fsdp", 10, "auto"),
        (3, "fsdp", 2, "auto"),
        (4, "hsdp", 9, "auto"),
        pytest.param(2, "ddp", 9, "auto", marks=pytest.mark.slow),
        pytest.param(2, "fsdp", 9, "padded", marks=pytest.mark.slow),
    ],
)
def test_gradient_equals_one_process(ranks, folder, world_size, strategy, num_rows, attention):
    """All chunks of a tower hold its texts alone; on 3 ranks with 2 rows a rank has no query, and computes a dummy."""
    model = dual_options(folder, attention=Attention(attention))
    loss, expected = plain_gradient(model, batch(num_rows))
    options = parallel(Strategy(strategy), shard_size=2 if strategy == "hsdp" else None)
    for number, cutting in enumerate(WAYS):
        # Also reduced after every chunk: replicas sum the gradients of a tower after its own last chunk.
        per_step = (True, False) if number == 2 else (True,)
        for reduce_per_step in per_step:
            answers = ranks(world_size, sharded_gradient, model, options, cutting, num_rows, reduce_per_step)
            assert sum(answer[0] for answer in answers) == pytest.approx(loss, rel=1e-6)
            assert_same_gradient(answers[0][1], expected)
            towers = [[tower for tower, _ in answer[2]] for answer in answers]
            assert all(of_rank == towers[0] for of_rank in towers), "the same towers in the same order on every rank"
            assert set(towers[0]) == {0, 1} and (number == 0 or num_rows < 9 or towers[0].count(1) > 1)
            if num_rows < world_size:
                assert [False] in [[is_text for tower, is_text in answer[2] if tower == 0] for answer in answers]
