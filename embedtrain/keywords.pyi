"""Types of the options of the Python functions, for editors and type checkers.

Written by docs/hooks/reference.py from the dataclasses of the options. It exists for type checkers alone.
"""

from os import PathLike
from typing import Any, Literal, TypedDict

from embedtrain.results import TrainResult


class LoraGroup(TypedDict, total=False):
    rank: int | None
    """r of every adapter; null trains all weights"""
    alpha: float | None
    """adapters are scaled by alpha / r; default: 2 r"""
    targets: Any
    """all-linear (of the blocks), or names of linear layers, such as [q_proj, v_proj]; of a model with several towers they may begin with that of a tower: text.all-linear, image.q_proj"""
    dropout: float
    """applied to the input of an adapter"""
    modules_to_save: list[str]
    """trained in full: embeddings, norms, or names of modules"""
    base_dtype: Literal['auto', 'bf16', 'fp32']
    """type of the frozen weights. The type that frozen weights are stored in. `auto` is bf16 if the model is computed in bf16, which loses nothing, or if its files hold bf16; otherwise fp32"""
    load_in_4bit: bool
    """frozen linear layers in 4 bits (QLoRA): CUDA, bitsandbytes"""
    path: str | PathLike[str] | None
    """start from an adapter of PEFT: directory or Hub id; its rank and targets are used"""
    revision: str | None
    """a commit, tag or branch of its Hub repository"""

class HeadGroup(TypedDict, total=False):
    out: int
    """dimensions of its output; that of the last head is the dimension of the vectors"""
    bias: bool
    """whether a trained vector is added"""
    activation: Literal['identity', 'tanh', 'gelu', 'silu']
    """The function after a head's linear layer; `identity`: none"""
    init: Literal['identity', 'normal']
    """Initial weights of a head; a bias starts at 0. `identity`: the first rows of the identity matrix, so that heads without an activation whose last has as many outputs as the pooling leave the vectors as they were. `normal`: of mean 0 and standard deviation 1 / sqrt(inputs)"""

class ImageGroup(TypedDict, total=False):
    frozen: bool
    """train nothing of the vision tower and of what projects its rows"""
    min_pixels: int | None
    """pixels of a picture, which the image processor of Qwen-VL makes larger or smaller; default: those of the directory"""
    max_pixels: int | None

class ChunkingGroup(TypedDict, total=False):
    late: bool | None
    """Late chunking: encode a document in one forward pass, and pool each of its chunks to a vector of its own, which knows the rest of the document. Default: that of the directory, else false"""
    negatives: bool
    """The other chunks of a document are negatives, of its own query and of the others; false: they are context alone"""

class TowerGroup(TypedDict, total=False):
    path: str | PathLike[str] | None
    """Hub id, Hugging Face directory or sentence-transformers directory"""
    revision: str | None
    """a commit, tag or branch of the Hub repository"""
    pooling: str | None
    """`cls`, `mean`, `last`, `max` or `weighted_mean`; default: that of a sentence-transformers directory"""
    normalize: bool | None
    """default: model.normalize, or that of the directory, else true"""
    heads: list[HeadGroup]
    """new dense heads between pooling and normalisation, for a tower that has none: both need the same dimensions"""
    max_length: int | None
    """tokens, including special tokens; default: model.max_length, or the directory's"""
    append_eos: bool | None
    """end every text with the end-of-text token; default: true with pooling `last`"""
    include_prompt: bool | None
    """include the prompt in mean pooling; default: that of the directory, else true"""

class ImageTextTowerGroup(TypedDict, total=False):
    path: str | PathLike[str] | None
    """Hub id or directory of a model of texts, or of pictures, of which a new pair is made; default: that of model.path"""
    revision: str | None
    """a commit, tag or branch of its Hub repository"""
    frozen: bool
    """train nothing of what its files have; a new projection is trained"""

class ModelGroup(TypedDict, total=False):
    kind: str
    """What the model computes: dense (a vector per text), dual_encoder (the same, by one model for queries and another for documents), image_text (a vector per text and per picture, CLIP), cross_encoder (a score per pair of query and document, a reranker), late_interaction (a vector per token of a text, ColBERT), m3 (a vector, lexical weights and a vector per token, BGE-M3) or sparse (a weight per word of the vocabulary, SPLADE). Each has further options"""
    path: str | PathLike[str] | None
    """Hub id, Hugging Face directory or sentence-transformers directory"""
    config: Any
    """instead, for random weights: a mapping with `model_type`, or the path of a config.json"""
    tokenizer: str | PathLike[str] | None
    """Hub id or directory; default: the model's, or one trained on the data"""
    tokenizer_revision: str | None
    """a commit, tag or branch of its Hub repository"""
    vocab_size: int
    """size of a vocabulary trained on the data"""
    vocab_lowercase: bool
    """lowercase texts for such a vocabulary"""
    max_length: int | None
    """tokens, including special tokens; default: that of the directory"""
    bidirectional: bool | None
    """tokens attend to later tokens as well; default: the configuration's"""
    attention: Literal['auto', 'packed', 'padded']
    """How texts of different lengths share a forward pass. `packed` concatenates them and computes no padding; `padded` pads all to the longest. `auto` packs if the model's code allows it and the embeddings are the same, and reports why not otherwise"""
    rope_theta: float | None
    """base of the rotary positions in training; default: the configuration's"""
    rope_scaling: Any
    """extends rotary positions: a mapping such as {rope_type: yarn, factor: 4}"""
    dropout: float | None
    """Probability of every dropout that the configuration names (hidden states, attention, classifier, ...), in training alone: the exported configuration is the original one. Default: those of the configuration"""
    lora: LoraGroup
    adapter: Any
    """Another adapter of PEFT instead of LoRA: a mapping of its type, such as dora, ia3 or vera, and settings of PEFT's configuration of this type, such as {type: dora, r: 16, target_modules: all-linear}"""
    query_prompt: str | None
    """precedes every query; default: that of the directory, else none"""
    document_prompt: str | None
    """precedes every document; default: that of the directory, else none"""
    revision: str | None
    """a commit, tag or branch of the Hub repository"""
    trust_remote_code: Any
    """Run Python code of the model: only for authors that you trust. It is set, and the model named, on the command line or in Python, never in a file"""
    pooling: Any
    """`cls`, `mean`, `last`, `max` or `weighted_mean` (weights 1, 2, 3, ... in the order of the tokens), or module:Class for your own; default: that of a sentence-transformers directory"""
    normalize: bool | None
    """L2-normalize embeddings; default: that of the directory, else true"""
    similarity: Literal['cosine', 'dot', 'euclidean', 'manhattan'] | None
    """How vectors are compared in evaluation, mining and search, and in the exported model: cosine, dot, euclidean or manhattan. Default: as the loss compares them unless they are normalised, else that of the directory, else cosine. How a model compares the vectors of two texts, as sentence-transformers names it. `euclidean` and `manhattan` are distances, less than 0"""
    heads: list[HeadGroup]
    """New dense heads between pooling and normalisation, for a model whose directory has none"""
    append_eos: bool | None
    """end every text with the end-of-text token; default: true with pooling `last`"""
    include_prompt: bool | None
    """include the prompt in mean pooling; default: that of the directory, else true"""
    image: ImageGroup
    """of a vision-language model"""
    chunking: ChunkingGroup
    item_template: str | None
    """What a vision-language model reads around an item, with {item} once, and {prompt} before it. Default: what the chat template of the directory writes, with the prompt as a system message; without a template {prompt}{item}"""
    query: TowerGroup
    """The tower of queries, unless model.path has both (a Router of sentence-transformers), whose options these replace"""
    document: TowerGroup
    """the tower of documents"""
    text: ImageTextTowerGroup
    """the tower of texts"""
    projection_dim: int
    """dimensions of the vectors of a pair that is made of text.path and image.path, by new projections"""
    pair_template: Any
    """The text around a pair's query and document, for a decoder: qwen3, qwen3_vl, gemma or mxbai, as Qwen3-Reranker, Qwen3-VL-Reranker, bge-reranker-v2-gemma and mxbai-rerank-v2 have it, or a mapping of prefix, query, document and suffix; default: that of the directory, else the tokenizer's pairs"""
    score_head: Literal['auto', 'classification', 'tokens']
    """How a cross-encoder's score is computed from the last layer. `classification` is the head of transformers' class for sequence classification. `tokens` is the logit of a token after the pair, or the difference of two; the same head starts from their rows of the vocabulary. `auto` is `tokens` for a `LogitScore` directory of sentence-transformers, with `score_tokens`, and for a causal language model with a named `pair_template`"""
    score_tokens: list[str] | None
    """[yes, no], or one token for its logit; default: those of the template"""
    score_labels: list[int] | None
    """Of a classifier of several labels: [1, 0] for the logit of label 1 minus that of label 0, or one for its logit"""
    dimension: int | None
    """dimensions of a token's vector; default: that of the directory, else 128"""
    query_length: int | None
    """tokens of a query; default: that of the directory, else model.max_length"""
    document_length: int | None
    """tokens of a document; default: that of the directory, else model.max_length"""
    query_expansion: Literal['none', 'min', 'fixed'] | None
    """default: that of the directory, else none. Which queries get further tokens, whose vectors are compared with documents as well (Khattab and Zaharia, 2020). `fixed` extends or cuts every query to `expansion_length` tokens, `min` extends shorter queries and keeps longer ones"""
    expansion_length: int | None
    """tokens of an expanded query; default: that of the directory, else 32"""
    expansion_token: str | None
    """The token that queries are expanded with; default: that of the directory, else the mask token, or the end-of-text token of a tokenizer without one"""
    attend_to_expansion_tokens: bool | None
    """default: that of the directory, else false"""
    skiplist_words: list[str] | None
    """Words of documents whose vectors are left out, each one token, such as punctuation; default: that of the directory, else none"""
    page_library: Literal['transformers', 'colpali_engine'] | None
    """The library whose class a new model over pages is for; default: transformers if it has one for the backbone, else colpali_engine. A directory of such a model is written as it was read. The library whose classes a late-interaction model over pages is for. They put other texts around queries and pages, and transformers counts the positions of a page's tokens as those of a text, so that vectors of the same weights differ"""
    only_picture_vectors: bool | None
    """Of a model over pages: pages have vectors of the tokens of pictures alone, without those of what stands around them; default: that of the directory, else false"""
    hybrid_weights: list[float] | None
    """Weights of the dense, lexical and multi-vector scores in the score of two texts, when training and searching; default: those of the directory, else [1, 0.3, 1]"""
    activation: Literal['relu', 'log1p_relu'] | None
    """default: that of the directory, else relu. The weight of a word at a token with the logit x. `relu` is log(1 + max(x, 0)), as in all SPLADE models; `log1p_relu` is log(1 + log(1 + max(x, 0))), as in models of OpenSearch from version 3 on. The names are those of sentence-transformers"""
    queries: Literal['encoded', 'static'] | None
    """default: that of the directory, else encoded. How queries become weights of words. `encoded`: by the model, as documents. `static`: each distinct token of a query has a weight of its own, the same in every query, so that queries need no inference; special tokens are left out (Geng et al., 2024)"""
    query_weights: str | PathLike[str] | None
    """Weights of the tokens of static queries: a JSON file of tokens and weights, such as idf.json of OpenSearch's models, or `idf`, which computes them from the documents of data.train. Default: those of the directory, else idf"""
    train_query_weights: bool | None
    """Whether they are trained, with the learning rate 1e-3 unless optim.groups has one for `query_weights`; default: as the directory says, else false"""

class SparsityGroup(TypedDict, total=False):
    query_weight: float | None
    """Factor of the queries' regularizer; 0: none. Default: 5e-5, or 0 for static queries, which are sparse already"""
    document_weight: float
    """factor of the documents' regularizer; 0: none"""
    query_regularizer: Literal['flops', 'l1']
    """What keeps vectors sparse. Every mean is over the texts of the global batch. `flops`: the sum over words of the squared mean weight (Paria et al., 2020), which also evens out how often words are used. `l1`: the mean over texts of the sum of weights"""
    document_regularizer: Literal['flops', 'l1']
    """What keeps vectors sparse. Every mean is over the texts of the global batch. `flops`: the sum over words of the squared mean weight (Paria et al., 2020), which also evens out how often words are used. `l1`: the mean over texts of the sum of weights"""
    query_threshold: int | None
    """Queries with at most so many active words are left out of flops (L0-masked FLOPS, Shen et al., 2025); null: none"""
    document_threshold: int | None
    """the same for documents"""
    ramp: float
    """The weights grow quadratically from 0 over these first steps: below 1 a fraction of all steps, from 1 a number"""

class ParameterGroupGroup(TypedDict, total=False):
    match: str
    """Regular expression that is searched in a parameter's name, which `inspect` and a group without a match print: `backbone.` and the names of transformers, `dense.` of heads, `loss.` of the loss"""
    name: str | None
    """in notes and metrics (`lr/NAME`); default: match"""
    lr: float | None
    """peak learning rate; 0: these parameters are not trained"""
    lr_scale: float | None
    """the same as a factor of optim.lr"""
    weight_decay: float | None
    """of all of the group's parameters; null: optim.weight_decay, of matrices only"""
    freeze_until: float | None
    """They stay unchanged, moments included, until this step: below 1 a fraction of all steps, from 1 a number of steps"""

class OptimGroup(TypedDict, total=False):
    name: Literal['adamw', 'stable_adamw', 'lion', 'muon']
    """How gradients become updates. `adamw` is AdamW. `stable_adamw` divides the learning rate of a tensor by the RMS of g / sqrt(v) if that is above 1 (Wortsman et al., 2023). `lion` uses the sign of a momentum (Chen et al., 2023): lower `lr` and raise `weight_decay` by a factor of 3 to 10, with `betas=[0.9,0.99]`. `muon` makes the momentum of each matrix of the blocks orthogonal (Jordan et al., 2024); embeddings, heads, norms, biases and adapters have AdamW"""
    lr: float
    """the peak learning rate, at the end of warm-up; models of billions of weights: 1e-6 to 2e-5"""
    weight_decay: float
    """of matrices; biases and norms are not decayed"""
    betas: list[float]
    """decay rates of the two moments"""
    eps: float
    """added to the root of the second moment"""
    state_dtype: Literal['fp32', 'bf16', 'int8']
    """Of the moments. bf16 halves their memory and needs betas=[0.9,0.99]; int8 leaves a quarter of it: codes of 8 bits with a scale for each block of a row. The type of the moments"""
    momentum: float
    """of muon"""
    muon_dtype: Literal['fp32', 'bf16']
    """of muon's products of matrices; bf16 depends on the kernel of the device. The type of the matrix products of muon"""
    max_grad_norm: float | None
    """norm of the gradient of the whole model; null: no clipping"""
    schedule: Literal['linear', 'cosine', 'constant', 'sqrt', 'inverse_sqrt', 'polynomial', 'wsd']
    """The learning rate after warm-up. u runs from 0 to 1 over the steps after warm-up: `linear` is 1 - u, `cosine` (1 + cos(pi u)) / 2, `sqrt` 1 - sqrt(u), `polynomial` (1 - u)^power. `wsd` (warm-up, stable, decay) is constant until the last `decay` steps. `inverse_sqrt` is sqrt(W / s) at step s, after W steps of warm-up"""
    warmup: float
    """below 1 a fraction of all steps, from 1 a number of steps"""
    decay: float
    """length of the decay of wsd: below 1 a fraction of all steps, from 1 a number of steps"""
    decay_shape: Literal['linear', 'cosine', 'sqrt']
    """The decay at the end of `schedule=wsd`, as the schedules of the same names"""
    power: float
    """exponent of polynomial"""
    min_lr_ratio: float
    """the learning rate does not fall below this fraction of lr after warm-up"""
    schedule_steps: int | None
    """all steps, as the schedule counts them; null: those of the run"""
    ema: float | None
    """Decay of a moving average of the weights, such as 0.999, which is evaluated and exported; null: none"""
    layer_decay: float | None
    """Of L blocks, counted from 0, block l has lr * layer_decay^(L - l), embeddings lr * layer_decay^(L + 1)"""
    groups: list[ParameterGroupGroup]
    """of each parameter the first that matches"""

class TrainGroup(TypedDict, total=False):
    steps: int | None
    """optimizer steps; instead of epochs"""
    epochs: float | None
    """passes over the data; default: 1, if steps is not set"""
    init_from: str | PathLike[str] | None
    """An earlier run of the same model, or one of its checkpoints: a new run starts with its weights, loss and optimizer state, at step 0 of its own data and schedule. Of a run, the step that it exported"""
    global_batch_size: int
    """rows per batch over all ranks, whatever their number"""
    chunk_tokens: int
    """tokens, including padding, of one forward pass on one rank"""
    activation_tokens: int | None
    """Tokens whose activations are kept, so that they are not encoded twice; default: what fits into memory"""
    pass_overhead_tokens: int | None
    """cost of a forward pass, in tokens: smaller is less padding in more passes"""
    gradient_accumulation_steps: int
    """global batches per step; each has its own negatives"""
    log_every: int | None
    """Steps between log lines and rows of metrics.jsonl; default: 10, and less in a run that would have fewer than ten"""

class ParallelGroup(TypedDict, total=False):
    strategy: Literal['auto', 'ddp', 'fsdp', 'hsdp']
    """How weights are distributed: replicated, sharded, or sharded within groups of ranks that are replicas"""
    shard_size: int | None
    """hsdp: ranks per replica of the weights; default: those of one node"""
    block_class: str | None
    """the layer class to shard; default: detected"""
    precision: Literal['auto', 'bf16', 'fp32']
    """a resumed run keeps its own. The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    gradient_reduction: Literal['auto', 'per_step', 'per_chunk']
    """When gradients are reduced over the ranks. `per_step` keeps them unreduced and reduces once per step; `per_chunk` reduces after every chunk and keeps a shard. `auto` reduces once per step if the unreduced gradients take little of a rank's memory"""
    reshard_after_forward: bool | None
    """Free a block's unsharded weights after its forward pass; null: if memory requires it"""
    activation_checkpointing: bool | str | None
    """Recompute activations of blocks in the backward pass: true all, selective those between matrix products and attention, whose results are kept, false none; null: as far as memory requires it"""
    cpu_offload: bool | None
    """weights and optimizer in host memory; null: if nothing else fits"""
    accelerate_config: str | PathLike[str] | None
    """a file that `accelerate config` wrote, for its FSDP options"""
    compile: bool | str
    """torch.compile for each block, in the first steps; auto: on GPUs, except with `deterministic`"""
    fp8: bool
    """Products of the linear layers of blocks in fp8 instead of bf16, in training: for models of a billion weights or more, on GPUs of compute capability 8.9 or above, with torchao"""
    fused_kernels: bool | str
    """RMSNorm, rotary positions and SwiGLU of layers that are not compiled by liger-kernel; auto: on GPUs where it is installed"""
    deterministic: bool
    """Only kernels that repeat bit for bit on GPUs, at a cost that has not been measured yet; no effect on CPUs"""
    timeout: float
    """seconds that a rank waits for the others before all end with an error"""
    step_timeout: float
    """The same within a step, after the first one that compiles nothing: at most `timeout`, at least three times the longest step so far"""

class CheckpointGroup(TypedDict, total=False):
    every: int
    """steps between checkpoints; 0: by time, see `every_minutes`"""
    every_minutes: float
    """minutes between checkpoints if `every=0` and `contents=all`; 0: only at the end"""
    keep: int
    """the newest checkpoints to keep, besides the best one"""
    keep_every: int
    """checkpoints at multiples of so many steps are never deleted; 0: none"""
    asynchronous: bool
    """write while training continues, from a copy in host memory; false: training waits"""
    max_disk_gb: float | None
    """limit for all checkpoints together, in 10^9 bytes; checked before each"""
    layout: Literal['sharded', 'full']
    """`sharded`: one file per shard. `full`: one safetensors file of whole tensors; each rank writes its rows to it"""
    contents: Literal['all', 'model']
    """`all`: weights and optimizer state, to resume from. `model`: only weights, to start a new run from"""
    best_metric: str | None
    """set/metric, such as dev/ndcg@10: keep and export the checkpoint that is best by it"""

class ExportGroup(TypedDict, total=False):
    formats: list[str]
    """sentence_transformers: always written, transformers opens it too, adapters are merged. onnx: an fp32 graph in the same directory; onnx_fp16, onnx_int8: smaller files of it, and openvino: OpenVINO's, each besides onnx. adapter: the adapter alone, in a directory inside it, for PEFT. logit_score: a reranker that started from the score of tokens as a causal language model again, in a directory inside it"""
    dtype: Literal['source', 'fp32', 'bf16', 'fp16']
    """The type of exported weights; `source` is the type of the weights that the run started from"""
    truncate_dim: int | None
    """vectors have only the first so many dimensions; needs loss.matryoshka.dims"""
    onnx_min_agreement: float
    """Smallest cosine of a vector of onnx_fp16, onnx_int8 or openvino to that of onnx, on probe texts; of vectors of tokens, the mean of a text; of a cross-encoder, 1 minus the largest difference of a probability. An export below it fails"""
    rope_theta: float | None
    """Base of the rotary positions of the exported model, which its evaluations measure; default: that of training"""
    max_file_size: str
    """larger weights are split into files of at most this size"""
    check: bool
    """reopen and compare; false for models that do not fit into one process"""
    push_to_hub: str | None
    """Hub id of a repository to upload to; created if missing"""
    private: bool
    """whether a repository that is created is private"""
    license: str | None
    """for the model card: an identifier of the Hub, such as apache-2.0"""
    language: list[str]
    """for the model card: ISO 639-1 codes, such as [en, zh]"""

class TrackingGroup(TypedDict, total=False):
    wandb: bool
    """log to Weights & Biases"""
    wandb_init: Any
    """A mapping of arguments of wandb.init: project (default: embedtrain), entity, group, job_type, name (default: that of the run), tags, notes, and mode, online or offline"""
    wandb_artifacts: bool
    """upload the exported model"""
    tensorboard: bool
    """write event files to `tensorboard/` in the run directory"""
    mlflow: bool
    """log to MLflow: the server of MLFLOW_TRACKING_URI"""
    mlflow_init: Any
    """a mapping: experiment (default: embedtrain), run_name (default: that of the run), tags"""
    trackio: bool
    """log to trackio"""
    trackio_init: Any
    """A mapping of arguments of trackio.init: project (default: embedtrain), name, group, space_id, dataset_id"""
    verbose: bool
    """Print diagnostics of every logged step as well: padding, waiting, communication, similarities, all metrics of the loss"""
    geometry: bool
    """similarities of positives, of the hardest negatives, ... of every logged batch"""
    communication: bool | None
    """Measure the fraction of the step that ranks spend in exposed collectives, in the 3rd step and every 100th logged one; null: on CPUs. On a GPU torch's profiler measures it, which starts for seconds and excludes other profilers"""
    profile: list[int]
    """steps to trace, such as [10,11,12]"""
    profile_ranks: list[int] | None
    """ranks that write traces; null: all"""
    report: bool
    """write report.html at the end, for which a few texts are encoded before and after"""

class TrainKeywords(TypedDict, total=False):
    name: str
    """name of the run; default: that of the recipe, else the last part of model.path"""
    seed: int
    """seed of the data order, dropout and new weights"""
    output_dir: str | PathLike[str]
    """directory of the run"""
    resume: Literal['auto', 'never', 'require']
    """What happens if `output_dir` holds a run. `auto` continues it; if it has finished, it only makes the evaluation and the export that are asked for, and ends with an error if an option that changes training is another one. `never` ends with an error. `require` ends with an error if there is no checkpoint to continue"""
    model: str | PathLike[str] | TrainResult | ModelGroup
    sparsity: SparsityGroup
    optim: OptimGroup
    train: TrainGroup
    parallel: ParallelGroup
    checkpoint: CheckpointGroup
    export: ExportGroup
    tracking: TrackingGroup

class EncoderKeywords(TypedDict, total=False):
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    revision: str | None
    """a commit, tag or branch of the model's Hub repository"""
    kind: Any
    """of the model, also `module:Class` of a module of your own; default: what its files say"""
    pooling: Any
    """cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's"""
    similarity: Literal['cosine', 'dot', 'euclidean', 'manhattan'] | None
    """How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting. How a model compares the vectors of two texts, as sentence-transformers names it. `euclidean` and `manhattan` are distances, less than 0"""
    max_length: int | None
    """tokens; default: the model's"""
    document_prompt: str | None
    """default: the model's"""
    query_prompt: str | None
    """default: the model's"""
    adapter: str | PathLike[str] | None
    """an adapter in PEFT's format: directory or Hub id"""
    normalize: bool | None
    """L2-normalize vectors; default: the model's setting"""
    chunk_tokens: int
    """per forward pass of a rank, including padding"""
    unshard: Literal['layer', 'model']
    """How much of sharded weights a rank gathers at a time to encode texts. `layer`: one layer, in every forward pass. `model`: all layers, once for each set of texts"""
    precision: Literal['auto', 'bf16', 'fp32']
    """The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    timeout: float
    """seconds that a rank waits for the others before all fail"""

class IndexGroup(TypedDict, total=False):
    dtype: Literal['fp32', 'bf16', 'fp16']
    """The type of the stored embeddings of documents. Scores are always fp32. `fp16` has three more bits than `bf16` for numbers up to 1, and is for unit vectors"""
    scan_dtype: Literal['bf16', 'fp16', 'int8'] | None
    """A search reads a smaller copy of this type, and scores by the embeddings themselves all documents that the error of the copy leaves possible. The results are the same. With place=auto, the copy is on the GPU if it fits into half its free memory, and the embeddings are on the host. The type of the copy of the embeddings that a search reads first"""
    place: Literal['auto', 'device', 'host', 'disk']
    """Where a rank keeps the embeddings of documents. `auto`: on the GPU if they fit into half its free memory, else on the host. `disk`: in the files of stored vectors, which are memory-mapped"""
    token_pooling: float
    """Of a late-interaction model: a document keeps one in so many of its vectors, means of those that are alike (HierarchicalTokenPooling of sentence-transformers); its first vector stays as it is"""
    first_stage: int | None
    """Of a late-interaction model: only so many documents of each query are scored by all of their vectors, those that score best by vectors pooled as with token_pooling. Others are not found: first_stage_recall@k of evaluate is the fraction of the best k documents that are. With place=auto, only the pooled vectors may be on the GPU"""
    first_stage_pooling: float
    """the first stage has one in so many of the vectors"""

class EvaluateKeywords(TypedDict, total=False):
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    revision: str | None
    """a commit, tag or branch of the model's Hub repository"""
    kind: Any
    """of the model, also `module:Class` of a module of your own; default: what its files say"""
    pooling: Any
    """cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's"""
    similarity: Literal['cosine', 'dot', 'euclidean', 'manhattan'] | None
    """How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting. How a model compares the vectors of two texts, as sentence-transformers names it. `euclidean` and `manhattan` are distances, less than 0"""
    max_length: int | None
    """tokens; default: the model's"""
    document_prompt: str | None
    """default: the model's"""
    query_prompt: str | None
    """default: the model's"""
    adapter: str | PathLike[str] | None
    """an adapter in PEFT's format: directory or Hub id"""
    normalize: bool | None
    """L2-normalize vectors; default: the model's setting"""
    reranker: Any
    """A cross-encoder or late-interaction model that orders the first documents of each query again: options of RerankerConfig, or its path. Scores are its own"""
    rerank_depth: int
    """documents per query for the reranker"""
    hybrid_weights: list[float] | None
    """Weights of the dense, lexical and multi-vector scores of a model of three representations (BGE-M3) in their sum; default: the model's"""
    vectors_dir: str | PathLike[str] | None
    """store document vectors there; the next run does not encode them again"""
    subset: int | None
    """maximum number of queries or rows of each set"""
    index: IndexGroup
    output_dir: str | PathLike[str]
    """directory for the results"""
    chunk_tokens: int
    """per forward pass of a rank, including padding"""
    unshard: Literal['layer', 'model']
    """How much of sharded weights a rank gathers at a time to encode texts. `layer`: one layer, in every forward pass. `model`: all layers, once for each set of texts"""
    precision: Literal['auto', 'bf16', 'fp32']
    """The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    timeout: float
    """seconds that a rank waits for the others before all fail"""
    first_stage: list[str] | None
    """What finds them: [model], [bm25], or [bm25,model] for both, one after the other. Default: the model if there is one, else BM25. Sets with candidates of their own have no other first stage"""
    mteb: list[str]
    """names of tasks or benchmarks of mteb"""
    suite: Any
    """One or several of nanobeir, rteb, bright, mteb_en, mmteb_multi and vidore: the tasks of a benchmark of mteb whose data is public, and the mean that people quote"""
    function: Any
    """module:function, called with the encoder after the sets; its metrics are a set of the function's name"""
    metrics: list[str] | None
    """Of each set those that its kind has, the main one first. Default, also of a set with none: those of its kind"""
    truncate_dims: list[int]
    """also measure the first so many dimensions, as SET@256"""
    vectors: list[Any]
    """Also measure retrieval sets with compressed vectors: options of VectorFormat, or precisions, as [int8,binary]"""
    calibration: int
    """documents of a set whose vectors give the ranges of int8 and uint8"""
    backend: Literal['torch', 'onnx', 'onnx_fp16', 'onnx_int8', 'openvino']
    """torch, or a graph that the export of the model has, on the CPU: onnx, onnx_fp16, onnx_int8 or openvino. What computes the outputs of a model: torch, or a graph of its directory on the CPU, see `export.formats`"""
    save_runs: bool
    """write each retrieval set's ranking and judgements as TREC run and qrels files"""
    run_depth: int | None
    """documents per query in a run file; default: 1000, or more if a metric needs them"""

class MineKeywords(TypedDict, total=False):
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    revision: str | None
    """a commit, tag or branch of the model's Hub repository"""
    kind: Any
    """of the model, also `module:Class` of a module of your own; default: what its files say"""
    pooling: Any
    """cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's"""
    similarity: Literal['cosine', 'dot', 'euclidean', 'manhattan'] | None
    """How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting. How a model compares the vectors of two texts, as sentence-transformers names it. `euclidean` and `manhattan` are distances, less than 0"""
    max_length: int | None
    """tokens; default: the model's"""
    document_prompt: str | None
    """default: the model's"""
    query_prompt: str | None
    """default: the model's"""
    adapter: str | PathLike[str] | None
    """an adapter in PEFT's format: directory or Hub id"""
    normalize: bool | None
    """L2-normalize vectors; default: the model's setting"""
    cache_dir: str | PathLike[str] | None
    """as data.cache_dir"""
    instruction_format: str
    """as data.instruction_format"""
    index: IndexGroup
    chunk_tokens: int
    """per forward pass of a rank, including padding"""
    unshard: Literal['layer', 'model']
    """How much of sharded weights a rank gathers at a time to encode texts. `layer`: one layer, in every forward pass. `model`: all layers, once for each set of texts"""
    precision: Literal['auto', 'bf16', 'fp32'] | None
    """default: bf16 on GPUs, fp32 on CPUs. The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    timeout: float
    """seconds that a rank waits for the others before all fail"""
    teacher: str | PathLike[str] | None
    """Bi-encoder or cross-encoder whose scores are used instead of the model's. Those of a cross-encoder are raw, before any sigmoid"""
    teacher_revision: str | None
    """a commit, tag or branch of its Hub repository"""
    teacher_max_length: int | None
    """tokens, of a pair for a cross-encoder; default: the teacher's"""
    teacher_pair_template: Any
    """of a cross-encoder, as model.pair_template"""
    teacher_score_labels: list[int] | None
    """of a cross-encoder, as model.score_labels"""
    teacher_document_windows: bool
    """A cross-encoder reads a document that is too long in overlapping windows, of which the best counts"""
    min_score: float | None
    """Of a negative that is mined, or a positive that is kept; the teacher's score if there is one"""
    exclude_same: str | None
    """A column of the corpus, such as pdf of rendered pages: documents with the value of a positive are no negatives"""
    query_batch_size: int
    """rows that are searched and written together; an interrupted run resumes after them"""
    seed: int
    """of random choices"""
    negatives: int
    """Maximum per row, including those that it keeps. 0 adds none: the rows' own are written with their scores"""
    rank_min: int
    """number of the best qualifying candidates to skip"""
    rank_max: int
    """number of candidates per query"""
    relative_margin: float | None
    """A negative scores at most (1 - this) times the positive: the 95 % rule. With a cross-encoder as teacher, its probability is at most so much of the positive's, both after a sigmoid"""
    absolute_margin: float | None
    """a negative scores at most the positive's score minus this"""
    max_score: float | None
    """of a negative; the teacher's score if there is one"""
    margin_reference: Literal['lowest', 'highest']
    """The positive whose score margins refer to, if a query has several, in one row or in many"""
    sampling: Literal['top', 'random']
    """Which of the qualifying candidates become negatives: the best, or a random sample"""
    keep_existing_negatives: bool
    """keep the rows' negatives before the new ones, except for positives"""
    scores: bool
    """write pos_scores and neg_scores, the teacher's if there is one"""

class FilterKeywords(TypedDict, total=False):
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    revision: str | None
    """a commit, tag or branch of the model's Hub repository"""
    kind: Any
    """of the model, also `module:Class` of a module of your own; default: what its files say"""
    pooling: Any
    """cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's"""
    similarity: Literal['cosine', 'dot', 'euclidean', 'manhattan'] | None
    """How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting. How a model compares the vectors of two texts, as sentence-transformers names it. `euclidean` and `manhattan` are distances, less than 0"""
    max_length: int | None
    """tokens; default: the model's"""
    document_prompt: str | None
    """default: the model's"""
    query_prompt: str | None
    """default: the model's"""
    adapter: str | PathLike[str] | None
    """an adapter in PEFT's format: directory or Hub id"""
    normalize: bool | None
    """L2-normalize vectors; default: the model's setting"""
    cache_dir: str | PathLike[str] | None
    """as data.cache_dir"""
    instruction_format: str
    """as data.instruction_format"""
    index: IndexGroup
    chunk_tokens: int
    """per forward pass of a rank, including padding"""
    unshard: Literal['layer', 'model']
    """How much of sharded weights a rank gathers at a time to encode texts. `layer`: one layer, in every forward pass. `model`: all layers, once for each set of texts"""
    precision: Literal['auto', 'bf16', 'fp32'] | None
    """default: bf16 on GPUs, fp32 on CPUs. The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    timeout: float
    """seconds that a rank waits for the others before all fail"""
    teacher: str | PathLike[str] | None
    """Bi-encoder or cross-encoder whose scores are used instead of the model's. Those of a cross-encoder are raw, before any sigmoid"""
    teacher_revision: str | None
    """a commit, tag or branch of its Hub repository"""
    teacher_max_length: int | None
    """tokens, of a pair for a cross-encoder; default: the teacher's"""
    teacher_pair_template: Any
    """of a cross-encoder, as model.pair_template"""
    teacher_score_labels: list[int] | None
    """of a cross-encoder, as model.score_labels"""
    teacher_document_windows: bool
    """A cross-encoder reads a document that is too long in overlapping windows, of which the best counts"""
    min_score: float | None
    """Of a negative that is mined, or a positive that is kept; the teacher's score if there is one"""
    exclude_same: str | None
    """A column of the corpus, such as pdf of rendered pages: documents with the value of a positive are no negatives"""
    query_batch_size: int
    """rows that are searched and written together; an interrupted run resumes after them"""
    seed: int
    """of random choices"""
    keep_rank: int | None
    """A positive is kept if at most keep_rank - 1 documents score higher, other positives of its query and documents that equal one not counted. KaLM-Embedding-V2: 50; E5 and nomic: 2, with pool=1000000. Null: any rank"""
    pool: int | None
    """Documents that each positive is ranked among: those of its part of a random partition into parts of about this size. Null: all documents"""
    annotate: bool
    """Write every row with the columns `rank` and `score`, which have a number for each positive, and reject none: `where` of a source, such as 'rank <= 2', then chooses rows each time they are read"""

class SplitKeywords(TypedDict, total=False):
    cache_dir: str | PathLike[str] | None
    """as data.cache_dir"""
    on_error: Literal['stop', 'skip']
    """for a row that cannot be used: stop with file and line, or skip and count it. How rows that cannot be used are handled"""
    seed: int
    """of random choices"""
    dev: int
    """queries to hold out, with all rows that share a query or a positive with them"""
    corpus: Literal['held_out', 'all']
    """all: search among the documents of training rows as well. The documents of the held-out set: those of its rows that no training row contains, or those of all rows. `all` has those of a corpus to whose documents the rows refer by id as well"""

class SearchKeywords(TypedDict, total=False):
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    revision: str | None
    """a commit, tag or branch of the model's Hub repository"""
    kind: Any
    """of the model, also `module:Class` of a module of your own; default: what its files say"""
    pooling: Any
    """cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's"""
    similarity: Literal['cosine', 'dot', 'euclidean', 'manhattan'] | None
    """How vectors are compared: cosine, dot, euclidean or manhattan; default: the model's setting. How a model compares the vectors of two texts, as sentence-transformers names it. `euclidean` and `manhattan` are distances, less than 0"""
    reranker: Any
    """A cross-encoder or late-interaction model that orders the first documents of each query again: options of RerankerConfig, or its path. Scores are its own"""
    rerank_depth: int
    """documents per query for the reranker"""
    hybrid_weights: list[float] | None
    """Weights of the dense, lexical and multi-vector scores of a model of three representations (BGE-M3) in their sum; default: the model's"""
    vectors_dir: str | PathLike[str] | None
    """store document vectors there; the next run does not encode them again"""
    index: IndexGroup
    chunk_tokens: int
    """per forward pass of a rank, including padding"""
    precision: Literal['auto', 'bf16', 'fp32']
    """The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    query: str | None
    """default: queries are read from the keyboard, or line by line from a pipe"""
    image: str | PathLike[str] | None
    """a file with a picture to search with, for models that read pictures; before the query"""
    top_k: int
    """results per query"""
    vectors: Any
    """Search compressed vectors: int8, uint8, binary, or options of VectorFormat as in evaluation.vectors, such as {documents: binary, rescore: {times: 4}}. The printed scores are those of the float vectors"""

class QueriesGroup(TypedDict, total=False):
    per_document: int
    """queries of a document; of a long one, for several windows"""
    kinds: Any
    """Kinds and their shares, of question, keywords, sentence, title, cross_lingual, multi_hop, instruction, and templates of your own in `prompts`: one name, or a mapping. Default: {question: 2, keywords: 1, sentence: 1}"""
    languages: list[str]
    """of cross_lingual, as ISO 639-1 codes: [de,fr]"""
    examples: Any
    """Training rows of your own: list of TrainSource, or of paths; or one path. Prompts show some as examples"""
    num_examples: int
    """in each prompt, if there are any"""
    negatives: int
    """hard negatives of each query that the language model writes"""

class WindowGroup(TypedDict, total=False):
    words: int
    """of a window; two characters of Chinese or Japanese are a word"""
    overlap: int
    """words that a window has in common with the one before it"""
    positive: Literal['document', 'window']
    """of a row: the document, or the window that its query is for. What the positive of a row is: the whole document, or the window that the query was written for"""

class PriceGroup(TypedDict, total=False):
    input: float
    """for a million tokens that the model reads"""
    output: float
    """for a million tokens that it writes"""

class WriterGroup(TypedDict, total=False):
    model: str | PathLike[str]
    """model directory or Hub id; of verify a directory"""
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    revision: str | None
    """a commit, tag or branch of the model's Hub repository"""
    precision: Literal['auto', 'bf16', 'fp32'] | None
    """default: bf16 on GPUs, fp32 on CPUs. The type of the forward and backward pass. Master weights, gradient reduction and the loss are always fp32. `auto`: bf16 where all GPUs or CPUs have instructions for it, otherwise fp32"""
    backend: Literal['local', 'api']
    """Where the language model runs. `local`: a causal language model of transformers, on the ranks of this command. `api`: a server that speaks OpenAI's protocol: vLLM, llama.cpp, TGI, Ollama, or a hosted one"""
    url: str | None
    """Of api: the address, such as http://localhost:8000/v1. Documents go there and nowhere else"""
    key_env: str | None
    """Of api: the NAME of the environment variable with the key, never the key itself; default: there is no key"""
    concurrency: int
    """Of api: requests in flight of all ranks together. Of local: texts that a rank writes at a time"""
    requests_per_minute: int | None
    """Of api, of all ranks together; null: no limit"""
    tokens_per_minute: int | None
    """read, and the most that may be written"""
    timeout: float
    """of api: seconds for one answer"""
    retries: int
    """of api: attempts after the first one of a request"""
    temperature: float
    """0 takes the most probable token each time"""
    max_new_tokens: int
    """of one answer"""
    price: PriceGroup

class JudgeGroup(TypedDict, total=False):
    min_grade: int | None
    """Queries with a lower grade are thrown away: 4 asks for documents that answer the query. Null: no judge"""
    writer: WriterGroup
    """the judge; without a model, the writer of the queries"""

class RoundTripGroup(TypedDict, total=False):
    model: str | PathLike[str]
    """model directory or Hub id; without one, queries are not searched for"""
    revision: str | None
    """a commit, tag or branch of its Hub repository"""
    keep_rank: int
    """A document is found if at most keep_rank - 1 other documents of `corpus` score higher"""

class ChecksGroup(TypedDict, total=False):
    max_copied_words: int | None
    """Most words in a row that a query has in common with its document; two characters of Chinese or Japanese are a word"""
    near_duplicate: float | None
    """Smallest Jaccard similarity of the words and pairs of words of two queries, of which the later one is thrown away. Null: only queries that are equal but for case and punctuation"""
    languages: bool
    """whether queries have to be in the language asked for, else in that of their document"""
    judge: JudgeGroup
    round_trip: RoundTripGroup

class SynthesizeKeywords(TypedDict, total=False):
    timeout: float
    """seconds that a rank waits for the others before all fail"""
    on_error: Literal['stop', 'skip']
    """for a row that cannot be used: stop with file and line, or skip and count it. How rows that cannot be used are handled"""
    seed: int
    """of random choices"""
    queries: QueriesGroup
    window: WindowGroup
    checks: ChecksGroup
    prompts: str | PathLike[str] | None
    """a folder of templates NAME.jinja, which replace those of the same name; other names are kinds of your own"""
    paraphrase: float
    """share of queries that are asked for once more in other words"""
    max_documents: int | None
    """the first ones"""
    max_requests: int | None
    """Limits of all requests of output_dir, also of runs that were interrupted or had other options. Null: no limit"""
    max_tokens: int | None
    """of what is read, and the most that may be written"""

class ExportKeywords(TypedDict, total=False):
    model: str | PathLike[str]
    """model directory or Hub id; of verify a directory"""
    kind: Any
    """of the model, also `module:Class` of a module of your own; default: what its files say"""
    pooling: Any
    """cls, mean, last, max, weighted_mean, or module:Class for your own; default: the model's"""
    trust_remote_code: Any
    """Execute Python code of the models that are named beside it: only for authors you trust"""
    base: str | PathLike[str] | None
    """The model that the adapters, or the models of task_arithmetic and ties, were trained from, as ID@REVISION; default of adapters: the model that they name"""
    subset: int | None
    """maximum number of queries or rows of each set"""
    push_to_hub: str | None
    """Hub id to upload to"""
    private: bool
    """whether a repository that is created is private"""
    adapters: Any
    """Instead of run: the directory has one base model and the LoRA adapters of several runs on it, by name of the task, {retrieval: runs/a, clustering: runs/b}. Options that default to the recipe's take those of the first run"""
    page_library: Literal['transformers', 'colpali_engine'] | None
    """Instead of run, `model` is a late-interaction model over pages, which is written for this library; vectors of the same weights change, and the command says by how much. The library whose classes a late-interaction model over pages is for. They put other texts around queries and pages, and transformers counts the positions of a page's tokens as those of a text, so that vectors of the same weights differ"""
    weights_of: Literal['trained', 'ema'] | None
    """default: the moving average if the run has one (optim.ema). Which weights of a checkpoint are read: those that were trained, or their moving average (`optim.ema`)"""
    formats: list[str] | None
    """default: the recipe's export.formats"""
    dtype: Literal['source', 'fp32', 'bf16', 'fp16'] | None
    """default: the recipe's export.dtype. The type of exported weights; `source` is the type of the weights that the run started from"""
    truncate_dim: int | None
    """vectors have only the first so many dimensions; default: the recipe's"""
    rope_theta: float | None
    """base of the rotary positions; default: the recipe's export.rope_theta"""
    max_file_size: str | None
    """default: the recipe's export.max_file_size"""
    onnx_min_agreement: float | None
    """default: the recipe's export.onnx_min_agreement"""
    check: bool | None
    """reopen and compare; default: the recipe's export.check"""
    max_metric_loss: float
    """Largest decrease of the main metric of a set, from the graph of onnx to a smaller one: more fails the export"""
