"""Vectors of fastembed, with the graph's output `sentence_embedding`."""

import json
import sys

import fastembed
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
TextEmbedding.add_custom_model(
    model="local/model",
    pooling=PoolingType.DISABLED,
    normalization=False,
    sources=ModelSource(hf="local/model"),
    dim=given["dimension"],
    output_name="sentence_embedding",
)
model = TextEmbedding("local/model", specific_model_path=given["model"], cuda=False)
vectors = {"text": [vector.tolist() for vector in model.embed(given["texts"], batch_size=4)]}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": fastembed.__version__, "vectors": vectors}, result)
