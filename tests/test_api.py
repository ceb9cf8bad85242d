"""The Python API: the commands as functions of one process, and of several ranks."""

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
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

import embedtrain.commands.evaluate
import embedtrain.commands.mine
from embedtrain import evaluate, export, load_encoder, mine, train
from embedtrain.api import _group
from embedtrain.cli.in_process import SHARED_WORLD, own_process_state
from embedtrain.config.recipe import DataConfig
from embedtrain.data.in_memory import InMemoryData
from embedtrain.distributed.sharding import compile_blocks
from embedtrain.distributed.signals import StopSignals
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, EmbedtrainError
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
    ],
    ids=["option", "missing", "date", "row", "source", "group", "corpus", "qrels", "path", "loss"],
)
def test_errors_are_those_of_the_command(model, tmp_path, options, message):
    arguments = {"data": rows(), "train.steps": 1, "model.pooling": "mean"} | options
    arguments.pop("train.steps") if "train" in options else None
    with pytest.raises(EmbedtrainError, match=message):
        train(model=model, output_dir=tmp_path, quiet=True, **arguments)
    assert not dist.is_initialized()


def test_data_in_memory_is_written_once_and_repaired(tmp_path):
    memory = InMemoryData()
    (source,) = memory.sources({"rows": iter(rows(3)), "weight": 2}, "data.train")
    assert source["weight"] == 2 and source["name"] == "rows"
    memory.write(tmp_path)
    (file,) = (tmp_path / "data").iterdir()
    written, content = file.stat().st_mtime_ns, file.read_bytes()
    memory.write(tmp_path)
    assert file.stat().st_mtime_ns == written
    file.write_bytes(content[:-5])
    memory.write(tmp_path)
    assert file.read_bytes() == content


def rows_in_memory(data: Any, option: str = "data.train") -> list[dict[str, Any]]:
    memory = InMemoryData()
    memory.sources(data, option)
    (lines,) = memory.files.values()
    return [json.loads(line) for line in lines()]


COLUMNS = {key: [row[key] for row in rows(5)] for key in ("query", "positive")}
FRAME = pd.DataFrame(COLUMNS)


@pytest.mark.parametrize(
    "data",
    [
        FRAME,
        FRAME.set_index("query"),  # as groupby leaves it
        {"rows": FRAME.convert_dtypes()},
        pa.table(COLUMNS),
        Dataset.from_dict(COLUMNS),
        Dataset.from_dict(COLUMNS).to_iterable_dataset(),
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
