"""The drafter's weights: which model drafts for a target, whether the two fit, and the proposer made of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.config.engine import EngineConfig
from quire.config.groups import SpeculativeConfig
from quire.config.speculative import PROPOSING
from quire.loader.checkpoint import Checkpoint
from quire.loader.dummy import dummy_schemes, fill_dummy
from quire.loader.hub import ModelSource, find_model
from quire.loader.mapper import bytes_in, count_parameters, load_weights, planned_bytes
from quire.loader.model_config import load_config
from quire.loader.open import has_weights, open_checkpoint
from quire.loader.part import PartOfCheckpoint
from quire.models.base import BuildContext, CausalLM, Model, ModelDescription
from quire.models.decoder import DecoderLM
from quire.models.drafters.base import DraftHead
from quire.models.drafters.eagle import tapped_layers
from quire.models.drafters.medusa import Medusa
from quire.models.drafters.registry import HEADS, MTP_MODULES
from quire.models.registry import architecture_of, generator_class
from quire.runner.containment import Containment
from quire.runner.eager import Eager, Padding
from quire.runner.experts import RoutedExpertsRecorder
from quire.runner.forward import StepProgram
from quire.runner.prompt_logprobs import LogitsHead, PromptLogprobs
from quire.runner.proposers.base import NoProposer
from quire.runner.proposers.draft_model import DraftModel
from quire.runner.proposers.heads import HeadProgram, HeadProposer
from quire.runner.proposers.medusa import MedusaProposer
from quire.runner.request_rows import RequestRows
from quire.runner.runner import Runner
from quire.runner.stages import StageInputs
from quire.runner.ways import WayContext, make_ways
from quire.types.errors import ConfigError, ModelError
from quire.types.ledger import LedgerLine


@dataclass(frozen=True)
class DraftPlan:
    """A model or a head that drafts, before its weights are read."""

    method: str
    architecture: type[Model]
    source: ModelSource
    model_config: dict[str, Any]
    description: ModelDescription
    prefix: str  # of its tensors in the target's checkpoint; "": it has its own
    made_up: bool  # its weights are
    seed: int
    quantization: str | None  # None: as the target's

    def beside(self, target: ModelSource) -> DraftPlan:
        """The same beside other weights of the target, which hold the drafter's if it has none of its own."""
        return replace(self, source=target) if self.prefix else self

    def build(self, context: BuildContext) -> Model:
        """The drafter without weights, on the current default device."""
        quantization = self.quantization or context.quantization
        return self.architecture.from_config(self.model_config, replace(context, quantization=quantization))

    def on_meta(self, context: BuildContext) -> tuple[Model, int, str]:
        """The drafter without storage, the bytes of its weights, and a note on them."""
        with torch.device("meta"):
            model = self.build(context)
        if self.made_up or not has_weights(self.source):
            num_bytes = bytes_in(model, dummy_schemes(model, self.model_config))
        else:
            num_bytes = planned_bytes(model, self._checkpoint().tensors())
        return model, num_bytes, f"{count_parameters(model) / 1e6:.1f} M of the drafter"

    def load(self, target: Model, context: BuildContext, device: torch.device) -> Model:
        """The drafter with its weights, and with what it shares with its target."""
        with device:
            model = self.build(context)
        if self.made_up:
            fill_dummy(model, self.seed, device, schemes=dummy_schemes(model, self.model_config))
        else:
            load_weights(model, self._checkpoint())
        if isinstance(model, DraftHead):
            assert isinstance(target, DecoderLM)
            model.use(target)
        return model.eval()

    def _checkpoint(self) -> Checkpoint:
        found = open_checkpoint(self.source)
        if not self.prefix:
            return found
        part = PartOfCheckpoint(found, self.prefix, "layer.")
        if not part.tensors():
            raise ConfigError(
                f"speculative_config: {self.source.name} has no module that drafts (no tensor {self.prefix}*);"
                " use a method other than mtp"
            )
        return part


def plan_draft(
    config: EngineConfig, source: ModelSource, model_config: dict[str, Any], target: ModelDescription, length: int
) -> DraftPlan | None:
    """What the settings name as a drafter, checked against the model that it drafts for; None: no model drafts."""
    speculative = config.speculation.speculative_config
    if speculative is None or speculative.method not in PROPOSING:
        return None
    size, prefix = config.parallel.tensor_parallel_size, ""
    if speculative.draft_tensor_parallel_size not in (None, size):
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size is {speculative.draft_tensor_parallel_size}, but the"
            f" drafter runs on the ranks of its target; leave it out or set {size}"
        )
    architecture: type[Model]
    if speculative.method == "mtp":
        head = MTP_MODULES.get(architecture_of(model_config))
        architecture, prefix = head, head.prefix.format(num_layers=target.num_layers)
    else:
        source = find_model(replace(config.model, model=str(speculative.model), revision=speculative.revision))
        model_config = load_config(source)
        is_model = speculative.method == "draft_model"
        try:
            architecture = generator_class(model_config) if is_model else HEADS.get(speculative.method)
        except ModelError as error:
            raise ModelError(f"speculative_config: model {speculative.model}: {error}") from error
        if not is_model:
            model_config = _completed(model_config, source, target)
        if speculative.method == "eagle3":
            model_config = {**model_config, "taps": tapped_layers(model_config, target.num_layers)}
    description = architecture.describe(model_config)
    _check_fits(speculative, architecture, description, target, length)
    return DraftPlan(
        speculative.method,
        architecture,
        source,
        model_config,
        description,
        prefix,
        config.model.load_format == "dummy",
        config.model.seed,
        speculative.quantization,
    )


def _completed(config: dict[str, Any], source: ModelSource, target: ModelDescription) -> dict[str, Any]:
    """The config of a head with what published ones leave out: sizes, which are the target's, and biases."""
    config = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, **config}
    if has_weights(source):
        biases = ("fc.bias", ".linear.bias", ".layers.0.bias")  # of EAGLE, and of the two layouts of Medusa
        config["fc_bias"] = any(name.endswith(biases) for name in open_checkpoint(source).tensors())
    return config


def _check_fits(
    config: SpeculativeConfig, kind: type[Model], draft: ModelDescription, target: ModelDescription, length: int
) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config: {config.model} has a vocabulary of {draft.vocab_size} tokens and its target one of"
            f" {target.vocab_size}; give a drafter of the same vocabulary"
        )
    if not issubclass(kind, CausalLM):
        if draft.hidden_size != target.hidden_size:
            raise ConfigError(
                f"speculative_config: {config.model} reads hidden states of size {draft.hidden_size} and its target's"
                f" have {target.hidden_size}; give heads that were trained for this target"
            )
        return
    if draft.max_position_embeddings < length:
        raise ConfigError(
            f"speculative_config: {config.model} was trained for {draft.max_position_embeddings} tokens and requests"
            f" may have {length}; set --max-model-len {draft.max_position_embeddings}"
        )
    if any(layer.form is None for layer in draft.layers):
        raise ConfigError(
            f"speculative_config: {config.model} has recurrent layers, whose states cannot take rejected tokens back;"
            " give a draft model of attention layers"
        )


def drafter_context(context: WayContext) -> WayContext | None:
    """Of the model that drafts for the one of `context`, if there is one."""
    drafter = context.model.drafter
    if drafter is None:
        return None
    width = drafter.hidden_size
    token_bytes = drafter.token_bytes(width, context.dtype.itemsize)
    sizes = replace(context.sizes, hidden_size=width, token_bytes=token_bytes, max_num_drafts=0, speculates=False)
    num_drafts = 0 if isinstance(drafter, Medusa) else context.sizes.max_num_drafts // context.sizes.max_num_seqs - 1
    is_head = isinstance(drafter, DraftHead)
    return replace(context, model=drafter, sizes=sizes, receives=is_head, num_drafts=max(0, num_drafts))


def head_lines(context: WayContext) -> Iterable[LedgerLine]:
    """What a head that is the drafter of a context takes for the hidden states of its target."""
    sizes, head = context.sizes, context.model
    read = head.num_hidden_read if isinstance(head, DraftHead) else 0
    return StageInputs.contributes(sizes, HeadProposer.num_kept(sizes), read)


def make_proposer(
    context: WayContext, target: Runner, program: StepProgram, ladder: list[int], room: int
) -> NoProposer:
    """What proposes tokens to the runner of a target, whose steps are as `program` says."""
    own = drafter_context(context)
    if own is None:
        return NoProposer()
    model, sizes, platform = own.model, own.sizes, own.platform
    rows = RequestRows(sizes.max_num_seqs, program.max_model_len, platform.device)
    if isinstance(model, Medusa):
        return MedusaProposer(model, target.rows, rows, program.sampler)
    with platform.device:
        inputs = model.token_inputs(sizes.max_num_seqs, program.max_model_len)
    if own.receives:
        num_rows = StageInputs.num_rows(sizes) + HeadProposer.num_kept(sizes)
        size = num_rows, model.num_hidden_read * sizes.hidden_size
        inputs = received = StageInputs(inputs, platform.zeros(size, own.dtype))
    place = (program.tables, program.backend, program.sampler, program.max_model_len, inputs)
    mine = (HeadProgram if own.receives else StepProgram)(model, rows, *place, dtype=own.dtype)
    head = LogitsHead(model, ladder)
    prompt_logprobs = PromptLogprobs(rows, head)
    eager = Eager(mine, head, prompt_logprobs, Padding(ladder, ladder, platform.narrow_above))
    runner = Runner(
        rows=rows,
        tables=program.tables,
        sampler=program.sampler,
        prompt_logprobs=prompt_logprobs,
        routed_experts=RoutedExpertsRecorder(model),
        containment=Containment(model.cached_layers(), program.tables),
        ways=list(make_ways(own, mine, eager, room)),
        inputs=inputs,
    )
    runner.sampling_kind = program.sampler.draft_kind
    most = sizes.max_num_batched_tokens
    if isinstance(model, DraftHead):
        return HeadProposer(model, target.rows, runner, received, most, asynchronous=platform.asynchronous)
    return DraftModel(target.rows, runner, most, asynchronous=platform.asynchronous)
