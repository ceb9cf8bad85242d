"""A language model on the ranks writes the same whatever stands beside a text, and on any number of ranks."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from embedtrain.commands.synthesize.types import Answer, Refusal, RefusalReason, WriterConfig
from embedtrain.errors import ModelError
from tests.small import save_language_model, save_small, small_model
from tests.synthesize.test_asker import ask, requests, single, texts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_language_model(small_model("qwen3"), tmp_path_factory.mktemp("local") / "writer")


def writer(model, **changes):
    return WriterConfig(**{"model": str(model), "concurrency": 3} | changes)


ASKED = [*requests(5, max_new_tokens=6), *requests(3, max_new_tokens=9, temperature=0.0), *requests(1, temperature=2.0)]


def test_the_most_probable_tokens_are_those_of_transformers(tmp_path, model):
    asked = requests(4, max_new_tokens=7, temperature=0.0)
    replies, usage, _ = single(ask, tmp_path / "out", writer(model), asked)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    for request, reply in zip(asked, replies, strict=True):
        prompt = tokenizer(request.messages[0].content + "\n\n")["input_ids"][:-1]
        with torch.no_grad():
            ids = plain.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False, pad_token_id=1)[0]
        assert reply.text == tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)
        assert reply.prompt_tokens == len(prompt)
    assert usage["requests"] == 4
    assert usage["tokens"] == sum(reply.prompt_tokens + reply.completion_tokens for reply in replies)


def test_answers_depend_on_the_request_alone(ranks, tmp_path, model):
    (alone, usage, _), *_ = ranks(1, ask, tmp_path / "one", writer(model), ASKED)
    assert len(set(texts(alone))) > 4
    assert {reply.finish for reply in alone} <= {"stop", "length"}
    assert all(name.startswith("writer@") for name in usage["models"])
    for outcome in ranks(3, ask, tmp_path / "three", writer(model, concurrency=2), ASKED[::-1]):
        assert texts(outcome[0]) == texts(alone)[::-1]
    # A run that continues asks the rest, in the groups that an undisturbed run has.
    ranks(2, ask, tmp_path / "begun", writer(model), ASKED[2:4])
    (resumed, usage, _), *_ = ranks(1, ask, tmp_path / "begun", writer(model), ASKED)
    assert resumed == alone
    assert usage["requests"] == len(ASKED)


def test_sampling_follows_the_probabilities(tmp_path, model):
    """The first token of 400 texts against the softmax of the logits."""
    asked = [request for seed in range(400) for request in requests(1, max_new_tokens=1, seed=seed, temperature=1.5)]
    replies, _, _ = single(ask, tmp_path / "out", writer(model, concurrency=100), asked)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer(asked[0].messages[0].content + "\n\n")["input_ids"][:-1]
    with torch.no_grad():
        probabilities = (plain(torch.tensor([prompt])).logits[0, -1] / 1.5).softmax(-1).tolist()
    names = [tokenizer.decode([token], skip_special_tokens=True) for token in range(len(probabilities))]
    drawn = [texts(replies).count(name) / len(asked) for name in names]
    expected = [sum(p for other, p in zip(names, probabilities, strict=True) if other == name) for name in names]
    distance = sum(abs(a - b) for a, b in zip(drawn, expected, strict=True) if a or b) / 2
    assert distance < 0.25


def test_a_budget_of_requests_and_tokens(ranks, tmp_path, model):
    asked = requests(8, max_new_tokens=6)
    for size in (1, 2):
        (replies, usage, _), *_ = ranks(size, limited, tmp_path / f"requests{size}", writer(model), asked, 5, None)
        assert [isinstance(reply, Answer) for reply in replies].count(True) == usage["requests"] == 5
        assert {reply.reason for reply in replies if isinstance(reply, Refusal)} == {RefusalReason.budget}
        (_, usage, _), *_ = ranks(size, limited, tmp_path / f"tokens{size}", writer(model), asked, None, 40)
        assert 20 < usage["tokens"] <= 40


def limited(world, folder, config, asked, max_requests, max_tokens):
    return ask(world, folder, config, asked, max_requests=max_requests, max_tokens=max_tokens)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s>{% endfor %}{% if add_generation_prompt %}mu{% endif %}"
)


def with_template(model, folder, template):
    shutil.copytree(model, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_a_chat_template(tmp_path, model):
    templated = with_template(model, tmp_path / "templated", TEMPLATE)
    replies, _, _ = single(ask, tmp_path / "out", writer(templated), requests(1))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(templated)
    expected = tokenizer("user document 0 </s>mu", add_special_tokens=False)["input_ids"]
    assert replies[0].prompt_tokens == len(expected)
    endless = with_template(model, tmp_path / "endless", "{% for i in range(99999999999) %}{{ i }}{% endfor %}")
    with pytest.raises(ModelError, match="chat template"):
        single(ask, tmp_path / "out", writer(endless), requests(1))


def test_models_that_cannot_write(tmp_path, model):
    encoder = tmp_path / "encoder"
    save_small(small_model("xlm-roberta"), encoder)
    with pytest.raises(ModelError, match="encoder"):
        single(ask, tmp_path / "out", writer(encoder), requests(1))
    with pytest.raises(ModelError, match=r"writer\.model=/nowhere"):
        single(ask, tmp_path / "out", writer("/nowhere"), requests(1))


def test_a_prompt_that_is_too_long_has_no_answer(tmp_path, model):
    replies, usage, _ = single(ask, tmp_path / "out", writer(model), requests(2, max_new_tokens=62) + requests(1))
    assert [type(reply) for reply in replies] == [Refusal, Refusal, Answer]
    assert "64 positions" in str(replies[0])
    assert usage["requests"] == 1
