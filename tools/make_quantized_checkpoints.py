"""Writes the tiny quantized checkpoints of tests/loader/quantized/checkpoints, and what an independent decoder reads.

Run in an environment of its own that has torch, safetensors, transformers, compressed-tensors, bitsandbytes and
torchao (`pip install --no-deps` keeps the torch that is there). Where a tool cannot be had, its layout is written
element by element after its specification, and expected values come of the formula. Imports nothing of quire.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Tensors = dict[str, Tensor]
Made = tuple[Tensors, Tensors]  # what is stored of all matrices, and what these are
HIDDEN, WIDTH = 32, 64
SIZES = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PLAIN_LAYER = "model.layers.0.self_attn.o_proj"  # not quantized in any of them


def base_model() -> tuple[dict[str, Any], Tensors]:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    values = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **config.to_diff_dict()}
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    return values, tensors


def each_matrix(weights: Tensors, make: Callable[[str, Tensor], tuple[Tensors, Tensor]]) -> Made:
    """`make` gives the stored tensors of a layer by the last parts of their names, and the matrix."""
    stored: Tensors = {}
    decoded: Tensors = {}
    for name, weight in weights.items():
        path = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or path == PLAIN_LAYER:
            stored[name] = weight
            continue
        parts, decoded[name] = make(path, weight.float())
        stored |= {f"{path}.{leaf}": tensor.contiguous() for leaf, tensor in parts.items()}
    return stored, decoded


# ---- compressed-tensors: its own compressors write and read
def compressed(weights: Tensors, groups: dict[str, tuple[list[str], dict[str, Any], dict[str, Any] | None]]) -> Any:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    schemes = {}
    for name, (targets, args, inputs) in groups.items():
        form = args.pop("format")
        activations = None if inputs is None else QuantizationArgs(**inputs)
        scheme = QuantizationScheme(targets=targets, weights=QuantizationArgs(**args), input_activations=activations)
        schemes[name] = (scheme, form, targets)

    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        scheme, form, _ = next(
            (s for s in schemes.values() if any(t.startswith("re:") and path.endswith(t[5:]) for t in s[2])),
            list(schemes.values())[-1],
        )
        args, weight = scheme.weights, weight.bfloat16()
        parts: Tensors = {"weight": weight}
        low, high = _extremes(weight, args)
        if args.strategy == "tensor_group":
            parts["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=parts.get("weight_global_scale"))
        parts |= {"weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(parts, scheme)
        matrix = compressor.decompress(dict(stored), scheme)["weight"]
        if inputs_of(scheme) == "static":
            stored["input_scale"] = torch.tensor([0.02])
        return dict(stored), matrix

    stored, decoded = each_matrix(weights, make)
    config = {
        "quant_method": "compressed-tensors",
        "format": next(iter(schemes.values()))[1] if len(schemes) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*o_proj"],
        "config_groups": {
            name: {**json.loads(scheme.model_dump_json()), "format": form}
            for name, (scheme, form, _) in schemes.items()
        },
    }
    return stored, decoded, config


def inputs_of(scheme: Any) -> str:
    return "static" if scheme.input_activations is not None and not scheme.input_activations.dynamic else "none"


def _extremes(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    if args.strategy == "tensor":
        return weight.min(), weight.max()
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
        tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


# ---- GPTQ and AWQ: after their specifications
def integer_groups(weight: Tensor, bits: int, index: Tensor, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """codes [out, in], scales and zero points [out, groups]."""
    groups = int(index.max()) + 1
    scales = torch.empty(weight.shape[0], groups)
    zero = torch.full((weight.shape[0], groups), 1 << bits - 1)
    for group in range(groups):
        part = weight[:, index == group]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if zeros:
            scales[:, group] = ((high - low) / (2**bits - 1)).half().float()
            zero[:, group] = (-low / scales[:, group]).round().long()
        else:
            scales[:, group] = (part.abs().amax(1) / (2 ** (bits - 1) - 1)).half().float()
    codes = (weight / scales[:, index] + zero[:, index]).round().clamp(0, 2**bits - 1).long()
    return codes, scales, zero


def bit_stream(codes: Tensor, bits: int) -> Tensor:
    """codes [n, lines] along the first axis into int32 words, bit after bit."""
    lines = []
    for column in codes.t().tolist():
        number = sum(int(code) << bits * place for place, code in enumerate(column))
        words = [number >> 32 * word & 0xFFFFFFFF for word in range(-(-len(column) * bits // 32))]
        lines.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(lines, dtype=torch.int32).t()


def gptq(
    weights: Tensors, bits: int, group: int, act_order: bool = False, v2: bool = False, sym: bool = False
) -> Any:
    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        size = group if group > 0 else weight.shape[1]
        index = torch.arange(weight.shape[1]) // size
        if act_order:
            index = index[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(path)))]
        codes, scales, zeros = integer_groups(weight, bits, index, zeros=not sym)
        zeros = zeros.clamp_min(0 if v2 else 1)
        kept = zeros if v2 else zeros - 1
        parts = {
            "qweight": bit_stream(codes.t(), bits),
            "scales": scales.t().half(),
            "qzeros": bit_stream(kept, bits).t(),
            "g_idx": index.int(),
        }
        return parts, (codes - zeros[:, index]) * scales[:, index]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": sym}
    config |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    return *each_matrix(weights, make), config


def awq(weights: Tensors, group: int) -> Any:
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word, from the low bits up

    def words(codes: Tensor) -> Tensor:
        """[inputs or groups, outputs] -> [.., outputs / 8]."""
        rows = []
        for row in codes.tolist():
            packed = [
                sum(int(row[start + output]) << 4 * place for place, output in enumerate(order))
                for start in range(0, len(row), 8)
            ]
            rows.append([word - (1 << 32) if word >> 31 else word for word in packed])
        return torch.tensor(rows, dtype=torch.int32)

    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        index = torch.arange(weight.shape[1]) // group
        codes, scales, zeros = integer_groups(weight, 4, index, zeros=True)
        parts = {"qweight": words(codes.t()), "scales": scales.t().half(), "qzeros": words(zeros.t())}
        return parts, (codes - zeros[:, index]) * scales[:, index]

    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return *each_matrix(weights, make), {**config, "modules_to_not_convert": ["o_proj"]}


# ---- fp8 and ModelOpt: after their specifications
def fp8(weights: Tensors, block: tuple[int, int] | None, static: bool, channels: bool = False) -> Any:
    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        rows, columns = block or ((1, weight.shape[1]) if channels else weight.shape)
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes, matrix = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
                scales[i, j] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scales[i, j]).to(codes.dtype)
                matrix[part] = codes[part].float() * scales[i, j]
        parts = {"weight": codes, "weight_scale_inv" if block else "weight_scale": scales}
        if block is None and not channels:
            parts["weight_scale"] = scales.reshape(())
        return parts | ({"input_scale": torch.tensor(0.03)} if static else {}), matrix

    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic"}
    config |= {"weight_block_size": list(block)} if block else {}
    return *each_matrix(weights, make), {**config, "modules_to_not_convert": ["o_proj"]}


def modelopt(weights: Tensors, algorithm: str) -> Any:
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def nvfp4(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        second = weight.abs().max() / (6 * 448)
        groups = weight.unflatten(1, (-1, 16))
        scales = (groups.abs().amax(-1) / 6 / second).to(torch.float8_e4m3fn)
        steps = (scales.float() * second)[..., None]
        codes = (groups.abs() / steps).unsqueeze(-1).sub(table).abs().argmin(-1)
        matrix = (table[codes] * groups.sign() * steps).flatten(1)
        codes = (codes + 8 * (groups < 0)).flatten(1)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": second, "input_scale": second * 3}, matrix

    def fp8_matrix(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scale, "input_scale": scale * 5}, codes.float() * scale

    made = each_matrix(weights, nvfp4 if algorithm == "NVFP4" else fp8_matrix)
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head", "*o_proj"]}
    inner |= {"group_size": 16} if algorithm == "NVFP4" else {}
    return *made, inner


# ---- bitsandbytes and torchao: they write, and they read
def bitsandbytes(weights: Tensors, kind: str, nested: bool) -> Any:
    import bitsandbytes.functional as functional

    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if kind == "int8":
            codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
            matrix = codes.float() * (scales / 127)[:, None]  # theirs multiplies first and rounds otherwise
            torch.testing.assert_close(matrix, functional.int8_vectorwise_dequant(codes, scales), rtol=3e-7, atol=0)
            return {"weight": codes, "SCB": scales}, matrix
        block = 32 if weight.shape[1] % 64 else 64
        packed, state = functional.quantize_4bit(weight, None, None, block, nested, kind)
        parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        return {"weight": packed, **parts}, functional.dequantize_4bit(packed, state)

    config = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    config |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested} if kind != "int8" else {}
    return *each_matrix(weights, make), {**config, "llm_int8_skip_modules": ["o_proj", "lm_head"]}


def torchao(weights: Tensors, kind: str) -> Any:
    from torchao import quantization as ao

    config = {
        "int8": ao.Int8WeightOnlyConfig(version=2),
        "int8-dynamic": ao.Int8DynamicActivationInt8WeightConfig(version=2),
        "fp8": ao.Float8WeightOnlyConfig(),
        "int4": ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(32), version=2),
    }[kind]

    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight)
        ao.quantize_(layer, config)
        names = [name for name in ("qdata", "scale", "zero_point") if getattr(layer.weight, name, None) is not None]
        parts = {f"_weight_{name}": getattr(layer.weight, name).clone() for name in names}
        return parts, layer.weight.dequantize()

    default = {"_type": type(config).__name__, "_version": 2, "_data": {}}
    return *each_matrix(weights, make), {"quant_method": "torchao", "quant_type": {"default": default}}


def torchao_packed(weights: Tensors, group: int = 32) -> Any:
    """Int4WeightOnlyConfig in its plain format; names of tensors and values of the config are torchao's.

    torchao rounds with mslk, which needs a GPU: weights are rounded after its formula here.
    """
    from torchao import quantization as ao
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor

    def make(path: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        grouped = weight.unflatten(1, (-1, group))
        low, high = grouped.amin(2), grouped.amax(2)
        scale = (high - low).clamp(min=1e-6) / 15
        codes = ((grouped - low[..., None]) / scale[..., None]).round().clamp(0, 15).flatten(1).to(torch.int8) - 8
        scale, zero = scale.bfloat16(), (low + 8 * scale).bfloat16()  # zero: the value of code 0
        packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
        grids = scale.t().contiguous(), zero.t().contiguous()
        tensor = Int4Tensor(packed, *grids, [1, group], weight.shape)
        flat, _ = flatten_tensor_state_dict({"layer.weight": tensor})
        wide = [grid.float().repeat_interleave(group, 1) for grid in (scale, zero)]
        return {name.removeprefix("layer."): part for name, part in flat.items()}, codes * wide[0] + wide[1]

    default = config_to_dict(ao.Int4WeightOnlyConfig(group_size=group))
    return *each_matrix(weights, make), {"quant_method": "torchao", "quant_type": {"default": default}}


INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "format": "int-quantized"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "format": "pack-quantized"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "format": "float-quantized"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "format": "nvfp4-pack-quantized",
}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "format": "mxfp4-pack-quantized"}
TOKENS8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = {**TOKENS8, "type": "float"}
MAKERS: dict[str, tuple[str, Callable[[Tensors], Any]]] = {
    "ct-w8a8-int8": ("compressed-tensors", lambda w: compressed(w, {"g": (["Linear"], {**INT8}, TOKENS8)})),
    "ct-w8a8-int8-asym": (
        "compressed-tensors",
        lambda w: compressed(w, {"g": (["Linear"], {**INT8, "symmetric": False}, None)}),
    ),
    "ct-w8a8-fp8": ("compressed-tensors", lambda w: compressed(w, {"g": (["Linear"], {**FP8}, FP8_TOKENS)})),
    "ct-fp8-static": (
        "compressed-tensors",
        lambda w: compressed(
            w,
            {
                "g": (
                    ["Linear"],
                    {**FP8, "strategy": "tensor"},
                    {"num_bits": 8, "type": "float", "strategy": "tensor"},
                )
            },
        ),
    ),
    "ct-fp8-block": (
        "compressed-tensors",
        lambda w: compressed(w, {"g": (["Linear"], {**FP8, "strategy": "block", "block_structure": [24, 40]}, None)}),
    ),
    "ct-w4a16": ("compressed-tensors", lambda w: compressed(w, {"g": (["Linear"], {**INT4}, None)})),
    "ct-w4a16-asym": (
        "compressed-tensors",
        lambda w: compressed(w, {"g": (["Linear"], {**INT4, "symmetric": False}, None)}),
    ),
    "ct-w3a16": ("compressed-tensors", lambda w: compressed(w, {"g": (["Linear"], {**INT4, "num_bits": 3}, None)})),
    "ct-w8a16": (
        "compressed-tensors",
        lambda w: compressed(
            w, {"g": (["Linear"], {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}, None)}
        ),
    ),
    "ct-nvfp4": ("compressed-tensors", lambda w: compressed(w, {"g": (["Linear"], {**NVFP4}, None)})),
    "ct-mxfp4": (
        "compressed-tensors",
        lambda w: compressed(w, {"g": (["Linear"], {**MXFP4, "scale_dtype": torch.uint8}, None)}),
    ),
    "ct-mixed": (
        "compressed-tensors",
        lambda w: compressed(
            w,
            {
                "attention": (["re:.*q_proj", "re:.*k_proj"], {**INT8}, TOKENS8),
                "gate": (["re:.*gate_proj"], {**NVFP4}, None),
                "rest": (["re:.*v_proj", "re:.*up_proj", "re:.*down_proj"], {**INT4}, None),
            },
        ),
    ),
    "gptq": ("by specification", lambda w: gptq(w, 4, 32)),
    "gptq-sym-channel": ("by specification", lambda w: gptq(w, 4, -1, sym=True)),
    "gptq-act-order": ("by specification", lambda w: gptq(w, 4, 32, act_order=True)),
    "gptq-v2-3bit": ("by specification", lambda w: gptq(w, 3, 32, v2=True)),
    "gptq-8bit": ("by specification", lambda w: gptq(w, 8, 32)),
    "awq": ("by specification", lambda w: awq(w, 32)),
    "fp8-block": ("by specification", lambda w: fp8(w, (24, 40), static=False)),
    "fp8-tensor-static": ("by specification", lambda w: fp8(w, None, static=True)),
    "fp8-channel": ("by specification", lambda w: fp8(w, None, static=False, channels=True)),
    "modelopt-fp8": ("by specification", lambda w: modelopt(w, "FP8")),
    "modelopt-nvfp4": ("by specification", lambda w: modelopt(w, "NVFP4")),
    "bnb-nf4": ("bitsandbytes", lambda w: bitsandbytes(w, "nf4", True)),
    "bnb-fp4": ("bitsandbytes", lambda w: bitsandbytes(w, "fp4", False)),
    "bnb-int8": ("bitsandbytes", lambda w: bitsandbytes(w, "int8", False)),
    "torchao-int8": ("torchao", lambda w: torchao(w, "int8")),
    "torchao-int8-dynamic": ("torchao", lambda w: torchao(w, "int8-dynamic")),
    "torchao-int4": ("torchao", lambda w: torchao(w, "int4")),
    "torchao-int4-packed": ("torchao", torchao_packed),
    "torchao-fp8": ("torchao", lambda w: torchao(w, "fp8")),
}


def digest(values: Tensor) -> dict[str, str]:
    """Type and hash of what a decoder gives; -0.0 counts as 0.0."""
    values = (values.detach() + 0.0).contiguous()
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "sha256": hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest(),
    }


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/loader/quantized/checkpoints")
    config, weights = base_model()
    for name in sys.argv[2:] or MAKERS:
        tool, make = MAKERS[name]
        stored, decoded, quantization = make(weights)
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        values = dict(config)
        if name == "modelopt-nvfp4":  # the other place of its config
            described = {"producer": {"name": "modelopt"}, "quantization": quantization}
            (folder / "hf_quant_config.json").write_text(json.dumps(described, indent=1) + "\n")
        else:
            quantization = (
                {"quant_method": "modelopt", **quantization} if name.startswith("modelopt") else quantization
            )
            values["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")
        save_file({key: tensor.detach().contiguous() for key, tensor in stored.items()}, folder / "model.safetensors")
        expected = {
            "tool": tool if tool == "by specification" else f"{tool} {version(tool)}",
            "torch": torch.__version__,
            "tensors": {key: digest(tensor) for key, tensor in decoded.items()},
        }
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        print(name, sum(file.stat().st_size for file in folder.iterdir()))


if __name__ == "__main__":
    main()
