"""The page as a parser of HTML sees it: its content, and that nothing in a run can become markup."""

import base64
import hashlib
import json
import os
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from embedtrain.errors import DataError
from embedtrain.report.changes import Change, Comparisons, describe_outcome
from embedtrain.report.page import write_report
from embedtrain.report.runs import read_runs
from embedtrain.report.sample import Role, Sample, SampleText, write_vectors
from embedtrain.report.sections import main_metric
from embedtrain.tracking.metrics import QueryMetrics, query_metrics_path, write_query_metrics
from embedtrain.tracking.sessions import SESSIONS_FILE, SessionClock, read_sessions, record_end, record_start
from tests.tracking.report.runs import ANSWERS, QUERIES, make_run, make_sample

EVIL = "<script>alert(1)</script>\"'><img src=//evil.example/x onerror=alert(2)>{{ 7*7 }}{% raw %}</style></svg>&amp;"
EVIL += "\u202e\0"


class Page(HTMLParser):
    """Elements with their attributes, and the text between them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.inside: dict[str, list[str]] = {"style": [], "script": []}
        self._raw: str | None = None
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._raw = tag if tag in self.inside else None

    def handle_endtag(self, tag: str) -> None:
        self._raw = None

    def handle_data(self, data: str) -> None:
        if self._raw is None:
            self.texts.append(data)
        else:
            self.inside[self._raw].append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def write_page(tmp_path: Path, *runs: Path) -> Page:
    write_report(list(runs), tmp_path / "out" / "report.html")
    return Page(tmp_path / "out" / "report.html")


def test_one_run(tmp_path):
    run = make_run(tmp_path / "run", model={"path": "org/some-model"}, train={"steps": 40})
    page = write_page(tmp_path, run)
    assert "dev-en ndcg@10 0.3000 → 0.7000 +0.4000" in page.text
    assert "org/some-model" in page.text
    assert "0.3000 @ 0 0.7000 @ 40 0.7000 @ 40 +0.4000" in page.text
    assert "Rows per second" in page.text
    assert page.count("svg") == 4 + 5, "two sets with two metrics each, and the training metrics that change"
    assert "Tokens per second without padding, over all ranks 52,000 tokens/s" in page.text
    assert "optim.lr" in page.text
    assert "What differs" not in page.text


def test_several_runs(tmp_path):
    one = make_run(tmp_path / "one", name="one", extra_metrics=("positive_similarity",))
    two = make_run(tmp_path / "two", name="two", sets=("dev-en", "other"), optim={"lr": 0.5}, seed=2)
    recipe = yaml.safe_load((two / "recipe.yaml").read_text())
    recipe["versions"]["torch"] = "2.99.0"
    recipe["model"]["nested"] = {"only": "here"}
    (two / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    page = write_page(tmp_path, one, two)
    assert "2 runs compared" in page.text
    assert page.text.index("What differs") > page.text.index("Gradient norm"), "results come before the recipes"
    differs = page.text[page.text.index("What differs") : page.text.index("Recipe", page.text.index("What differs"))]
    assert "optim.lr 5.0e-05 0.5" in differs
    assert "version torch 2.13.0 2.99.0" in differs
    assert "model.nested.only not set here" in differs
    assert "seed" not in differs
    assert "Similarity to the positive" in page.text, "a metric of one run only"
    charts = json.loads(page.inside["script"][0])
    loss = next(chart for chart in charts if len(chart["lines"]) == 2)
    assert [line["name"] for line in loss["lines"]] == ["one", "two"]


def test_a_later_step_is_not_the_value_before_training(tmp_path):
    run = make_run(tmp_path / "run")
    (metric,) = (main_metric(run, Comparisons()) for run in read_runs([run]))
    assert metric is not None
    assert metric.change is not None
    assert (metric.before, metric.change.text, metric.change.direction) == ("0.3000", "+0.4000", "")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] > 0))
    (metric,) = (main_metric(run, Comparisons()) for run in read_runs([run]))
    assert metric is not None
    assert (metric.before, metric.change) == (None, None)


def test_a_run_that_was_not_evaluated_after_step_0_has_no_value_after_training(tmp_path):
    run = make_run(tmp_path / "run", name="stopped", sets=("dev-en",), metrics=("ndcg@10",), model={"path": "/m/a/b"})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "set" not in row or row["step"] == 0]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_page(tmp_path, run)
    assert "dev-en ndcg@10 before training 0.3000 , not evaluated since Loss" in page.text
    assert "ndcg@10 0.3000 @ 0 0.3000 @ 0 — In parentheses" in page.text
    other = make_run(tmp_path / "other", name="other", sets=("dev-en",), metrics=("ndcg@10",), model={"path": "o/c"})
    for runs in ((run, other), (other, run)):
        page = write_page(tmp_path, *runs)
        assert "0.3000 a/b → not evaluated since" in page.text
        assert "0.3000 o/c → 0.7000 +0.4000" in page.text
        assert "0.3000 @ 0" not in page.text


@pytest.mark.parametrize(
    ("before", "after", "differences", "expected"),
    [
        (0.5, 0.50044, None, ("+0.0004", "", "")),
        (0.5, 0.49999, None, ("−0.0000", "", "")),
        (0.5, 0.5, [0.0, 0.0], ("0", "", "noise")),
        (0.5, 0.5, None, ("0", "", "")),
        (0.5, 0.75, [0.0, 0.5], ("+0.2500", "0 to +0.5000", "noise")),
        (0.5, 0.49999, [-0.00001] * 9, ("−0.0000", "−0.0000 to −0.0000", "down")),
        (1e-5, 2e-5, None, ("+1.0e-05", "", "")),
        (50.0, 62.5, None, ("+12.50", "", "")),
    ],
)
def test_the_sign_of_a_difference_is_visible(before, after, differences, expected):
    change = Change.of(before, after, None if differences is None else [np.array(differences)])
    assert (change.text, change.interval, change.direction) == expected


def add_query_metrics(run: Path, values: dict[int, list[float]]) -> None:
    """Replace the values of dev-en by the means of these; the same change for every query counts as certain."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("set") == "dev-en":
            of_queries = np.array(values[row["step"]])
            queries = [f"q{number}" for number in range(len(of_queries))]
            path = query_metrics_path(run, row["step"], "dev-en")
            write_query_metrics(path, QueryMetrics(queries, ["ndcg@10"], of_queries[:, None]))
            row["ndcg@10"] = float(of_queries.mean())
            row["dataset"] = {"kind": "retrieval", "queries": len(queries), "documents": 4800, "subset": True}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_differences_within_noise_are_not_marked(tmp_path):
    """Before and after, and between runs, by the queries that both have."""
    generator = np.random.default_rng(0)
    start = generator.uniform(0.2, 0.5, 100)
    noise = generator.normal(0, 0.2, 100)
    runs = []
    for name, gain in (("one", 0.3), ("two", 0.305)):
        run = make_run(tmp_path / name, name=name, sets=("dev-en",), metrics=("ndcg@10",))
        after = start + gain + (noise - noise.mean() if name == "two" else 0)
        add_query_metrics(run, {0: start.tolist(), **dict.fromkeys((10, 20, 30, 40), after.tolist())})
        runs.append(run)
    page = write_page(tmp_path, runs[0])
    changes = [of["class"] for tag, of in page.elements if tag == "span" and "change " in (of.get("class") or "")]
    assert changes == ["change up"] * 2
    assert "+0.3000 (+0.3000 to +0.3000) 95% confidence interval of the change over 100 queries." in page.text
    assert "retrieval · 100 queries, 4,800 documents subset" in page.text

    page = write_page(tmp_path, *runs)
    changes = [of["class"] for tag, of in page.elements if tag == "span" and "change " in (of.get("class") or "")]
    assert changes == ["change up", "change up", "change noise"]
    low, high = np.percentile(
        [(noise - noise.mean())[generator.integers(0, 100, 100)].mean() + 0.005 for _ in range(4000)], [2.5, 97.5]
    )
    shown = re.search(r"\+0\.0050 \(−([0-9.]+) to \+([0-9.]+)\)", page.text)
    assert shown is not None
    assert (-float(shown[1]), float(shown[2])) == pytest.approx((low, high), abs=0.008)
    # Files of an earlier run in the same directory do not count, nor do other queries.
    path = query_metrics_path(runs[1], 40, "dev-en")
    write_query_metrics(path, QueryMetrics(["q0"], ["ndcg@10"], np.array([[0.1]])))
    assert "(−" not in write_page(tmp_path, *runs).text


def test_an_exported_step_that_is_worse_than_step_0_is_named(tmp_path):
    run = make_run(tmp_path / "run", sets=("dev-en", "other"), metrics=("ndcg@10",))
    options = {"selects_best": False, "evaluates_between": False}
    assert describe_outcome(run, 40, **options)[0] == "dev-en: ndcg@10 0.3000 at step 0, 0.7000 at step 40"
    generator = np.random.default_rng(0)
    start, noise = generator.uniform(0.6, 0.8, 100), generator.normal(0, 0.2, 100)
    for change, text in (
        (noise - noise.mean() - 0.001, ": no clear change (95% interval of the difference -"),
        (noise - noise.mean() + 0.001, ": no clear change (95% interval of the difference -"),
        (
            np.full(100, -0.1),
            ", which is worse (95% interval of the difference -0.1000 to -0.1000): the exported model",
        ),
    ):
        add_query_metrics(run, dict.fromkeys((0, 10, 20, 30), start.tolist()) | {40: (start + change).tolist()})
        lines = describe_outcome(run, 40, **options)
        assert f"at step 40{text}" in lines[0]
        assert lines[1] == "other: ndcg@10 0.3100 at step 0, 0.7100 at step 40"
        assert len(lines) == 2 + ("worse" in text)
    assert lines[2].startswith("checkpoint.best_metric=dev-en/ndcg@10 exports the best evaluated step, with evaluation")
    assert "evaluation.every" not in describe_outcome(run, 40, selects_best=False, evaluates_between=True)[2]
    shutil.rmtree(run / "query_metrics")
    lines = describe_outcome(run, 40, selects_best=True, evaluates_between=True)
    assert lines[0].endswith("at step 40, which is worse: the exported model is below the one before training")
    assert len(lines) == 2


def test_sources_are_lines_of_one_plot_and_epochs_are_marked(tmp_path):
    run = make_run(tmp_path / "run", extra_metrics=("loss/web/train", "loss/news/train"))
    session = {"started": 1.0, "step": 0, "total_steps": 40, "ranks": 1, "devices": "cpu", "steps_per_epoch": 15.5}
    (run / "sessions.jsonl").write_text(json.dumps(session) + "\n")
    page = write_page(tmp_path, run)
    charts = json.loads(page.inside["script"][0])
    (loss,) = [chart for chart in charts if len(chart["lines"]) > 1]
    assert [line["name"] for line in loss["lines"]] == ["all rows", "news/train", "web/train"]
    low, high, start, end = loss["x"]
    marks = [of["d"] or "" for tag, of in page.elements if tag == "path" and of.get("class") == "epoch"]
    expected = [start + (step - low) / (high - low) * (end - start) for step in (15.5, 31.0)]
    actual = [float(mark[1:].split()[0]) for mark in marks[-2:]]
    assert actual == pytest.approx(expected, abs=0.06)
    assert "epoch 1" in page.text


def test_runs_with_the_same_name_have_different_labels(tmp_path):
    page = write_page(tmp_path, make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    assert str(tmp_path / "a") in page.text
    with pytest.raises(DataError, match=r"b/\.\./a.*twice"):
        write_page(tmp_path, tmp_path / "a", tmp_path / "b" / ".." / "a")


def test_the_content_of_a_run_never_becomes_markup(tmp_path):
    """The page of a harmless run has the same elements."""
    pages = []
    for number, name in enumerate(("harmless", EVIL)):
        folder = tmp_path / str(number)
        sample = make_sample([f"{name} {text}" for text in QUERIES], [f"{text} {name}" for text in ANSWERS], name)
        run = make_run(
            folder, name=name, sets=(name,), metrics=(f"{name}@10",), extra_metrics=(name, f"loss/{name}"),
            sample=sample, model={"path": name, "query_prompt": name},
        )  # fmt: skip
        session = {"started": 1.0, "step": 0, "ranks": 2, "devices": name, "total_steps": 40}
        end = {"ended": 9.0, "how": "failed", "error": name, "last_step": 40}
        (run / "sessions.jsonl").write_text(f"{json.dumps(session)}\n{json.dumps(end)}\n")
        pages.append(write_page(tmp_path / f"out{number}", run))
    harmless, evil = pages
    assert [tag for tag, _ in evil.elements] == [tag for tag, _ in harmless.elements]
    assert (evil.count("script"), evil.count("style"), evil.count("img")) == (2, 1, 0)
    for _, attributes in evil.elements:
        assert not [name for name in attributes if name.startswith("on")]
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
        assert "src" not in attributes
    assert "<script>alert(1)</script>" in evil.text, "it is shown as text"
    assert "49" not in evil.text[evil.text.index("<script>") :][:80], "nor is it rendered as a template"
    texts = [text for text in evil.texts if "compress files" in text]
    assert texts
    assert not [text for text in texts if "\u202e" in text], "direction marks are removed"


def test_only_its_own_script_may_run_and_nothing_is_loaded(tmp_path):
    page = write_page(tmp_path, make_run(tmp_path / "run", sample=make_sample()))
    (policy,) = [of["content"] or "" for tag, of in page.elements if tag == "meta" and "http-equiv" in of]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, text in (("script-src", page.inside["script"][1]), ("style-src", page.inside["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    without = page.source.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|url\(|@import|//[a-z]", without.replace("\n//", ""))


@pytest.mark.parametrize(
    ("session", "end", "extra", "status"),
    [
        (None, None, "", "ended unexpectedly"),
        ({}, {"how": "finished", "exported": 40}, "", "finished"),
        ({}, {"how": "stopped"}, "", "stopped by a signal"),
        ({}, {"how": "failed", "error": "TrainingError: loss is nan"}, "", "failed TrainingError: loss is nan"),
        ({}, None, "", "ended unexpectedly"),
        (None, None, "stopped.json", "stopped by a signal"),
        (None, None, "model/modules.json", "finished"),
    ],
)
def test_status(tmp_path, session, end, extra, status):
    run = make_run(tmp_path / "run", steps=4)
    rows = []
    if session is not None:
        rows.append({"started": 100.0, "step": 0, "ranks": 2, "devices": "cpu", "total_steps": 40})
    if end is not None:
        rows.append({"ended": 190.0, "last_step": 4, **end})
    (run / "sessions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half')
    if extra:
        (run / extra).parent.mkdir(exist_ok=True)
        (run / extra).write_text("[]")
    page = write_page(tmp_path, run)
    head = page.text[: page.text.index("Loss")]
    assert status.split()[0] in head
    assert status in page.text.replace(f"{head} ", "") or status.split(" ", 1)[0] in head
    if status.startswith("failed"):
        assert "TrainingError: loss is nan" in page.text
    if end is not None:
        assert "Duration 1 min 30 s" in page.text


def test_a_run_resumed_on_other_ranks(tmp_path):
    """Killed on 2 ranks, resumed on 3: the killed session counts at most up to the start of the next one."""
    run = make_run(tmp_path / "run", steps=4)
    rows = [
        {"started": 100.0, "step": 0, "ranks": 2, "devices": "cpu", "total_steps": 4},
        {"started": 160.0, "step": 2, "ranks": 3, "devices": "cpu", "total_steps": 4},
        {"ended": 170.0, "how": "finished", "last_step": 4, "exported": 4},
    ]
    (run / "sessions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_page(tmp_path, run)
    assert "Ranks 2, then 3 (cpu)" in page.text
    assert "Duration 1 min 10 s" in page.text
    assert "ended unexpectedly" in page.text


def test_a_clock_that_was_set_back(tmp_path, monkeypatch):
    """No duration is negative, and one that is measured during a session is right."""
    run = make_run(tmp_path / "run", steps=4)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    clock = SessionClock()
    record_start(run / SESSIONS_FILE, clock, step=0, total_steps=4, ranks=1, devices="cpu", from_scratch=True)
    monkeypatch.setattr(time, "time", lambda: now - 86400)
    record_end(run / SESSIONS_FILE, clock, "stopped", step=2)
    (stopped,) = read_sessions(run / SESSIONS_FILE)
    assert 0 <= stopped.end.ended - stopped.started < 3600
    # Sessions of hosts whose clocks differ, and metrics written in the future.
    rows = [
        {"started": now, "step": 2, "ranks": 1, "devices": "cpu", "total_steps": 4, "ended": now - 60, "how": "failed"},
        {"started": now - 3600, "step": 2, "ranks": 1, "devices": "cpu", "total_steps": 4},
    ]
    (run / SESSIONS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(run / "metrics.jsonl", (now + 10**9, now + 10**9))
    monkeypatch.setattr(time, "time", lambda: now)
    page = write_page(tmp_path, run)
    assert "Duration 1 h 0 min" in page.text
    assert not re.search(r"-[0-9.]+ (s|min|h)\b", page.text)


def test_a_running_run_is_detected_and_not_disturbed(tmp_path):
    from filelock import FileLock

    run = make_run(tmp_path / "run", steps=4)
    with FileLock(run / "run.lock"):
        (run / "run.lock").write_text("held by a run")
        page = write_page(tmp_path, run)
        assert (run / "run.lock").read_text() == "held by a run"
    assert "still running" in page.text
    assert "ended unexpectedly" in write_page(tmp_path, run).text


def test_metrics_with_holes(tmp_path):
    run = make_run(tmp_path / "run", steps=10, sets=())
    good = (run / "metrics.jsonl").read_text().splitlines()
    changed = [json.loads(line) for line in good]
    changed[3]["loss"], changed[4]["loss"] = None, float("nan")
    changed[5]["loss"], changed[6]["grad_norm"] = float("inf"), "text"
    changed[7]["only_once"] = 3.25
    lines = [json.dumps(row) for row in changed]
    lines[8:8] = ["", '{"step": 9, "lo', "[1, 2]", '{"no": "step"}']
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 11, "loss": 0.')
    page = write_page(tmp_path, run)
    assert "3 lines, the first of them line 10, cannot be read" in page.text
    assert "since the last point; 3 without a finite value" in page.text
    assert "only_once" in page.text
    (line,) = json.loads(page.inside["script"][0])[0]["lines"]
    assert [point[0] for point in line["points"]] == [1, 2, 3, 7, 8, 9, 10]
    paths = [of["d"] for tag, of in page.elements if tag == "path" and of.get("class") == "line c0"]
    assert (paths[0] or "").count("M") == 2, "the line breaks off where values are missing"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs(tmp_path, steps):
    run = make_run(tmp_path / "run", steps=steps, sets=() if steps == 0 else ("dev",))
    page = write_page(tmp_path, run)
    assert ("No step has been logged yet" in page.text) == (steps == 0)
    assert "nan" not in page.source.lower().replace("nano", "")
    (run / "metrics.jsonl").unlink()
    assert "No step has been logged yet" in write_page(tmp_path, run).text


@pytest.mark.parametrize("steps", [4_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_has_a_small_page(tmp_path, steps):
    """29 metrics at every step: a single spike is kept."""
    more = [f"loss/source-{number}" for number in range(18)]
    run = make_run(tmp_path / "run", steps=steps, extra_metrics=more, sample=make_sample())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    spike = next(number for number, line in enumerate(lines) if line.startswith('{"step": 3321,') and "loss" in line)
    lines[spike] = json.dumps(json.loads(lines[spike]) | {"grad_norm": 321.5})
    (run / "metrics.jsonl").write_text("\n".join(lines))
    began = time.process_time()
    page = write_page(tmp_path, run)
    assert time.process_time() - began < 30
    assert len(page.source.encode()) < 1.5e6
    assert "highest 321.50" in page.source


def test_samples_that_cannot_be_read_are_reported(tmp_path):
    run = make_run(tmp_path / "run", steps=4, sample=make_sample())
    assert "Nearest neighbours" in write_page(tmp_path, run).text
    (run / "sample" / "after.safetensors").unlink()
    page = write_page(tmp_path, run)
    assert "Before training" in page.text, "a run that was stopped"
    assert "After step" not in page.text
    (run / "sample" / "after.safetensors").write_bytes(b"no safetensors")
    assert "cannot be read as vectors of the sample" in write_page(tmp_path, run).text
    write_vectors(run / "sample", "after", np.ones((3, 4), dtype=np.float32), 4)
    assert "does not hold one finite vector for each of the 20 texts" in write_page(tmp_path, run).text
    (run / "sample" / "sample.json").write_text('{"format": 1, "texts": [], "pairs": [[0, 1, "positive"]]}')
    assert "cannot be read as the sample of a run" in write_page(tmp_path, run).text


DAMAGED_FILES = {
    "sessions.jsonl": [
        b"", b"\xff\x00", b"[" * 100_000, b"null\n[]\n7\n", b'{"ended": 1}\n',
        b'{"started": 1e999, "step": 0, "total_steps": 1, "ranks": 1, "devices": "cpu"}',
        b'{"started": 1e300, "step": 0, "total_steps": 1, "ranks": 1, "devices": "cpu"}',
        b'{"started": 1, "step": null, "total_steps": [], "ranks": {}, "devices": 3}',
        b'{"started": 1, "step": 0, "total_steps": 1, "ranks": 1, "devices": "cpu"}\n{"ended": NaN, "how": ["x"]}',
        b'{"started": -1e17, "step": 1e999, "total_steps": -1, "ranks": 0.5, "devices": ""}',
        b'{"started": 1, "step": 0, "total_steps": ' + b"9" * 400 + b', "ranks": 1, "devices": ""}',
    ],
    "metrics.jsonl": [
        b"", b"\xff\x00", b"[" * 100_000 + b"\n{}", b'{"step": ' + b"9" * 400 + b"}\n",
        b'{"step": -1, "loss": 1}\n', b'{"step": true, "loss": 1}\n', b'{"step": 1, "set": ["x"], "a": 1}\n',
        b'{"step": 1, "loss": ' + b"9" * 400 + b"}\n", b'{"step": 9007199254740992, "loss": 1e308}\n',
        b'{"step": 0, "loss": -1e308}\n{"step": 1, "loss": 1e308}\n', b'{"step": 1, "set": "s", "a": {"b": 1}}\n',
    ],
    "sample/sample.json": [
        b"", b"[]", b'{"format": 1, "texts": [], "pairs": [[Infinity, 0, "positive"]]}',
        b'{"format": 1, "texts": [{"text": 1, "role": "query", "origin": "x", "held_out": 1}], "pairs": []}',
    ],
    "recipe.yaml": [
        b"", b"\xff\x00", b"[" * 10_000, b"- 1", b"name: [1, {a: 2}]\nloss: {name: [x]}", b"? [a]\n: 1\n",
        b"loss: 7\nmodel: x\ntrain: {steps: -1}\nversions: 3", b"train: {steps: ['x']}", b"a: 2020-13-45\n",
        b"a: !!timestamp 99999-99-99", b"a: !!int ''",
        b"train: {steps: " + b"9" * 5000 + b"}", b"1: 2\n2020-01-01: x\n~: {true: 1}\n", b"a: !!binary '#'",
        b"model: {path: {a: 1}}\ncheckpoint: {best_metric: [1]}\n", b"a: !!float x\n", b"a: !!int 0x\n", b"<<: [1]\n",
    ],
}  # fmt: skip


def test_damaged_files_of_a_run_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", steps=4, sets=("dev",), sample=make_sample())
    for name, contents in DAMAGED_FILES.items():
        path = run / name
        before = path.read_bytes() if path.is_file() else None
        for content in contents:
            path.write_bytes(content)
            write_report([run], tmp_path / "x.html")
        path.unlink()
        path.mkdir()
        if name == "recipe.yaml":
            with pytest.raises(DataError, match=r"recipe\.yaml"):
                write_report([run], tmp_path / "x.html")
        else:
            write_report([run], tmp_path / "x.html")
        path.rmdir()
        if before is not None:
            path.write_bytes(before)


def test_texts_with_classes_only(tmp_path):
    """Very long texts with classes, all with the same vector: no map, no neighbours."""
    texts = [SampleText("word " * 50_000, Role.text, "topics", True, label=str(number % 2)) for number in range(6)]
    run = make_run(tmp_path / "run", steps=4, sample=Sample(texts, []))
    same = np.ones((6, 4), dtype=np.float32)
    for which in ("before", "after"):
        write_vectors(run / "sample", which, same, 4)
    page = write_page(tmp_path, run)
    assert "labelled pairs and classes" in page.text
    assert "same / different 6 / 9 1.000 / 1.000 1.000 / 1.000 50.0% 50.0%" in page.text
    assert "Map of the sample" not in page.text
    assert "Nearest neighbours" not in page.text
    assert len(page.source) < 300_000


def test_texts_have_their_own_direction(tmp_path):
    page = write_page(tmp_path, make_run(tmp_path / "run", name="مقارنة", sample=make_sample()))
    assert "ضغط الملفات" in page.text
    assert "👩‍👩‍👧" in page.text, "joined characters stay joined"
    spans = [of for tag, of in page.elements if tag == "span" and of.get("class") in ("found", "asked")]
    assert spans
    assert all(of.get("dir") == "auto" for of in spans)


def test_a_folder_that_is_not_a_run_is_rejected(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty.* recipe\.yaml"):
        write_report([tmp_path / "empty"], tmp_path / "x.html")
    with pytest.raises(DataError, match=r"none.*folder"):
        write_report([tmp_path / "none"], tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
    run = make_run(tmp_path / "run", steps=2)
    (run / "recipe.yaml").write_text("a: &a [x, x, x]\nb: [*a, *a\n")
    assert "recipe.yaml cannot be read" in write_page(tmp_path, run).text
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))
    (run / "recipe.yaml").write_text(f"l0: &l0 [[1, 2]]\n{levels}\n")
    assert len(write_page(tmp_path, run).source) < 3e6, "aliases within aliases are limited"
