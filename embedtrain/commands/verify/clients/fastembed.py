"""The output of fastembed: the graph's `sentence_embedding`, or the scores of a cross-encoder."""

import json
import sys

import fastembed
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
from fastembed.rerank.cross_encoder import TextCrossEncoder

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
if given["kind"] == "cross_encoder":
    TextCrossEncoder.add_custom_model(
        model="local/model", sources=ModelSource(hf="local/model"), model_file="onnx/model.onnx"
    )
    model = TextCrossEncoder("local/model", specific_model_path=given["model"], cuda=False)
    scores = model.rerank_pairs([tuple(pair) for pair in given["formatted_pairs"]], batch_size=4)
    output = {"scores": {"logits": [float(score) for score in scores]}}
else:
    TextEmbedding.add_custom_model(
        model="local/model",
        pooling=PoolingType.DISABLED,
        normalization=False,
        sources=ModelSource(hf="local/model"),
        dim=given["dimension"],
        output_name="sentence_embedding",
    )
    model = TextEmbedding("local/model", specific_model_path=given["model"], cuda=False)
    output = {"vectors": {"text": [vector.tolist() for vector in model.embed(given["texts"], batch_size=4)]}}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": fastembed.__version__} | output, result)
