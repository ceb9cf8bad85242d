"""A backslash and an n in a prompt causes a warning; a newline does not."""

from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.config.checks import prompt_warnings, untrained_prompt_warnings
from embedtrain.config.compose import compose_recipes

GOOD = ["name=a", "model.path=m", "train.steps=5"]


def test_a_literal_backslash_n_in_any_prompt():
    (recipe,) = compose_recipes(
        [
            *GOOD,
            r'model.query_prompt="Instruct: a\nQuery: "',
            r"data.train=[x, {path: y, document_prompt: 'a\nb'}]",
            r"evaluation.sets=[{path: dev, query_prompt: 'a\nb'}]",
            r'data.instruction_format="{instruction}\n{text}"',
        ]
    )
    named = [warning.partition(" ")[0] for warning in prompt_warnings(recipe)]
    expected = ["model.query_prompt", "data.train[1].document_prompt", "data.instruction_format"]
    assert named == [*expected, "evaluation.sets[0].query_prompt"]


def test_as_bash_passes_it_with_a_dollar():
    argument = 'model.query_prompt="Instruct: a\nQuery: "'  # bash: $'model.query_prompt="Instruct: a\nQuery: "'
    (recipe,) = compose_recipes([*GOOD, "data.train=[x]", argument])
    assert recipe.model.query_prompt == "Instruct: a\nQuery: "
    assert prompt_warnings(recipe) == []


def test_options_of_commands():
    evaluate = compose_evaluate(["model=m", "sets=[x]", r'query_prompt="a\nb"'])
    rank_batch = compose_mine(["model=m", "data=[x]", "output_dir=o", r'document_prompt="a\nb"'])
    assert prompt_warnings(evaluate)[0].startswith("query_prompt ")
    assert prompt_warnings(rank_batch)[0].startswith("document_prompt ")


def warned(data: str, **prompts: str) -> list[str]:
    (recipe,) = compose_recipes([*GOOD, f"data.train={data}"])
    return untrained_prompt_warnings(recipe.data.train, prompts)


def test_prompts_of_sources_that_evaluation_and_export_do_not_have():
    (warning,) = warned("[{path: x, query_prompt: 'query: '}, {path: y, query_prompt: 'Q '}]")
    assert "query_prompt of the sources ('query: ', 'Q ')" in warning
    assert "model.query_prompt" in warning
    (warning,) = warned("[{path: x, document_prompt: ''}]", document="passage: ")
    assert "'passage: ' before each document" in warning
    assert warned("[{path: x, query_prompt: 'query: '}, y]") == [], "the other source trains with the model's prompt"
    assert warned("[{path: x, query_prompt: 'query: '}]", query="query: ") == []
    assert warned("[x]", query="query: ") == []
