"""The worker: takes what the plan says (weights, KV blocks, rows) and runs steps through the runner."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from quire.attention.groups import GroupBackends
from quire.config.engine import EngineConfig
from quire.layers.adapters import AdapterTokens
from quire.layers.attention import CachedLayer
from quire.layers.quant.base import kept_weights
from quire.layers.rope.embedding import RotaryEmbedding
from quire.loader.digest import model_digest
from quire.loader.dummy import dummy_schemes, fill_dummy
from quire.loader.hub import find_model
from quire.loader.mapper import Progress, load_weights
from quire.loader.peft import AdapterLayers
from quire.loader.quantized.kv_cache import scale_caches
from quire.models.base import CausalLM, Model
from quire.models.registry import model_class
from quire.parallel.collectives import NullCollectives
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline
from quire.planning.drafting import make_proposer
from quire.planning.engine_plan import EnginePlan, adapter_sizes, plan_engine, with_measured_step
from quire.platform.allocator import return_free_memory
from quire.platform.base import HostCopy
from quire.runner.adapters import RowAdapters, make_room, slot_buffers
from quire.runner.containment import Containment
from quire.runner.eager import Eager, Padding
from quire.runner.experts import ExpertLoads, RoutedExpertsRecorder
from quire.runner.forward import StepProgram
from quire.runner.pooling import PooledHeads, Pooler
from quire.runner.prompt_embeds import PromptEmbedInputs
from quire.runner.prompt_logprobs import LogitsHead, PromptLogprobs
from quire.runner.request_rows import BlockTables, RequestRows
from quire.runner.runner import Runner, RunningStep
from quire.runner.sampling.logits_processors import load_processors
from quire.runner.sampling.registry import FEATURES, MakeFeature, sampling_features
from quire.runner.sampling.sampler import Sampler
from quire.runner.sampling.sharded import VocabShard
from quire.runner.stages import NoSampler, Stage, StageInputs
from quire.runner.ways import make_ways
from quire.types.errors import EngineDeadError
from quire.types.step import Returned, StepPlan
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase, ignore_phase
from quire.utils.units import format_bytes
from quire.worker.alone import forward_alone
from quire.worker.description import WorkerDescription
from quire.worker.rebalancing import ExpertBalancer, NoBalancer
from quire.worker.replacing import check_same_model, with_weights
from quire.worker.selfcheck import coarse_ladder, make_invariant

logger = get_logger(__name__)


class Worker:
    def __init__(
        self,
        config: EngineConfig,
        report: ReportPhase = ignore_phase,
        group: ParallelGroup | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """Takes all that the engine will need; `report` is called as each part of the work begins."""
        started = time.perf_counter()
        self._config = config
        self.adapters: dict[str, AdapterLayers] = {}
        """Those in host memory, by digest; they stay while weights go."""
        self._runner: Runner | None = None
        self._balancer = NoBalancer()
        self._host: HostCopy | None = None  # of the weights, while they stay the same
        self._is_moved = False
        report("plan")
        features = sampling_features(load_processors(config.model.logits_processors))
        plan = plan_engine(config, group=group, pipeline=pipeline)
        self.platform = plan.platform
        logger.info("settings: %s", "; ".join(plan.settings.explain()))
        for entry in plan.ledger.entries:
            logger.debug("memory: %s %s (%s)", entry.name, format_bytes(entry.num_bytes), entry.note)
        try:
            self._take(plan, config, features, started, report)
        except Exception as error:
            if plan.platform.is_out_of_memory(error):
                raise plan.ledger.ran_out(error) from error
            raise

    def _take(
        self,
        plan: EnginePlan,
        config: EngineConfig,
        features: Sequence[MakeFeature],
        started: float,
        report: ReportPhase,
    ) -> None:
        self._features = features
        planned = time.perf_counter()
        report("weights")
        model = load_model(plan, config, lambda done, total: report("weights", done / total))
        self.plan = plan = measure_workspace(plan.without_checkpoint(), config, model)
        loaded = time.perf_counter()
        logger.info("weights: %s", kept_weights(model))
        report("self-check")
        settings = plan.settings
        self._ladders = find_ladders(plan, model)
        checked = time.perf_counter()
        report("KV")
        ledger = plan.ledger
        logger.info(
            "KV cache: %s for %d tokens (%s)", format_bytes(ledger.kv_bytes), ledger.num_kv_tokens, ledger.kv_reason
        )
        self.model: Model | None = model
        self._build()
        self.description = WorkerDescription(
            architecture=plan.model_config["architectures"][0],
            vocab_size=plan.description.vocab_size,
            hidden_size=plan.description.hidden_size,
            settings=settings,
            ledger=ledger,
            step_times=self.platform.step_times,
            pooler=plan.pooler,
            is_bidirectional=model.is_bidirectional,
            routes=self.runner.routed_experts.can_record and plan.pipeline.size == 1,
            kernel_path=plan.kernel_path,
            step_sizes=self.runner.step_sizes,
            query_tile=plan.backend.query_tile,
        )
        logger.info(
            "%s ready in %.2f s (plan %.2f, weights %.2f, self-check %.2f, KV %.2f); context %d",
            plan.source.name,
            time.perf_counter() - started,
            planned - started,
            loaded - planned,
            checked - loaded,
            time.perf_counter() - checked,
            ledger.max_model_len,
        )

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "the worker sleeps"
        return self._runner

    def learn(self, returned: Sequence[Returned]) -> None:
        """What the last stage of a pipeline sampled, before the next step."""
        self.runner.stage.learn(returned)

    def execute(self, plan: StepPlan) -> RunningStep:
        self._balancer.before_step(plan.step_id)
        return self.runner.execute(plan)

    def sleep(self, level: int) -> str:
        """Give memory back; level 1 keeps the weights in host memory, which on the CPU is where they are."""
        times = _Times("asleep")
        if self._runner is not None:
            self._let_go()
        times.note("rows and graphs")
        if level == 1 and not self._is_moved:
            assert self.model is not None
            if self._host is None:
                model = self.model
                self._host = self.platform.host_copy(model.parameters(), model.buffers(), slot_buffers(model))
                times.note("host memory")
            self._host.move()
            self._is_moved = True
            times.note("weights")
        elif level == 2:
            self._forget_weights()
        self.platform.release_memory()
        times.note("memory")
        times.log()
        return ""

    def wake(self) -> str:
        times = _Times("awake")
        if self.model is None:
            self._load(self._config)
        elif self._is_moved:
            assert self._host is not None
            self._host.put_back()
            self._is_moved = False
        times.note("weights")
        self._build()
        times.note("rows")
        times.log()
        return ""

    def _forget_weights(self) -> None:
        self.model = self._host = None
        self._is_moved = False

    def check_weights(self, path: str) -> str:
        config = self._config.with_model(path)
        check_same_model(self.plan, config)
        return model_digest(find_model(config.model), config.model)

    def update_weights(self, path: str) -> str:
        """Load the weights of another folder in place of these; if they cannot be used, these stay."""
        before, config = self._config, self._config.with_model(path)
        check_same_model(self.plan, config)
        self._let_go()
        self._forget_weights()
        self.platform.release_memory()
        try:
            self._load(config)
        except Exception as error:
            logger.error("the weights of %s cannot be loaded: %s; the old ones are loaded again", path, error)
            try:
                self._load(before)
                self._build()
            except Exception as worse:
                raise EngineDeadError(f"neither the weights of {path} nor the old ones load: {worse}") from error
            raise
        self._config = config
        self._build()
        return model_digest(find_model(config.model), config.model)

    def _let_go(self) -> None:
        """Drop all that runs steps; adapters in host memory stay."""
        assert self.model is not None
        if self._runner is not None:
            self._runner.stage.empty_link()
        for layer in self.model.cached_layers():
            layer.unbind()
        self._runner = None

    def _load(self, config: EngineConfig) -> None:
        self.platform.start(config.device.num_threads)  # this is another thread than the one that runs steps
        self.model = load_model(with_weights(self.plan, config), config)
        self._ladders = find_ladders(self.plan, self.model)

    def _build(self) -> None:
        assert self.model is not None
        self._runner = build_runner(
            self.plan, self.model, self._config.cache.block_size, *self._ladders, self._features
        )
        self._runner.adapters.host = self.adapters
        parallel = self._config.parallel
        if parallel.enable_eplb:
            self._balancer = ExpertBalancer(self.model, self.plan.group, parallel.eplb_interval)

    def shutdown(self) -> None:
        self._runner = None
        self._forget_weights()


class _Times:
    """Logs how long the parts of a change took."""

    def __init__(self, name: str) -> None:
        self._name, self._begin, self._parts = name, time.perf_counter(), list[str]()

    def note(self, part: str) -> None:
        now = time.perf_counter()
        self._parts.append(f"{part} {now - self._begin:.2f} s")
        self._begin = now

    def log(self) -> None:
        logger.info("%s: %s", self._name, ", ".join(self._parts))


def find_ladders(plan: EnginePlan, model: Model) -> tuple[list[int], list[int]]:
    """Numbers of tokens, and of samples, that steps are padded to; sets the recipes of matmuls that need one."""
    settings = plan.settings
    if plan.platform.batch_invariant:
        return make_invariant(model, settings.max_num_batched_tokens, plan.sizes.max_num_samples)
    # The library loads a kernel when a shape first needs it, so few numbers of logits are asked for.
    tokens = coarse_ladder(settings.max_num_batched_tokens) if plan.deterministic else []
    return tokens, coarse_ladder(plan.sizes.max_num_samples)


def load_model(plan: EnginePlan, config: EngineConfig, progress: Progress | None = None) -> Model:
    """Build the model and fill every parameter."""
    with plan.platform.device:
        model = model_class(plan.model_config).from_config(plan.model_config, plan.context)
        make_room(model, adapter_sizes(config))
    if plan.checkpoint is None:
        schemes = dummy_schemes(model, plan.model_config)
        fill_dummy(model, config.model.seed, plan.platform.device, schemes=schemes)
    else:
        report = load_weights(model, plan.checkpoint, progress)
        scale_caches(model.attention_layers(), plan.checkpoint, plan.kv_dtype)
        if report.weight_only:
            kinds, dtype = ", ".join(report.weight_only), plan.settings.activations
            dtype = plan.settings.dtype if dtype == "auto" else dtype
            logger.info("the checkpoint asks for quantized activations, which stay %s for %s weights", dtype, kinds)
    for note in {module.note for module in model.modules() if isinstance(module, RotaryEmbedding)} - {None}:
        logger.warning("%s", note)
    if plan.draft is not None:
        model.drafter = plan.draft.load(model, plan.context, plan.platform.device)
    return_free_memory()  # of weights before they were packed, which no plan has
    return model.eval()


def build_runner(
    plan: EnginePlan,
    model: Model,
    block_size: int,
    token_ladder: list[int],
    sample_ladder: list[int],
    features: Sequence[MakeFeature] = FEATURES,
) -> Runner:
    """Allocate KV blocks and rows, and wire the collaborators of a step."""
    platform, ledger, settings = plan.platform, plan.ledger, plan.settings
    bind_caches(plan, model.cached_layers(), block_size)
    rows = RequestRows(settings.max_num_seqs, ledger.max_model_len, platform.device)
    tables = BlockTables(
        len(ledger.layout.groups), settings.max_num_seqs, ledger.max_model_len, block_size, platform.device
    )
    max_samples, pipeline = plan.sizes.max_num_samples, plan.pipeline
    sampler: Sampler = NoSampler()
    if pipeline.is_last:
        vocab_size, group, shard = plan.description.vocab_size, plan.group, None
        if not isinstance(group.collectives, NullCollectives):
            shard = VocabShard(group.share_of(vocab_size, "vocabulary")[0], group.size, group.collectives)
        sampler = Sampler(vocab_size, settings.max_num_seqs, platform.device, features, max_samples, shard)
    with platform.device:
        inputs = model.token_inputs(settings.max_num_seqs, ledger.max_model_len)
    received = None
    if not pipeline.is_first:
        size = StageInputs.num_rows(plan.sizes), plan.description.hidden_size
        inputs = received = StageInputs(inputs, platform.zeros(size, plan.context.dtype))
    elif isinstance(model, CausalLM):
        inputs = PromptEmbedInputs(inputs, model.embed, plan.context.dtype, platform.device)
    tokens = None
    if plan.adapters is not None:
        tokens = AdapterTokens(plan.adapters, settings.max_num_seqs, platform.device)
    backends, length = GroupBackends(plan.backends), ledger.max_model_len
    limits = (max_samples, plan.group, plan.context.dtype)
    program = StepProgram(model, rows, tables, backends, sampler, length, inputs, tokens, *limits)
    adapters = None if tokens is None else RowAdapters(model, tokens, plan.dtype)
    head = LogitsHead(model, sample_ladder, tokens)
    prompt_logprobs = PromptLogprobs(rows, head, has_logits=pipeline.is_last)
    containment = Containment(model.cached_layers(), tables)
    # Where matmuls were checked, samples are padded to sizes that were admitted, as all tokens are.
    samples = token_ladder if platform.batch_invariant else coarse_ladder(max_samples)
    eager = Eager(program, head, prompt_logprobs, Padding(token_ladder, samples, platform.narrow_above))
    room = ledger.room(ledger.max_model_len)
    runner = Runner(
        rows=rows,
        tables=tables,
        sampler=sampler,
        prompt_logprobs=prompt_logprobs,
        routed_experts=RoutedExpertsRecorder(model),
        containment=containment,
        ways=list(make_ways(plan.way_context(model), program, eager, room)),
        inputs=inputs,
        pooler=None
        if plan.pooler is None
        else Pooler(PooledHeads(model, head, token_ladder, plan.context.target), generates=plan.pooler.generates),
        adapters=adapters,
        stage=None if pipeline.size == 1 else Stage(pipeline, rows, containment.heal, received),
        expert_loads=ExpertLoads(model),
    )
    runner.proposer = make_proposer(plan.way_context(model), runner, program, token_ladder or sample_ladder, room)
    return runner


def measure_workspace(plan: EnginePlan, config: EngineConfig, model: Model) -> EnginePlan:
    """Run the largest step there can be, where the platform can measure it; KV blocks get what is left."""
    block_size, count = config.cache.block_size, plan.settings.max_num_batched_tokens
    length = min(count, plan.ledger.max_model_len)
    lengths = [length] * (count // length) + ([count % length] if count % length else [])
    layout, per_group = plan.ledger.layout, sum(-(-length // block_size) for length in lengths)
    blocks = [1 + per_group * len(layout.groups_of(pool)) for pool in range(len(layout.pools))]

    def work() -> None:
        bind_caches(plan, model.cached_layers(), block_size, blocks)
        forward_alone(plan, model, block_size, [[0] * length for length in lengths])
        for layer in model.cached_layers():
            layer.unbind()

    peak = plan.platform.peak_memory(work)
    if peak is None:
        return plan
    return with_measured_step(plan, config, model, max(0, peak - layout.num_bytes(blocks)))


def bind_caches(
    plan: EnginePlan, layers: Sequence[CachedLayer], block_size: int, num_blocks: Sequence[int] = ()
) -> None:
    """Allocate the cache tensors; layer k of a group uses tensor k of its pool, at its group's blocks.

    `num_blocks` is of each pool; by default as the ledger has it.
    """
    counts = num_blocks or plan.ledger.pool_blocks
    slots: dict[tuple[int, int], torch.Tensor] = {}
    for group in plan.ledger.layout.groups:
        for slot, index in enumerate(group.layers):
            place, layer, backend = (group.pool, slot), layers[index], plan.backends[group.index]
            if place not in slots:
                shape = layer.cache_shape(
                    plan.attention.of(group.form), counts[group.pool], block_size, plan.kv_dtype
                )
                slots[place] = plan.platform.zeros(shape, layer.cache_dtype(plan.kv_dtype))
            layer.bind(backend, slots[place], group.index)
