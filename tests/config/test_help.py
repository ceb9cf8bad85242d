"""`--help`: one screen for every command, topics from the comments of options, wrong forms answered with right ones."""

import shlex

import pytest

from embedtrain.config.commands import COMMANDS
from embedtrain.config.compose import compose_recipes
from embedtrain.errors import ConfigError
from tests.docs.commands import Command, compose


def help_of(command, *arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        compose(Command(command, arguments))
    assert not caught.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself_on_one_screen(command, capsys):
    page = help_of(command, "--help", capsys=capsys)
    lines = page.splitlines()
    assert len(lines) <= (48 if command == "train" else 35)
    assert max(map(len, lines)) <= 80
    assert f"  embedtrain {command} " in page
    assert "--help TOPIC" in page
    assert ("--gpus N" in page) == COMMANDS[command].ranks


def test_values_and_required_options(capsys):
    page = help_of("train", "recipe=minilm", "optim.lr=0.5", "--help", capsys=capsys)
    assert "optim.lr=0.5 " in page
    assert "name=minilm " in page
    assert "data.train=... " in page
    assert "required: sources" in page


@pytest.mark.parametrize(
    ("command", "topic", "contained", "absent"),
    [
        ("train", "optim", ["optim.lr=5.0e-05\n", "optim.schedule=linear\n", "constant"], "train.steps"),
        ("train", "train.steps", ["train.steps=null\n    optimizer steps"], "train.epochs"),
        ("train", "steps", ["train.steps=null\n"], "optim."),
        ("train", "loss", ["loss.temperature=null\n"], "optim."),
        ("train", "model.lora", ["model.lora.rank=null\n"], "model.path"),
        ("train", "data.train", ["data.train=[]\n", "\npath=(required)\n", "\ncolumns=null\n"], "data.workers"),
        ("train", "all", ["seed=42\n", "tracking.wandb=false\n", "evaluation.every="], "()"),
        ("evaluate", "index", ["index.dtype="], "sets="),
        ("submit", "slurm", ["slurm.nodes=1\n"], "kubernetes."),
    ],
)
def test_topics(command, topic, contained, absent, capsys):
    page = help_of(command, f"--help={topic}", capsys=capsys)
    for text in contained:
        assert text in page
    assert absent not in page


def test_an_unknown_topic_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"--help optimm: .*did you mean optim\?"):
        compose_recipes(["--help", "optimm"])


@pytest.mark.parametrize("topic", ["train.lr", "learning_rate"])
def test_a_topic_of_another_name_is_answered_with_the_option(topic):
    with pytest.raises(ConfigError, match=rf"^{topic} is optim\.lr here: --help optim\.lr$"):
        compose_recipes(["--help", topic])


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("--recipe minilm", "write recipe=minilm"),
        ("--recipe=minilm", "write recipe=minilm"),
        ("recipe minilm", "write recipe=minilm"),
        ("minilm", "write recipe=minilm"),
        ("inspect recipe=minilm", "python -m embedtrain inspect"),
        ("train recipe=minilm", "embedtrain train"),
        ("--config my.yaml", "--config-dir . recipe=my"),
        ("--config=my/recipe/mine.yaml", "write --config-dir my recipe=mine"),
        ("recipe=conf/mine.yaml", "move it to conf/recipe/mine.yaml, and write --config-dir conf recipe=mine"),
        ("--dry-run recipe=minilm", "--cfg job"),
        ("recipe=minilm --output_dir runs/x", "output_dir=runs/x"),
        ("recipe=minilm --learning_rate 1e-5", "optim.lr=1e-5"),
        ("recipe=minilm --frobnicate 3", "--frobnicate 3: there is no such flag"),
        ("--version", "`embedtrain --version`"),
    ],
)
def test_wrong_forms_are_answered_with_the_right_one(arguments, answer):
    with pytest.raises(ConfigError) as caught:
        compose_recipes(shlex.split(arguments))
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_forms_of_other_commands():
    with pytest.raises(ConfigError, match="write model=dir"):
        compose(Command("evaluate", ("--model", "dir", "sets=[dev]")))
    with pytest.raises(ConfigError, match="write top_k=3"):
        compose(Command("search", ("model=m", "corpus=c", "top_k", "3")))
