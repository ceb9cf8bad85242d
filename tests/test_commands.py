"""Commands in processes of their own: under torchrun, errors of one sentence, exports, an installed wheel."""

import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embedtrain import __version__
from embedtrain.config.commands import COMMANDS
from tests.commands import ENVIRONMENT, call, call_separately
from tests.conftest import ROOT
from tests.runs import metric_rows
from tests.small import save_small, small_model, write_beir, write_rows
from tests.tracking.report.runs import make_run


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    write_rows(folder / "train.jsonl", 60)
    write_beir(folder / "dev", 20)
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "model")
    return folder


OPTIONS = [
    "name=t", "model.path=model", "model.pooling=mean", "data.train=[train.jsonl]", "train.global_batch_size=8",
    "train.log_every=1", "parallel.strategy=fsdp", "parallel.precision=fp32", "evaluation.sets=[dev]",
]  # fmt: skip


OWN_LAUNCHER = ("train", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["loss.tempature=0.1"], "unknown option loss.tempature, did you mean temperature?"),
        pytest.param(["data.train=[bad.jsonl]"], "bad.jsonl:3: ", marks=pytest.mark.slow),
        (["-m", "train.steps=1,2"], "multirun (-m) on several ranks"),
        pytest.param(
            ["parallel.block_class=BertLayer"],
            "parallel.block_class=BertLayer: Encoder has no such layer. It has XLMRobertaLayer x2",
            marks=pytest.mark.slow,  # test_a_mistake_on_two_ranks_is_one_sentence
        ),
    ],
)
def test_a_mistake_is_reported_once(workshop, arguments, message):
    lines = (workshop / "train.jsonl").read_text().splitlines()
    lines[2] = '{"query": 7, "pos": ["a"]}'
    (workshop / "bad.jsonl").write_text("\n".join(lines))
    output = call(
        "embedtrain", *OPTIONS, "train.steps=2", "output_dir=never", *arguments, ranks=2, cwd=workshop, code=1
    )
    assert output.count(f"error: {message}") == 1, output
    assert output.count(message) == 1, output
    assert "embedtrain/training/train.py" not in output, "a traceback"
    assert not (workshop / "never" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("arguments", "message", "before"),
    [
        (["loss.tempature=0.1"], "unknown option loss.tempature", []),
        (["--gpus=2"], "--gpus and --nproc-per-node", []),
        (
            ["parallel.block_class=BertLayer"],
            "parallel.block_class=BertLayer: Encoder has no such layer",
            ["starting 2 ranks"],
        ),
    ],
)
def test_a_mistake_on_two_ranks_is_one_sentence(workshop, arguments, message, before):
    """The third is found by the ranks."""
    given = [*OPTIONS, "train.steps=2", "output_dir=never", *arguments]
    _, errors = call_separately(*OWN_LAUNCHER, *given, cwd=workshop, code=1)
    *earlier, line = errors.splitlines()
    assert earlier == before
    assert line.startswith(f"error: {message}")


def test_evaluate_export_and_search(workshop, monkeypatch):
    from sentence_transformers import SentenceTransformer

    printed = call("embedtrain", *OPTIONS, "train.steps=6", "checkpoint.every=3", "output_dir=run", cwd=workshop)
    assert re.search(
        r"^evaluation at step 0, before training, in fp32\n  set  kind       ndcg@10", printed, re.MULTILINE
    )
    assert "evaluation at step 6, in fp32 (changes since step 0)\n" in printed
    before, after = (row["ndcg@10"] for row in metric_rows(workshop / "run") if "set" in row)
    assert f"dev: ndcg@10 {before:.4f} at step 0, {after:.4f} at step 6" in printed
    assert "model: exported" in call("export", "run=run", "step=3", "output_dir=exported", cwd=workshop)
    assert "weights of step 3" in (workshop / "exported" / "README.md").read_text()
    texts = ["alpha beta", "gamma"]
    earlier, later = (SentenceTransformer(str(workshop / name)).encode(texts) for name in ("exported", "run/model"))
    assert np.abs(earlier - later).max() > 1e-4
    call("export", "run=run", "output_dir=half", "dtype=bf16", cwd=workshop)
    assert np.abs(SentenceTransformer(str(workshop / "half")).encode(texts) - later).max() < 2e-2
    assert "step=4: " in call("export", "run=run", "step=4", "output_dir=no", cwd=workshop, code=1)
    (workshop / "precious").mkdir()
    (workshop / "precious" / "notes.txt").write_text("mine")
    for directory in ("precious", "run"):
        output = call("export", "run=run", f"output_dir={directory}", cwd=workshop, code=1)
        assert re.search(rf"^error: .*{directory}", output, re.MULTILINE)
    assert (workshop / "precious" / "notes.txt").is_file()
    # With these variables transformers would load a model without weights on the second rank.
    hostile = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_VERSION": "2"}
    for name, value in hostile.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    outputs = [call("evaluate", "model=run/model", "sets=[dev]", ranks=n, cwd=workshop) for n in (0, 2)]
    for output in outputs:
        assert output.count(f"ignored in the environment: {', '.join(hostile)}; options decide\n") == 1
    tables = [re.findall(r"^ +dev +(.*)$", output, re.MULTILINE) for output in outputs]
    assert tables[0] == tables[1] != []
    final = metric_rows(workshop / "run")[-1]
    written = metric_rows(workshop / "runs" / "evaluate")
    for row in written:
        assert row["ndcg@10"] == pytest.approx(final["ndcg@10"], abs=1e-6)
    output = call(
        "search",
        "model=run/model",
        "corpus=dev",
        "top_k=3",
        cwd=workshop,
        stdin="alpha\nbeta gamma\n",
    )
    assert len(re.findall(r"^ *-?[01]\.\d{3}  d\d+", output, re.MULTILINE)) == 6


def test_the_console_command_lists_its_commands():
    for arguments in ([], ["--help"]):
        output = call("embedtrain.cli.console", *arguments)
        assert len(output.splitlines()) <= 34
        assert max(map(len, output.splitlines())) <= 80
        for command in COMMANDS.values():
            assert f"  {command.name} " in output
            assert command.summary in output
    assert call("embedtrain.cli.console", "--version") == f"embedtrain {__version__}\n"
    assert "optim.lr=0.5\n" in call("embedtrain.cli.console", "train", "optim.lr=0.5", "--help", "optim")
    assert "optim.lr=5.0e-05\n" in call("embedtrain.cli.console", "--help", "optim")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("trian recipe=quickstart", "`embedtrain train`"),
        ("recipe=quickstart 'data.train=[a b.jsonl]'", "`embedtrain train recipe=quickstart 'data.train=[a b.jsonl]'`"),
        ("--gpus 8 train recipe=minilm", "`embedtrain train --gpus 8 recipe=minilm`"),
        ("--config-dir my recipe=mine", "`embedtrain train --config-dir my recipe=mine`"),
        ("quickstart", "commands are train, plan"),
        ("finetune recipe=minilm", "`embedtrain train`"),
        ("eval model=m", "`embedtrain evaluate`"),
        ("encode model=m", "load_encoder"),
        ("completion", "completion: write `embedtrain completion SHELL`"),
    ],
)
def test_the_console_command_answers_with_the_right_form(arguments, written):
    output, errors = call_separately("embedtrain.cli.console", *shlex.split(arguments), code=1)
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith("error: ")
    assert written in errors


def test_the_table_of_commands_is_complete_and_needs_no_torch():
    script = """
import importlib, sys
from embedtrain.config.commands import COMMANDS
assert not [name for name in sys.modules if name.startswith("embedtrain.commands")]
for name, command in COMMANDS.items():
    module = importlib.import_module(f"embedtrain.commands.{name}")
    assert callable(module.compose) and callable(module.run)
    assert getattr(module, command.option_class.__name__) is command.option_class
    assert hasattr(module, "require_paths") == (getattr(command.require_paths, "__name__", "") != "_nothing"), name
assert "torch" not in sys.modules
print(*sorted(COMMANDS), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = sorted(path.stem for path in (ROOT / "embedtrain" / "commands").iterdir() if path.stem[0] != "_")
    assert done.stdout.split() == modules


def test_commands_that_read_files_run_without_torch(tmp_path):
    """Importing it takes longer than all that they do."""
    script = """
import sys
class NoTorch:
    def find_spec(self, name, *_):
        assert name != "torch", sys.argv
sys.meta_path.insert(0, NoTorch())
from embedtrain.__main__ import main
main()
"""
    make_run(tmp_path / "run", name="one")
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"query": "q{i}", "pos": ["p{i}"]}}\n' for i in range(9)))
    for arguments in ["split", "data=rows.jsonl", "output_dir=split", "dev=2"], ["report", "run"]:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "split" / "train.jsonl").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.fixture(scope="module")
def completion_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    (folder / "my" / "recipe").mkdir(parents=True)
    (folder / "my" / "recipe" / "of_mine.yaml").touch()
    for shell, name in ("bash", "embedtrain"), ("zsh", "_embedtrain"), ("fish", "embedtrain.fish"):
        (folder / name).write_text(call("embedtrain.cli.console", "completion", shell))
    return folder


LINES = [
    ("embedtrain tr", ["train"]),
    ("embedtrain train recipe=qu", ["quickstart"]),
    ("embedtrain train --gpus 8 optim.l", ["optim.layer_decay=", "optim.lr="]),
    ("embedtrain train parallel.precision=", ["bf16", "fp32"]),
    ("embedtrain train --nod", ["--nodes", "--node-rank"]),
    ("embedtrain search --nod", []),
    ("embedtrain train data.train=", []),
    ("embedtrain train model.kind=", ["sparse", "cross_encoder"]),
    ("embedtrain train model.pooling=", ["mean", "weighted_mean", "sum"]),
    ("embedtrain train model.hybrid_w", ["model.hybrid_weights="]),
    ("embedtrain plan model.query_w", ["model.query_weights="]),
    ("embedtrain mine kind=late", ["late_interaction"]),
    ("embedtrain mine pooling=w", ["weighted_mean"]),
    ("embedtrain train recipe=of", []),
    ("embedtrain evaluate save_runs=t", ["true"]),
    ("embedtrain submit slurm.launcher=s", ["srun"]),
]


@pytest.mark.parametrize(("line", "replies"), [*LINES, ("embedtrain train --config-dir my recipe=of", ["of_mine"])])
def test_bash_completes(completion_files, line, replies):
    """As bash calls the function; it replaces what follows the last equals sign, and without replies offers files."""
    program = (
        'source "$0"; compopt() { :; }; COMP_LINE=$1 COMP_POINT=${#1}; _embedtrain; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", program, completion_files / "embedtrain", line]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=completion_files)
    assert done.stderr == ""
    answered = [reply for reply in done.stdout.splitlines() if reply]
    assert sorted(set(replies) & set(answered)) == sorted(replies)
    assert bool(answered) == bool(replies)


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(completion_files):
    program = 'source $argv[1]; for line in $argv[2..]; echo ">$line"; complete -C $line; end'
    lines = [line for line, _ in LINES]
    command = ["fish", "--no-config", "-c", program, completion_files / "embedtrain.fish", *lines]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    answers = [part.splitlines()[1:] for part in done.stdout.split(">")[1:]]
    for (line, replies), answered in zip(LINES, answers, strict=True):
        assert all(any(word.endswith(reply) for word in answered) for reply in replies), (line, answered)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_at_the_first_tab(completion_files, tmp_path):
    """In a terminal: a TAB after the line, of which zsh prints the rest."""
    (tmp_path / ".zshrc").write_text(
        f"PS1='ready> '\nfpath=({completion_files} $fpath)\nautoload -Uz compinit && compinit -u -d $ZDOTDIR/dump\n"
    )
    (tmp_path / "rows.jsonl").touch()
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-i"], {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb"})

    def read_until(text: str) -> None:
        seen = ""
        while text not in seen:
            assert select.select([terminal], [], [], 60)[0], f"{seen!r} lacks {text!r}"
            seen += os.read(terminal, 4096).decode(errors="replace")

    try:
        read_until("ready> ")
        for line, completed in [
            ("embedtrain tr", "embedtrain train "),
            ("embedtrain train recipe=ll", "recipe=llama_embedder "),
            ("embedtrain train optim.wa", "optim.warmup="),
            ("embedtrain train data.train=ro", "data.train=rows.jsonl "),
            ("embedtrain evaluate save_runs=t", "save_runs=true "),
        ]:
            os.write(terminal, f"{line}\t".encode())
            read_until(completed)
            os.write(terminal, b"\x15")  # clears the line
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_other_shells_have_the_same_words():
    for shell in ("zsh", "fish"):
        script = call("embedtrain.cli.console", "completion", shell)
        for word in ("recipe=quickstart", "optim.lr=", "parallel.precision=bf16", "slurm.nodes=", *COMMANDS):
            assert word in script
    assert "bash, zsh, fish" in call("embedtrain.cli.console", "completion", "tcsh", code=1)


@pytest.mark.slow
def test_an_installed_wheel_trains_outside_the_checkout(workshop, tmp_path):
    """A wheel is built, installed into a fresh environment, and trains from another directory."""

    def do(*command: object) -> str:
        done = subprocess.run(
            [str(part) for part in command], cwd=workshop, env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    do(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, ROOT)
    do(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = tmp_path.glob("*.whl")
    do(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    # The dependencies are those of this environment. A path in a .pth file does not include its editable embedtrain.
    (site,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (site / "dependencies.pth").write_text(str(Path(np.__file__).parent.parent))
    assert str(site) in do(python, "-c", "import embedtrain; print(embedtrain.__file__)")
    shorter = ["train.epochs=null", "train.steps=2", "model.max_length=40"]
    do(tmp_path / "env" / "bin" / "embedtrain", "train", "recipe=bce_xlmr", *OPTIONS, *shorter, "output_dir=wheel")
    assert (workshop / "wheel" / "model" / "modules.json").is_file()
    assert "quickstart" in do(python, "-m", "embedtrain", "--help")
    (data,) = site.glob("embedtrain/recipes/quickstart/train-en.jsonl.gz")
    assert data.stat().st_size > 500_000
