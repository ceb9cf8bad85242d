"""Search with compressed vectors: the documents that the formulas select, with the scores of the float vectors."""

import json
import re

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from embedtrain.commands.search import compose as compose_search
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.errors import ConfigError
from tests.commands import call
from tests.small import save_guide, small_model, text

TEXTS = [text(number, 3 + number % 9) for number in range(60)]
QUERY = text(900, 4)


def test_the_best_of_a_binary_search_are_scored_again(tmp_path):
    model = save_guide(small_model("bert"), tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": f"d{i:02}", "text": each}) + "\n" for i, each in enumerate(TEXTS)))
    form = "vectors={documents: binary, rescore: {times: 2, top_k: 4}}"
    printed = call("search", f"model={model}", f"corpus={corpus}", f"query={QUERY}", "top_k=12", form)
    actual = [list(match) for match in re.findall(r"^ *(-?[01]\.\d{3})  (d\d\d)", printed, re.MULTILINE)]

    theirs = SentenceTransformer(str(model), device="cpu")
    documents, query = theirs.encode(TEXTS), theirs.encode(QUERY)
    bits = ((documents > 0) == (query > 0)).sum(axis=1)
    first = sorted(range(len(TEXTS)), key=lambda number: (bits[number], number), reverse=True)
    low, high = documents.min(0), documents.max(0)
    codes = quantize_embeddings(documents, "int8", ranges=np.stack([low, high])).astype(np.float64)
    decoded = low + (codes + 128.5) * (high - low) / 255
    again = sorted(first[:8], key=lambda number: decoded[number] @ query, reverse=True)
    assert actual == [[f"{documents[number] @ query:.3f}", f"d{number:02}"] for number in [*again, *first[8:12]]]
    assert "vectors: binary-x2-top4, " in printed


@pytest.mark.slow  # the same with pictures: tests/image_text/test_search.py
def test_vectors_that_an_earlier_search_stored(tmp_path):
    """The same documents and scores, whether they are encoded, stored or read, searched as they are or by a copy."""
    model = save_guide(small_model("bert"), tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"_id": f"d{i:02}", "text": each}) + "\n" for i, each in enumerate(TEXTS)))

    def found(*options: str) -> list[str]:
        arguments = [f"model={model}", f"corpus={corpus}", f"query={QUERY}", "top_k=12", *options]
        return re.findall(r"^ *-?[01]\.\d{3}  d\d\d", call("search", *arguments), re.MULTILINE)

    expected, stored = found(), f"vectors_dir={tmp_path / 'vectors'}"
    assert len(expected) == 12
    assert found(stored) == expected
    (path,) = (tmp_path / "vectors").rglob("*.safetensors")
    written = path.stat().st_mtime_ns
    assert found(stored, "index.place=disk", "index.scan_dtype=int8") == expected
    assert [(each, each.stat().st_mtime_ns) for each in (tmp_path / "vectors").rglob("*.safetensors")] == [
        (path, written)
    ]


def test_forms_that_search_takes():
    options = compose_search(["model=m", "corpus=c", "vectors=int8"])
    assert options.vectors.documents is VectorPrecision.int8
    for value, words in (
        ("[int8]", "vectors="),
        ("int4", "vectors: documents"),
        ("{dims: 0}", "vectors.dims=0"),
        ("float", "without this option"),
    ):
        with pytest.raises(ConfigError) as caught:
            compose_search(["model=m", "corpus=c", f"vectors={value}"])
        assert words in str(caught.value)
