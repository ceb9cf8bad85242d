"""Rerankers whose score is the logit of a token: their authors' ids, and the scores of sentence-transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from embedtrain.config.kind_settings import PAIR_TEMPLATES, ScoreHead
from embedtrain.config.recipe import ModelConfig, Strategy
from embedtrain.data.rows import TextFormat
from embedtrain.data.tokens import TextTokenizer
from embedtrain.data.types import Pair
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.source import open_model_source
from embedtrain.inference.loading.load import load_model
from embedtrain.kinds.cross_encoder.model import PairLayout, template_format
from embedtrain.models.build import full_state_dict
from tests.small import model_options, parallel
from tests.token_rerankers import GEMMA_CHAT, QWEN3_CHAT, add_logit_score, chat_tokenizer, save_causal

TEXTS = ["Is it?", "Where?\n", "a\n\n", "", "如何训练？", "<|im_end|> yes", "alpha gamma? " * 90, " two  words "]
PAIRS = [(query, document) for query in TEXTS for document in TEXTS]


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int = 10_000) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, truncation=True, max_length=max_length)["input_ids"]
    return ids


def qwen3(tokenizer: Any, query: str, document: str, max_length: int, instruction: str | None = None) -> list[int]:
    """As Qwen3-Reranker's model card."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    before, after = ids_of(tokenizer, prefix), ids_of(tokenizer, suffix)
    content = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return before + ids_of(tokenizer, content, max_length - len(before) - len(after)) + after


def mxbai(tokenizer: Any, query: str, document: str, max_length: int, instruction: str | None = None) -> list[int]:
    """As `MxbaiRerankV2.prepare_inputs`, whose own limit does not count the text around the pair."""
    prefix = ids_of(
        tokenizer,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n",
    )
    task = ids_of(
        tokenizer,
        "You are a search relevance expert who evaluates how well documents match search queries. For each "
        "query-document pair, carefully analyze the semantic relationship between them, then provide your binary "
        "relevance judgment (0 for not relevant, 1 for relevant).\nRelevance:",
    )
    suffix, sep = ids_of(tokenizer, "<|im_end|>\n<|im_start|>assistant\n"), ids_of(tokenizer, "\n")
    limit = max_length - len(prefix) - len(task) - len(suffix) - len(sep)
    text = f"query: {query}" if instruction is None else f"instruction: {instruction}\nquery: {query}"
    first = ids_of(tokenizer, text, limit * 3 // 4)
    second = sep + ids_of(tokenizer, f"document: {document}", limit)
    return prefix + first + second[: limit - len(first)] + sep + task + suffix


def gemma(tokenizer: Any, query: str, document: str, max_length: int, instruction: str | None = None) -> list[int]:
    """As FlagEmbedding's `DatasetForReranker`, which truncates only the second part."""
    prompt = ids_of(
        tokenizer,
        "Given a query A and a passage B, determine whether the passage contains an answer to the query by providing "
        "a prediction of either 'Yes' or 'No'.",
    )
    sep = ids_of(tokenizer, "\n")
    limit = max_length - len(sep) - len(prompt)
    first = [tokenizer.bos_token_id, *ids_of(tokenizer, f"A: {query}", (limit - 1) * 3 // 4)]
    second = sep + ids_of(tokenizer, f"B: {document}")
    return first + second[: limit - len(first)] + sep + prompt


@pytest.mark.parametrize("authors", [qwen3, mxbai, gemma])
def test_pairs_have_the_ids_of_their_authors_code(authors):
    tokenizer = chat_tokenizer(bos=authors is gemma)
    template = PAIR_TEMPLATES[authors.__name__]
    pairs = TextTokenizer(tokenizer, 512, PairLayout(tokenizer, template_format(template, tokenizer)))
    prompts = template.prompts
    inputs = [Pair(prompts["query"] + query, prompts["document"] + document) for query, document in PAIRS]
    cut = 0
    for length in (320, 512):
        expected = [authors(tokenizer, *pair, length) for pair in PAIRS]
        assert pairs.ids(inputs, length) == expected
        cut += sum(len(ids) == length for ids in expected)
    assert cut > len(TEXTS)
    # An instruction of a row replaces the prompt; single texts, whose tokens are cached, get what surrounds them.
    if template.instruction_format is None:
        return
    prompt = TextFormat(instruction_format=template.instruction_format).query("Find 1?")
    document = pairs.layout.document_prompt(TextFormat(document_prompt=prompts["document"]).document(None))
    texts = [pairs.layout.query_prompt(prompt)("Is it?"), document("line\n")]
    joined = pairs.layout.join(*(pairs.tokens([text]) for text in texts), 512)
    assert joined.ids.tolist() == authors(tokenizer, "Is it?", "line\n", 512, "Find 1?")


def logit_score_directory(case: str, folder: Path) -> tuple[Path, ModelConfig]:
    """A directory that sentence-transformers opens, and the options with which we do."""
    name = "Qwen3-Reranker-tiny" if case == "by name" else "model"
    if case == "gemma":
        directory = add_logit_score(save_causal(folder / name, "gemma"), "Yes", None, GEMMA_CHAT)
    else:
        untied = case == "untied"
        directory = save_causal(folder / name, tied=not untied, max_shard_size="40KB" if untied else "5GB")
        settings = {"prompts": {"web": "Find pages."}, "default_prompt_name": "web"} if untied else {}
        add_logit_score(directory, "yes", "no", QWEN3_CHAT, **settings)
    model = model_options(path=str(directory), kind="cross_encoder")
    if case == "by name":
        for file in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
            (directory / file).unlink()
    if case == "named template":
        model = replace(model, pair_template="qwen3", score_head=ScoreHead.tokens)
        (directory / "modules.json").unlink()
        (directory / "chat_template.jinja").unlink()
    return directory, model


def scores_and_ids(world: World, model: ModelConfig, strategy: Strategy) -> tuple[list[float], list[list[int]]]:
    loaded = load_model(model, parallel(strategy), world, seed=1)
    prompts = loaded.source.prompts
    pairs = [Pair(prompts["query"] + query, prompts["document"] + document) for query, document in PAIRS]
    tokens = loaded.tokenizer.tokens(pairs)
    scores = []
    encoder = loaded.encoder.eval()
    with torch.no_grad():
        for chunk in loaded.tokenizer.cut(tokens, 4000):
            scores += zip(chunk.rows, encoder(chunk)[0][:, 0].tolist(), strict=True)
    return [score for _, score in sorted(scores)], tokens.lists()


@pytest.mark.quick("by name", "tied", "gemma")
@pytest.mark.parametrize("case", ["tied", "untied", "gemma", "by name", "named template"])
def test_scores_equal_sentence_transformers(ranks, case, tmp_path):
    directory, model = logit_score_directory(case, tmp_path)
    if case == "named template":
        (tmp_path / "reference").mkdir()
        directory = logit_score_directory("tied", tmp_path / "reference")[0]
    reference = CrossEncoder(str(directory), device="cpu")
    expected = reference.predict(PAIRS, activation_fn=torch.nn.Identity(), show_progress_bar=False).tolist()
    prompt = reference.prompts.get(str(reference.default_prompt_name))
    features = [reference.preprocess([pair], prompt=prompt)["input_ids"][0].tolist() for pair in PAIRS]
    assert max(map(len, features)) == 512
    strategy = Strategy.ddp if case == "gemma" else Strategy.fsdp
    for scores, ids in ranks(2, scores_and_ids, model, strategy):
        assert ids == features
        assert scores == pytest.approx(expected, abs=1e-4)
    assert max(expected) - min(expected) > 0.05


def test_the_head_starts_from_rows_of_weights_in_any_format(tmp_path):
    directory, model = logit_score_directory("untied", tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = chat_tokenizer()
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    rows = whole.lm_head.weight.detach()
    expected = (rows[yes] - rows[no])[None]
    for path in directory.glob("model*"):
        path.unlink()
    torch.save(whole.state_dict(), directory / "pytorch_model.bin")
    state = full_state_dict(open_model_source(model), seed=0)
    torch.testing.assert_close(state["head.score.weight"], expected)
    torch.testing.assert_close(state["backbone.norm.weight"], whole.model.norm.weight.detach())


def rewrite(directory: Path, file: str, **changes: Any) -> None:
    settings = json.loads((directory / file).read_text()) | changes
    (directory / file).write_text(json.dumps(settings))


def test_tokens_that_cannot_be_used_are_rejected(tmp_path):
    directory, model = logit_score_directory("tied", tmp_path)

    def fails(error: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(error, match=message):
            open_model_source(replace(model, **options))

    fails(ConfigError, r"model\.score_tokens=\['yes', 'no'\].*LogitScore", score_tokens=["yes", "no"])
    with pytest.raises(ConfigError, match=r"LogitScore.*model\.kind=cross_encoder"):
        open_model_source(model_options(path=str(directory)))
    rewrite(directory, "1_LogitScore/config.json", true_token_id=5000)
    fails(ModelError, "5000")
    (directory / "modules.json").unlink()
    fails(ConfigError, r"model\.score_head=tokens.*model\.score_tokens", score_head=ScoreHead.tokens)
    fails(ConfigError, r"model\.score_tokens=.*: 'Yes or' is \d+ tokens", score_tokens=["Yes or", "No"])
    source = open_model_source(replace(model, score_tokens=["Yes"], pair_template="qwen3"))
    assert source.kind.name == "cross_encoder"
    assert source.settings.tokens == (chat_tokenizer().convert_tokens_to_ids("Yes"),)
    # A bare language model gets a new head.
    plain = open_model_source(model).settings
    assert plain is not None
    assert plain.is_new
    rewrite(directory, "config.json", final_logit_softcapping=30.0)
    fails(ModelError, "final_logit_softcapping=30.0", pair_template="qwen3")
    AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1).save_pretrained(directory)
    fails(ConfigError, r"model\.score_head=tokens.*Qwen3ForSequenceClassification", score_head=ScoreHead.tokens)


def test_a_chat_template_must_render_both_roles_in_parts(tmp_path):
    directory, model = logit_score_directory("tied", tmp_path)
    for template, message in {
        "{{ messages[0].content }}": "role query",
        QWEN3_CHAT.replace('"query")', '"user")').replace("| first }}\n<Doc", "| first }}\n<Doc"): "role",
        QWEN3_CHAT.replace("| first }}", "| first | trim }}"): "chat template",
        "{{ raise_exception('no') }}": "no",
    }.items():
        (directory / "chat_template.jinja").write_text(template)
        with pytest.raises(ModelError, match=message):
            open_model_source(model)
