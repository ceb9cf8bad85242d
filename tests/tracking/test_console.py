"""What the console prints to a log file, a terminal, a narrow terminal, and a closed pipe."""

import contextlib
import io
import itertools
import os
import re
import subprocess
import sys
import types
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.live import Live

from embedtrain.tracking.console import Console, ProgressLine, StepTimer, rate, step_metrics
from embedtrain.tracking.metrics import DatasetInfo
from embedtrain.utils.streams import SafeStream

ROW = {
    "step": 100,
    "loss": 1.23451,
    "grad_norm": 0.8712,
    "lr": 4.9e-4,
    "samples_per_s": 812.4,
    "tokens_per_s": 71344.2,
    "padding": 0.0312,
    "data_wait": 0.001,
    "memory_gib": 0.93,
    "accuracy": 0.5,
}
RESULTS = {
    "dev-en": {"ndcg@10": 0.41, "mrr@10": 0.39, "recall@10": 0.6, "recall@100": 0.8},
    "开发集": {"ndcg@10": 0.51, "mrr@10": 0.49, "recall@10": 0.7, "recall@100": 0.9},
    "sts": {"spearman": 0.81},
}
LATER = {name: {metric: value + 0.01 for metric, value in metrics.items()} for name, metrics in RESULTS.items()}
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal(width, **environment):
    out = StringIO()
    environment = {"TERM": "xterm-256color", **environment}
    return RichConsole(width=width, force_terminal=True, file=out, highlight=False, _environ=environment), out


def print_everything(console):
    console.note("rows come from [train.jsonl]")
    with console.phase("loading the model"):
        pass
    with console.training(600, start_step=90):
        console.advance(99)
        console.step(ROW)
        with console.phase("evaluating"):
            console.evaluation(100, RESULTS)
        console.step({**ROW, "step": 110, "loss": float("nan")})
        console.evaluation(110, LATER)
    console.warn("careful")
    console.close()


def test_a_log_file_gets_a_plain_line_per_step(capsys):
    seconds = 0.0
    console = Console(clock=lambda: seconds)
    with console.training(600, start_step=99):
        seconds = 0.26
        console.step(ROW)
        line = capsys.readouterr().out
    assert line == (
        "step 100/600  loss 1.2345  accuracy 0.5000  grad_norm 0.87  lr 4.9e-04  samples/s 812  tokens/s 71,344  "
        "memory 0.9 GiB  left 2:10\n"
    )


def test_a_log_file_gets_everything_without_escape_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # CI services set it
    print_everything(Console())
    lines = capsys.readouterr().out.splitlines()
    assert not any("\x1b" in line or "\r" in line for line in lines)
    assert lines[:2] == ["rows come from [train.jsonl]", "loading the model"]
    assert lines[2].startswith("step 100/600  loss 1.2345  accuracy 0.5000  grad_norm 0.87  ")
    assert lines[3:9] == [
        "evaluating",
        "evaluation at step 100",
        "  set     ndcg@10  mrr@10  recall@10  recall@100",
        "  dev-en  0.4100   0.3900  0.6000     0.8000",
        "  开发集  0.5100   0.4900  0.7000     0.9000",
        "  set  spearman",
    ]
    assert lines[10].startswith("step 110/600  loss nan ")
    assert "evaluation at step 110 (changes since step 100)" in lines
    assert "  dev-en  0.4200  +0.0100  0.4000  +0.0100  0.6100  +0.0100  0.8100  +0.0100" in lines
    assert lines[-2:] == ["trained 20 steps in 0.0 s", "warning: careful"]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e[bold]\u2028\r\nend"
CONTROLS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]")


def print_hostile(console):
    console.note(HOSTILE)
    console.warn(HOSTILE)
    with console.phase(HOSTILE), console.progress() as report:
        report(HOSTILE, 1, 2)
    with console.training(600, start_step=90):
        print(HOSTILE)  # as a library does
        console.step({**ROW, f"loss/{HOSTILE}": 1.0})
        console.evaluation(100, {HOSTILE: {HOSTILE: 0.5}}, title=HOSTILE)
        console.evaluation(110, {HOSTILE: {HOSTILE: 0.6}})


def test_names_of_a_run_cannot_control_a_log(capsys):
    with safe_stdout():
        print_hostile(Console())
    text = capsys.readouterr().out
    assert not CONTROLS.search(text)
    assert r"warning: \x1b]0;title\x07\x1b[2J\x9b31m\u202e[bold]\u2028\r\nend" in text
    assert [line for line in text.splitlines() if line.startswith("end")] == ["end"], "of print() only"


def test_names_of_a_run_cannot_control_a_terminal(monkeypatch):
    rich, out = terminal(300)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(out, "isatty", lambda: True)
    with safe_stdout():
        print_hostile(Console(terminal=rich))
    own = ESCAPES.sub("", out.getvalue()).replace("\r", "")
    assert not CONTROLS.search(own), "more than styles and the display's cursor movements"
    assert out.getvalue().count("\x1b[2J") == 0
    assert own.count(r"\x1b[2J") >= 8


@contextlib.contextmanager
def safe_stdout():
    original = sys.stdout
    sys.stdout = SafeStream(original)
    try:
        yield
    finally:
        sys.stdout = original


def test_columns_of_a_log_are_aligned(capsys):
    console = Console()
    for samples_per_s in (812.0, 1234.0, 12.3):
        console.step({**ROW, "samples_per_s": samples_per_s})
    _, second, third = capsys.readouterr().out.splitlines()
    assert "samples/s 1,234  tokens/s" in second
    assert "samples/s 12.3   tokens/s" in third


GEOMETRY = {
    "positive_similarity": 0.8123, "hardest_negative_similarity": 0.6543, "false_negatives": 0.00123,
    "alignment": 0.375, "uniformity": -2.5,
}  # fmt: skip


DIAGNOSTICS = {**GEOMETRY, "model_tflops": 312.5, "mfu": 0.4321, "communication": 0.31, "loss/web/train": 1.5}


def test_the_columns_of_a_log_stay_whatever_a_row_has(capsys):
    """Whether a step is the first, waited, or has no value: scripts read column by column."""
    console = Console()
    with console.training(600):
        console.step({**ROW, "step": 1})
        console.step({**ROW, **DIAGNOSTICS, "step": 2, "data_wait": 0.5})
        console.step({key: value for key, value in ROW.items() if key != "accuracy"} | {"step": 3})
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    labels = ["step", "loss", "accuracy", "grad_norm", "lr", "samples/s", "tokens/s", "memory", "left"]
    for line in lines:
        assert [part.split()[0] for part in re.split("  +", line)] == labels, line
    assert "accuracy -" in lines[2]


def test_diagnostics_are_shown_on_request(capsys):
    rich, out = terminal(400)
    for console in (Console(verbose=True), Console(verbose=True, terminal=rich)):
        console.step({**ROW, **DIAGNOSTICS})
    for line in (capsys.readouterr().out, ESCAPES.sub("", out.getvalue())):
        assert "accuracy 0.5000  loss/web/train 1.5000  grad_norm" in line
        assert "mfu 43.2%  padding 3.1%  waiting for data 0%  communication 31%  positive 0.812" in line
        assert "uniformity -2.50  alignment 0.375" in line
        assert "312" not in line, "shown as mfu"


def test_a_narrow_terminal_keeps_the_loss_and_the_accuracy():
    shown = {}
    row = {**ROW, **DIAGNOSTICS, "loss/news/train": 0.5}
    for width, verbose in ((40, False), (80, False), (150, False), (180, False), (80, True)):
        rich, out = terminal(width)
        Console(terminal=rich, verbose=verbose).step(row)
        shown[width, verbose] = " ".join(ESCAPES.sub("", out.getvalue()).split())
    assert shown[40, False] == "step 100 loss 1.2345 accuracy 0.5000"
    assert shown[80, False] == "step 100 loss 1.2345 accuracy 0.5000 lr 4.9e-04 samples/s 812"
    rest = "grad_norm 0.87 lr 4.9e-04 samples/s 812 tokens/s 71,344 memory 0.9 GiB"
    assert shown[150, False] == f"step 100 loss 1.2345 accuracy 0.5000 {rest}", "all sources or none"
    sources = "loss/web/train 1.5000 loss/news/train 0.5000"
    assert shown[180, False] == f"step 100 loss 1.2345 accuracy 0.5000 {sources} {rest}"
    assert f"{sources} {rest} mfu 43.2% padding 3.1%" in shown[80, True], "on several lines"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_nothing_is_wider_than_the_terminal(width):
    rich, out = terminal(width)
    print_everything(Console(terminal=rich))
    lines = ESCAPES.sub("", out.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(cell_len, lines)) <= width
    assert any("loss 1.2345" in line for line in lines)


def live_line(width, step=100, remaining=130.0, **environment):
    rich, out = terminal(width, **environment)
    rich.print(ProgressLine(step_metrics({**ROW, "step": step}, 600, remaining), 600, {}))
    return out.getvalue()


def test_the_live_line_at_60_columns_keeps_the_most_important_metrics():
    lines = ESCAPES.sub("", live_line(60)).splitlines()
    assert len(lines) == 1
    assert re.fullmatch(r"━+[╸╺]?━+  100/600  loss 1\.2345  accuracy 0\.5000 *", lines[0])


def test_the_live_line_at_100_columns_has_every_metric():
    (line,) = ESCAPES.sub("", live_line(100)).splitlines()
    assert line.split("━  ")[1].rstrip() == (
        "100/600  loss 1.2345  accuracy 0.5000  lr 4.9e-04  812 samples/s  0.9 GiB  left 2:10"
    )


@pytest.mark.parametrize("width", range(8, 130))
def test_the_live_line_is_one_line_at_every_width(width):
    (line,) = ESCAPES.sub("", live_line(width)).splitlines()
    assert cell_len(line) < width


def test_no_color_is_respected():
    rich, out = terminal(80, NO_COLOR="1")
    print_everything(Console(terminal=rich))
    sgr = re.findall(r"\x1b\[([0-9;]*)m", out.getvalue())
    assert not [code for code in sgr if any(30 <= int(part or 0) <= 107 for part in code.split(";"))]
    coloured, out = terminal(80)
    print_everything(Console(terminal=coloured))
    assert "36m" in out.getvalue()


def test_a_dumb_terminal_gets_plain_lines():
    rich, out = terminal(60, TERM="dumb")
    print_everything(Console(terminal=rich))
    assert "\x1b" not in out.getvalue()
    assert "step 100/600  loss 1.2345  accuracy 0.5000  grad_norm 0.87" in out.getvalue()


def test_a_table_that_is_too_wide_lists_the_omitted_metrics():
    rich, out = terminal(40)
    Console(terminal=rich).evaluation(1, RESULTS)
    text = ESCAPES.sub("", out.getvalue())
    assert "also in metrics.jsonl: recall@100" in text
    assert "0.4100" in text


def test_a_table_shows_the_kind_of_each_set(capsys):
    datasets = {
        "dev-en": DatasetInfo("retrieval", {"queries": 9}, subset=True),
        "sts": DatasetInfo("sts", {"pairs": 9}, subset=False, precision="bf16"),
    }
    Console().evaluation(1, RESULTS, datasets=datasets)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "evaluation at step 1, in bf16"
    assert lines == [
        "  set     kind                ndcg@10  mrr@10  recall@10  recall@100",
        "  dev-en  retrieval (subset)  0.4100   0.3900  0.6000     0.8000",
        "  开发集                      0.5100   0.4900  0.7000     0.9000",
        "  set  kind  spearman",
        "  sts  sts   0.8100",
    ]


def test_long_names_of_sets_keep_their_end(capsys):
    """The subsets of a task of mteb; a log has whole names, a terminal those that fit."""
    names = [f"Vidore3FinanceEnRetrieval/{language}/test" for language in ("english", "french")]
    results = {name: {"ndcg@10": 0.5} for name in [*names, "集" * 30]}
    Console().evaluation(0, results)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)
    for width, shown in ((100, names), (50, ["Vidore3Fin…/english/test", "Vidore3Fin…l/french/test"])):
        rich, out = terminal(width)
        Console(terminal=rich).evaluation(0, results)
        lines = ESCAPES.sub("", out.getvalue()).splitlines()
        assert all(any(line.startswith(f"{name} ") for line in lines) for name in shown)
        assert all(cell_len(line) <= width for line in lines)


def test_the_cursor_is_visible_during_training():
    rich, out = terminal(80)
    console = Console(terminal=rich)
    with console.training(600):
        console.step(ROW)
        written = out.getvalue()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_an_error_in_training_ends_the_live_display():
    rich, out = terminal(80)
    console = Console(terminal=rich)
    with pytest.raises(ZeroDivisionError), console.training(600), console.phase("evaluating"):
        raise ZeroDivisionError
    assert "trained" not in out.getvalue()
    displays = out.getvalue().count("\x1b[?25l")
    with console.training(600):  # starts a new display
        console.step(ROW)
    assert out.getvalue().count("\x1b[?25l") == displays + 1


def test_a_disabled_console_prints_nothing(capsys):
    print_everything(Console(enabled=False))
    rich, out = terminal(80)
    print_everything(Console(enabled=False, terminal=rich))
    captured = capsys.readouterr()
    assert (captured.out, captured.err, out.getvalue()) == ("", "", "")


def test_a_closed_pipe_does_not_stop_the_run():
    script = (
        "import sys; from embedtrain.tracking.console import Console\n"
        "console = Console()\n"
        "for step in range(2000):\n    console.note('x' * 1000)\n"
        "sys.stderr.write('trained to the end')\n"
        "sys.stderr.flush(); import os; os._exit(0)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "trained to the end"
    process.stderr.close()
    assert process.wait() == 0


def test_an_encoding_without_the_characters_does_not_stop_the_run():
    script = "from embedtrain.tracking.console import Console; Console().note('dev 开发 ✓')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert done.stdout == rb"dev \u5f00\u53d1 \u2713" + b"\n"


def test_a_forked_child_does_not_print_through_the_live_display(monkeypatch):
    rich, out = terminal(80)
    monkeypatch.setattr(sys, "stdout", StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console = Console(terminal=rich)
    with console.training(600):
        print("from the parent")
        reader, writer = os.pipe()
        with rich._lock:  # as the display's thread may hold it at the fork
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException):
                    os.write(writer, type(sys.stdout).__name__.encode())
                os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reader, 100) == b"StringIO"
    os.close(reader)
    os.close(writer)
    assert "from the parent" in out.getvalue()


def test_remaining_time_follows_the_last_steps_and_counts_down():
    timer = StepTimer(100, 40, now=1000.0)
    assert timer.remaining(1000.0) is None
    for step in range(41, 80):
        timer.observe(step, 1000.0 + 2 * (step - 40))
    assert timer.remaining(1078.0) == pytest.approx(21 * 2)
    assert timer.remaining(1083.0) == pytest.approx(21 * 2 - 5)
    assert timer.remaining(9999.0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.7, "1:00"), (130, "2:10"), (3730, "1:02:10"), (273600, "3d 4h")]
)
def test_remaining_time_is_shown_as_a_clock(seconds, text):
    assert step_metrics(ROW, 600, seconds)[-1].text == f"left {text}"


def test_rates():
    assert [rate(value) for value in (71344.2, 812.4, 3.44)] == ["71,344", "812", "3.4"]


def test_progress_is_shown_on_a_terminal_and_at_intervals_in_a_log(capsys, monkeypatch):
    displays = []

    class RecordedLive(Live):
        def start(self, refresh=False):
            displays.append(self)
            super().start(refresh)

    monkeypatch.setattr("embedtrain.tracking.console.Live", RecordedLive)
    rich, out = terminal(80)
    console = Console(terminal=rich)
    with console.progress() as report:
        for done in range(3):
            report("reading train", done, 2)
            displays[0].refresh()
        report("tokenizing train", 0, 1)
        displays[0].refresh()
    text = ESCAPES.sub("", out.getvalue())
    assert "reading train  0/2" in text
    assert "reading train  2/2" in text
    assert "tokenizing train  0/1" in text
    assert text.splitlines()[-1].strip() == ""
    seconds = 0.0
    log = Console(clock=lambda: seconds)
    with log.progress() as report:
        for done in range(50):
            seconds += 1.0
            report("reading train", done, 5000)
    assert capsys.readouterr().out.splitlines() == [f"reading train  {done}/5,000" for done in (9, 19, 29, 39, 49)]


class Cell(io.StringIO):
    """The standard output of a cell of Jupyter."""


Cell.__module__ = "ipykernel.iostream"


def test_a_notebook_gets_one_output_that_is_replaced(monkeypatch):
    """Not a line for each step, without widgets, and nothing where standard output was redirected, as by `quiet`."""
    shown: list[list[str]] = []

    class Handle:
        def update(self, html):
            shown[-1].append(html)

    def display(html, *, display_id):
        assert display_id is True
        shown.append([html])
        return Handle()

    module = types.ModuleType("IPython.display")
    module.HTML, module.display = str, display
    package = types.ModuleType("IPython")
    package.display = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(sys, "stdout", cell := Cell())
    seconds = itertools.count()
    console = Console(clock=lambda: float(next(seconds)))
    console.note("a <b> note")
    with console.training(1000):
        for step in range(1, 1001):
            console.step({"step": step, "loss": 1 / step})
        with console.phase("evaluating <dev>"), console.progress() as progress:
            progress("encoding", 3, 10)
    (pages,) = shown
    text = [re.sub("<[^>]*>", "", page) for page in pages]
    assert any("encoding  3/10" in page and "1000/1000" in page for page in text)
    assert any("evaluating &lt;dev&gt;" in page for page in text)
    assert [line.split()[1] for line in text[-1].strip().splitlines()] == [f"{step}/1000" for step in range(993, 1001)]
    assert cell.getvalue().splitlines()[0] == "a <b> note" and len(cell.getvalue().splitlines()) == 3
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with Console().training(10):
        pass
    assert len(shown) == 1
