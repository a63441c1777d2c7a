"""Quantized checkpoints by the name in their config. Adding one is a file with a decorator and one line here."""

from __future__ import annotations

from quire.loader.checkpoint import Checkpoint
from quire.loader.quantized.base import QuantizedCheckpoint
from quire.types.errors import CheckpointError
from quire.utils.registry import Registry

QUANTIZED: Registry[type[QuantizedCheckpoint]] = Registry(
    "quantized checkpoint",
    "quire.loader.quantized",
    {
        "awq": "awq:Awq",
        "bitsandbytes": "bitsandbytes:BitsAndBytes",
        "compressed-tensors": "compressed_tensors:CompressedTensors",
        "fbgemm_fp8": "fp8:Fp8",
        "fp8": "fp8:Fp8",
        "gptq": "gptq:Gptq",
        "modelopt": "modelopt:ModelOpt",
        "modelopt_fp4": "modelopt:ModelOpt",
        "mxfp4": "mxfp4:Mxfp4",
        "torchao": "torchao:TorchAo",
    },
)


def logical(stored: Checkpoint) -> Checkpoint:
    """The checkpoint as models see it: itself, or decorated as the `quantization_config` of its config says."""
    quantization = stored.config.get("quantization_config")
    if quantization is None:
        return stored
    name = quantization["quant_method"]
    if name not in QUANTIZED:
        known = f"; known: {', '.join(sorted(QUANTIZED))}" if list(QUANTIZED) else ""
        raise CheckpointError(
            f"the model config's quantization_config.quant_method is {name!r}, which cannot be read{known}; use the"
            " model without quantization, or as a GGUF file"
        )
    return QUANTIZED.get(name)(stored)
