"""Prompts are templates that a user can replace, and answers are read with the damage that models do."""

import json

import pytest

from embedtrain.commands.synthesize import prompts as module
from embedtrain.commands.synthesize.prompts import QUERY_KINDS, Parsed, Prompts, parse_answer, texts_in
from embedtrain.errors import ConfigError

VALUES = {"documents": ["A short document."], "count": 2, "examples": [], "language": None}


def folder_of(tmp_path, **templates):
    for name, text in templates.items():
        (tmp_path / f"{name}.jinja").write_text(text, encoding="utf-8")
    return str(tmp_path)


@pytest.mark.parametrize("kind", QUERY_KINDS)
def test_a_prompt_has_the_documents_the_number_and_the_examples(kind):
    documents = ["The first text.", "The second text."][: QUERY_KINDS[kind].num_documents]
    examples = [{"query": "how old is it?", "document": "It is a hundred years old."}]
    system, user = Prompts(None).render(kind, documents=documents, count=3, examples=examples, language="German")
    assert (system.role, user.role) == ("system", "user")
    for text in (*documents, examples[0]["query"], examples[0]["document"], '{"queries": [3'):
        assert text in user.content
    assert ("German" in user.content) == QUERY_KINDS[kind].has_language
    assert ('"instruction"' in user.content) == QUERY_KINDS[kind].has_instruction


def test_markup_in_a_document_is_text():
    text = "{{ 7 * 7 }} {% raw %} <b>&amp;</b> {# no comment #}"
    assert text in Prompts(None).render("question", **VALUES | {"documents": [text]})[1].content


def test_a_template_of_the_user_replaces_one_and_has_another_hash(tmp_path):
    own = Prompts(folder_of(tmp_path, question="{% block user %}About: {{ documents[0] }}{% endblock %}"))
    (message,) = own.render("question", **VALUES)
    assert (message.role, message.content) == ("user", "About: A short document.")
    assert own.digest("question") != Prompts(None).digest("question")
    assert own.digest("keywords") == Prompts(None).digest("keywords")


def test_the_base_of_all_prompts_is_part_of_their_hash(tmp_path):
    base = (module._FOLDER / "_base.jinja").read_text(encoding="utf-8")
    own = Prompts(folder_of(tmp_path, _base=base.replace("You write", "Write")))
    assert own.digest("keywords") != Prompts(None).digest("keywords")
    assert own.digest("judge") == Prompts(None).digest("judge")
    assert own.render("keywords", **VALUES)[0].content.startswith("Write search queries")


def test_a_template_of_another_name_is_a_kind(tmp_path):
    text = '{% extends "_base.jinja" %}{% block task %}Write a {{ count }}-fold riddle.{% endblock %}'
    own = Prompts(folder_of(tmp_path, riddle=text), ["riddle"])
    assert "riddle" in own.kinds
    assert "Write a 2-fold riddle." in own.render("riddle", **VALUES)[1].content


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({}, "no file NAME.jinja"),
        ({"qestion": ""}, "qestion.jinja is not used"),
        ({"question": "{% block user %}{{ documents[0] }"}, "question.jinja:1: "),
        ({"question": "{% block user %}{{ document }}{% endblock %}"}, "'document' is undefined"),
        ({"question": "{{ documents[0] }}"}, "has no text in its block `user`"),
        ({"question": '{% include "/etc/passwd" %}'}, "/etc/passwd"),
        ({"question": '{% extends "../../types.py" %}'}, "types.py"),
        ({"question": "{% block user %}{{ documents.__class__.__mro__ }}{% endblock %}"}, "unsafe"),
        (
            {"question": "{% block user %}{{ documents.append('x') }}{% endblock %}"},
            "'append' of 'list' object",
        ),
        ({"question": "{% block user %}{{ 'x' * 9000000 }}{% endblock %}"}, "9,000,000 characters"),
    ],
)
def test_a_template_that_cannot_be_used_ends_in_a_sentence(tmp_path, templates, expected):
    with pytest.raises(ConfigError, match=f"^prompts={tmp_path}") as caught:
        Prompts(folder_of(tmp_path, **templates)).require_usable("question", VALUES)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RENDER_SECONDS", 0.5)
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ConfigError, match=r"rendering question\.jinja needs more than"):
        Prompts(folder_of(tmp_path, question=loops)).require_usable("question", VALUES)


WHOLE = {"queries": ["first one", "second one"]}
TEXT = json.dumps(WHOLE)


@pytest.mark.parametrize(
    ("answer", "is_repaired"),
    [
        (TEXT, False),
        (f"  {TEXT}\n", False),
        (f"```json\n{TEXT}\n```", True),
        (f"Here you are:\n```\n{TEXT}\n```\nAnything else?", True),
        (f"Sure! {TEXT} I hope this helps.", True),
        (f"<think>A {{ brace, and [1, 2].</think>\n{TEXT}", True),
        (f"no tag at the start {{</think>{TEXT}", True),
        (TEXT[:-1], True),
        (TEXT[:-2], True),
        (TEXT[:-3], True),
        ("{'queries': ['first one', 'second one']}", True),
        ('{"queries": ["first one", "second one",]}', True),
        ('{"queries": ["first one" "second one"]}', True),
        ('{queries: ["first one", "second one"]}', True),
    ],
)
def test_damaged_answers_are_repaired(answer, is_repaired):
    parsed = parse_answer(answer)
    assert parsed == Parsed(WHOLE, is_repaired)
    assert texts_in(parsed.value, "queries") == WHOLE["queries"]


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        ('["first one", "second one"]', WHOLE["queries"]),
        ("1. first one\n2) second one", WHOLE["queries"]),
        ("Queries:\n- first one\n- second one\n", WHOLE["queries"]),
        ('{"questions": ["first one", "second one"]}', WHOLE["queries"]),
        ('{"query": "first one"}', ["first one"]),
        ('{"queries": "first one"}', ["first one"]),
        ('{"queries": ["half \\ud83d of it"]}', ["half  of it"]),
        ('{"queries": ["whole \\ud83d\\ude00"]}', ["whole \U0001f600"]),
    ],
)
def test_answers_of_another_form_are_read(answer, texts):
    parsed = parse_answer(answer)
    assert parsed is not None
    assert texts_in(parsed.value, "queries", "query") == texts


@pytest.mark.parametrize("answer", ["", "I cannot do that.", "null", "42", '"text"', "<think>{", "[" * 100_000])
def test_an_answer_without_json_is_none(answer):
    assert parse_answer(answer) is None or texts_in(parse_answer(answer).value, "queries") in ([], [[]])
