"""Calibration of an existing model: an affine head and ranges, the same files on any number of ranks."""

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

from embedtrain.commands import calibrate, evaluate
from embedtrain.commands.calibrate.head import write_directory
from embedtrain.config.evaluation import VectorPrecision
from embedtrain.config.kinds import load_kind
from embedtrain.errors import ModelError
from embedtrain.inference.quantised import QUANTISATION_FILE, read_ranges
from embedtrain.losses.quantisation import Quantiser
from tests.custom_code import model_with_remote_code
from tests.small import save_guide, small_model, text, write_beir

DENSE = load_kind("dense")
TEXTS = [text(number, 3 + number % 9) for number in range(60)]


def calibrated(world, runs):
    return [calibrate.run(calibrate.compose(arguments)) for arguments in runs]


def files_of(directory):
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def encode(directory, **options):
    model = SentenceTransformer(str(directory), device="cpu")
    return model.encode(TEXTS, normalize_embeddings=True, **options).astype(np.float64)


def raw_vectors(directory):
    """Vectors before the normalisation."""
    model = SentenceTransformer(str(directory), device="cpu")
    del model[-1]
    return model.encode(TEXTS).astype(np.float64)


def normalised(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_head_is_that_of_numpy_and_every_library_applies_it(ranks, tmp_path):
    model = save_guide(small_model("bert"), tmp_path)
    corpus = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"_id": str(number), "text": each}) for number, each in enumerate(TEXTS)]
    corpus.write_text("\n".join(lines) + "\n")
    common = [f"model={model}", f"data={tmp_path}/corp*.jsonl"]

    def runs(size):
        kinds = {"pca": ["ranges=[8]"], "cut": ["dims=8"], "mean": ["head=mean"], "none": ["head=none"]}
        return [[*common, f"output_dir={tmp_path / f'{name}{size}'}", *more] for name, more in kinds.items()]

    ranks(1, calibrated, runs(1))
    ranks(3, calibrated, runs(3)[:3:2])
    for name in ("pca", "mean"):
        one, three = (files_of(tmp_path / f"{name}{size}") for size in (1, 3))
        assert one.keys() == three.keys()
        assert all(one[file] == three[file] for file in one), name

    raw = raw_vectors(model)
    centred = raw - raw.mean(0)
    left, singular, _ = np.linalg.svd(centred, full_matrices=False)
    expected = left * singular
    vectors = encode(tmp_path / "pca1")
    signs = np.sign((vectors * expected).sum(0))
    assert vectors == pytest.approx(normalised(expected * signs), abs=2e-4)
    assert encode(tmp_path / "cut1") == pytest.approx(normalised(vectors[:, :8]), abs=2e-4)
    assert encode(tmp_path / "mean1") == pytest.approx(normalised(centred), abs=2e-4)
    assert vectors @ vectors.T == pytest.approx(normalised(centred) @ normalised(centred).T, abs=2e-4), "a rotation"
    assert encode(tmp_path / "none1") == pytest.approx(encode(model), abs=1e-5)

    ranges = read_ranges(tmp_path / "pca1")
    assert ranges.keys() == {vectors.shape[1], 8}
    short = normalised(vectors[:, :8]).astype(np.float32)
    assert ranges[8].low.numpy() == pytest.approx(short.min(0), abs=1e-5)
    assert ranges[8].high.numpy() == pytest.approx(short.max(0), abs=1e-5)
    content = json.loads((tmp_path / "pca1" / QUANTISATION_FILE).read_text())["ranges"]["8"]
    # In float32, as from sentence-transformers 6.2 on.
    stored = np.array([content["min"], content["max"]], dtype=np.float32)
    codes = quantize_embeddings(short, "int8", ranges=stored)
    assert (Quantiser(VectorPrecision.int8, ranges[8]).encode(torch.from_numpy(short)).numpy() == codes).all()


def evaluated(world, arguments):
    return evaluate.run(evaluate.compose(arguments))


def test_evaluate_uses_the_ranges_of_the_directory(ranks, tmp_path):
    model, out = save_guide(small_model("bert"), tmp_path), tmp_path / "out"
    write_beir(tmp_path / "dev", 12)
    arguments = [f"model={model}", f"data={tmp_path / 'dev'}", f"output_dir={out}", "head=none"]
    ranks(1, calibrated, [arguments])
    command = [f"model={out}", f"sets=[{tmp_path / 'dev'}]", "vectors=[int8]", f"output_dir={tmp_path / 'ev'}"]
    (before,) = ranks(1, evaluated, command)
    (out / "embedtrain.json").unlink()
    content = json.loads((out / QUANTISATION_FILE).read_text())
    (values,) = content["ranges"].values()
    values["min"] = values["max"] = [0.0] * len(values["min"])  # all codes are equal
    (out / QUANTISATION_FILE).write_text(json.dumps(content))
    (after,) = ranks(1, evaluated, command)
    assert before["dev"] == after["dev"]
    assert before["dev@int8"]["mrr@10"] > after["dev@int8"]["mrr@10"]

    for damaged in ("{", '{"version": 2}', '{"version": 1, "ranges": {"8": {"min": [1], "max": [2]}}}'):
        (out / QUANTISATION_FILE).write_text(damaged)
        with pytest.raises(ModelError, match=QUANTISATION_FILE):
            read_ranges(out)
    with pytest.raises(AssertionError, match=f"ModelError: .*{QUANTISATION_FILE}"):
        ranks(1, evaluated, command)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["dims=4000"], "dims=4000"),
        (["ranges=[4000]"], r"ranges=\[4000\]"),
        (["head=mean", "dims=8"], "dims=8"),
        (["output_dir=taken"], "output_dir=taken"),
        (["model=plain"], "/.*plain, which has no modules.json"),
        (["documents=1"], "documents=1"),
        (["output_dir=guide/1_Pooling/out"], "output_dir=guide/1_Pooling/out is inside "),
    ],
)
def test_what_cannot_be_calibrated(ranks, tmp_path, more, message):
    guide = save_guide(small_model("bert"), tmp_path)
    (tmp_path / "backbone").rename(tmp_path / "plain")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "alpha"}\n{"_id": "2", "text": "beta"}\n')
    arguments = [f"model={guide}", "data=corpus.jsonl", "output_dir=out", *more]
    with pytest.raises(AssertionError, match=f"ConfigError: {message}"):
        ranks(1, calibrated_in, tmp_path, arguments)
    assert not (tmp_path / "out").exists()


def test_a_model_whose_transformer_is_in_a_folder_of_its_own(ranks, tmp_path):
    model = save_guide(small_model("bert"), tmp_path)
    modules = json.loads((model / "modules.json").read_text())
    (model / "0_Transformer").mkdir()
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(model / "0_Transformer" / path.name)
    modules[0]["path"] = "0_Transformer"
    (model / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "corpus.jsonl").write_text(
        "".join(f'{{"_id": "{i}", "text": "{each}"}}\n' for i, each in enumerate(TEXTS))
    )
    out = tmp_path / "out"
    ranks(1, calibrated, [[f"model={model}", f"data={tmp_path / 'corpus.jsonl'}", f"output_dir={out}", "head=mean"]])
    raw = raw_vectors(model)
    assert encode(out) == pytest.approx(normalised(raw - raw.mean(0)), abs=2e-4)
    assert read_ranges(out / "0_Transformer").keys() == {raw.shape[1]}


def calibrated_in(world, folder, arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        calibrated(world, [arguments])


def test_a_model_with_python_code_is_written_if_its_code_is_trusted(tmp_path):
    model = model_with_remote_code(tmp_path / "model")
    types = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for path, name in types.items()]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    write_directory(tmp_path / "calibrated", model, None, {}, {}, kind=DENSE, trust_remote_code=True)
    assert (tmp_path / "calibrated" / "modeling_pairing.py").is_file()


def test_a_copy_has_no_code_without_trust_and_nothing_that_links_lead_to(tmp_path):
    model = save_guide(small_model("bert"), tmp_path)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoModel": "evil.Model"}}))
    (model / "evil.py").write_text("raise SystemExit\n")
    write_directory(tmp_path / "calibrated", model, None, {}, {}, kind=DENSE, trust_remote_code=False)
    assert not list((tmp_path / "calibrated").rglob("*.py"))
    assert "auto_map" not in (tmp_path / "calibrated" / "config.json").read_text()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    (model / "notes").mkdir()
    for number, target in enumerate((tmp_path / "secret", tmp_path / "secret" / "key", model / "notes")):
        link = model / "notes" / "link"
        link.symlink_to(target)
        with pytest.raises(ModelError, match=r"notes/link (leads to|is a link to)"):
            write_directory(tmp_path / f"copy-{number}", model, None, {}, {}, kind=DENSE, trust_remote_code=False)
        assert not (tmp_path / f"copy-{number}").exists()
        link.unlink()
