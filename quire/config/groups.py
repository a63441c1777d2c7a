"""The settings, in groups of frozen dataclasses. A field's help text is its documentation everywhere.

CLI flags and the reference page are generated from these (args.py); `None` means "decided at start from the
model and the machine" (resolve.py), and the decision is logged with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote

from quire.types.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
MoeBackend = Literal["auto", "native", "triton", "torch"]
Activations = Literal["auto", "float32", "int16", "int8"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
SchedulingPolicy = Literal["fcfs", "priority"]
DeviceName = Literal["auto", "cpu", "cuda"]
LoRADType = Literal["auto", "float32", "float16"]
KVCacheDType = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]
PerformanceMode = Literal["balanced", "interactivity", "throughput"]
MetricsNames = Literal["quire", "vllm"]
RunnerName = Literal["auto", "generate", "pooling"]
Conversion = Literal["auto", "none", "embed", "classify"]
LogFormat = Literal["text", "json"]
ParallelName = Literal["manual", "auto"]
ExecutorName = Literal["auto", "inproc", "multiproc", "hosts", "ray"]

DEFAULT_MODEL = "smollm2"


def setting(
    default: Any, help: str, *, unit: str | None = None, positional: bool = False, short: str | None = None
) -> Any:
    """A dataclass field whose help text is kept with it; unit="bytes" accepts values like 2GiB on the CLI.

    `short` is a second flag.
    """
    return field(default=default, metadata={"help": help, "unit": unit, "positional": positional, "short": short})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model to load and how."""

    model: str = setting(
        DEFAULT_MODEL,
        "A Hugging Face folder, a .gguf file, a hub id, or a built-in alias (smollm2; minilm, which embeds).",
        positional=True,
    )
    runner: RunnerName = setting(
        "auto",
        "What the model is for: generate (text) or pooling (vectors, classes, scores). auto: pooling for encoders,"
        " classifiers, reward models and folders of sentence-transformers, which have a modules.json.",
    )
    convert: Conversion = setting(
        "auto",
        "embed makes an embedder of a model that generates or classifies: what is on top is not read. With runner"
        " generate it stays a model that generates, and embeds beside that by its last hidden states. classify makes"
        " a classifier of one that generates: a reranker, whose classes are the tokens that classifier_from_token in"
        " its config names (no and yes if there is none). auto: as the architecture says; none: as it is.",
    )
    tokenizer: str | None = setting(None, "Folder or .gguf file to take the tokenizer from, if not the model's own.")
    skip_tokenizer_init: bool = setting(
        False,
        "Load no tokenizer: prompts are token ids, and outputs have token ids and no text. What"
        " generation_config.json names as end of sequence still ends an output.",
    )
    enable_prompt_embeds: bool = setting(
        False, "Take prompts of embeddings (`prompt_embeds`) in place of text or token ids."
    )
    revision: str | None = setting(None, "Branch, tag or commit of a hub model.")
    chat_template: str | None = setting(None, "A Jinja file or a template's text, instead of the model's own.")
    system_date: str | None = setting(
        None,
        "The date that chat templates see, as YYYY-MM-DD, so that prompts and their cached prefixes are the same on"
        " every day. Unset: QUIRE_SYSTEM_DATE of the environment, else today.",
    )
    dtype: DType = setting(
        "auto",
        "Type of activations, and of weights unless --quantization says otherwise. auto: float32 activations on a"
        " CPU; on a GPU bfloat16, or float16 for GGUF files of Llama and Mistral models, whose values it holds;"
        " and weights as --quantization auto has them.",
    )
    quantization: str = setting(
        "auto",
        "How weights are kept: stored (as in the checkpoint: packed on a CPU, and on a GPU where kernels multiply"
        " by that), int8, int4, fp8 or mxfp4 (float weights, experts' too, are quantized while loading), unpacked"
        " (as in a quantized checkpoint, unpacked for each matmul: slow but small), or none (in"
        " --dtype). auto: stored on a CPU where there are kernels and --dtype is not set, and on a GPU for quantized"
        " checkpoints other than GGUF files; else none.",
    )
    activations: Activations = setting(
        "auto",
        "What activations are rounded to for matmuls with quantized weights on a CPU. int16 has a scale for each 32"
        " of them and is off by 1 / 65534 of the largest at most; processors with AVX512-VNNI multiply it faster."
        " int8, off by 1 / 254, is faster still where many tokens are computed at once; the LM head and"
        " o_proj keep int16."
        " float32 is not rounded. auto: int16 on these processors, and int8 for checkpoints that are made for it.",
    )
    moe_backend: MoeBackend = setting(
        "auto",
        "Whose kernels multiply experts: native (a CPU, with any --quantization but none), triton (an NVIDIA"
        " GPU), or torch (plain, slow, with --quantization none). One that cannot serve is refused with the reason."
        " auto: the one that can.",
    )
    logits_processors: tuple[str, ...] = setting(
        (),
        "Classes that edit logits, as module:Class; each must extend quire.LogitsProcessor. Requests that ask for one"
        " by their sampling parameters run eagerly.",
    )
    max_model_len: int | None = setting(
        None,
        "Longest prompt plus output, in tokens. Unset: what the model was trained for, if its KV cache fits. RoPE of"
        " type dynamic or longrope rotates every sequence as one of this length, however short it is.",
    )
    load_format: LoadFormat = setting("auto", "How to read weights; dummy makes seeded random ones from the config.")
    seed: int = setting(0, "Seed of dummy weights. As an argument of LLM also of requests that bring none.")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = setting(16, "Tokens per KV block.")
    kv_cache_memory: int | None = setting(
        None,
        "Bytes for KV blocks, e.g. 2GiB. Unset: on a GPU what weights and workspace leave; on a CPU 1GiB or one"
        " request of full length, if that is more, but at most a tenth of the machine's memory, a quarter of what is"
        " available, and what max_num_seqs requests of full length can fill.",
        unit="bytes",
    )
    kv_cache_dtype: KVCacheDType = setting(
        "auto",
        "Type of keys and values. auto: fp8 if the checkpoint is made for it, else float16 with native CPU kernels,"
        " that of the activations elsewhere. float32, bfloat16 and int8 (a CPU), or fp8 (E4M3, with the scales that"
        " a checkpoint has for it), trade accuracy for the number of tokens held.",
    )
    state_cache_size: int | None = setting(
        None,
        "Of the memory for KV blocks, bytes for states of recurrent layers that running requests do not hold, which"
        " are checkpoints that cached prefixes go on from. Unset: a quarter. Models without such layers have none.",
        unit="bytes",
    )
    gpu_memory_utilization: float = setting(
        0.9, "Part of a GPU's memory that weights, KV blocks and everything else may take together."
    )
    enable_prefix_caching: bool = setting(True, "Reuse KV blocks of equal prompt prefixes.")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs in a step."""

    max_num_seqs: int | None = setting(None, "Most requests running at once. Unset: 64 on a CPU.")
    max_num_batched_tokens: int | None = setting(None, "Most tokens computed in one step. Unset: 512 on a CPU.")
    long_prefill_token_threshold: int | None = setting(
        None,
        "Most tokens of a step that one prompt may take while other requests want to run, so that short ones"
        " keep flowing. Unset: half of max_num_batched_tokens.",
    )
    policy: SchedulingPolicy = setting(
        "fcfs",
        "Order of service: first come first served, or by priority. Of equal ones, a prompt with few tokens left"
        " passes a longer one, unless that has waited long or step_time_target is 0.",
    )
    performance_mode: PerformanceMode = setting(
        "balanced",
        "What unset values are chosen for: interactivity takes shorter steps, so that tokens come evenly while"
        " others' prompts are computed; throughput takes steps of any time, larger ones, and more requests at once.",
    )
    step_time_target: float | None = setting(
        None,
        "Seconds that a step with prompt tokens may take while it delays other requests; longer prompts are computed"
        " in several steps. 0: no such bound. Unset: 0.14 on a CPU, 0.023 on a GPU, 0.35 times that for"
        " interactivity, 0 for throughput.",
    )
    steps_in_flight: int | None = setting(
        None,
        "Steps planned ahead of the first one's result. Unset: 1 on a CPU, 2 on a GPU, with pipeline stages one more"
        " than there are of them.",
    )


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where to run."""

    device: DeviceName = setting("auto", "The device to run on.")
    num_threads: int | None = setting(None, "CPU threads for tensor work. Unset: one per physical core.")
    reserved_memory: int = setting(
        0,
        "Bytes of free memory that the engine leaves to others, where it runs on a CPU; `quire serve` adds its spare"
        " process to it.",
        unit="bytes",
    )
    standby: bool = setting(
        False,
        "`quire serve` keeps a second engine process with the model loaded, which takes over at once when the engine"
        " dies. Its weights and workspace are in the memory ledger. For engines on a CPU.",
    )
    attention_backend: str | None = setting(None, "Attention implementation. Unset: the best one for the device.")
    deterministic: bool = setting(
        False,
        "Give a request the same tokens and log-probabilities, to the bit, whatever runs beside it and however its"
        " prompt is cut, cached or resumed. A CPU always does; a GPU is a little slower with it.",
    )


@dataclass(frozen=True, kw_only=True)
class StructuredConfig:
    """Output that obeys a schema, a regular expression or a grammar."""

    structured_outputs_backend: str = setting("llguidance", "What compiles grammars: llguidance, or xgrammar.")
    structured_outputs_compile_timeout: float = setting(
        10.0, "Seconds that a grammar may take to compile; past it its request is refused."
    )
    structured_outputs_max_bytes: int = setting(1 << 20, "Largest schema or grammar.", unit="bytes")
    structured_outputs_max_depth: int = setting(64, "Deepest nesting of a schema.")
    structured_outputs_cache_size: int = setting(128, "Compiled grammars that are kept for the next request.")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA adapters on the model."""

    enable_lora: bool = setting(False, "Serve LoRA adapters: requests may name one that is added to the model.")
    max_loras: int = setting(8, "Adapters that are on the device at once, each with its own slot.")
    max_lora_rank: int = setting(16, "Highest rank of an adapter; slots take memory for it.")
    lora_slots: str | None = setting(
        None,
        "Slots by rank, such as 16x6,64x2: six for ranks up to 16 and two for ranks up to 64, in place of max_loras"
        " slots of max_lora_rank. Unset: these.",
    )
    lora_dtype: LoRADType = setting(
        "auto",
        "Type of adapters in their slots. auto: float16 on a CPU, which can have float32 too; that of the activations"
        " elsewhere.",
    )
    lora_experts: bool = setting(
        False, "Adapters may be on experts too; a slot then takes memory for a pair of matrices of each expert."
    )
    max_cpu_loras: int | None = setting(
        None, "Adapters that are kept in host memory, so that a slot is filled at once. Unset, or fewer: one a slot."
    )

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(rank, slots of it), the lowest rank first; ConfigError if lora_slots is not that."""
        if self.lora_slots is None:
            return ((self.max_lora_rank, self.max_loras),)
        found: dict[int, int] = {}
        for part in self.lora_slots.split(","):
            rank, _, count = part.strip().partition("x")
            if not (rank.isdecimal() and count.isdecimal() and int(rank) and int(count)):
                raise ConfigError(f"lora_slots has {part!r}; write ranks and numbers of slots, such as 16x6,64x2")
            found[int(rank)] = found.get(int(rank), 0) + int(count)
        return tuple(sorted(found.items()))

    @property
    def num_in_host_memory(self) -> int:
        """Adapters that are kept there: those in slots, and what max_cpu_loras has beyond."""
        return max(self.max_cpu_loras or 1, sum(count for _, count in self.buckets))


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """What an engine writes down about its own steps."""

    trace: str | None = setting(
        None,
        "A file for a trace of all that enters the engine and of every step, for `quire replay` and `quire plan`. It"
        " holds the token ids of prompts and outputs, and is readable by its owner only. Each of several replicas has"
        " its own, FILE-replica0 and so on; with --models, each model has FILE-NAME. Unset: none.",
    )
    trace_redact: bool = setting(
        False, "Keep lengths and salted prefix hashes in the trace, and no token ids: good for `quire plan` only."
    )
    trace_size: int = setting(
        256 << 20, "Most bytes of a trace; its oldest quarter goes when it is full.", unit="bytes"
    )
    dump_dir: str | None = setting(
        None,
        "A folder where the engine keeps its last 1,000 steps while it runs (counts and request ids, no tokens); the"
        " file stays if the engine dies, for `quire explain`. Unset: `quire serve` uses the folder dumps of Quire's"
        " cache.",
    )

    def named(self, name: str) -> TracingConfig:
        """The same for one engine of several, which must not rotate the others' files away."""
        return self if self.trace is None else replace(self, trace=f"{self.trace}-{quote(name, safe='')}")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Who guesses draft tokens, and how many at most. Fields are named as in vLLM; not every method reads each."""

    method: str
    num_speculative_tokens: int | None = None  # most drafts of a request in a step; None: the method's own number
    model: str | None = None  # of methods with weights: where they are
    revision: str | None = None  # of that model
    quantization: str | None = None  # of that model; None: as the target's
    draft_tensor_parallel_size: int | None = None  # of that model; None: as the target's
    prompt_lookup_max: int | None = None  # ngram: the longest n-gram that is looked up
    prompt_lookup_min: int | None = None  # ngram: the shortest one
    suffix_decoding_max_tree_depth: int = 24  # suffix: the longest context that is compared
    suffix_decoding_max_cached_requests: int = 10000  # suffix: past outputs that are kept
    suffix_decoding_max_spec_factor: float = 1.0  # suffix: most drafts, as a multiple of the matched context
    suffix_decoding_min_token_prob: float = 0.1  # suffix: the least share of past continuations that a draft had


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Draft tokens that steps verify: more tokens a step, and never other ones."""

    speculative_config: SpeculativeConfig | None = setting(
        None,
        'Who guesses draft tokens, as JSON: {"method": "ngram", "num_speculative_tokens": 4}. Methods: ngram, suffix,'
        " prediction, draft_model, eagle, eagle3, medusa, mtp."
        " Unset: the `prediction` field of requests and, on the CPU, what grammars force; method none: nothing.",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many processes share the work."""

    parallel: ParallelName = setting(
        "manual",
        "auto chooses the sizes below by the memory that the model needs and the GPUs of this machine: the fewest"
        " ranks that hold it, then replicas; `quire fit --parallel auto` says which, and why. manual: as set.",
    )
    tensor_parallel_size: int = setting(
        1, "Processes that share every layer: each holds a slice of the weights and of the KV heads.", short="-tp"
    )
    pipeline_parallel_size: int = setting(
        1,
        "Stages that the layers are cut into, each a process of its own (times -tp); each has a batch in flight.",
        short="-pp",
    )
    data_parallel_size: int = setting(
        1,
        "Engines of `quire serve`, each with all of the model; a request goes to the one that would be done first, by"
        " load and cached prefixes.",
        short="-dp",
    )
    elastic: bool = setting(
        False,
        "Let `quire ctl replicas` add a replica to a server of one engine without a restart; with -dp 2 or more it"
        " may anyway.",
    )
    decode_context_parallel_size: int = setting(
        1,
        "Tensor parallel ranks that hold the same KV head and split its tokens: each keeps a part of every KV block,"
        " so that as many times more blocks fit. Divides the number of ranks that hold a KV head.",
        short="-dcp",
    )
    sequence_parallel_threshold: int | None = setting(
        None,
        "With -tp: tokens of a step from which on it is sequence parallel: ranks hold its residual stream by rows, so"
        " that each adds and normalizes its share of them. Changes no bit. 0: no step is. Unset: 1024.",
    )
    enable_expert_parallel: bool = setting(
        False,
        "Give each tensor parallel rank some of the experts whole, instead of a slice of every one. With -dp and"
        " without -tp (on a CPU): give each replica some of the experts, for the tokens of all.",
    )
    all2all_backend: Literal["all_reduce", "allgather_reducescatter", "all_to_all"] = setting(
        "all_reduce",
        "With enable_expert_parallel: how experts' results come together. all_reduce: ranks add up what each has of"
        " all tokens. allgather_reducescatter: each adds up its share of the tokens and gets the sums of the others,"
        " which moves less between many ranks. all_to_all (on a CPU): a token goes to the ranks of its experts, and"
        " results come back, to be added in the order of one rank.",
    )
    enable_eplb: bool = setting(
        False,
        "With enable_expert_parallel: move experts between ranks by the load that they have had, while requests run.",
    )
    eplb_interval: int = setting(1000, "Steps between two times that the experts of a layer may be moved (EPLB).")
    expert_load_stats: bool = setting(
        False,
        "Count the tokens that come to each expert of each layer, for the metric expert_tokens_total and `quire ctl"
        " expert-load`.",
    )
    num_redundant_experts: int = setting(
        0, "With enable_expert_parallel: copies of experts in each layer beyond one of each, shared by the ranks."
    )
    tp_exact: bool = setting(
        False,
        "Sum what tensor parallel ranks compute so that sizes of 1, 2, 4 and 8 give equal bits. Costs some speed; on"
        " a CPU. Models with experts need enable_expert_parallel, and another all2all_backend than all_reduce.",
    )
    executor: ExecutorName = setting(
        "auto",
        "Where steps run: inproc (the engine's process), multiproc (processes of this host), hosts (workers that"
        " join with `quire worker`) or ray (workers that Ray places). auto: multiproc for several ranks.",
    )
    hosts_address: str | None = setting(
        None,
        "With executor hosts: the HOST:PORT of this machine where workers join; port 0 takes a free one. With -dp,"
        " workers of the next replicas join at the ports that follow.",
    )
    hosts_secret_file: str | None = setting(
        None,
        "File with the secret that the engine and its workers share, 16 bytes or more. Unset: the environment"
        " variable QUIRE_HOSTS_SECRET.",
    )
    join_timeout: float = setting(300.0, "Seconds to wait for workers of other hosts to join.", unit="seconds")

    @property
    def num_ranks(self) -> int:
        """Processes of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether each replica holds some of the experts for all of them."""
        return self.enable_expert_parallel and self.data_parallel_size > 1 and self.tensor_parallel_size == 1

    @property
    def counts_experts(self) -> bool:
        return self.expert_load_stats or self.enable_eplb

    @property
    def group_settings(self) -> dict[str, Any]:
        """What a ParallelGroup has of these settings."""
        threshold = 1024 if self.sequence_parallel_threshold is None else self.sequence_parallel_threshold
        return {
            "exact": self.tp_exact,
            "splits_experts": self.enable_expert_parallel,
            "expert_exchange": self.all2all_backend,
            "counts_experts": self.counts_experts,
            "num_redundant_experts": self.num_redundant_experts,
            "row_threshold": threshold if self.tensor_parallel_size > 1 else 0,
        }

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of tensor parallel, of pipelines and of groups that split contexts."""
        return self.tensor_parallel_size, self.pipeline_parallel_size, self.decode_context_parallel_size

    @property
    def answering_rank(self) -> int:
        """The first of the last stage, which samples."""
        return self.num_ranks - self.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP server of `quire serve`. The engine knows none of these."""

    host: str = setting("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in.")
    port: int = setting(8000, "TCP port; 0 takes a free one and says which.")
    uds: str | None = setting(None, "Listen on this Unix socket instead of host and port.")
    api_server_count: int = setting(1, "API processes that share the address, in front of the same engine.")
    models: str | None = setting(
        None,
        "A TOML file with several models for this server, of which a request's `model` picks one; see"
        " docs/guides/several-models.md. Engine flags are then defaults for all of them. Unset: one model.",
    )
    admin: str | None = setting(
        None,
        "Where the admin surface listens, for `quire ctl`: unix:PATH (its owner may connect) or HOST:PORT (needs an"
        " admin key). Unset: there is none.",
    )
    admin_key_file: str | None = setting(
        None, "File with one admin key per line; API keys do not open the admin surface. Also: QUIRE_ADMIN_KEY."
    )
    served_model_name: tuple[str, ...] = setting(
        (), "The model's name for clients; the first is in the answers. Unset: as given with --model."
    )
    api_key: tuple[str, ...] = setting(
        (), "A key that clients must send as `Authorization: Bearer KEY`. Unset: no key is asked for."
    )
    api_key_file: str | None = setting(None, "A file with one API key per line, besides --api-key.")
    protect_health: bool = setting(False, "Ask for the API key on /health, /ready, /ping, /load and /metrics too.")
    allowed_origins: tuple[str, ...] = setting(
        (), "A web origin whose pages may call this server (CORS), or * for any. Unset: none."
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "A name by which clients reach this server, beside addresses, localhost and names without a dot; * for any."
        " Asked of the Host header where no API key is set.",
    )
    ui: bool = setting(True, "Serve the chat page at / and the console at /console.")
    console_show_text: bool = setting(False, "Show the prompts of requests, and their log lines, in the console.")
    keep_alive: bool = setting(
        False,
        "Let `keep_alive` of Ollama's requests put the idle engine to sleep; the next request of any API wakes it.",
    )
    ssl_certfile: str | None = setting(None, "TLS certificate chain (PEM); serves https.")
    ssl_keyfile: str | None = setting(None, "Private key of the TLS certificate, if not in the same file.")
    root_path: str = setting("", "Path prefix that a proxy in front takes off, such as /llm.")
    max_queue: int = setting(
        256, "Most completions waiting beyond those that run; past it a request is refused with status 503."
    )
    max_body_bytes: int = setting(16 << 20, "Largest request body.", unit="bytes")
    header_timeout: float = setting(
        30.0,
        "Seconds that a client gets to send a request's headers; in each such time after that, 500 bytes a second"
        " of the body have to come. Otherwise the connection is closed. 0: no limit.",
    )
    max_n: int = setting(64, "Most completions of one prompt (n) in a request.")
    max_logprobs: int = setting(20, "Most log-probabilities per token that a request may ask for; -1: no limit.")
    drain_timeout: float = setting(
        30.0, "Seconds that running requests get to finish after SIGTERM or the first Ctrl-C."
    )
    stall_timeout: float = setting(
        120.0,
        "Seconds without a finished step, while requests wait, after which /health fails and the engine is replaced.",
    )
    spare_engine: bool = setting(
        True,
        "Keep a process that has imported all that an engine needs, and no model, so that a server whose engine died"
        " is back sooner. It takes up to 300 MiB of the machine's memory.",
    )
    max_restarts: int = setting(
        3,
        "Restarts of a dying engine in a row before the server gives up and exits. An engine that gave tokens before"
        " it died does not count.",
    )
    tool_call_parser: str = setting(
        "auto", "How the model writes tool calls: a format's name, auto (as its chat template says) or none."
    )
    reasoning_parser: str = setting(
        "auto", "How the model writes its thinking: a format's name, auto (as its chat template says) or none."
    )
    allow_request_chat_template: bool = setting(False, "Accept a chat_template in requests.")
    max_stored_responses: int = setting(
        1000, "Most responses kept in memory for previous_response_id; the one used longest ago goes first."
    )
    max_stored_bytes: int = setting(64 << 20, "Most memory for stored responses.", unit="bytes")
    journal: str | None = setting(
        None,
        "A folder where background responses and requests with an Idempotency-Key are kept, so that they outlive the"
        " server: another one with this setting takes them over. Unset: none.",
    )
    journal_ttl: float = setting(3600.0, "Seconds that a response is kept in the journal.")
    tool_server: tuple[str, ...] = setting(
        (),
        "An MCP server whose tools the Responses API may call: LABEL=http://HOST:PORT/mcp or"
        " LABEL=stdio:COMMAND ARGS. Unset: none.",
    )
    tool_call_timeout: float = setting(60.0, "Seconds that a tool server gets to answer, for each call.")
    max_tool_turns: int = setting(
        16, "Most turns of one response that call tool servers; after them the model must answer without."
    )
    max_tool_result_bytes: int = setting(
        64 << 10,
        "Most of a tool server's result that the model reads; the rest is cut off.",
        unit="bytes",
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        'A LoRA adapter that requests may name as their model: NAME=FOLDER, or {"name": NAME, "path": FOLDER}.'
        " Needs --enable-lora. Unset: none.",
    )
    lora_root: str | None = setting(
        None,
        "Folder that adapters may be loaded from while the server runs, by POST /v1/load_lora_adapter or"
        " `quire ctl load-adapter`. Unset: none.",
    )
    log_requests: bool = setting(False, "Write prompts and parameters of requests to the log.")
    log_format: LogFormat = setting("text", "Form of log lines.")
    stats_interval: float = setting(
        10.0, "Seconds between two log lines that say how the server is doing, while it does anything; 0: none."
    )
    metrics_names: MetricsNames = setting(
        "quire", "Names of the metrics. vllm: under vLLM's names too, for dashboards that were made for it."
    )
    otlp_traces_endpoint: str | None = setting(
        None, "OpenTelemetry collector that gets a span per request, such as http://localhost:4318. Unset: none."
    )
