"""What can be refused of the settings before torch is imported: names that nothing has, a model that is not there.

What depends on the device (fp8 on a CPU) or on the model's size is refused by quire.planning.engine_plan.
"""

from __future__ import annotations

from quire.attention.registry import BACKENDS
from quire.config.engine import EngineConfig
from quire.layers.quant.registry import METHODS
from quire.loader.hub import find_model
from quire.structured.registry import check_backend


def check_settings(config: EngineConfig) -> None:
    """Raise a ConfigError or ModelNotFoundError that names the value. May download the model."""
    check_backend(config.structured.structured_outputs_backend)
    if config.model.quantization != "auto":
        METHODS.check(config.model.quantization)
    if config.device.attention_backend is not None:
        BACKENDS.check(config.device.attention_backend)
    find_model(config.model)
