"""Models whose weights stay packed: the same answers as dequantized ones, in the memory that was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.kernels.cpu.library import unavailable
from quire.layers.linear import Linear
from quire.layers.weights import weighted_layers
from quire.models.base import CausalLM
from quire.planning.engine_plan import EnginePlan, plan_engine
from quire.types.errors import ConfigError
from quire.types.sampling import SamplingParams
from quire.worker.direct import DirectModel
from quire.worker.worker import load_model
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.loader.gguf_tiny import write_tiny_gguf
from tests.loader.test_mapped import needs_proc, resident

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="needs the native CPU library")

TOKENS = [3, 9, 27, 81, 43, 29, 7, 21, 63, 55, 12, 36]
SMALL_BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"]
LARGE_BLOCKS = [
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_M",
    "IQ3_S",
    "TQ2_0",
    "MXFP4",
]  # the first has no kernels and is decoded


def load(model: Path, **settings: Any) -> tuple[EnginePlan, CausalLM]:
    config = EngineConfig.from_flat(model=str(model), max_model_len=64, **settings)
    plan = plan_engine(config)
    return plan, load_model(plan, config)


def logits(model: Path, **settings: Any) -> torch.Tensor:
    with torch.inference_mode():
        # Keys and values in float32, because only the weights are compared.
        settings = {"model": str(model), "max_model_len": 64, "kv_cache_dtype": "float32", **settings}
        return DirectModel(EngineConfig.from_flat(**settings)).logits(TOKENS)


def taken(model: CausalLM) -> int:
    """Bytes of all weights and tables that the model holds."""
    held = sum(buffer.nbytes for buffer in model.buffers())
    for _, layer in weighted_layers(model):
        methods = [child for child in layer.children() if hasattr(child, "num_bytes")]
        held += sum(method.num_bytes for method in methods)  # type: ignore[misc]  # asked for above
        held += sum(parameter.nbytes for parameter in layer.parameters(recurse=False))
    return held


def weights_of(plan: EnginePlan) -> int:
    return next(entry.num_bytes for entry in plan.ledger.entries if entry.name == "weights")


@pytest.mark.parametrize(
    ("name", "quant"),
    [("llama", quant) for quant in SMALL_BLOCKS] + [("llama-wide", quant) for quant in LARGE_BLOCKS],
)
def test_every_gguf_type_answers_as_if_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, quant: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(name, path, quant)
    packed, rounded = logits(path, activations="float32"), logits(path, activations="int16")
    with monkeypatch.context() as without:
        without.setattr("quire.kernels.cpu.library.load", lambda: None)
        reference = logits(path)
    torch.testing.assert_close(packed, reference, atol=2e-4, rtol=1e-3)
    # Activations that are rounded are off by 1 / 65534 of the largest of 32, in every layer.
    assert (rounded - reference).abs().max() < 1e-3 * reference.abs().max()
    assert torch.equal(rounded, packed) == (quant in ("Q2_K", "F16", "BF16")), "floats are not rounded"
    plan, model = load(path)
    assert weights_of(plan) == taken(model)
    assert {type(m.method).__name__ for m in model.modules() if isinstance(m, Linear)} == {"PackedLinear"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen2", dtype="bfloat16", tie_word_embeddings=True)


def test_half_precision_checkpoints_keep_their_type_and_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = load(folder)
    full_plan, full = load(folder, dtype="float32")
    assert weights_of(plan) == taken(model)
    assert weights_of(full_plan) == taken(full)
    assert weights_of(plan) < 0.6 * weights_of(full_plan)
    torch.testing.assert_close(logits(folder), logits(folder, dtype="float32"), atol=1e-4, rtol=1e-4)
    monkeypatch.setattr("quire.kernels.cpu.library.load", lambda: None)
    torch.testing.assert_close(logits(folder), logits(folder, dtype="float32"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("method", "bound"), [("int8", 0.02), ("int4", 0.25), ("fp8", 0.1), ("mxfp4", 0.4)])
def test_quantizing_while_loading(tmp_path: Path, method: str, bound: float) -> None:
    """Small weights: with large ones a random model blows up every error, as no trained model does."""
    folder = make_model(tmp_path, "qwen2", initializer_range=0.05)
    plan, model = load(folder, quantization=method)
    assert weights_of(plan) == taken(model)
    expected = logits(folder)
    assert (logits(folder, quantization=method) - expected).norm() / expected.norm() < bound


def test_a_float_gguf_can_be_quantized_and_a_quantized_one_cannot(tmp_path: Path) -> None:
    half, quantized = tmp_path / "half.gguf", tmp_path / "q8.gguf"
    write_tiny_gguf("llama", half, "F16")
    write_tiny_gguf("llama", quantized, "Q8_0")
    plan, model = load(half, quantization="int8")
    assert weights_of(plan) == taken(model)
    for method in ("int8", "int4", "fp8", "mxfp4"):
        message = (
            f"quantization is '{method}', which quantizes float weights while they are loaded, but .* is quantized"
            r" already \(.*weights .*are Q8_0\); leave --quantization out"
        )
        with pytest.raises(ConfigError, match=message):
            load(quantized, quantization=method)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int8", "dtype": "bfloat16"}, "'int8' but it computes in float32, not in torch.bfloat16"),
        ({"quantization": "fp8", "dtype": "bfloat16"}, "'fp8' but it runs on cuda, and on cpu in float32"),
    ],
)
def test_what_cannot_be_combined_is_refused(folder: Path, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **settings)


@needs_proc
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_pages_of_the_file_leave_memory_as_weights_are_packed(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        path = tmp_path / "wide.gguf"
        write_tiny_gguf("llama-wide", path, "Q8_0")
        plan, model = load(path)
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "dtype": "bfloat16"}
        path = make_model(tmp_path / "wide", "llama", **sizes) / "model.safetensors"
        plan, model = load(path.parent)
    assert plan.checkpoint is not None, "the file is still mapped"
    assert path.stat().st_size > 1 << 20
    assert resident(path) < 64 << 10
    assert taken(model) > 1 << 20


@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "int8"}, {"quantization": "int4"}, {"quantization": "int8", "activations": "int8"}],
    ids=str,
)
def test_answers_do_not_depend_on_the_batch(folder: Path, settings: dict[str, str]) -> None:
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=6, logprobs=2, ignore_eos=True)
    prompts = [[1 + (7 * index + position) % 190 for position in range(3 + 5 * index)] for index in range(9)]
    together = Driver(make_engine(folder, max_num_batched_tokens=32, max_num_seqs=8, **settings))
    for index, prompt in enumerate(prompts):
        together.add(str(index), prompt, params)
    answers = together.finish()
    alone = Driver(make_engine(folder, max_num_seqs=1, **settings))
    for index in (0, 3, 8):
        alone.add(str(index), prompts[index], params)
        assert alone.finish()[str(index)].content() == answers[str(index)].content()
