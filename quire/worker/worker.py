"""The worker: takes what the plan says (weights, KV blocks, rows) and runs steps through the runner."""

from __future__ import annotations

import time

import torch

from quire.config.engine import EngineConfig
from quire.layers.attention import Attention
from quire.layers.rope.embedding import RotaryEmbedding
from quire.loader.dummy import fill_dummy
from quire.loader.mapper import Progress, load_weights
from quire.models.base import CausalLM
from quire.models.registry import model_class
from quire.platform.host import return_free_memory
from quire.platform.recording import Recorder
from quire.types.masks import Masks
from quire.types.step import StepPlan
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase, ignore_phase
from quire.utils.units import format_bytes
from quire.worker.alone import forward_alone
from quire.worker.block_tables import BlockTables
from quire.worker.graphs import (
    ForwardGraphs,
    NoForwardGraphs,
    NoGraphs,
    NoPromptGraphs,
    PieceGraphs,
    PromptGraphs,
    Recorders,
    StepGraphs,
)
from quire.worker.input_batch import InputBuilder, Narrowing
from quire.worker.logits import LogitsHead
from quire.worker.planning import (
    EnginePlan,
    beside_steps,
    plan_engine,
    recorded_sizes,
    with_workspace,
)
from quire.worker.prompt_logprobs import PromptLogprobs
from quire.worker.recorded_decode import RecordedDecode
from quire.worker.recorded_forward import MOST_TOKENS, RecordedForward
from quire.worker.request_rows import RequestRows
from quire.worker.runner import Finish, Runner
from quire.worker.sampling.sampler import Sampler
from quire.worker.selfcheck import coarse_ladder, make_invariant

logger = get_logger(__name__)


class Worker:
    def __init__(self, config: EngineConfig, report: ReportPhase = ignore_phase) -> None:
        """Takes all that the engine will need; `report` is told of each part of the work as it begins."""
        started = time.perf_counter()
        report("plan")
        plan = plan_engine(config)
        self.platform = plan.platform
        logger.info("settings: %s", "; ".join(plan.settings.explain()))
        for entry in plan.ledger.entries:
            logger.debug("memory: %s %s (%s)", entry.name, format_bytes(entry.num_bytes), entry.note)
        try:
            self._take(plan, config, started, report)
        except Exception as error:
            if plan.platform.is_out_of_memory(error):
                raise plan.ledger.ran_out(error) from error
            raise

    def _take(self, plan: EnginePlan, config: EngineConfig, started: float, report: ReportPhase) -> None:
        planned = time.perf_counter()
        report("weights")
        model = load_model(plan, config, lambda done, total: report("weights", done / total))
        self.plan = plan = measure_workspace(plan.without_checkpoint(), config, model)
        loaded = time.perf_counter()
        report("self-check")
        settings = plan.settings
        ladders: tuple[list[int], list[int]] = ([], [])
        if self.platform.batch_invariant:
            ladders = make_invariant(model, settings.max_num_batched_tokens, settings.max_num_seqs)
        else:  # the library loads a kernel when a shape first needs it, so few numbers of logits are asked for
            tokens = coarse_ladder(settings.max_num_batched_tokens) if plan.deterministic else []
            ladders = tokens, coarse_ladder(settings.max_num_seqs)
        checked = time.perf_counter()
        report("KV")
        ledger = plan.ledger
        logger.info(
            "KV cache: %s for %d tokens (%s)", format_bytes(ledger.kv_bytes), ledger.num_kv_tokens, ledger.kv_reason
        )
        self.runner = build_runner(plan, model, config.cache.block_size, *ladders)
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

    def execute(self, plan: StepPlan) -> Finish:
        return self.runner.execute(plan)

    def sample(self, masks: Masks) -> None:
        self.runner.sample(masks)

    def prepare(self) -> bool:
        """Do something that steps to come will need, if there is anything; False if not."""
        return self.runner.prepare()

    def mask_room(self, count: int) -> Masks:
        """Where so many masks are best written for `sample`; always the same memory."""
        return self.runner.sampler.mask_buffer.room(count)

    def shutdown(self) -> None:
        del self.runner


def load_model(plan: EnginePlan, config: EngineConfig, progress: Progress | None = None) -> CausalLM:
    """Build the model and fill every parameter."""
    with plan.platform.device:
        model = model_class(plan.model_config).from_config(plan.model_config, plan.context)
    if plan.checkpoint is None:
        fill_dummy(model, config.model.seed, plan.platform.device)
    else:
        load_weights(model, plan.checkpoint, progress)
    for note in {module.note for module in model.modules() if isinstance(module, RotaryEmbedding)} - {None}:
        logger.warning("%s", note)
    return_free_memory()  # of weights before they were packed, which no plan has
    return model.eval()


def build_runner(
    plan: EnginePlan, model: CausalLM, block_size: int, token_ladder: list[int], sample_ladder: list[int]
) -> Runner:
    """Allocate KV blocks and rows, and wire the collaborators of a step."""
    platform, ledger, settings = plan.platform, plan.ledger, plan.settings
    bind_caches(plan, model.attention_layers(), block_size)
    rows = RequestRows(settings.max_num_seqs, ledger.max_model_len, platform.device)
    tables = BlockTables(
        len(ledger.layout.groups), settings.max_num_seqs, ledger.max_model_len, block_size, platform.device
    )
    head = LogitsHead(model, sample_ladder)
    above = platform.narrow_above
    # Where products were checked, the wanted tokens are padded to sizes that were admitted, as all tokens are.
    ladder = token_ladder if platform.batch_invariant else coarse_ladder(settings.max_num_seqs)
    narrowing = None if above is None else Narrowing(above, ladder)
    sampler = Sampler(plan.description.vocab_size, settings.max_num_seqs, platform.device)
    graphs, masked_graphs, prompt_graphs, forward_graphs = make_graphs(plan, model, rows, tables, sampler)
    return Runner(
        model=model,
        rows=rows,
        tables=tables,
        inputs=InputBuilder(rows, tables, plan.backend, token_ladder, platform.device, narrowing),
        head=head,
        sampler=sampler,
        prompt_logprobs=PromptLogprobs(rows, head),
        graphs=graphs,
        masked_graphs=masked_graphs,
        prompt_graphs=prompt_graphs,
        forward_graphs=forward_graphs,
    )


def make_graphs(
    plan: EnginePlan, model: CausalLM, rows: RequestRows, tables: BlockTables, sampler: Sampler
) -> tuple[StepGraphs, PieceGraphs, PromptGraphs, ForwardGraphs]:
    """What replays whole decode steps, those that wait for masks, steps with prompts, and the model's part alone."""
    nothing = (NoGraphs(), NoGraphs(), NoPromptGraphs(), NoForwardGraphs())
    recorder = plan.backend.recorder()
    if recorder is not None:
        room = min(plan.ledger.max_model_len, (plan.ledger.num_kv_blocks - 1) * tables.block_size)
        if room < MOST_TOKENS:
            return nothing
        max_tokens, max_rows = plan.settings.max_num_batched_tokens, plan.settings.max_num_seqs
        return (
            RecordedDecode(model, rows, tables, plan.backend, recorder, sampler, max_rows),
            NoGraphs(),
            NoPromptGraphs(),
            RecordedForward(model, tables, plan.backend, recorder, max_tokens, max_rows),
        )
    sizes = recorded_sizes(plan.platform, plan.backend, plan.settings)
    if not sizes:
        return nothing
    # These need Triton, which a CPU does without.
    from quire.worker.decode_graphs import DecodeGraphs
    from quire.worker.recorded_prompts import RecordedPrompts

    length = plan.ledger.max_model_len
    recorders = Recorders(Recorder(plan.recorded.forward), Recorder(plan.recorded.sample))
    place = (model, rows, tables, plan.backend, sampler, recorders)
    decode = DecodeGraphs(*place, sizes, length)
    samples = 1 << (plan.settings.max_num_seqs - 1).bit_length()
    hidden = plan.platform.zeros((samples, plan.description.hidden_size), plan.dtype)
    prompts = RecordedPrompts(*place, length, plan.settings.max_num_batched_tokens, hidden)
    return decode, decode, prompts, NoForwardGraphs()


def measure_workspace(plan: EnginePlan, config: EngineConfig, model: CausalLM) -> EnginePlan:
    """Run the largest step there can be, where the platform can measure it; KV blocks get what is left."""
    block_size, count = config.cache.block_size, plan.settings.max_num_batched_tokens
    length = min(count, plan.ledger.max_model_len)
    lengths = [length] * (count // length) + ([count % length] if count % length else [])
    blocks = 1 + sum(-(-length // block_size) for length in lengths) * len(plan.ledger.layout.groups)

    def work() -> None:
        bind_caches(plan, model.attention_layers(), block_size, num_blocks=blocks)
        forward_alone(plan, model, block_size, [[0] * length for length in lengths])
        for layer in model.attention_layers():
            layer.unbind()

    peak = plan.platform.peak_memory(work)
    if peak is None:
        return plan
    step = max(0, peak - blocks * plan.ledger.layout.page_bytes)
    place = (plan.platform, plan.backend, plan.settings, plan.description)
    beside, recorded = beside_steps(*place, model, step / count, plan.ledger.max_model_len)
    return with_workspace(plan, config, step + beside, recorded)


def bind_caches(plan: EnginePlan, layers: list[Attention], block_size: int, num_blocks: int | None = None) -> None:
    """One cache tensor per slot of the layout; layer k of every group uses slot k at its group's blocks."""
    layout = plan.ledger.layout
    spec = layers[0].spec
    count = plan.ledger.num_kv_blocks if num_blocks is None else num_blocks
    shape = plan.backend.cache_shape(count, block_size, spec.num_kv_heads, spec.head_dim, plan.kv_dtype)
    slots: list[torch.Tensor] = [plan.platform.zeros(shape, plan.kv_dtype) for _ in range(layout.num_slots)]
    for group in layout.groups:
        for slot, layer in enumerate(group.layers):
            layers[layer].bind(plan.backend, slots[slot], group.index)
