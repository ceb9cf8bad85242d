"""Plans of models that read pictures, compared with what real passes keep and compute."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from embedtrain.config.recipe import Precision, Strategy
from embedtrain.data.images.files import PICTURES, Place, read_picture
from embedtrain.data.images.processing import QwenPatches
from embedtrain.data.prefetch import Prefetcher
from embedtrain.data.rows import Documents, Example
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Chunk, GlobalBatch
from embedtrain.distributed.block_compute import recompute_activations
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.formats.chat_template import ItemTemplate
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import model_tokenizer
from embedtrain.kinds.dense.model import Markup, VisionLayout
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict
from embedtrain.models.encoder import Encoder
from embedtrain.planning.memory import ClusterSpec, StepWorkload, step_memory
from embedtrain.planning.model_costs import LiveBytes, ModelSpec, measure_activations, model_spec
from embedtrain.training.rank_batch import ChunkOptions, RankBatch, make_rank_batch
from tests.image_text.models import image_text, picture_item, save_image_text
from tests.marks import slow_but
from tests.memory import MB, memory_growth
from tests.small import small_tokenizer, text, tokenised
from tests.vision_models import END, IMAGE, QWEN, START, chunk_of, item_of, vision_encoder

# Pictures of 256 tokens, or of 32 tiles.
SHAPES = {True: [1, (32, 32)], False: [1, (64, 0)]}


def planned(encoder: Encoder, tokens: int) -> ModelSpec:
    blocks = find_blocks(encoder)
    return model_spec(encoder, blocks, precision=Precision.fp32, tokens_per_text=tokens, gpu=False, packed=True)


def measured(encoder: Encoder, chunk: Chunk) -> tuple[float, float]:
    """Bytes per token that a forward pass keeps, and the most during the backward pass."""
    existing = [chunk.ids, chunk.mask, *encoder.parameters(), *encoder.buffers()]
    with LiveBytes(existing) as live:
        (vectors,) = encoder(chunk.map_tensors(torch.clone))
        kept = live.peak = live.bytes
        vectors.sum().backward()
        return kept / chunk.ids.numel(), live.peak / chunk.ids.numel()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "architecture",
    slow_but({"qwen3_vl", "modernvbert"}, ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "modernvbert")),
)
def test_bytes_are_those_of_a_pass(architecture, recompute):
    """Of chunks that count the same: of pictures alone, or of texts alone, which have more tokens."""
    encoder, random = vision_encoder(architecture).train(), np.random.default_rng(0)
    spec, blocks = planned(encoder, 256), find_blocks(encoder)
    plan = spec.activations(recompute)
    if recompute:
        recompute_activations(blocks, recompute)
    for parameter in encoder.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    found = []
    for shape in (SHAPES[architecture in QWEN], [256]):
        items = [item_of(architecture, shape, random) for _ in range(4)]
        chunk = chunk_of(architecture, encoder, items, dummy=False)
        found.append(measured(encoder, chunk))
        if chunk.pictures is not None:
            fraction = len(chunk.pictures.rows) / chunk.ids.numel()  # there is much markup around small tiles
    # If all tokens of the chunk were rows of a picture, or if it had texts alone.
    pictures = [text + (picture - text) / fraction for picture, text in zip(*found, strict=True)]
    texts = [spec.weights.picture_cost * text for text in found[1]]
    kept, backward = map(max, zip(pictures, texts, strict=True))
    assert plan.cached(len(blocks)) == pytest.approx(kept, rel=0.08)
    if architecture in QWEN:
        assert plan.cached(len(blocks)) + plan.backward == pytest.approx(backward, rel=0.08)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen2_5_vl", "modernvbert"])
def test_products_are_those_of_a_pass(architecture, frozen):
    """A row of a text and a picture: a token of a picture is that of a text, and the patches that it stands for."""
    encoder, random = vision_encoder(architecture), np.random.default_rng(0)
    for module in encoder.vision_modules:
        module.requires_grad_(not frozen)
    weights = planned(encoder, 259).weights
    query, document = (of.forward[0] + of.backward[0] for of in (weights.query, weights.document))
    if (
        architecture != "qwen3_vl"
    ):  # attention within tiles or windows, of 16 patches in 2 layers, does not depend on the length
        document -= 4 * 2 * 16 * 4 * 16 * (1 if frozen else 3)
    for shape in ([259], SHAPES[architecture in QWEN]):
        chunk = chunk_of(architecture, encoder, [item_of(architecture, shape, random)], dummy=False)
        with FlopCounterMode(display=False) as real:  # counts no attention on a CPU
            encoder(chunk)[0].sum().backward()
        rows = 0 if chunk.pictures is None else len(chunk.pictures.rows)
        expected = chunk.ids.numel() * query + rows * (document - query)
        assert real.get_total_flops() == pytest.approx(expected, rel=0.05)
        encoder.zero_grad()
    if architecture == "qwen3_vl":  # 1,024 patches attend to each other, in 3 layers of 16 dimensions
        slope = weights.document.forward[1] - weights.query.forward[1]
        assert slope * 256**2 == 4 * 3 * 16 * 1024**2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", slow_but({"clip"}, ("clip", "siglip2")))
def test_bytes_of_a_tower_of_pictures_are_those_of_a_pass(tmp_path, name, recompute):
    save_image_text(name, tmp_path)
    source = open_model_source(image_text(tmp_path / name))
    encoder, tokenizer = assemble_encoder(source), model_tokenizer(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    tower = encoder.towers["image."].train()
    chunk = tokenizer.chunk(tokenizer.tokens([picture_item(tmp_path, seed) for seed in range(40)]), range(40))
    patches = chunk.ids.shape[1]
    meta, blocks = build_encoder(source).towers["image."], find_blocks(tower)
    plan = measure_activations(
        meta, find_blocks(meta), dtype=torch.float32,
        tokens_per_text=patches, recompute=recompute, gpu=False,
    )  # fmt: skip
    if recompute:
        recompute_activations(blocks, recompute)
    for parameter in tower.parameters():
        parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    kept, _ = measured(tower, chunk)
    assert plan.cached(len(blocks)) == pytest.approx(kept, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_prepared_batches_of_large_pictures_take_what_is_planned(tmp_path, workers):
    """16 pictures of a megapixel each in a batch, in one chunk: none is in memory twice."""
    side = 1024
    encoder, family = vision_encoder("qwen3_vl"), vision_encoder("qwen3_vl").vision
    values = {"resample": 3, "scale": 1 / 255, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    processing = QwenPatches(
        **values, patch_size=16, merge_size=2, temporal_size=2, min_area=1024, max_area=side * side
    )
    encoder.decoded_bytes = processing.bytes_per_patch * 4
    template = replace(ItemTemplate.of_text("{prompt}{item}", "", None), special_tokens=False)
    markup = Markup(template, IMAGE, lambda rows, columns: [START, *[IMAGE] * (rows * columns // 4), END])
    layout = VisionLayout(small_tokenizer(), processing, family, markup)
    tokenizer = TextTokenizer(small_tokenizer(), 2000, layout, packed=True)
    items = []
    for seed in range(8):
        place = Place(str(tmp_path / f"{seed}.jpg"))
        blocks = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((side, side), Image.Resampling.NEAREST).save(place.file)
        picture = read_picture(place)
        PICTURES.add(picture, place)
        items.append(str(picture))
    rows = tuple(Example(text(number, 3), Documents((items[number % 8],))) for number in range(16))
    batch, made = tokenised(GlobalBatch(0, rows), tokenizer), list[int]()

    def make(number: int) -> RankBatch:
        prepared = make_rank_batch(batch, 0, 1, tokenizer, ChunkOptions(10**9))
        made.append(number)
        return prepared

    work = StepWorkload(rows=16, texts_per_row=1, tokens_per_text=1026)
    one = ParallelLayout(Strategy.ddp, 1, 1, "")
    machine = ClusterSpec(ranks=1, per_node=1, memory=10**12, gpu=False)
    plan = step_memory(planned(encoder, 1026), one, machine, work, reduce_per_step=True).pictures / MB
    make(0)  # what a process never frees
    made.clear()
    peaks = list[float]()
    with memory_growth(peaks):
        for number, _ in enumerate(Prefetcher(make, 0, 6, workers=workers, ahead=2)):
            while len(made) < min(6, number + 3):  # a step takes longer than its batches
                time.sleep(0.02)
    assert plan == pytest.approx(4 * 16 * 3 * side**2 / MB, rel=0.01)
    assert 0.8 * plan < peaks[0] < 1.1 * plan


def test_a_row_is_planned_as_it_is_chunked():
    """A token of a picture counts more than one in `train.chunk_tokens`."""
    weights = planned(vision_encoder("qwen3_vl"), 64).weights
    assert weights.picture_cost > 2
    work = StepWorkload(rows=32, texts_per_row=2, tokens_per_text=64, chunk_tokens=640, activation_tokens=1280)
    local = replace(work, picture_cost=weights.picture_cost).per_rank(1)
    in_chunk = int(640 // (64 * weights.picture_cost))
    assert (local.tokens, local.chunks) == (64 * in_chunk, -(-64 // in_chunk))
    assert local.num_cached_graphs == 2
    assert work.per_rank(1).tokens == 640
