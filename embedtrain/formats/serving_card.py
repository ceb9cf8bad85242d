"""Which engines serve a model, and how to start them: a section of the model card, and lines for the console."""

import json
import shlex
from collections.abc import Callable, Mapping

from embedtrain.formats.serving import BEARABLE, Effect, ServedModel
from embedtrain.formats.serving_engines import ENGINES

_IMAGE = "ghcr.io/huggingface/text-embeddings-inference"
_VLLM_CLASSES = {"sparse": "BertSpladeSparseEmbeddingModel", "m3": "BgeM3EmbeddingModel"}
# Of late interaction; the projection is read from 1_Dense.
_VLLM_COLBERT = {"bert": "HF_ColBERT", "modernbert": "ColBERTModernBertModel"}
_MAX_BATCH_TOKENS = 16384  # of text-embeddings-inference by default

Start = Callable[[ServedModel, str], str]


def _text_embeddings_inference(tag: str, options: str) -> Start:
    def start(model: ServedModel, name: str) -> str:
        arguments = [f"--model-id {name}", *([options] if options else [])]
        if model.source.kind.name == "sparse":
            arguments.append("--pooling splade")
        length = model.source.tokenization.max_length or 0
        if length > _MAX_BATCH_TOKENS:
            arguments.append(f"--max-batch-tokens {length}")
        device = "--gpus all " if options else ""
        return f"docker run {device}-p 8080:80 -v $PWD:/data -w /data {_IMAGE}:{tag} {' '.join(arguments)}"

    return start


def _vllm(model: ServedModel, name: str) -> str:
    kind, arguments = model.source.kind.name, ["--runner pooling"]
    if kind == "dense":
        pooling = {"pooling_type": model.source.pooling.value.upper(), "use_activation": model.source.normalize}
        arguments += ["--convert embed", f"--pooler-config {shlex.quote(json.dumps(pooling))}"]
    colbert = _VLLM_COLBERT.get(model.model_type, "") if kind == "late_interaction" else ""
    if class_name := _VLLM_CLASSES.get(kind, colbert):
        arguments.append(f"--hf-overrides {shlex.quote(json.dumps({'architectures': [class_name]}))}")
    return f"vllm serve {name} {' '.join(arguments)} --dtype float32"


def _llama_cpp(model: ServedModel, name: str) -> str:
    is_pair = model.source.kind.name == "cross_encoder"
    options = "--reranking" if is_pair else f"--embedding --pooling {model.source.pooling.value}"
    options += " --attention non-causal" if model.is_bidirectional_decoder else ""
    dense = " --sentence-transformers-dense-modules" if model.source.dense else ""
    return (
        f"python convert_hf_to_gguf.py {name} --outfile model.gguf --outtype f32{dense} && "
        f"llama-server -m model.gguf {options}"
    )


def _flag_embedding(model: ServedModel, name: str) -> str:
    if model.source.kind.name == "cross_encoder":
        return f'FlagReranker("{name}", use_fp16=False)'
    if model.source.kind.name == "m3":
        return f'BGEM3FlagModel("{name}", use_fp16=False)'
    last = model.source.pooling.value == "last"
    pooling = "" if last else f', pooling_method="{model.source.pooling.value}"'
    query = _quoted(model, "query")
    instruction = f", query_instruction_for_retrieval={query}" if query != '""' else ""
    instruction += ', query_instruction_format="{}{}"' if last and instruction else ""
    return f'{"FlagLLMModel" if last else "FlagModel"}("{name}"{pooling}{instruction}, use_fp16=False)'


def _quoted(model: ServedModel, role: str) -> str:
    return json.dumps(model.source.prompts.get(role, ""), ensure_ascii=False)


def _with_prompt_names(name: str, model: ServedModel) -> str:
    prompts = model.source.prompts
    query = ', query_encode_kwargs={"prompt_name": "query"}' if prompts.get("query") else ""
    document = ', encode_kwargs={"prompt_name": "document"}' if prompts.get("document") else ""
    if query and not document:
        document = ', encode_kwargs={"prompt": ""}'
    return f'HuggingFaceEmbeddings(model_name="{name}"{query}{document})'


# How to start each engine, or the call that opens the model; sentence-transformers is in the section on usage.
_START: Mapping[str, Start] = {
    "text_embeddings_inference": _text_embeddings_inference("cuda-1.9", "--dtype float32"),
    "text_embeddings_inference_cpu": _text_embeddings_inference("cpu-1.9", ""),
    "vllm": _vllm,
    "infinity_emb": lambda _, name: f"infinity_emb v2 --model-id {name} --engine torch --dtype float32",
    "llama_cpp": _llama_cpp,
    "FlagEmbedding": _flag_embedding,
    "transformers_js": lambda _, name: f'await AutoModel.from_pretrained("{name}", {{ dtype: "fp32" }})',
    "langchain_huggingface": lambda model, name: _with_prompt_names(name, model),
    "llama_index": lambda model, name: (
        f'HuggingFaceEmbedding("{name}", query_instruction={_quoted(model, "query")}, '
        f"text_instruction={_quoted(model, 'document')}, normalize=False)"
    ),
    "chromadb": lambda _, name: f'SentenceTransformerEmbeddingFunction("{name}", default_prompt_name="document")',
    "txtai": lambda _, name: f'Embeddings(path="{name}", method="sentence-transformers")',
}
_VERDICTS = {
    Effect.rounded: "nearly",
    Effect.some_texts: "most texts",
    Effect.partial: "a part",
    Effect.changed: "**other numbers**",
    Effect.refused: "no",
}


def serving_section(model: ServedModel, name: str) -> str:
    """A section of the model card: which engines serve the model `name` exactly, why others do not, and commands."""
    rows, commands = [], []
    for key, engine in ENGINES.items():
        losses = engine.losses(model)
        verdict = _VERDICTS[losses[0].effect] if losses else "exactly"
        reasons = "; ".join(loss.reason for loss in losses)
        rows.append(f"| {engine.title} ({engine.source}) | {verdict} | {reasons} |")
        is_served = not losses or losses[0].effect in BEARABLE
        if key in _START and is_served:
            commands += [f"# {engine.title}", _START[key](model, shlex.quote(name))]
    lines = [
        "## Serving",
        "",
        "What engines compute of this model in float32, from the source code of the versions in parentheses. "
        "`embedtrain verify` compares those that are installed.",
        "",
        "| engine | serves it | why not exactly |",
        "| --- | --- | --- |",
        *rows,
        "",
        *(["```text", *commands, "```", ""] if commands else []),
    ]
    return "\n".join(lines)


def changed_outputs(model: ServedModel) -> list[str]:
    """A line for each reason why engines that open the model return other numbers, and nothing says so."""
    engines: dict[str, list[str]] = {}
    for engine in ENGINES.values():
        for loss in engine.losses(model):
            if loss.effect is Effect.changed:
                engines.setdefault(loss.reason, []).append(engine.title)
    return [f"other numbers with {_joined(titles)}: {reason}" for reason, titles in engines.items()]


def _joined(titles: list[str]) -> str:
    return titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"
