"""How a model is cut into the stages of a pipeline: which layers each holds, and its part of the KV layout.

And what of a model cannot be cut so, or into experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.kv.layout import KVLayout
from quire.layers.attention import CachedLayer
from quire.layers.experts import GroupedLinear
from quire.layers.weights import Schemes, WeightedLayer, weighted_layers
from quire.loader.mapper import allocate
from quire.models.base import Model
from quire.models.decoder import DecoderLM
from quire.parallel.groups import ParallelGroup
from quire.parallel.pipeline import Pipeline, split_layers
from quire.platform.base import Platform
from quire.types.errors import ConfigError


def check_stages(pipeline: Pipeline, architecture: type[Model], *, pools: bool, drafter: str | None) -> None:
    """Refuse, by name, what is not cut into stages."""
    if pipeline.size == 1:
        return
    what = f"pipeline_parallel_size is {pipeline.size}, but"
    if pools or not issubclass(architecture, DecoderLM):
        raise ConfigError(f"{what} stages are for models that generate; use --data-parallel-size to pool in parallel")
    if drafter is not None:
        raise ConfigError(
            f"{what} the drafter of speculative_config ({drafter}) runs in one stage; use ngram, or tensor parallel"
        )


def check_experts(model: Model, group: ParallelGroup, platform: Platform) -> None:
    if group.splits_experts and not any(isinstance(module, GroupedLinear) for module in model.modules()):
        raise ConfigError("enable_expert_parallel is set, but the model has no experts; leave it out")
    if group.all_to_all and not platform.uses_host_memory:
        raise ConfigError(
            "all2all_backend is 'all_to_all', which runs on a CPU: CUDA graphs hold messages of one size, and NCCL"
            " would send every token to every rank; leave it out"
        )


def cut(model: Model, schemes: Mapping[WeightedLayer, Schemes], pipeline: Pipeline) -> Pipeline:
    """The pipeline with the layers of its stage, by the bytes of the whole model's weights. Allocates them."""
    assert isinstance(model, DecoderLM)
    allocate(model, schemes)
    layers = [0] * len(model.model.layers)
    table = head = 0
    for path, layer in weighted_layers(model):
        num_bytes = layer.planned_bytes(schemes.get(layer, {}))
        if path.startswith("model.layers."):
            layers[int(path.split(".")[2])] += num_bytes
        elif path.startswith("model.embed_tokens"):
            table = num_bytes
        else:
            head += num_bytes
    last = head + (table if model.config.tied_embeddings else 0)
    return replace(pipeline, layers=split_layers(layers, table, last, pipeline.size)[pipeline.stage])


def layout_of_stage(layout: KVLayout, model: Model, pipeline: Pipeline) -> KVLayout:
    """The stage's part of the layout of the whole model."""
    if pipeline.size == 1:
        return layout
    assert isinstance(model, DecoderLM)
    members, count = [], 0
    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if isinstance(module, CachedLayer):
                if pipeline.holds(index):
                    members.append(count)
                count += 1
    return layout.part(members)
