"""Graphs of the towers of texts and pictures, run by onnxruntime against the encoder."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from embedtrain.commands.export.convert import graph_metrics
from embedtrain.errors import ConfigError
from embedtrain.formats.onnx import check_graph, require_graph, variant_table, write_graph, write_variants
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.formats.verify import PROBES, probe_outputs
from embedtrain.inference.loading.load import model_tokenizer
from embedtrain.kinds.image_text.files import probe_images
from embedtrain.models.build import assemble_encoder, full_state_dict
from tests.image_text.models import image_text, save_image_text
from tests.marks import slow_but


@pytest.mark.parametrize("name", slow_but({"clip"}, ("clip", "siglip", "pair")))
def test_graphs_compute_the_vectors_of_the_encoder(tmp_path, name):
    directory = save_image_text(name, tmp_path)
    source = open_model_source(image_text(directory))
    source.kind.files.write(directory, source, model_tokenizer(source))
    source = open_model_source(image_text(directory))
    encoder = assemble_encoder(source)
    encoder.load_state_dict(full_state_dict(source, 0))
    expected = probe_outputs(encoder, source, model_tokenizer(source))
    assert check_graph(directory, source, write_graph(directory, source)) < 1e-5
    variants = write_variants(directory, source, ["onnx", "onnx_fp16", "onnx_int8"], 0.9)
    files = [f"onnx/{tower}_model_{form}.onnx" for tower in ("text", "vision") for form in ("fp16", "quantized")]
    assert [variant.file for variant in variants] == files
    assert "`onnx/text_model.onnx` and `onnx/vision_model.onnx`" in variant_table(variants, source)
    is_padded = name == "siglip"
    texts = load_tokenizer(source)(
        list(PROBES), padding="max_length" if is_padded else True, truncation=True, return_tensors="np"
    )
    processing = source.settings.processing
    pictures = [processing.pixels(image, image.width, image.height) for image in probe_images(processing)]
    inputs = dict(texts) | {"pixel_values": processing.normalised(torch.stack(pictures)).numpy()}
    vectors = []
    for tower in ("text", "vision"):
        graph = onnxruntime.InferenceSession(directory / f"onnx/{tower}_model.onnx")
        names = [node.name for node in graph.get_inputs()]
        assert ("attention_mask" in names) is (name == "pair" and tower == "text")
        (output,) = (node.name for node in graph.get_outputs())
        assert output == ("pooler_output" if is_padded else {"text": "text_embeds", "vision": "image_embeds"}[tower])
        given = {name: np.asarray(inputs[name], dtype=None if tower == "vision" else np.int64) for name in names}
        vectors.append(torch.from_numpy(graph.run([output], given)[0]))
    torch.testing.assert_close(F.normalize(torch.cat(vectors), dim=-1), expected, atol=1e-5, rtol=0)


def test_pictures_of_any_size_have_no_graph(tmp_path):
    source = open_model_source(image_text(save_image_text("siglip2", tmp_path)))
    with pytest.raises(ConfigError, match="onnx is for pictures of one size"):
        require_graph(source)


def test_sets_measure_no_graphs_of_towers():
    options = cast("Any", SimpleNamespace(sets=["dev.jsonl"]))
    with (
        pytest.raises(ConfigError, match="sets: measure a graph of the whole model"),
        graph_metrics(options, "image_text", cast("Any", None)),
    ):
        pass
