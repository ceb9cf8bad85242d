"""A real server of a language model, which `make test-engines` installs, against the same model on the ranks."""

import json
import os
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from embedtrain.commands.synthesize.types import Answer, Message, WriterConfig
from tests.checkpoint.test_export_tokenizers import qwen
from tests.conftest import ROOT
from tests.small import save_language_model, small_model
from tests.synthesize.test_asker import ask, requests, single, texts, writer

pytestmark = pytest.mark.engines
SERVER = Path(__file__).with_name("llama_server.py")
PYTHON = ROOT / ".venv-llamacpp" / "bin" / "python"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    tokenizer = qwen()[0]
    tokenizer.chat_template = TEMPLATE
    changes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "hidden_size": 64, "head_dim": 32}
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = small_model("qwen3").config | changes | ids
    folder = save_language_model(small_model("qwen3", config=config), tmp_path_factory.mktemp("served") / "writer")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def url(model):
    if not os.access(PYTHON, os.X_OK) or shutil.which(str(PYTHON)) is None:
        pytest.skip(f"{PYTHON.parents[1].name} does not exist: make test-engines installs it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"LLAMA_CPP_PRE_TOKENIZER": "qwen2"}
    command = [str(PYTHON), "-I", str(SERVER), str(model), str(port)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            while not (line := process.stdout.readline()).startswith("http"):
                assert line, "the server has not started"
            yield f"{line.strip()}/v1"
        finally:
            process.kill()


def asked(count, **changes):
    messages = (Message("system", "Write a query."), Message("user", "compress files quickly"))
    return [replace(each, messages=messages) for each in requests(count, **changes)]


def test_a_server_and_the_ranks_write_the_same(tmp_path, model, url):
    """The most probable tokens, from the same chat template."""
    short = [replace(each, messages=(each.messages[0],)) for each in requests(4, schema=None, temperature=0.0)]
    both = [*short, *asked(1, schema=None, temperature=0.0)]
    served, usage, _ = single(ask, tmp_path / "served", writer(url), both)
    local, _, _ = single(ask, tmp_path / "local", WriterConfig(model=str(model)), both)
    # The server leaves out the character that the limit has cut off.
    assert [text.rstrip("\ufffd") for text in texts(served)] == [text.rstrip("\ufffd") for text in texts(local)]
    assert len("".join(texts(served))) > 100
    assert [reply.prompt_tokens for reply in served] == [reply.prompt_tokens for reply in local]
    assert {reply.finish for reply in served} <= {"length", "stop"}
    assert usage["requests"] == 5
    # Again, with a server that is gone.
    assert single(ask, tmp_path / "served", writer("http://127.0.0.1:9/v1"), both)[0] == served


def test_a_schema_constrains_the_answers(ranks, tmp_path, url):
    schema = {
        "type": "object",
        "properties": {"query": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
        "required": ["query"],
        "additionalProperties": False,
    }
    sampled = [request for seed in range(6) for request in asked(1, schema=schema, seed=seed, max_new_tokens=100)]
    (replies, usage, _), *_ = ranks(2, ask, tmp_path, writer(url), sampled)
    assert all(isinstance(reply, Answer) for reply in replies)
    answers = [json.loads(reply.text) for reply in replies]
    assert all(answer.keys() == {"query"} and len(answer["query"]) <= 8 for answer in answers)
    assert len({reply.text for reply in replies}) > 1
    assert usage["requests"] == 6
