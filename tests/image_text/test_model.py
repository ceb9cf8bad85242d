"""The encoder of texts and pictures: the vectors of transformers' classes, chunks, weights, and what it refuses."""

import copy
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from embedtrain import load_encoder
from embedtrain.config.kinds import kind_of_files, load_kind
from embedtrain.config.losses import InfoNCEConfig, LossDirection, PartitionMode, SigLIPConfig
from embedtrain.config.optim import OptimConfig
from embedtrain.config.recipe import ExportConfig, LoraConfig, Precision, Strategy
from embedtrain.data.images.files import PICTURES, Place, image_identity
from embedtrain.data.images.item import Picture, pictures_of
from embedtrain.data.images.layout import BLANK
from embedtrain.distributed.sharding import ParallelLayout
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.formats.verify import probe_outputs
from embedtrain.formats.weights import write_architecture
from embedtrain.inference.loading.load import model_tokenizer
from embedtrain.kinds.image_text.options import ImageTextTower, check_adapter_alone
from embedtrain.losses.build import build_loss
from embedtrain.models.adapters import add_adapters
from embedtrain.models.blocks import find_blocks
from embedtrain.models.build import assemble_encoder, build_encoder, full_state_dict, locate_weights
from embedtrain.models.packing import check_packing, enable_packing
from embedtrain.planning.memory import ClusterSpec, StepWorkload, host_memory, step_memory
from embedtrain.planning.model_costs import model_spec
from embedtrain.training.optimizer import trained_parameters
from tests.image_text.models import DIMENSION, NAMES, image_text, picture_item, save_image_text, save_parts
from tests.losses.global_batch import GlobalVectors, vectors
from tests.small import model_options, text

BOTH = [LossDirection.query_document, LossDirection.document_query]
TEXTS = [text(1, 2), text(2, 9), text(3, 30), "alpha </s> beta"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_text")
    for name in NAMES:
        save_image_text(name, folder)
    save_parts(folder)
    return folder


def opened(path: Path, **options):
    source = open_model_source(image_text(path, **options))
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, seed=0))
    return source, encoder.eval(), model_tokenizer(source)


def of_class(directory: Path, items: list[str]) -> torch.Tensor:
    """The vectors of transformers' class, tokenizer and image processor, each item alone."""
    model = transformers.AutoModel.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    processor = AutoImageProcessor.from_pretrained(directory)
    is_padded = "siglip" in directory.name
    rows = []
    with torch.no_grad():
        for item in items:
            if pictures := pictures_of(item):
                image = Image.open(PICTURES.place(pictures[0]).file)
                rows.append(model.get_image_features(**processor(images=[image], return_tensors="pt")).pooler_output)
                continue
            inputs = tokenizer(
                [item], truncation=True, return_tensors="pt", padding="max_length" if is_padded else False
            )
            mask = {} if is_padded else {"attention_mask": inputs["attention_mask"]}
            rows.append(model.get_text_features(input_ids=inputs["input_ids"], **mask).pooler_output)
    return F.normalize(torch.cat(rows), dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_the_class(folder, name):
    """Also of pictures that are resized, of texts in one batch, packed if the class can, and cut at their end."""
    source, encoder, tokenizer = opened(folder / name)
    assert kind_of_files(folder / name)[0].name == "image_text"
    items = [*TEXTS, *(picture_item(folder, seed) for seed in range(3))]
    expected = of_class(folder / name, items)
    tokens = tokenizer.tokens(items)
    assert tokenizer.layout.towers(np.zeros(len(items), np.bool_), tokens.take).tolist() == [0] * 4 + [1] * 3
    support = check_packing(encoder, precision=Precision.fp32, capability=(0, 0))
    assert (support.padding_reason is None) is (name in ("clip", "pair"))
    for packed in (False, True) if support.padding_reason is None else (False,):
        if packed:
            enable_packing(encoder)
        bound = tokenizer.with_packing(packed)
        with torch.no_grad():
            vectors = [encoder(bound.chunk(tokens, rows))[0] for rows in (range(4), range(4, 7))]
        torch.testing.assert_close(torch.cat(vectors), expected, rtol=1e-5, atol=1e-5)
    alone = [encoder(tokenizer.chunk(tokens, [row]))[0] for row in range(len(items))]
    torch.testing.assert_close(torch.cat(alone), expected, rtol=1e-5, atol=1e-5)
    shapes = {name: tensor.shape for name, tensor in build_encoder(source).state_dict().items()}
    located = locate_weights(source, shapes)
    assert located is None if name == "pair" else located.keys() == shapes.keys(), "ViT's files have older names"


def test_the_old_module_of_sentence_transformers(folder, tmp_path):
    """CLIPModel in a folder of its own, with weights in a pickle: vectors as sentence-transformers computes them."""
    shutil.copytree(folder / "clip", tmp_path / "0_CLIPModel")
    weights = tmp_path / "0_CLIPModel" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    module = {"idx": 0, "name": "0", "path": "0_CLIPModel", "type": "sentence_transformers.models.CLIPModel"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    assert kind_of_files(tmp_path)[0].name == "image_text"
    source, encoder, tokenizer = opened(tmp_path)
    expected = source.kind.files.of_sentence_transformers(tmp_path, source, {}, 16)
    torch.testing.assert_close(probe_outputs(encoder, source, tokenizer), expected, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match=r"model\.kind=dense: .*write model\.kind=image_text"):
        open_model_source(model_options("dense", path=str(tmp_path), pooling="mean"))


def test_the_python_api_encodes_pictures_of_pillow(folder):
    """Alone, in a mapping and beside texts; a mapping with both is refused by this kind."""
    _, encoder, tokenizer = opened(folder / "clip")
    image = Image.open(PICTURES.place(pictures_of(picture_item(folder, 1))[0]).file)
    with load_encoder(str(folder / "clip"), precision="fp32", quiet=True) as loaded:
        vectors = loaded.encode_documents([TEXTS[0], image, {"image": image}, {"text": TEXTS[0]}])
        np.testing.assert_array_equal(loaded.encode(image), vectors[1])
        with pytest.raises(ModelError, match="a text and a picture"):
            loaded.encode([{"image": image, "text": "both"}])
        with pytest.raises(ConfigError, match=r"item 0 of 1 is 3 \(int\), not a text, picture of Pillow"):
            loaded.encode([3])
    tokens = tokenizer.tokens([TEXTS[0], picture_item(folder, 1)] * 2)
    with torch.no_grad():
        expected = torch.cat([encoder(tokenizer.chunk(tokens, [row]))[0] for row in (0, 1, 1, 0)])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_directories_of_earlier_years(folder, tmp_path):
    """OpenAI's CLIP: another number of the end, settings of pictures under other names, and no processor's file."""
    shutil.copytree(folder / "clip", tmp_path / "clip")
    path = tmp_path / "clip" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["eos_token_id"] = 2
    path.write_text(json.dumps(config))
    (tmp_path / "clip" / "processor_config.json").unlink()
    settings = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32, "do_center_crop": True}
    (tmp_path / "clip" / "preprocessor_config.json").write_text(json.dumps(settings))
    source, encoder, tokenizer = opened(tmp_path / "clip")
    items = [*TEXTS, picture_item(folder, 1)]
    tokens = tokenizer.tokens(items)
    with torch.no_grad():
        vectors = torch.cat([encoder(tokenizer.chunk(tokens, [row]))[0] for row in range(len(items))])
    torch.testing.assert_close(vectors, of_class(tmp_path / "clip", items), rtol=1e-5, atol=1e-5)
    write_architecture(tmp_path / "out", source, tokenizer)
    written = json.loads((tmp_path / "out" / "processor_config.json").read_text())
    assert written["image_processor"]["image_processor_type"] == "CLIPImageProcessor"
    assert written["processor_class"] == "CLIPProcessor"


def test_the_end_of_a_text_has_the_largest_id_where_the_class_says_so(folder, tmp_path):
    """The class would take another token of a vocabulary that is trained on the data, or if tokens were added."""
    shutil.copytree(folder / "clip", tmp_path / "clip")
    path = tmp_path / "clip" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["eos_token_id"] = 2
    path.write_text(json.dumps(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "clip")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "clip")
    with pytest.raises(ModelError, match="eos_token_id=2"):
        opened(tmp_path / "clip")


def test_opens_what_sentence_transformers_wrote(folder, tmp_path):
    """Without the module Normalize, vectors keep their lengths."""
    theirs = SentenceTransformer(str(folder / "clip"), device="cpu")
    theirs.save_pretrained(str(tmp_path))
    source, encoder, tokenizer = opened(tmp_path)
    assert kind_of_files(tmp_path)[0].name == "image_text" and not source.vectors.normalize
    files = source.kind.files
    expected = files.of_sentence_transformers(tmp_path, source, source.prompts, tokenizer.max_length)
    ours = files.probe(encoder, tokenizer, source.prompts, torch.device("cpu"))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_rates_decay_by_the_layers_of_each_tower(folder):
    encoder = build_encoder(open_model_source(image_text(folder / "clip")))
    optim = OptimConfig(lr=1.0, layer_decay=0.5)
    factors = {item.name: item.settings.lr_factor for item in trained_parameters(encoder, optim)}
    for tower, first in (("text", "embeddings.token_embedding.weight"), ("image", "pre_layrnorm.weight")):
        assert factors[f"{tower}.backbone.{first}"] == 0.125
        assert factors[f"{tower}.backbone.encoder.layers.0.mlp.fc1.weight"] == 0.25
        assert factors[f"{tower}.backbone.encoder.layers.1.mlp.fc1.weight"] == 0.5
        assert factors[f"{tower}.projection.weight"] == 1


def test_chunks_of_patches_know_their_grids(folder):
    """NaFlex pads to the most patches of the chunk, and the largest picture has as many as the settings allow."""
    _, encoder, tokenizer = opened(folder / "siglip2")
    items = [picture_item(folder, seed) for seed in range(6)]
    chunk = tokenizer.chunk(tokenizer.tokens(items), range(6))
    counts = chunk.grids.prod(axis=1)
    assert chunk.lengths.tolist() == counts.tolist() == tokenizer.layout.num_tokens(tokenizer.tokens(items)).tolist()
    assert len(set(counts.tolist())) > 1 and counts.max() <= tokenizer.layout.processing.most_patches == 16
    assert chunk.decoded["pixels"].dtype is torch.uint8 and chunk.tower == 1
    dummy = tokenizer.dummies()[1]
    assert dummy.is_dummy and dummy.tower == 1 and not dummy.decoded["pixels"].any()
    assert encoder(dummy)[0].isfinite().all()


@pytest.mark.parametrize("name", ["clip", "siglip2"])
def test_refuses_items_of_several_parts(folder, name):
    _, _, tokenizer = opened(folder / name)
    picture = picture_item(folder, 1)
    prompted = tokenizer.tokens(["query: " + picture], prompts="query: ")
    assert prompted.slots().pictures() == pictures_of(picture), "a prompt precedes texts alone"
    for item, found in ((f"a caption {picture}", "a text and a picture"), (picture * 2, "several pictures")):
        with pytest.raises(ModelError, match=f"an item has {found}"):
            tokenizer.tokens([item])
    narrow = Picture(7, 1, 999_999_999)
    PICTURES.add(narrow, Place("narrow.png"))
    with pytest.raises(DataError, match=r"narrow\.png: "):
        tokenizer.tokens([str(narrow)])
    assert tokenizer.tokens([str(BLANK)]).slots().pictures() == [BLANK]


def test_pads_on_the_side_of_the_tokenizer(folder):
    source, _, tokenizer = opened(folder / "siglip2")
    left = copy.copy(tokenizer.tokenizer)
    left.padding_side = "left"
    layout = source.kind.layout(source, left)
    tokens = layout.tokenize([text(1, 1)], 16)
    chunk = layout.chunk(tokens, [0], packed=False)
    assert chunk.ids[0, -len(tokens.ids) :].tolist() == tokens.ids.tolist() and chunk.mask.all()


def test_a_pair_is_made_of_two_models(folder, tmp_path):
    """New projections follow from the seed; the rest is of both directories, and what is written opens."""
    towers = {"text": ImageTextTower(path=str(folder / "bert")), "image": ImageTextTower(path=str(folder / "vit"))}
    source = open_model_source(model_options("image_text", **towers, projection_dim=DIMENSION))
    assert source.has_new_head and source.dimension == DIMENSION
    state = full_state_dict(source, seed=4)
    assert torch.equal(state["text.projection.weight"], full_state_dict(source, seed=4)["text.projection.weight"])
    bert = transformers.AutoModel.from_pretrained(folder / "bert").state_dict()
    vit = transformers.AutoModel.from_pretrained(folder / "vit").state_dict()
    for name, weight in state.items():
        tower, _, rest = name.partition(".backbone.")
        if rest:
            assert torch.equal(weight, (bert if tower == "text" else vit)[rest]), name
    encoder = assemble_encoder(source)
    encoder.load_state_dict(state)
    write_architecture(tmp_path / "out", source, model_tokenizer(source))
    names = source.kind.files.stored_names(state, tmp_path / "out")
    stored = {names[name].key: tensor.contiguous() for name, tensor in state.items()}
    save_file(stored, tmp_path / "out" / "model.safetensors")
    again = open_model_source(image_text(tmp_path / "out"))
    files = again.kind.files
    expected = files.probe(encoder.eval(), model_tokenizer(source), {}, torch.device("cpu"))
    torch.testing.assert_close(files.of_transformers(tmp_path / "out", again), expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_tower_has_all_of_its_weights(folder, tmp_path):
    without = transformers.BertModel.from_pretrained(folder / "bert", add_pooling_layer=False)
    without.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(folder / "bert").save_pretrained(tmp_path)
    image = ImageTextTower(path=str(folder / "vit"))
    for frozen in (False, True):
        text_tower = ImageTextTower(path=str(tmp_path), frozen=frozen)
        source = open_model_source(model_options("image_text", text=text_tower, image=image))
        if frozen:
            with pytest.raises(ModelError, match=r"model\.text\.frozen=true: .* lacks a pooler"):
                full_state_dict(source, seed=0)
        else:
            assert full_state_dict(source, seed=0)["text.backbone.pooler.dense.weight"].any()


@pytest.mark.parametrize("name", ["clip", "siglip", "siglip2"])
def test_a_configuration_makes_a_model(folder, name):
    config = transformers.AutoConfig.from_pretrained(folder / name).to_dict()
    source = open_model_source(model_options("image_text", config=config))
    assert source.settings.processing.digest == opened(folder / name)[0].settings.processing.digest
    state = full_state_dict(source, seed=0)
    if name != "clip":
        assert state["logit_scale"].exp().item() == pytest.approx(10) and state["logit_bias"].item() == -10


def test_a_plan_reads_no_file(folder):
    """Tokens, lengths and towers follow from items; a file that is gone is named where its pixels are needed."""
    _, _, tokenizer = opened(folder / "siglip2")
    picture = Picture(11, 300, 200)
    PICTURES.add(picture, Place("gone.jpg"))
    tokens = tokenizer.tokens([str(picture), "alpha"])
    assert tokenizer.layout.num_tokens(tokens).tolist() == [15, 16]
    assert tokenizer.layout.towers(np.zeros(2, np.bool_), tokens.take).tolist() == [1, 0]
    with pytest.raises(DataError, match=r"gone\.jpg"):
        tokenizer.chunk(tokens, [0])


def test_another_pillow_changes_vectors_and_no_batch(folder, monkeypatch):
    """Stored vectors name the version that pixels depend on; tokens, lengths and so the order of a run do not."""
    source, _, tokenizer = opened(folder / "clip")
    before, tokens = source.kind.identity(source), tokenizer.fingerprint
    image_identity.cache_clear()
    monkeypatch.setattr("PIL.__version__", "1.0")
    assert "Pillow 1.0" in str(source.kind.identity(source)) and source.kind.identity(source) != before
    assert opened(folder / "clip")[2].fingerprint == tokens
    image_identity.cache_clear()


def test_plans_know_the_vision_tower(folder):
    """Activations are measured with both towers, of which the text tower may be frozen or adapted."""
    source = open_model_source(image_text(folder / "clip", image=ImageTextTower(frozen=True)))
    encoder = build_encoder(source)
    blocks = find_blocks(encoder)
    assert [type(block).__name__ for block in blocks] == ["CLIPEncoderLayer"] * 4
    spec = model_spec(encoder, blocks, precision=Precision.fp32, tokens_per_text=16, gpu=False, packed=True)
    frozen = sum(weight.numel() for weight in encoder.image.parameters())
    assert spec.weights.trained == spec.weights.parameters - frozen > 0
    # A text is computed by the one tower and a picture by the other, which has no backward pass here.
    text, image = encoder.text, encoder.image
    assert spec.weights.query.forward[0] + spec.weights.document.forward[0] < 2 * spec.weights.parameters
    assert all(spec.weights.query.backward) and not any(spec.weights.document.backward)
    assert (spec.weights.query.max_tokens, spec.weights.document.max_tokens) == (text.max_tokens, image.max_tokens)
    assert spec.weights.document.of(16) == spec.weights.document.of(1000), "a picture has 16 patches"
    assert spec.activations(False) is not None and spec.allows_selective()
    larger = transformers.AutoConfig.from_pretrained(folder / "clip").to_dict()
    larger["vision_config"]["image_size"] = 64
    source = open_model_source(model_options("image_text", config=larger))
    assert source.kind.longest_item(source, 16) == 64, "a picture has more patches than a text positions"
    encoder = build_encoder(source)
    spec = model_spec(encoder, find_blocks(encoder), precision=Precision.fp32, tokens_per_text=64, gpu=False)
    assert spec.allows_selective() is True
    naflex = build_encoder(open_model_source(image_text(folder / "siglip2")))
    blocks = find_blocks(naflex)
    measured = model_spec(naflex, blocks, precision=Precision.fp32, tokens_per_text=16, gpu=False)
    assert measured.allows_selective() is True, "the code of both towers runs without memory"


@pytest.mark.parametrize("name", ["clip", "siglip2"])
def test_plans_know_the_bytes_of_pixels(folder, name):
    """Those of a batch on the device, and page-locked those of the batches that threads prepare."""
    source = open_model_source(image_text(folder / name))
    encoder, tokenizer = build_encoder(source), model_tokenizer(source)
    spec = model_spec(encoder, find_blocks(encoder), precision=Precision.fp32, tokens_per_text=16, gpu=True)
    chunk = tokenizer.chunk(tokenizer.tokens([picture_item(folder, i) for i in range(4)]), range(4))
    pixels = sum(part.nbytes for part in chunk.decoded.values())
    assert spec.decoded_bytes * 16 * 4 == pytest.approx(pixels, rel=0.01)
    work = StepWorkload(rows=2, texts_per_row=2, tokens_per_text=16, chunk_tokens=64)
    layout = ParallelLayout(Strategy.ddp, 1, 1, "")
    for gpu, on_device, on_host in ((True, 1, 4), (False, 4, 0)):
        cluster = ClusterSpec.of_ranks(1, 1, 2**34, gpu=gpu)
        assert step_memory(spec, layout, cluster, work, reduce_per_step=True).pictures == on_device * pixels
        host = host_memory(spec, layout, cluster, work)
        assert host.pictures in range(on_host * pixels, 2 * on_host * pixels + 1), "torch rounds to powers of two"


def test_adapters_are_rooted_at_a_tower(folder):
    source = open_model_source(image_text(folder / "siglip"))

    def adapted(*targets: str) -> set[str]:
        encoder = build_encoder(source)
        add_adapters(encoder, LoraConfig(rank=2, targets=list(targets)), None, torch.float32)
        return {name.split(".lora_")[0] for name, weight in encoder.named_parameters() if weight.requires_grad}

    of_text = adapted("text.q_proj")
    assert len(of_text) == 2 and all(name.startswith("text.") and name.endswith("q_proj") for name in of_text)
    both = adapted("q_proj", "image.fc1")
    assert len(both) == 7 and not any(name.startswith("text.") and name.endswith("fc1") for name in both)
    whole = adapted("image.all-linear")
    assert all(name.startswith("image.") for name in whole)
    assert "image.backbone.head.attention.out_proj" not in whole, "torch reads its weight, and never calls it"
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .* has no layer image\.nothing"):
        adapted("image.nothing")


def class_losses(world: World, folder: Path, batch: GlobalVectors, options: dict[str, float]) -> list[dict[str, float]]:
    """Of each class: our loss and that of transformers' formula with its numbers, and the numbers of the encoder."""
    answers = []
    queries, documents, batch_info = batch.of_rank(range(len(batch.sizes)), torch.float32)
    for name, config in {
        "clip": InfoNCEConfig(
            learn_temperature=True, directions=BOTH, partition_mode=PartitionMode.separate, **options
        ),
        "clip, fixed": InfoNCEConfig(directions=BOTH, partition_mode=PartitionMode.separate, **options),
        "siglip": SigLIPConfig(**options),
        "siglip, fixed": SigLIPConfig(learn_temperature=False, learn_bias=False, **options),
    }.items():
        encoder, kind = opened(folder / name.split(",")[0])[1], load_kind("image_text")
        encoder.logit_scale.fill_(1.5)
        if encoder.logit_bias is not None:
            encoder.logit_bias.fill_(-3.0)
        loss = build_loss(config, dimension=queries.shape[1], seed=0)
        kind.share_weights(loss, encoder)
        output = loss(queries, documents, batch_info)
        logits = queries @ documents.T * encoder.logit_scale.exp()
        if encoder.logit_bias is None:
            labels = torch.arange(len(queries))
            expected = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        else:
            signs = 2 * torch.eye(len(queries)) - 1
            expected = -F.logsigmoid(signs * (logits + encoder.logit_bias)).sum(1).mean()
        trained = list(loss.parameters())
        with torch.no_grad():  # a step of training changes what is exported
            for parameter in trained:
                parameter.add_(0.25)
        bias = 0.0 if encoder.logit_bias is None else encoder.logit_bias.item()
        answers.append(
            {"loss": output.local_loss.item(), "expected": expected.item(), "scale": encoder.logit_scale.item()}
            | {"bias": bias, "trained": len(trained)}
        )
    return answers


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}])
def test_losses_start_from_the_model_and_train_it(ranks, folder, options):
    """The formulas are those of `return_loss` of transformers' classes; an option wins over the model's number."""
    ((clip, fixed_clip, siglip, fixed_siglip),) = ranks(
        1, class_losses, folder, vectors((1,) * 5, dimension=6), options
    )
    start = math.log(2) if options else 1.5
    for answer in (clip, fixed_clip, siglip, fixed_siglip):
        assert answer["loss"] == pytest.approx(answer["expected"], rel=1e-5)
        assert answer["scale"] == pytest.approx(start + 0.25 * (answer["trained"] > 0))
    assert [clip["trained"], fixed_clip["trained"], siglip["trained"], fixed_siglip["trained"]] == [1, 0, 2, 0]
    assert siglip["bias"] == -2.75 and fixed_siglip["bias"] == -3.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bidirectional": True}, r"model\.bidirectional=true: "),
        ({"text": ImageTextTower(path="a")}, r"model\.text\.path=a: .*model\.image\.path"),
        (
            {"path": "b", "text": ImageTextTower(path="a"), "image": ImageTextTower(path="a")},
            r"model\.path and model\.",
        ),
        ({"path": "b", "projection_dim": 7}, r"model\.projection_dim=7: "),
        ({"path": "b", "text": ImageTextTower(revision="a")}, r"model\.text\.revision=a: "),
        ({"path": "b", "lora": LoraConfig(path="a")}, r"model\.lora\.path=a: "),
        (
            {"path": "b", "text": ImageTextTower(frozen=True), "image": ImageTextTower(frozen=True)},
            r"model\.text\.frozen=true, model\.image\.frozen=true: ",
        ),
    ],
)
def test_refuses_options(options, message):
    with pytest.raises(ConfigError, match=message):
        load_kind("image_text").check_options(model_options("image_text", **options))


def test_refuses_models_and_formats(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.max_length=8: .*padded to 16"):
        model_tokenizer(open_model_source(image_text(folder / "siglip", max_length=8)))
    with pytest.raises(ConfigError, match=r"model\.kind=dense: .*write model\.kind=image_text"):
        open_model_source(model_options("dense", path=str(folder / "clip"), pooling="mean"))
    with pytest.raises(ModelError, match="bert, which is not known as a model of texts and pictures"):
        open_model_source(image_text(folder / "bert"))
    with pytest.raises(ConfigError, match=r"formats=\[openvino\]: "):
        load_kind("image_text").files.check_export(ExportConfig(formats=["openvino"]), "image_text")
    pair = model_options("image_text", text=ImageTextTower(path="a"), image=ImageTextTower(path="b"))
    with pytest.raises(ConfigError, match=r"model\.text\.path=a: .*leave adapter out of export\.formats"):
        check_adapter_alone(pair, ExportConfig(formats=["adapter"]))
