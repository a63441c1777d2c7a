"""Mixers and MLPs: the two blocks of a layer, by the names that a DecoderConfig gives for each layer.

Adding a kind is a file with a Mixer or an MLP and one line here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch
from quire.layers.fusion import Passed, Stage
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.types.cache import LayerKV
from quire.utils.registry import Registry


class Mixer(Stage):
    """What mixes the tokens of a sequence: attention, or anything else that reads earlier ones."""

    __call__: Callable[..., Passed]

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        """What the layer caches, in a CachedLayer of this block; None: nothing."""
        return None

    @classmethod
    def keeps_all(cls, config: DecoderConfig, layer: int) -> tuple[LayerKV, ...]:
        """The same of a block with any number of CachedLayers, in their order."""
        kept = cls.keeps(config, layer)
        return () if kept is None else (kept,)

    @abstractmethod
    def forward(self, hidden: Passed, rotation: Rotation, batch: ForwardBatch) -> Passed:
        """hidden [n, hidden] -> [n, hidden], or of the batch's wanted tokens alone."""


class MLP(Stage):
    """What is computed for each token by itself."""

    __call__: Callable[..., Passed]

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, hidden: Passed) -> Passed:
        """hidden [n, hidden] -> [n, hidden]."""


NONE = "none"  # in place of a name: the layer has no such block, and no norm before it
MIXERS: Registry[type[Mixer]] = Registry(
    "mixer",
    "quire.models",
    {
        "attention": "blocks:AttentionBlock",
        "latent": "latent:LatentBlock",
        "latent_pair": "longcat_flash:LatentPair",
        "gated_attention": "qwen3_next_mixers:GatedAttention",
        "gated_delta": "qwen3_next_mixers:GatedDelta",
        "grouped_gated_delta": "qwen3_next_mixers:GroupedGatedDelta",
        "half_grouped_gated_delta": "qwen3_next_mixers:HalfGroupedGatedDelta",
        "kimi_delta": "kimi_delta:KimiDelta",
        "lightning": "minimax:Lightning",
        "mamba": "mamba_mixers:MambaMixer",
        "mamba2": "mamba_mixers:Mamba2Mixer",
        "beside_attention": "falcon_h1:BesideAttention",
        "short_conv": "lfm2:ShortConv",
    },
)
MLPS: Registry[type[MLP]] = Registry(
    "MLP",
    "quire.models",
    {
        "gated": "blocks:GatedMLP",
        "experts": "experts:ExpertsMLP",
        "scaled": "falcon_h1:ScaledMLP",
        "squared_relu": "squared_relu:SquaredReluMLP",
        "squared_relu_experts": "squared_relu:SquaredReluExperts",
    },
)
