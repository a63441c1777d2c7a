"""How a model is cut into the stages of a pipeline: which layers each holds, and its part of the KV layout.

And what of a model cannot be cut so, or into experts, or by --tp-exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count

from quire.kv.layout import KVLayout
from quire.layers.attention import CachedLayer
from quire.layers.experts import GroupedLinear
from quire.layers.weights import Schemes, WeightedLayer, weighted_layers
from quire.loader.mapper import allocate
from quire.models.base import Model
from quire.models.decoder import DecoderLM
from quire.models.rotary_encoder import RotaryEncoder
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


def check_replicas(group: ParallelGroup, platform: Platform, drafter: str | None) -> None:
    """Refuse, by name, what replicas that share experts cannot do."""
    device = None if platform.uses_host_memory else f"device {platform.device}"
    what = device or (drafter and f"the drafter of speculative_config ({drafter})")
    if group.replicas is not None and what:
        raise ConfigError(
            f"data_parallel_size is {group.replicas.size} with enable_expert_parallel, but {what} is not for replicas"
            " that share experts; share them by -tp, or leave --enable-expert-parallel out"
        )


def check_group(model: Model, group: ParallelGroup, platform: Platform) -> None:
    """Refuse what ranks of this model on this platform cannot do."""
    if group.splits_experts and not any(isinstance(module, GroupedLinear) for module in model.modules()):
        raise ConfigError("enable_expert_parallel is set, but the model has no experts; leave it out")
    if group.expert_exchange == "all_to_all" and not platform.uses_host_memory:
        raise ConfigError(
            "all2all_backend is 'all_to_all', which runs on a CPU: CUDA graphs hold messages of one size, and NCCL"
            " would send every token to every rank; leave it out"
        )
    if group.exact and not platform.uses_host_memory:
        raise ConfigError(
            "tp_exact is set, but equal bits are promised of the CPU's kernels alone: a GPU's matmuls choose their"
            " order of sums by the shape of a rank's slice; leave --tp-exact out, or use --device cpu"
        )


def check_rows(architecture: type[Model], threshold: int | None) -> None:
    if threshold and not issubclass(architecture, (DecoderLM, RotaryEncoder)):
        raise ConfigError(
            f"sequence_parallel_threshold is {threshold}, but {architecture.__name__} does not hold its residual"
            " stream by rows: it normalizes the stream itself; leave it out"
        )


def cut(
    model: Model, schemes: Mapping[WeightedLayer, Schemes], layout: KVLayout, num_tokens: int, pipeline: Pipeline
) -> Pipeline:
    """The pipeline with the layers of its stage, by the bytes of the whole model's weights, which are allocated, and
    of what one request of `num_tokens` keeps."""
    assert isinstance(model, DecoderLM)
    kept = layout.layer_bytes(num_tokens, layout.block_size)
    allocate(model, schemes)
    layers = [sum(kept[index] for index in members) for members in _cached_layers(model)]
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
    held = (members for index, members in enumerate(_cached_layers(model)) if pipeline.holds(index))
    return layout.part([member for members in held for member in members])


def _cached_layers(model: DecoderLM) -> list[list[int]]:
    """Of each layer of the decoder, the indices of its parts among all that keep something of tokens."""
    found, indices = [], count()
    for layer in model.model.layers:
        found.append([next(indices) for module in layer.modules() if isinstance(module, CachedLayer)])
    return found
