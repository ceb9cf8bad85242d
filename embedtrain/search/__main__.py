"""`python -m embedtrain.search model=DIR corpus=DIR query="..."`: find texts with a model."""

import sys
from collections.abc import Iterator

from embedtrain.cli import run_command
from embedtrain.search.options import SearchOptions, compose_search


def act(options: SearchOptions) -> None:
    """Encode the corpus once, then answer one query, or one after another from the keyboard or a pipe."""
    from pathlib import Path

    from embedtrain.config.recipe import ModelConfig, ParallelConfig
    from embedtrain.distributed.world import joined_world
    from embedtrain.evaluation.readers.retrieval import read_corpus
    from embedtrain.inference.encode import SentenceEncoder
    from embedtrain.inference.exact import unit_vectors
    from embedtrain.inference.index import ShardedIndex, trec_order
    from embedtrain.loading.command_model import MODEL_OPTION_NAMES, command_option_names
    from embedtrain.loading.load import load_model
    from embedtrain.search.printing import print_answers
    from embedtrain.tracking.console import Console

    corpus = read_corpus(Path(options.corpus))
    ids, texts = corpus.ids, corpus.texts
    console = Console()
    with joined_world() as world:
        source = ModelConfig(path=options.model, revision=options.revision, trust_remote_code=options.trust_remote_code)
        with command_option_names(MODEL_OPTION_NAMES):
            model = load_model(source, ParallelConfig(precision=options.precision), world, seed=0, work=None)
        prompts = model.source.prompts
        encoder = SentenceEncoder(model.encoder, model.tokenizer, world, chunk_tokens=options.chunk_tokens)
        index = ShardedIndex(trec_order(ids), world)
        with console.phase(f"encoding {len(texts):,} texts"):
            for block in encoder.encode_blocks(texts, prompts.get("document", ""), finish=unit_vectors):
                index.add(block)
        for query in _queries(options.query):
            vector = unit_vectors(encoder.encode_all([query], prompts.get("query", "")))
            ranking = index.search(vector, options.top_k)
            found = zip(ranking.documents[0].tolist(), ranking.scores[0].tolist(), strict=True)
            print_answers(query, [(score, ids[place], texts[place]) for place, score in found])


def _queries(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    while True:
        if sys.stdin.isatty():
            print("query (empty to end): ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


if __name__ == "__main__":
    run_command(compose_search, act)
