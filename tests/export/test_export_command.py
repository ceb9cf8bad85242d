"""`python -m embedtrain export` from a run on three ranks: every step, layout and format, and upload to the Hub."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import close_session, constants
from sentence_transformers import SentenceTransformer

from embedtrain import evaluate, load_encoder
from embedtrain import export as export_in_python
from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.export import run as main
from embedtrain.config.compose import compose_recipes
from embedtrain.errors import CheckpointError, ConfigError
from embedtrain.formats.export_record import RECORD
from embedtrain.formats.hub import upload_model
from embedtrain.formats.source import open_model_source
from embedtrain.training.inputs import check_dimensions
from tests.checkpoint.hub_server import TOKEN, Hub, running_hub
from tests.extending.test_kind import Halves, HalvesFiles
from tests.extending.test_pooling import AttentionPooling
from tests.runs import run
from tests.small import save_small, small_model, write_beir, write_rows

TEXTS = ["alpha beta", "gamma"]
POOLING = "tests.export.test_export_command:OwnPooling"


class OwnPooling(AttentionPooling):
    """Its path is named in this module only: a class that a process has used is trusted until the process ends."""


def export(*arguments: str) -> None:
    """Run the command in this process."""
    main(compose_export(list(arguments)))


@pytest.fixture(scope="module")
def workshop(ranks, tmp_path_factory):
    """Runs on three ranks: `sharded` with its best step, and `full` with weights only."""
    folder = tmp_path_factory.mktemp("export")
    rows, dev = write_rows(folder / "train.jsonl", 30), write_beir(folder / "dev", 20)
    model = save_small(small_model("bert"), folder / "model")
    common = [f"model.path={model}", f"data.train=[{rows}]", "train.steps=6", "model.query_prompt='beta '"]
    more = [
        f"evaluation.sets=[{dev}]",
        "evaluation.every=2",
        "checkpoint.best_metric=dev/recall@100",
        "checkpoint.every=2",
    ]
    ranks(3, run, *common, *more, f"output_dir={folder / 'sharded'}", "export.check=true", "export.formats=[onnx]")
    whole = ["checkpoint.layout=full", "checkpoint.contents=model", "checkpoint.every=2", "checkpoint.keep=3"]
    ranks(3, run, *common, *whole, f"output_dir={folder / 'full'}", "export.check=false", "export.max_file_size=20KB")
    return folder


def vectors(directory: Path) -> np.ndarray:
    return SentenceTransformer(str(directory)).encode(TEXTS)


@pytest.mark.slow
def test_every_step_of_both_layouts_is_exported(workshop, tmp_path):
    """With the weights of the step: the two runs learn the same, and latest is what the run exported."""
    named = {}
    for step in ("2", "4", "6", "latest"):
        export(f"run={workshop / 'full'}", f"step={step}", f"output_dir={tmp_path / step}")
        named[step] = vectors(tmp_path / step)
        number = "6" if step == "latest" else step
        assert f"weights of step {number}." in (tmp_path / step / "README.md").read_text()
    assert np.array_equal(named["6"], named["latest"])
    assert np.abs(named["2"] - named["4"]).max() > 1e-4 < np.abs(named["4"] - named["6"]).max()
    export(
        f"run={workshop / 'sharded'}", "step=best", f"output_dir={tmp_path / 'best'}", "formats=[sentence_transformers]"
    )
    assert np.allclose(vectors(tmp_path / "best"), named["2"], atol=1e-5)
    assert not (tmp_path / "best" / "onnx").exists()
    with pytest.raises(CheckpointError, match=r"step=best: .*checkpoint\.best_metric"):
        export(f"run={workshop / 'full'}", "step=best", f"output_dir={tmp_path / 'no'}")
    assert not (tmp_path / "no").exists()


def test_truncated_vectors(workshop, tmp_path):
    """sentence-transformers returns the first dimensions of the same vectors."""
    for more in ([], ["truncate_dim=6"]):
        export(f"run={workshop / 'full'}", f"output_dir={tmp_path / str(len(more))}", *more)
    truncated = vectors(tmp_path / "1")
    assert truncated.shape == (2, 6)
    assert np.allclose(truncated, vectors(tmp_path / "0")[:, :6], atol=1e-6)
    assert "with 6 dimensions" in (tmp_path / "1" / "README.md").read_text()
    with pytest.raises(ConfigError, match=r"truncate_dim: 6000 .* \d+ dimensions"):
        export(f"run={workshop / 'full'}", f"output_dir={tmp_path / 'no'}", "truncate_dim=6000")


def test_the_final_export_obeys_the_recipe(workshop):
    """On three ranks: an ONNX graph; files of limited size, and no check."""
    assert (workshop / "sharded" / "model" / "onnx" / "model.onnx").is_file()
    assert "onnx" in yaml.safe_load((workshop / "sharded" / "model" / "README.md").read_text().split("---")[1])["tags"]
    assert len(list((workshop / "full" / "model").glob("model-*.safetensors"))) > 1
    assert SentenceTransformer(str(workshop / "full" / "model")).prompts["query"] == "beta "
    assert sorted(path.name for path in (workshop / "sharded").glob("model*")) == ["model"]


def test_an_unchecked_export_warns(workshop, tmp_path, capsys):
    export(
        f"run={workshop / 'sharded'}", f"output_dir={tmp_path / 'out'}", "check=false", "dtype=fp16", "formats=[onnx]"
    )
    output = capsys.readouterr().out
    assert "check=false: " in output
    assert "reopening" not in output
    assert "(float16; not checked)" in output
    assert (tmp_path / "out" / "onnx" / "model.onnx").is_file()


def test_settings_that_older_versions_did_not_write_are_added(workshop, tmp_path):
    run_dir = shutil.copytree(workshop / "full", tmp_path / "run")
    for name, settings in (("config.json", "architectures"), ("tokenizer.json", "truncation")):
        path = run_dir / "architecture" / name
        content = json.loads(path.read_text())
        assert content.pop(settings)
        path.write_text(json.dumps(content))
    (run_dir / "architecture" / "checksums.json").unlink(missing_ok=True)
    export(f"run={run_dir}", "check=false", f"output_dir={tmp_path / 'out'}")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["BertModel"]
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text())["truncation"]["max_length"] == 48


def test_graphs_are_measured_on_evaluation_sets(workshop, tmp_path):
    """Columns of the model card; the fp32 graph has the metric of the step."""
    dev = workshop / "dev"
    texts = {name: [json.loads(line) for line in (dev / f"{name}.jsonl").open()] for name in ("queries", "corpus")}
    judged = [line.split() for line in (dev / "qrels" / "test.tsv").read_text().splitlines()[1:]]
    in_memory = {
        "name": "memory",
        **{name: {row["_id"]: row["text"] for row in rows} for name, rows in texts.items()},
        "qrels": {query: {document: int(score)} for query, document, score in judged},
    }
    options = {"check": False, "sets": [dev, in_memory], "max_metric_loss": 1, "quiet": True}
    export_in_python(
        workshop / "full", output_dir=tmp_path / "out", formats=["onnx", "onnx_int8"], onnx_min_agreement=0.9, **options
    )
    card = (tmp_path / "out" / "README.md").read_text().splitlines()
    head, _, *rows = card[next(row for row, line in enumerate(card) if line.startswith("| file")) :]
    assert [cell.strip() for cell in head.split("|")][4:6] == ["dev ndcg@10", "memory ndcg@10"]
    assert all(len(set(row.split("|")[4:6])) == 1 for row in rows if row.startswith("| `"))
    measured = {row.split("`")[1]: float(row.split("|")[4]) for row in rows if row.startswith("| `")}
    assert list(measured) == ["onnx/model.onnx", "onnx/model_quantized.onnx"]
    expected = evaluate(tmp_path / "out", [str(workshop / "dev")], precision="fp32", quiet=True)["dev"]["ndcg@10"]
    assert measured["onnx/model.onnx"] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ConfigError, match=r"formats=\[sentence_transformers\]: sets"):
        export_in_python(workshop / "full", output_dir=tmp_path / "no", formats=["sentence_transformers"], **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("formats=[gguf]", r"formats=\[gguf\]: .*sentence_transformers, onnx, onnx_fp16, onnx_int8, openvino, adapter"),
        ("max_file_size=5", "max_file_size=5: .*above 0 with KB, MB, GB or TB"),
        ("max_file_size=0GB", "max_file_size=0GB: .*above 0"),
        ("push_to_hub='me/my model'", "push_to_hub=me/my model: "),
        ("push_to_hub=a/b/c", "push_to_hub=a/b/c: .*id of a repository on the Hub"),
        ("push_to_hub=/tmp", "push_to_hub=/tmp: "),
    ],
)
def test_invalid_options_are_rejected(argument, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compose_export(["run=nowhere", argument])


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A local Hub, used by huggingface_hub in this process."""
    with running_hub() as actual:
        monkeypatch.setattr(constants, "ENDPOINT", actual.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        close_session()  # one that was made offline stays so
        yield actual
    close_session()


def environment(hub: Hub, folder: Path) -> dict[str, str]:
    """Environment of a process that uses the local Hub."""
    kept = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    return kept | {
        "HF_ENDPOINT": hub.address, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def test_the_directory_is_uploaded_in_one_commit(workshop, tmp_path, hub):
    """By the command in a separate process."""
    to = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "embedtrain",
        "export",
        f"run={workshop / 'full'}",
        f"output_dir={to}",
        "push_to_hub=me/model",
    ]
    done = subprocess.run(
        command, env=environment(hub, tmp_path / "home"), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"uploaded: {hub.address}/me/model" in done.stdout
    (repository,) = hub.repositories.values()
    assert (repository["visibility"], repository["message"]) == ("private", "Model of step 6")
    here = {str(path.relative_to(to)): path.read_bytes() for path in to.rglob("*") if path.is_file()}
    assert list(json.loads(here.pop(RECORD))["files"]) == sorted(here)
    assert here == repository["files"]
    card = repository["files"]["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "sentence-transformers"
    assert "base_model" not in header, "a local directory is not a model on the Hub"
    assert 'SentenceTransformer("me/model")' in card
    # Again, to a repository with an earlier model in more files, and a file of the owner.
    repository["files"] |= {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    upload_model(to, "me/model", private=True, step=6)
    assert repository["files"] == here | {"notes.txt": b"mine"}


def test_a_failed_upload_keeps_the_model(workshop, tmp_path, hub, monkeypatch):
    arguments = [f"run={workshop / 'full'}", f"output_dir={tmp_path / 'out'}", "push_to_hub=me/model", "check=false"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"push_to_hub=me/model.*token.*HF_TOKEN"):
        export(*arguments)
    assert not (tmp_path / "out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    again = f"the model is in {tmp_path / 'out'}: .*`hf upload me/model {tmp_path / 'out'}`"
    with pytest.raises(CheckpointError, match=rf"push_to_hub=me/model failed \(\w+: .*401.*\); {again}"):
        export(*arguments)
    assert vectors(tmp_path / "out").shape == (2, 32)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuse = 403
    with pytest.raises(CheckpointError, match=r"403.*You don't have the rights to do this"):
        upload_model(tmp_path / "out", "me/model", private=True, step=6)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"push_to_hub=me/model failed .*[Cc]onnect") as failure:
        upload_model(tmp_path / "out", "me/model", private=True, step=6)
    assert "\n" not in str(failure.value)
    assert hub.repositories == {}


def test_ranks_that_cannot_upload_do_not_start(ranks, workshop, tmp_path):
    """The ranks are offline."""
    options = [f"model.path={workshop / 'model'}", f"data.train=[{workshop / 'train.jsonl'}]", "train.steps=2"]
    with pytest.raises(AssertionError) as failure:
        ranks(2, run, *options, f"output_dir={tmp_path / 'run'}", "export.push_to_hub=me/model")
    assert str(failure.value).count("push_to_hub=me/model, but HF_HUB_OFFLINE is set") == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_on_two_ranks_uploads_once(workshop, tmp_path, hub):
    options = [f"model.path={workshop / 'model'}", f"data.train=[{workshop / 'train.jsonl'}]", "train.steps=1"]
    options += ["model.pooling=mean", f"output_dir={tmp_path / 'run'}", "export.push_to_hub=me/run", "name=t"]
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "-m", "embedtrain", *options], env=environment(hub, tmp_path / "home"), check=True, timeout=300
    )
    assert hub.num_commits == 1
    weights = (tmp_path / "run" / "model" / "model.safetensors").read_bytes()
    assert hub.repositories["me/run"]["files"]["model.safetensors"] == weights


def test_a_run_with_a_pooling_of_the_user(ranks, tmp_path):
    """The recipe names the class, and only the user has it imported."""
    rows, model = write_rows(tmp_path / "train.jsonl", 12), save_small(small_model("bert"), tmp_path / "model")
    output_dir, to = tmp_path / "run", tmp_path / "out"
    arguments = [f"model.path={model}", f"data.train=[{rows}]", "train.steps=2", f"output_dir={output_dir}"]
    ranks(1, run, *arguments, f"model.pooling={POOLING}", "export.check=true")
    refused = {
        (): rf"{POOLING}, .* write pooling={POOLING}",
        ("kind=sparse",): r"kind=sparse: .*model.kind=dense; leave it out",
        ("pooling=mean",): rf"pooling=mean: .* write pooling={POOLING}",
    }
    for options, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            export(f"run={output_dir}", f"output_dir={to}", *options)
    export(f"run={output_dir}", f"output_dir={to}", f"pooling={POOLING}", "formats=[onnx]")
    with load_encoder(to, pooling=OwnPooling, precision="fp32", quiet=True) as encoder:
        expected = encoder.encode(TEXTS)
    with load_encoder(output_dir / "model", pooling=OwnPooling, precision="fp32", quiet=True) as encoder:
        assert np.allclose(encoder.encode(TEXTS), expected, atol=1e-6)
    export_in_python(output_dir, output_dir=tmp_path / "again", pooling=OwnPooling, check=False, quiet=True)
    assert (tmp_path / "again" / "1_Pooling" / "model.safetensors").is_file()


class GraphFiles(HalvesFiles):
    """Has outputs of a graph, which the head does not compute."""

    def graph_outputs(self, source):
        return {"sentence_embedding": None}


class WithGraph(Halves):
    """A kind without a graph, whose files say that it has one."""

    name = "tests.export.test_export_command:WithGraph"

    @property
    def files(self):
        return GraphFiles()


@pytest.mark.parametrize("kind", [Halves, WithGraph])
def test_a_kind_without_a_graph_is_refused_before_training(tmp_path, kind):
    save_small(small_model("bert"), tmp_path / "model")
    options = ["name=t", "train.steps=1", "data.train=[rows.jsonl]", f"model.path={tmp_path / 'model'}"]
    (recipe,) = compose_recipes([*options, f"model.kind={kind.name}", "export.formats=[onnx]"])
    with pytest.raises(ConfigError, match=rf"export\.formats: model\.kind={kind.name} has no ONNX graph"):
        check_dimensions(recipe, open_model_source(recipe.model))
