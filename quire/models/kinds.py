"""Mixers and MLPs: the two blocks of a layer, by the names that a DecoderConfig gives for each layer.

Adding a kind is a file with a Mixer or an MLP and one line here.
"""

from __future__ import annotations

from abc import abstractmethod

from quire.attention.base import Rotation
from quire.layers.attention import ForwardBatch, WantedTokens
from quire.layers.fusion import Passed, Stage
from quire.models.base import BuildContext
from quire.models.config import DecoderConfig
from quire.types.cache import LayerKV
from quire.utils.registry import Registry


class Mixer(Stage):
    """What mixes the tokens of a sequence: attention, or anything else that reads earlier ones."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()

    @classmethod
    def keeps(cls, config: DecoderConfig, layer: int) -> LayerKV | None:
        """What the layer caches, in a CachedLayer of this block; None: nothing."""
        return None

    @abstractmethod
    def forward(
        self, hidden: Passed, rotation: Rotation, batch: ForwardBatch, wanted: WantedTokens | None = None
    ) -> Passed:
        """hidden [n, hidden] -> [n, hidden], or of the wanted tokens alone."""


class MLP(Stage):
    """What is computed for each token by itself."""

    def __init__(self, config: DecoderConfig, ctx: BuildContext, layer: int) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, hidden: Passed) -> Passed:
        """hidden [n, hidden] -> [n, hidden]."""


MIXERS: Registry[type[Mixer]] = Registry(
    "mixer", "quire.models", {"attention": "blocks:AttentionBlock", "latent": "latent:LatentBlock"}
)
MLPS: Registry[type[MLP]] = Registry(
    "MLP", "quire.models", {"gated": "blocks:GatedMLP", "experts": "experts:ExpertsMLP"}
)
