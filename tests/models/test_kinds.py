"""A mixer, an MLP and a model are each one file and one registry line: the files are written here, by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.layers.fusion import Form, Forms, Stage, settle
from quire.loader.dummy import fill_dummy
from quire.loader.mapper import allocate
from quire.models.decoder import DecoderLM
from quire.models.kinds import MIXERS, MLPS
from quire.models.registry import ARCHITECTURES, describe, generator_class
from quire.types.errors import ModelError, UnknownNameError
from quire.types.ledger import EngineSizes
from quire.utils.registry import Registry
from tests.models.harness import build, run_chunks
from tests.models.zoo import SIZES

MIXER = '''
"""A mixer without a cache: each token by itself, through one matrix."""
from quire.layers.linear import ColumnParallelLinear
from quire.models.kinds import Mixer

class TokenMixer(Mixer):
    def __init__(self, config, ctx, layer):
        super().__init__(config, ctx, layer)
        size = config.hidden_size
        self.proj = ColumnParallelLinear(size, size, bias=False, target=ctx.target, group=ctx.group)

    def forward(self, hidden, rotation, batch):
        out = self.proj(hidden)
        return out if batch.wanted is None else out[batch.wanted.tokens]
'''
MLP = '''
"""An MLP without gates: two matrices and a ReLU."""
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.models.kinds import MLP
from quire.types.ledger import LedgerLine

class ReluMLP(MLP):
    def __init__(self, config, ctx, layer):
        super().__init__(config, ctx, layer)
        sizes = config.hidden_size, config.intermediate_size
        self.up = ColumnParallelLinear(*sizes, bias=False, target=ctx.target, group=ctx.group)
        self.down = RowParallelLinear(*sizes[::-1], bias=False, target=ctx.target, group=ctx.group)

    def contributes(self, sizes):
        yield LedgerLine("relu", sizes.max_num_batched_tokens * self.up.out_features * sizes.itemsize, "all tokens")

    def forward(self, hidden):
        return self.down(self.up(hidden).clamp(min=0))
'''
MODEL = '''
"""Llama with other blocks in its upper layers."""
from dataclasses import replace
from quire.models.config import read_config
from quire.models.decoder import DecoderLM

class Mixed(DecoderLM):
    @classmethod
    def decoder_config(cls, config):
        return replace(
            read_config(config),
            mixers=("attention", "attention", "token", "token"),
            mlps=("gated", "relu", "gated", "relu"),
        )
'''
ENCODER = '''
"""A model that generates nothing."""
from quire.models.base import Model, ModelDescription

class Encoder(Model):
    capabilities = frozenset({"encodes", "pools"})

    @classmethod
    def describe(cls, config):
        return ModelDescription(100, 8, 1, 64, ())
'''
CONFIG = {**SIZES, "architectures": ["MixedForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-6}
LINES: tuple[tuple[Registry[Any], str, str], ...] = (
    (MIXERS, "token", "added.token_mixer:TokenMixer"),
    (MLPS, "relu", "added.relu_mlp:ReluMLP"),
    (ARCHITECTURES, "MixedForCausalLM", "added.mixed:Mixed"),
    (ARCHITECTURES, "TinyEncoderModel", "added.encoder:Encoder"),
)


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contexts: ExitStack) -> None:
    package = tmp_path / "added"
    package.mkdir()
    sources = {"__init__": "", "token_mixer": MIXER, "relu_mlp": MLP, "mixed": MODEL, "encoder": ENCODER}
    for name, source in sources.items():
        (package / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, "added" if name == "__init__" else f"added.{name}", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (MIXERS, MLPS, ARCHITECTURES):
        contexts.enter_context(registry.with_entries({}))
    for registry, name, target in LINES:
        registry.register(name, target)


def make(config: Mapping[str, Any] = CONFIG) -> DecoderLM:
    model = build(dict(config), 64)
    assert isinstance(model, DecoderLM)
    fill_dummy(model, amplitude=0.3)
    return model


def test_layers_of_several_kinds_make_a_model_that_any_chunking_runs_alike() -> None:
    model = make()
    kinds = [(type(layer.self_attn).__name__, type(layer.mlp).__name__) for layer in model.model.layers]
    assert kinds == [
        ("AttentionBlock", "GatedMLP"),
        ("AttentionBlock", "ReluMLP"),
        ("TokenMixer", "GatedMLP"),
        ("TokenMixer", "ReluMLP"),
    ]
    tokens = [(7 * index) % 250 for index in range(23)]
    whole = run_chunks(model, tokens, [23])
    assert whole.isfinite().all()
    for sizes in ([5, 1, 7, 2], [1]):
        torch.testing.assert_close(run_chunks(model, tokens, sizes), whole, atol=1e-4, rtol=1e-4)


def test_only_layers_that_keep_something_are_cached() -> None:
    description = describe(CONFIG)
    assert description.num_layers == 4
    assert len(description.layers) == len(make().attention_layers()) == 2


def test_a_block_says_its_line_of_the_ledger() -> None:
    """Once, although two layers have the block: they run one after the other."""
    sizes = EngineSizes(
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        block_size=16,
        vocab_size=CONFIG["vocab_size"],
        hidden_size=CONFIG["hidden_size"],
        itemsize=2,
        token_bytes=100.0,
    )
    lines = {line.name: line for line in make().contributes(sizes)}
    assert lines["activations"].num_bytes == 3200
    assert lines["relu"].num_bytes == 32 * CONFIG["intermediate_size"] * 2
    assert len(lines) == 2


def test_a_model_that_generates_nothing_is_registered_and_described_and_not_served() -> None:
    config = {"architectures": ["TinyEncoderModel"]}
    assert describe(config).layers == ()
    with pytest.raises(ModelError, match="TinyEncoderModel does not generate tokens; what it does: encodes, pools"):
        generator_class(config)


def test_an_unknown_kind_is_named_beside_the_known_ones() -> None:
    known = {"attention": "blocks:AttentionBlock"}
    expected = pytest.raises(UnknownNameError, match="unknown mixer 'token'; known: attention")
    with MIXERS.with_entries(known, only=True), expected:
        make()


class Recorder(Stage):
    """Stands for a mixer or an MLP: takes a form, and notes which forms its reader takes."""

    def __init__(self, *forms: Form) -> None:
        super().__init__()
        self.forms, self.fed = frozenset(forms), list[Forms]()

    @property
    def accepts(self) -> Forms:
        return self.forms

    def feed(self, accepted: Forms) -> None:
        self.fed.append(accepted)


@pytest.mark.parametrize(
    ("architecture", "keys", "merges"),
    [
        ("LlamaForCausalLM", {}, True),
        ("GraniteForCausalLM", {"residual_multiplier": 0.5}, False),  # a factor comes between
        ("Gemma2ForCausalLM", {}, False),  # a norm comes between
        ("Olmo2ForCausalLM", {}, False),
    ],
)
def test_results_stay_in_partial_sums_only_where_a_norm_reads_them_as_they_are(
    architecture: str, keys: dict[str, Any], merges: bool
) -> None:
    config = {**CONFIG, **keys, "architectures": [architecture]}
    model = build(config, 64)
    assert isinstance(model, DecoderLM)
    allocate(model)
    for layer in model.model.layers:
        layer.self_attn, layer.mlp = Recorder(), Recorder()
    settle(model)
    expected = [frozenset({Form.ROWS, Form.PARTIAL_SUMS}) if merges else frozenset({Form.ROWS})]
    for layer in model.model.layers:
        assert layer.self_attn.fed == layer.mlp.fed == expected


def test_norms_quantize_for_blocks_that_read_quantized_activations() -> None:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"]}
    model = build(config, 64)
    assert isinstance(model, DecoderLM)
    allocate(model)
    first = model.model.layers[0]
    first.mlp = Recorder(Form.E4M3_PER_TOKEN)
    settle(model)
    first.mlp_norm.weight.data.fill_(1.0)
    first.attn_norm.weight.data.fill_(1.0)
    hidden = torch.randn(3, CONFIG["hidden_size"])
    quantized, stream = first.mlp_norm.merge(hidden, torch.ones_like(hidden))
    assert quantized.values.dtype == torch.float8_e4m3fn
    assert torch.equal(stream, hidden + 1)
    assert isinstance(first.attn_norm.merge(hidden, None)[0], torch.Tensor)
    assert isinstance(model.model.norm.merge(hidden, None)[0], torch.Tensor), "the final norm feeds the head"
