"""The Python API: the commands as functions of one process, and of several ranks."""

import ast
import atexit
import dataclasses
import errno
import inspect
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
import yaml
from datasets import Dataset, DatasetDict
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CoSENTLoss

import embedtrain.commands.evaluate
import embedtrain.commands.mine
from embedtrain import evaluate, export, filter, load_encoder, mine, plan, search, split, train
from embedtrain.api import EncoderOptions, _group
from embedtrain.cli.in_process import SHARED_WORLD, own_process_state
from embedtrain.config.commands import COMMANDS
from embedtrain.config.recipe import DataConfig, Recipe
from embedtrain.data.in_memory import InMemoryData
from embedtrain.distributed.sharding import compile_blocks
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, EmbedtrainError, TrainingError
from embedtrain.results import Metrics, MineResult, SplitResult, TrainResult
from embedtrain.tracking.metrics import read_metrics
from tests.commands import TORCHRUN
from tests.conftest import ROOT
from tests.small import WORDS, save_small, small_model

OPTIONS: dict[str, Any] = {
    "train": {"steps": 4, "global_batch_size": 10},
    "model.pooling": "mean",
    "optim.lr": 1e-3,
    "parallel": {"precision": "fp32", "strategy": "fsdp"},
    "tracking.report": False,
}


def rows(count: int = 36) -> list[dict[str, str]]:
    return [
        {"query": f"{WORDS[i % 13]} {WORDS[i % 7]} a", "positive": f"{WORDS[i % 13]} {WORDS[i % 7]} b {WORDS[i % 11]}"}
        for i in range(count)
    ]


# What InformationRetrievalEvaluator of sentence-transformers takes.
DEV = {
    "name": "dev",
    "queries": {f"q{i}": f"{WORDS[i]} a" for i in range(10)},
    "corpus": {f"d{i}": f"{WORDS[i]} b" for i in range(10)},
    "relevant_docs": {f"q{i}": {f"d{i}", f"d{(i + 1) % 10}"} for i in range(10)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "model"
    save_small(small_model("xlm-roberta"), path)
    return path


def test_import_imports_no_torch():
    code = (
        "import sys, embedtrain; assert 'torch' not in sys.modules; embedtrain.evaluate; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_dir_lists_the_functions():
    code = "import embedtrain, sys; print(*dir(embedtrain)); assert 'torch' not in sys.modules"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert {"train", "evaluate", "mine", "export", "load_encoder", "__version__"} <= set(output.split())


def test_functions_stay_functions_when_the_commands_are_imported():
    assert embedtrain.evaluate.__module__ == embedtrain.mine.__module__ == "embedtrain.api"
    assert all(isinstance(function, FunctionType) for function in (train, evaluate, mine, export, load_encoder))


def process_state() -> dict[str, Any]:
    """What a function of the API must leave as it was."""
    return {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "stored": sorted(name for name in ConfigStore.instance().repo if name != "hydra" and name[0] != "_"),
        "random": torch.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "ranks": dist.is_initialized(),
        "errors": sys.excepthook,
        "python threads": {thread.name for thread in threading.enumerate() if thread.daemon} - {"Thread-1", "Thread-2"},
    }


def test_settings_of_compilation_are_restored():
    limit, lowering = torch._dynamo.config.recompile_limit, torch._functorch.config.force_non_lazy_backward_lowering
    with own_process_state("train", quiet=True):
        compile_blocks(torch.nn.Linear(1, 1))
        assert torch._dynamo.config.recompile_limit > limit
    assert torch._dynamo.config.recompile_limit == limit
    assert torch._functorch.config.force_non_lazy_backward_lowering == lowering


def test_one_process_trains_evaluates_mines_exports_and_encodes(model, tmp_path, capsys):
    OmegaConf.register_new_resolver("oc.env", lambda name: f"own {name}", replace=True)
    before = process_state()
    trained = train(model=model, data=rows(), evaluation=[DEV], output_dir=tmp_path / "run", options=OPTIONS)
    assert "step 4/4" in capsys.readouterr().out
    assert [row["step"] for row in trained.history if "loss" in row] == [1, 2, 3, 4]
    assert trained.step == 4
    saved = {row["set"]: row for row in trained.history if "set" in row and row["step"] == 4}
    assert trained.metrics["dev"].items() <= saved["dev"].items()

    again = train(
        model=str(model), data=Dataset.from_list(rows()), evaluation={"sets": [DEV]}, output_dir=str(tmp_path / "run"),
        options=OPTIONS, quiet=True,
    )  # fmt: skip
    assert again.metrics == trained.metrics and len(again.history) == len(trained.history)  # resumed: nothing to do
    assert (trained.has_trained, again.has_trained) == (True, False)

    assert evaluate(trained, DEV, output_dir=tmp_path / "evaluate", quiet=True)["dev"] == pytest.approx(
        trained.metrics["dev"]
    )
    mined = mine(trained, rows(), tmp_path / "mined", negatives=2, relative_margin=None, quiet=True)
    assert mined.summary["sources"]["rows"]["rows"] == 36
    assert mined.files == [tmp_path / "mined" / "rows.jsonl"] and len(mined.files[0].read_text().splitlines()) == 36
    assert export(trained, output_dir=tmp_path / "exported", quiet=True) == tmp_path / "exported"

    texts = ["alpha b", "beta a", "alpha b"]
    with (
        load_encoder(trained, query_prompt="gamma ", quiet=True) as encoder,
        load_encoder(model, pooling="cls", quiet=True) as other,
    ):
        vectors = encoder.encode_documents(texts)
        other.close()
        queries = encoder.encode_queries(texts)  # the process group stays until the last encoder is closed
        np.testing.assert_array_equal(encoder.encode(texts[0], prompt_name="query"), queries[0])
    assert capsys.readouterr().out == ""
    assert process_state() == before
    assert OmegaConf.create({"a": "${oc.env:X}"}).a == "own X"
    OmegaConf.clear_resolvers()
    theirs = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    np.testing.assert_allclose(vectors, theirs.encode(texts), atol=1e-5)
    np.testing.assert_allclose(queries, theirs.encode([f"gamma {text}" for text in texts]), atol=1e-5)
    assert vectors.dtype == np.float32


def test_rows_are_split_filtered_searched_and_planned(model, tmp_path, capsys):
    """Data in memory for commands of one process, whose files are gone afterwards, and for a filter."""
    parts = split(pd.DataFrame(rows()), tmp_path / "data", dev=2, quiet=True)
    assert parts.files == [tmp_path / "data" / "train.jsonl"] and parts.dev == tmp_path / "data" / "dev"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["dev", "train.jsonl"]
    assert sum(parts.summary["train_rows"]) + parts.summary["dev_rows"] == 36
    corpus = {f"d{number}": text for number, text in enumerate(WORDS)}
    kept = filter(
        model, rows(), tmp_path / "kept", corpus=corpus, keep_rank=1000, options={"pooling": "mean"}, quiet=True
    )
    assert len(kept.files[0].read_text().splitlines()) == 36 == kept.summary["sources"]["rows"]["kept_rows"]
    assert sorted(path.name.partition("-")[0] for path in (tmp_path / "kept" / "data").iterdir()) == ["corpus", "rows"]

    corpus = {f"d{number}": f"{word} <b>" for number, word in enumerate(WORDS)}
    found = search(model, corpus, ["gamma <b>", "alpha <b>"], top_k=2, pooling="mean", quiet=True)
    assert [hits[0].id for hits in found] == [f"d{WORDS.index(word)}" for word in ("gamma", "alpha")]
    assert [len(hits) for hits in found] == [2, 2] and found[0][0].text == "gamma <b>"
    assert found[0][0].score > found[0][1].score
    table = pd.DataFrame({"id": list(corpus), "text": list(corpus.values())})
    assert search(model, table, ["gamma <b>"], top_k=2, pooling="mean", quiet=True) == found[:1]
    assert search(model, corpus, [], pooling="mean", quiet=True) == []
    with pytest.raises(ConfigError, match=r"queries='gamma': must be a list of texts; write \['gamma'\]"):
        search(model, corpus, "gamma", pooling="mean")
    assert capsys.readouterr().out == ""
    planned = plan(model=model, gpus=2, options={"model.pooling": "mean", "train.global_batch_size": 4}, quiet=True)
    assert planned.fits and planned.summary["cluster"]["ranks"] == 2 and "memory per GPU" in planned.text
    assert not plan(model=model, gpus=1, gpu_memory=0.001, options={"model.pooling": "mean"}, quiet=True).fits
    assert capsys.readouterr().out == ""
    assert "&lt;b&gt;" in found[0]._repr_html_() and "<b>" not in found[0]._repr_html_()


@pytest.mark.parametrize("name", embedtrain.__all__[1:])
def test_help_has_every_option_with_its_default_and_meaning(name):
    """From the dataclasses: what a command accepts is in its docstring and its signature."""
    function = getattr(embedtrain, name)
    text, parameters = inspect.getdoc(function), inspect.signature(function).parameters
    assert all(f"\n{section}:\n" in text for section in ("Args", "Returns", "Raises"))
    kind = {"train": Recipe, "load_encoder": EncoderOptions}.get(name) or COMMANDS[name].option_class
    for field in dataclasses.fields(kind):
        assert field.name in parameters, field.name
    assert "more" not in parameters
    assert re.search(r"^    \w.*\(", text, re.MULTILINE), "an example"
    example = textwrap.dedent(re.search(r"\n\n((?:    .*\n)+)\n", text)[1])
    called = {node.func.id: node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call) and
              isinstance(node.func, ast.Name)}  # fmt: skip
    for function_name, call in called.items():
        accepted = inspect.signature(getattr(embedtrain, function_name)).parameters
        assert {keyword.arg for keyword in call.keywords} <= set(accepted), function_name


def test_help_of_train_has_the_options_of_groups():
    text = inspect.getdoc(train)
    assert "\noptim.lr: float = 5e-05\n    " in text
    assert "\nparallel.precision: 'auto' | 'bf16' | 'fp32' " in text
    assert inspect.signature(mine).parameters["seed"].default == 42


TYPED = """
from embedtrain import evaluate, load_encoder, search, train

trained = train("minilm", data="a.jsonl", optim={"lr": 1e-4}, train={"steps": 5}, output_dir="runs/a")
reveal_type(trained.metrics["dev"]["ndcg@10"])
reveal_type(search(trained, "corpus", ["a"])[0][0].id)
reveal_type(evaluate(trained, precision="bf16")["dev"])
with load_encoder(trained) as encoder:
    reveal_type(encoder.encode_queries(["a"]))
    reveal_type(encoder.encode("a", convert_to_tensor=True))
    reveal_type(encoder.encode(["a"], output_value="lexical_weights"))
train(optim={"lrate": 1e-4})
train(trian={"steps": 5})
evaluate(trained, precision="fp31")
"""


@pytest.mark.slow
def test_type_checkers_know_results_and_options(tmp_path):
    (tmp_path / "program.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml"), "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert re.search(r'"numpy\.ndarray\[.*float.*32.*"torch.*Tensor".*"Any"', done.stdout, re.S), done.stdout
    for expected in ('"float"', '"str"', '"dict[str, float]"', '"lrate"', '"trian"', "\"Literal['fp31']\""):
        assert expected in done.stdout.replace("builtins.", ""), done.stdout + done.stderr
    assert done.stdout.count(": error:") == 3


def test_results_are_tables_in_a_notebook(tmp_path):
    metrics = Metrics({"<dev>": {"ndcg@10": 0.5, "queries": 1200}, "other": {"accuracy": 0.25}})
    assert metrics == {"<dev>": {"ndcg@10": 0.5, "queries": 1200}, "other": {"accuracy": 0.25}}
    assert metrics._repr_html_().count("<table>") == 2  # of different metrics
    assert "<td>&lt;dev&gt;</td><td>0.5000</td><td>1,200</td>" in metrics._repr_html_()
    losses = '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n'
    start = '{"step": 0, "set": "other", "accuracy": 0.125, "model": "m"}\n'
    end = start.replace('"step": 0', '"step": 2').replace("0.125", "0.25")
    (tmp_path / "metrics.jsonl").write_text(start + losses + end)
    result = TrainResult(tmp_path, tmp_path / "<i>", 2, True, metrics)
    assert "<i>" not in result._repr_html_() and "2.5000 at first, 2.0000 at last" in result._repr_html_()
    assert result.metrics_before == {"other": {"accuracy": 0.125}}
    assert "<td>other, before training</td><td>0.1250</td>" in result._repr_html_()
    assert repr(result).endswith("step=2, metrics={'<dev>': {'ndcg@10': 0.5}, 'other': {'accuracy': 0.25}})")
    mined = MineResult([tmp_path / "a.jsonl"], {"sources": {"a": {"rows": 1234}}, "suspicious": [{}, {}]})
    assert "<td>sources.a.rows</td><td>1,234</td>" in mined._repr_html_() and "2 entries" in mined._repr_html_()
    assert repr(mined).endswith("a.jsonl'], summary={'sources': ..., 'suspicious': ...})")
    split_rows = SplitResult([tmp_path / "train.jsonl"], {"train_rows": [1800], "dev_queries": 200})
    assert "<td>train_rows</td><td>1,800</td>" in split_rows._repr_html_() and "/dev</td>" in split_rows._repr_html_()
    assert f"dev='{tmp_path}/dev', summary={{'train_rows': [1800]" in repr(split_rows)


def test_encoders_take_texts_alone_and_until_they_are_closed(model):
    with load_encoder(model, pooling="cls", quiet=True) as encoder:
        expected = encoder.encode(["alpha b", "beta"])
        for texts in (np.array(["alpha b", "beta"]), ("alpha b", "beta"), iter(["alpha b", "beta"])):
            np.testing.assert_array_equal(encoder.encode(texts), expected)
        for value, kind in (
            (None, "NoneType"),
            (float("nan"), "float"),
            (3, "int"),
            ({"text": "a"}, "dict"),
            (b"a", "bytes"),
        ):
            for call in (encoder.encode, encoder.encode_queries, encoder.encode_documents):
                with pytest.raises(ConfigError, match=rf"item 1 of 2 is .*\({kind}\)"):
                    call(["alpha", value])
            with pytest.raises(ConfigError, match=kind):
                encoder.encode(value)
    for call in (encoder.encode, encoder.encode_queries, encoder.encode_documents):
        with pytest.raises(ConfigError, match="closed"):
            call(["alpha"])


def test_an_encoder_that_is_never_closed_is_at_the_end_of_the_program(monkeypatch):
    """While modules are torn down, leaving the process group prints an exception that is ignored."""
    registered, removed = [], []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", removed.append)
    SHARED_WORLD.join(60.0)
    try:
        assert registered
        assert not removed
    finally:
        SHARED_WORLD.leave()
    assert removed == registered


def test_a_finished_run_keeps_its_model_and_what_describes_it(model, tmp_path):
    """Another evaluation and another export are made; what would train another model is an error, quiet or not."""
    out, options = tmp_path / "run", OPTIONS | {"export.check": False}
    small = {"evaluation.at_start": False, "quiet": True, "output_dir": out, "model": model, "data": rows()}
    first = train(**small, options=options)
    assert first.metrics == {}
    weights = (out / "model" / "model.safetensors").read_bytes()
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())

    changed = options | {"optim.lr": 2e-3, "optim.weight_decay": 0.5}
    with pytest.raises(EmbedtrainError, match=r"optim.lr=0.001, optim.weight_decay=.*this run has optim.lr=0.002, "):
        train(**small, options=changed)
    with pytest.raises(EmbedtrainError, match=r"resume=never: output_dir=.*run holds a run"):
        train(**small, options=options, resume="never")
    assert yaml.safe_load((out / "recipe.yaml").read_text()) == recipe

    more = {"evaluation.sets": [DEV], "export.license": "mit", "parallel.strategy": "ddp", "name": "other"}
    measured = train(**small, options={**options, **more, "parallel": {"precision": "fp32"}}, resume="require")
    assert not measured.has_trained and measured.step == 4
    assert measured.metrics["dev"] == pytest.approx(evaluate(first, DEV, output_dir=tmp_path / "e", quiet=True)["dev"])
    evaluate(first, DEV, output_dir=tmp_path / "bf16", precision="bf16", quiet=True)
    for precision, folder in {"fp32": out, "bf16": tmp_path / "bf16"}.items():
        assert read_metrics(folder / "metrics.jsonl")[-1]["dataset"]["precision"] == precision
    assert (out / "model" / "model.safetensors").read_bytes() == weights
    card = (out / "model" / "README.md").read_text()
    assert "license: mit" in card and "| dev |" in card and "# run\n" in card and "strategy: fsdp" in card
    after = yaml.safe_load((out / "recipe.yaml").read_text())
    assert after["evaluation"]["sets"] and after["export"]["license"] == "mit"
    unchanged = [group for group in recipe if group not in ("evaluation", "export")]
    assert [after[group] for group in unchanged] == [recipe[group] for group in unchanged]

    rows_of_dev = [row for row in measured.history if row.get("set") == "dev"]
    repeated = train(**small, options={**options, "evaluation.sets": [DEV]})
    assert repeated.metrics == measured.metrics and repeated.history == measured.history  # not measured again
    half = train(**small, options={**options, "evaluation.sets": [DEV | {"subset": 5}]})
    assert len([row for row in half.history if row.get("set") == "dev"]) == len(rows_of_dev) + 1

    with pytest.raises(EmbedtrainError, match=r"resume=require: output_dir=.*new holds no intact checkpoint"):
        train(**{**small, "output_dir": tmp_path / "new"}, options=options, resume="require")
    longer = train(**small, options={**options, "train": {"steps": 6, "global_batch_size": 10, "log_every": 1}})
    assert longer.has_trained and longer.step == 6
    earlier = export(out, step=4, output_dir=tmp_path / "earlier", check=False, quiet=True)
    assert (
        "steps: 4\n" in (earlier / "README.md").read_text()
        and "steps: 6\n" in (out / "model" / "README.md").read_text()
    )
    assert (out / "model" / "model.safetensors").read_bytes() != weights


def train_and_encode(world: World, model: Path, folder: Path) -> tuple[Any, ...]:
    trained = train(model=model, data=rows(), evaluation=DEV, output_dir=folder / "run", options=OPTIONS, quiet=True)
    metrics = evaluate(trained, DEV, output_dir=folder / "evaluate", quiet=True)
    with load_encoder(trained, quiet=True) as encoder:
        return trained, metrics, encoder.encode_queries(["alpha b", "beta a", "eta"])


def test_all_ranks_get_the_same_results(ranks, model, tmp_path):
    results = ranks(2, train_and_encode, model, tmp_path)
    (one, metrics, vectors), (other, other_metrics, other_vectors) = results
    assert one == other and metrics == other_metrics and metrics["dev"] == pytest.approx(one.metrics["dev"])
    np.testing.assert_array_equal(vectors, other_vectors)
    written = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["data"]["train"][0]["path"]
    assert Path(written).parent == tmp_path / "run" / "data" and len(Path(written).read_text().splitlines()) == 36


SCRIPT = """
import sys
from pathlib import Path
from tests.test_api import train_and_encode
if __name__ == "__main__":
    trained, metrics, vectors = train_and_encode(None, Path(sys.argv[1]), Path(sys.argv[2]))
    train_and_encode(None, Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"vectors {vectors.shape}")  # one write, which that of the other rank cannot split
"""


@pytest.mark.slow
def test_script_under_torchrun(model, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [*TORCHRUN, "2", str(tmp_path / "script.py"), str(model), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("vectors (3, 32)") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": {"stepz": 4}}, r"train\.stepz"),
        ({"data": [{"query": "a", "positive": float("nan")}]}, r"rows-\w+\.jsonl:1: .*positive"),
        (
            {"data": [{"query": "a", "positive": datetime(2026, 1, 2)}]},
            r"rows-\w+\.jsonl.*positive.*datetime\.datetime",
        ),
        ({"data": [("a", "b")]}, r"data\.train\[0\]\[0\]: a row is a mapping of columns, not str"),
        ({"data": [{"path": "x"}, 3]}, r"data\.train\[1\]"),
        ({"data": {"train": "x", "other": 1}}, r"data\.other"),
        ({"evaluation": {"queries": {}, "corpus": ["a"], "qrels": {}}}, r"evaluation\.sets: corpus"),
        ({"evaluation": {"queries": {}, "corpus": {}, "qrels": {"q": "d"}}}, r"qrels of query 'q'"),
        ({"data": "missing.jsonl"}, r"missing\.jsonl"),
        ({"loss": "infonse"}, r"loss=infonse"),
        ({"loss": CoSENTLoss}, r"loss=CoSENTLoss: write loss=cosent"),
    ],
    ids=["option", "missing", "date", "row", "source", "group", "corpus", "qrels", "path", "loss", "class"],
)
def test_errors_are_those_of_the_command(model, tmp_path, options, message):
    arguments = {"data": rows(), "train.steps": 1, "model.pooling": "mean"} | options
    arguments.pop("train.steps") if "train" in options else None
    with pytest.raises(EmbedtrainError, match=message):
        train(model=model, output_dir=tmp_path, quiet=True, **arguments)
    assert not dist.is_initialized()


def read_once(rows: list[dict[str, str]]) -> Any:
    """The rows for one reader: a second one would find none."""
    yield from rows


def test_a_call_that_fails_leaves_no_rows_but_those_of_a_run(model, tmp_path):
    given = {"data": rows(), "evaluation": DEV, "model": model, "quiet": True}
    with pytest.raises(ConfigError, match="max_length=1000"):
        train(**given, options=OPTIONS | {"model.max_length": 1000}, output_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "data").exists()
    unclear = [{"x": "a", "y": "b", "z": "c"}]
    with pytest.raises(DataError, match="columns x, y, z"):
        evaluate(model, unclear, pooling="mean", output_dir=tmp_path / "evaluate", quiet=True)
    with pytest.raises(DataError, match="x, y, z"):
        mine(model, unclear, tmp_path / "mined", pooling="mean", quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]  # with the file of its lock
    with pytest.raises(TrainingError, match="not finite"):
        train(**given, options=OPTIONS | {"optim.lr": 1e30}, output_dir=tmp_path / "run")
    (kept,) = (tmp_path / "run" / "data").glob("rows-*")  # recipe.yaml names it
    with pytest.raises(ConfigError, match="max_length=1000"):
        train(**given | {"data": rows(20)}, options=OPTIONS | {"model.max_length": 1000}, output_dir=tmp_path / "run")
    assert list((tmp_path / "run" / "data").glob("rows-*")) == [kept]


def test_warnings_of_a_quiet_call_are_those_of_python(model, tmp_path, capsys):
    """Columns whose order was taken for their roles are seen also where nothing is printed."""
    ordered = [{"deu": row["query"], "eng": row["positive"]} for row in rows()]
    options = OPTIONS | {"train": {"steps": 1, "global_batch_size": 10}, "evaluation.at_start": False}
    with pytest.warns(UserWarning, match="deu = query, eng = positive") as caught:
        train(data=ordered, model=model, options=options, output_dir=tmp_path / "run", quiet=True)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = {"rows": ordered, "columns": ["deu", "eng"]}
        train(data=source, model=model, options=options, output_dir=tmp_path / "named", quiet=True)
    assert not capsys.readouterr().out
    with pytest.warns(UserWarning, match="deu = query, eng = positive"):
        mine(model, ordered, tmp_path / "mined", pooling="mean", negatives=1, quiet=True)


def test_data_in_memory_is_read_once_and_repaired(tmp_path):
    def held() -> InMemoryData:
        memory = InMemoryData(near=tmp_path / "run")
        (source,) = memory.sources({"rows": read_once(rows(3)), "weight": 2}, "data.train")
        assert source["weight"] == 2 and source["name"] == "rows"
        return memory

    with held() as memory:
        assert [path.name[:12] for path in tmp_path.iterdir()] == [".embedtrain-"]  # on the disk of the run
        memory.write(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (file,) = (tmp_path / "run" / "data").iterdir()
    written, content = file.stat(), file.read_bytes()
    assert [json.loads(line) for line in content.splitlines()] == rows(3)
    with held() as memory:
        memory.write(tmp_path / "run")
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (written.st_mtime_ns, written.st_ino)
    file.write_bytes(content[:-5])
    with held() as memory:
        memory.write(tmp_path / "run")
    assert file.read_bytes() == content


def test_data_in_memory_is_copied_from_another_disk(tmp_path, monkeypatch):
    with InMemoryData(near=tmp_path / "run") as memory:
        (source,) = memory.sources(rows(3), "data.train")
        replace = Path.replace

        def of_another_disk(self: Path, target: Path) -> Path:
            if self.parent.name[:12] == ".embedtrain-":
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", of_another_disk)
        memory.write(tmp_path / "run")
    assert len((tmp_path / "run" / "data" / Path(source["path"]).name).read_text().splitlines()) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_ranks_other_than_the_first_write_nothing(tmp_path):
    with InMemoryData(near=tmp_path / "run", keeps=False) as memory, InMemoryData() as kept:
        sources = [each.sources(rows(3), "data.train") for each in (memory, kept)]
        assert sources[0] == sources[1] and memory.digests == kept.digests
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence(tmp_path):
    def no_space() -> Any:
        yield from rows(2)
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(DataError, match=r"data\.train: the rows do not fit.*TMPDIR"),
        InMemoryData(near=tmp_path / "run") as memory,
    ):
        memory.sources(no_space(), "data.train")
    assert not list(tmp_path.iterdir())


def train_on_own_rows(world: World, model: Path, folder: Path) -> None:
    data = rows()[:: 1 if world.rank == 0 else -1]
    train(model=model, data=data, output_dir=folder / "run", options=OPTIONS, quiet=True)


def test_ranks_with_different_rows_are_refused_alike(ranks, model, tmp_path):
    with pytest.raises(Exception, match="rank 1 holds other rows than rank 0"):
        ranks(2, train_on_own_rows, model, tmp_path)
    assert not (tmp_path / "run" / "data").exists()


def rows_in_memory(data: Any, option: str = "data.train") -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder, InMemoryData() as memory:
        memory.sources(data, option)
        memory.write(Path(folder))
        (name,) = memory.digests
        return [json.loads(line) for line in Path(folder, "data", name).read_bytes().splitlines()]


COLUMNS = {key: [row[key] for row in rows(5)] for key in ("query", "positive")}
FRAME = pd.DataFrame(COLUMNS)


class RowsOfTheUser:
    """An iterable of one's own."""

    def __iter__(self) -> Any:
        return iter(rows(5))


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME.set_index("query"),  # as groupby leaves it
        {"rows": FRAME.convert_dtypes()},
        pa.table(COLUMNS),
        Dataset.from_dict(COLUMNS),
        Dataset.from_dict(COLUMNS).to_iterable_dataset(),
        Dataset.from_dict(COLUMNS).to_iterable_dataset().map(lambda row: row),  # its columns are not known
        Dataset.from_list([*reversed(rows(5))]).select([4, 3, 2, 1, 0]).with_format("numpy"),
        read_once(rows(5)),
        RowsOfTheUser(),
        COLUMNS,
        {key: np.array(values) for key, values in COLUMNS.items()},
        {"rows": dict(FRAME.items())},
        DatasetDict(train=Dataset.from_dict(COLUMNS), test=Dataset.from_list(rows(2))),
        {"rows": {"a": Dataset.from_list(rows(2)), "b": FRAME}, "split": "b"},
        DatasetDict(all=Dataset.from_dict(COLUMNS)),
    ],
    ids=lambda data: type(data).__name__,
)
def test_tables_in_memory_are_rows(data):
    assert rows_in_memory(data) == rows(5)


def test_frames_of_polars_are_rows():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(COLUMNS).with_columns(at=polars.lit(date(2026, 1, 2)), pair=polars.lit(["a", "b"]))
    assert rows_in_memory(frame)[4] == rows(5)[4] | {"at": {"datetime.date": None}, "pair": ["a", "b"]}
    with pytest.raises(ConfigError, match=r"not LazyFrame; call collect\(\)"):
        InMemoryData().sources(frame.lazy(), "data.train")


def test_splits_in_memory_are_those_of_their_use():
    splits = DatasetDict(train=Dataset.from_dict(COLUMNS), validation=Dataset.from_list(rows(2)))
    assert rows_in_memory(splits, "evaluation.sets") == rows_in_memory([splits], "sets") == rows(2)
    assert _group(splits, "data", "train", DataConfig) == {"data.train": splits}
    with pytest.raises(ConfigError, match=r'no split train, but a, b: write \{"rows": ..., "split": "a"\}'):
        rows_in_memory({"a": FRAME, "b": FRAME})


def test_values_that_json_lacks_matter_only_where_they_are_used():
    half = "\ud800"  # of a surrogate pair
    values = {
        "nan": np.float32("nan"),
        "missing": [pd.NaT, pd.NA, Decimal("NaN"), np.datetime64("NaT")],
        "numbers": [Decimal("0.5"), np.int64(3), np.bool_(True), np.array([1.5, np.nan])],
        "long": np.longdouble(1),
        "infinite": float("-inf"),
        "dates": [pd.Timestamp("2026-01-02"), date(2026, 1, 2), np.datetime64("2026-01-02", "ns")],
        "objects": {"a": object(), "b": b"x", "c": {1}, "d": half},
    }
    (row,) = rows_in_memory([values])
    date_of_numpy = {"numpy.datetime64": None}
    assert row == {
        "nan": None,
        "missing": [None, None, None, date_of_numpy],
        "numbers": [0.5, 3, True, [1.5, None]],
        "long": {"numpy.longdouble": None},
        "infinite": {"-inf": None},
        "dates": [{"pandas.Timestamp": None}, {"datetime.date": None}, date_of_numpy],
        "objects": {
            "a": {"builtins.object": None},
            "b": {"builtins.bytes": None},
            "c": {"builtins.set": None},
            "d": "\ud800",
        },
    }
    frame = FRAME.assign(at=pd.Timestamp("2026-01-02"), price=[Decimal(1), None, 2.5, "x", object()])
    assert [{key: row[key] for key in COLUMNS} for row in rows_in_memory(frame)] == rows(5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"query": ["a", "b"], "positive": ["c"]}, r"'query' 2, 'positive' 1"),
        ({"query": "a", "positive": "b"}, r"'query', 'positive'.*in brackets"),
        ({"train": FRAME, "test": []}, r"'train', 'test'"),
        ([FRAME["query"]], r"data\.train\[0\] must .*DataFrame.*, not Series"),
        (np.zeros((1000, 2)), r"^data\.train must be .*, not ndarray$"),
        (pd.DataFrame([["a", "b"]], columns=["x", "x"]), r"two columns are called 'x'"),
    ],
    ids=["lengths", "row", "splits", "series", "array", "names"],
)
def test_other_objects_in_memory_are_refused_without_their_content(data, message):
    with pytest.raises(ConfigError, match=message) as error:
        InMemoryData().sources(data, "data.train")
    assert len(str(error.value)) < 350


@pytest.fixture
def interruptible():
    """A process in the background of a shell ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_signals_are_deferred_while_training_and_restored(interruptible, capsys):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    signals = StopSignals()
    with signals.listening(), signals.deferred():
        signal.raise_signal(signal.SIGINT)
        assert "SIGINT: stopping after the current step" in capsys.readouterr().err
        assert signals.received is signal.SIGINT
        signals.agreed = True  # as the loop does, which then raises Stopped
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    with pytest.raises(KeyboardInterrupt), StopSignals().listening():
        signal.raise_signal(signal.SIGINT)
    late = StopSignals()
    with pytest.raises(KeyboardInterrupt), late.listening(), late.deferred():
        signal.raise_signal(signal.SIGINT)


def test_threads_encode_one_after_the_other(model):
    texts = [f"{WORDS[i % 13]} {WORDS[i % 7]}" for i in range(24)]
    with load_encoder(model, pooling="mean", quiet=True) as encoder:
        expected = encoder.encode_documents(texts)
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(encoder.encode_documents, [texts] * 6))
    assert all(np.allclose(result, expected, atol=1e-6) for result in results)


_STARTED, _GO_ON = threading.Event(), threading.Event()


def wait_for_the_other(encoder: Any) -> dict[str, float]:
    _STARTED.set()
    assert _GO_ON.wait(120)
    return {"dimension": float(encoder.get_embedding_dimension())}


def test_a_second_call_in_another_thread_is_refused(model, tmp_path):
    before, stdout = process_state(), sys.stdout
    with ThreadPoolExecutor(1) as pool:
        options = {**OPTIONS, "export.check": False, "evaluation": {"function": wait_for_the_other, "at_start": True}}
        training = pool.submit(
            train, model=model, data=rows(), options=options, output_dir=tmp_path / "first", quiet=True
        )
        try:
            assert _STARTED.wait(120), training.exception(0)
            for call in (
                lambda: train(model=model, data=rows(), options=OPTIONS, output_dir=tmp_path / "second", quiet=True),
                lambda: load_encoder(model, pooling="mean", quiet=True),
            ):
                with pytest.raises(ConfigError, match="while train runs in another thread"):
                    call()
        finally:
            _GO_ON.set()
        assert training.result().step == 4
    assert sys.stdout is stdout
    assert process_state() == before
    assert not (tmp_path / "second").exists()


def _encode_forked(text: str) -> Any:
    return _FORKED[0].encode_documents([text])


_FORKED: list[Any] = []


def test_forked_processes_are_refused(model):
    with load_encoder(model, pooling="mean", quiet=True) as encoder:
        _FORKED.append(encoder)
        for call in (_encode_forked, load_encoder):
            fork = multiprocessing.get_context("fork")
            with fork.Pool(2) as pool, pytest.raises(ConfigError, match=r"get_context\('spawn'\)"):
                pool.map_async(call, [str(model)] * 4).get(60)
