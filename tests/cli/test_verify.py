"""quire verify: agrees with transformers on every architecture, and names the very op that was tampered with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from quire.cli.main import main
from quire.cli.verify import DEFAULT_TEXT, Difference, Report, verify
from quire.config.engine import EngineConfig
from quire.layers.quant.plain import PlainLinear
from quire.models.base import CausalLM
from quire.types.errors import ConfigError
from quire.worker import direct
from tests.loader.gguf_experts import write_expert_gguf
from tests.models.zoo import ARCHITECTURES, LATENTS, MIXTURES, RECURRENT, ROPES, Tiny

LLAMA = ARCHITECTURES[0]


def write_tokenizer(folder: Path, vocab_size: int = 250) -> None:
    """Each word of the default text is a token, and so is each of some letters."""
    words = sorted({*DEFAULT_TEXT.split(), *"abcdefghijklmnopqrstuvwxyz"})
    vocab = {"[UNK]": 0, **{word: 7 * index % 240 + 1 for index, word in enumerate(words)}}
    assert len(set(vocab.values())) == len(vocab) < vocab_size
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def make(folder: Path, tiny: Tiny = LLAMA) -> str:
    tiny.make(folder)
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("tiny", ARCHITECTURES + ROPES, ids=lambda tiny: tiny.name)
def test_every_architecture_is_equal(tmp_path: Path, tiny: Tiny) -> None:
    report = verify(EngineConfig.from_flat(model=make(tmp_path, tiny)))
    assert report.first is None, report.format()
    names = [difference.name for difference in report.compared]
    assert sum(name.endswith("self_attn.attention") for name in names) == 4
    assert sum(name.endswith("mlp.down_proj") for name in names) == 4
    assert names[-1] == "logits"


# All but LongCat-Flash, of whose published folders transformers loads none.
LATENT = [tiny for tiny in LATENTS if tiny.name != "longcat-flash"]
INTERLEAVED = [tiny for tiny in MIXTURES if tiny.name == "ernie-moe"]


@pytest.mark.parametrize("tiny", LATENT + INTERLEAVED, ids=lambda tiny: tiny.name)
def test_rotated_pairs_are_compared_as_a_checkpoint_has_them(tmp_path: Path, tiny: Tiny) -> None:
    report = verify(EngineConfig.from_flat(model=make(tmp_path, tiny)))
    assert report.first is None, report.format()
    names = [difference.name for difference in report.compared]
    pieces = {f"{name}_proj" for name in ("q_b", "q", "k")} | {"kv_a_proj_with_mqa"}
    assert sum(name.rpartition(".")[2] in pieces for name in names) == 8
    assert sum(name.endswith("self_attn.attention") for name in names) == 4
    indexers = tiny.keys.get("indexer_types", ["full"] * 4) if "index_topk" in tiny.keys else []
    own = [f"model.layers.{layer}.self_attn.indexer" for layer, kind in enumerate(indexers) if kind == "full"]
    assert sum(".indexer." in name for name in names) == 4 * len(own)
    assert report.left_out == tuple(own)
    assert ("left out" in report.format()) == bool(own)


OTHERWISE = {"llama4": "qk_norm", "llama4-dense": "router", "hunyuan-moe": "query_layernorm", "falcon-h1": "in_proj"}


@pytest.mark.parametrize("name", list(OTHERWISE))
def test_other_values_to_the_same_effect(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers norms heads that it rotated, and scales what comes before a matmul instead of behind it."""
    folder = make(tmp_path, next(tiny for tiny in MIXTURES + RECURRENT if tiny.name == name))
    assert main(["verify", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("other values to the same effect: layer ")
    assert OTHERWISE[name] in lines[1]
    load = direct.load_model

    def load_and_tamper(*args: Any) -> CausalLM:
        loaded = load(*args)
        add_to("model.norm.weight")(loaded)
        return loaded

    monkeypatch.setattr(direct, "load_model", load_and_tamper)
    assert main(["verify", folder]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("DIFFERENT, first at model.")


def test_a_model_whose_weights_transformers_cannot_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longcat = next(tiny for tiny in LATENTS if tiny.name == "longcat-flash")
    assert main(["verify", make(tmp_path, longcat)]) == 1
    assert "error: transformers cannot load" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("parameter", "rows", "named"),
    [
        ("q_b_proj.method.weight", slice(20, 22), "layer 2, self_attn.q_b_proj"),
        ("a_proj.method.weight", slice(60, 64), "layer 2, self_attn.kv_a_proj_with_mqa"),
        ("indexer.k_norm.weight", slice(2, 4), "layer 2, self_attn.indexer.k_norm"),
    ],
)
def test_names_the_rotated_part_that_was_tampered_with(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parameter: str,
    rows: slice,
    named: str,
) -> None:
    dsa = make(tmp_path, next(tiny for tiny in LATENTS if tiny.name == "glm-moe-dsa"))
    load = direct.load_model

    def load_and_tamper(*args: Any) -> CausalLM:
        loaded = load(*args)
        add_to(f"model.layers.2.self_attn.{parameter}", rows)(loaded)
        return loaded

    monkeypatch.setattr(direct, "load_model", load_and_tamper)
    assert main(["verify", dsa, "--quantization", "none"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"DIFFERENT, first at {named} (off by ")


def test_prints_equal_and_exits_with_0(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", model]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("48 ops compared on 20 tokens")
    assert lines[-2:] == ["greedy next token: the same at 20 of 20 positions", "EQUAL"]


def add_to(name: str, rows: slice = slice(None)) -> Callable[[CausalLM], None]:
    def tamper(model: CausalLM) -> None:
        weight = model.get_parameter(name).data
        layer = model.get_submodule(name.removesuffix(".weight"))
        # Outputs are the lines of a transposed weight, else its columns.
        (weight.t() if isinstance(layer, PlainLinear) and not layer.transposed else weight)[rows] += 0.05

    return tamper


def wrong_window(model: CausalLM) -> None:
    attention = model.attention_layers()[3]
    attention.spec = type(attention.spec)(**{**vars(attention.spec), "sliding_window": 4})


def wrong_cap(model: CausalLM) -> None:
    model.lm_head.logit_soft_cap = 5.0


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (add_to("model.embed_tokens.method.weight"), "model.embed_tokens"),
        (add_to("model.layers.0.attn_norm.weight"), "layer 0, input_layernorm"),
        (add_to("model.layers.2.self_attn.qkv_proj.method.weight", slice(0, 8)), "layer 2, self_attn.q_proj"),
        (add_to("model.layers.2.self_attn.qkv_proj.method.weight", slice(-8, None)), "layer 2, self_attn.v_proj"),
        (add_to("model.layers.1.self_attn.o_proj.method.weight"), "layer 1, self_attn.o_proj"),
        (wrong_window, "layer 3, self_attn.attention"),
        (add_to("model.layers.1.mlp_norm.weight"), "layer 1, post_attention_layernorm"),
        (add_to("model.layers.3.mlp.gate_up_proj.method.weight", slice(-8, None)), "layer 3, mlp.up_proj"),
        (add_to("model.norm.weight"), "model.norm"),
        (add_to("lm_head.projection.method.weight"), "lm_head"),
        (wrong_cap, "logits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_the_op_that_was_tampered_with(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tamper: Callable[[CausalLM], None],
    named: str,
) -> None:
    load = direct.load_model

    def load_and_tamper(*args: Any) -> CausalLM:
        loaded = load(*args)
        tamper(loaded)
        return loaded

    monkeypatch.setattr(direct, "load_model", load_and_tamper)
    assert main(["verify", model, "--quantization", "none"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"DIFFERENT, first at {named} (off by ")


@pytest.mark.parametrize("norm", ["q", "k"])
def test_names_a_norm_of_heads(
    norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention applies these norms itself, and some norms add first: neither is a module's call."""
    qwen3 = make(tmp_path, next(tiny for tiny in ARCHITECTURES if tiny.name == "qwen3"))
    load = direct.load_model

    def load_and_tamper(*args: Any) -> CausalLM:
        loaded = load(*args)
        add_to(f"model.layers.2.self_attn.qk_norm.{norm}.weight")(loaded)
        return loaded

    monkeypatch.setattr(direct, "load_model", load_and_tamper)
    assert main(["verify", qwen3]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("56 ops compared"), "all norms are among them"
    assert lines[-1].startswith(f"DIFFERENT, first at layer 2, self_attn.{norm}_norm (off by ")


def test_a_weight_that_differs_on_disk(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if the other program read another file: its model is replaced while it loads."""
    original = AutoModelForCausalLM.from_pretrained

    def other(*args: Any, **kwargs: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
        loaded, found = original(*args, **kwargs)
        loaded.get_parameter("model.layers.1.self_attn.k_proj.weight").data[0, 0] += 1.0
        return loaded, found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", other)
    assert main(["verify", model]) == 1
    assert "layer 1, self_attn.k_proj" in capsys.readouterr().out.splitlines()[-1]


def test_half_precision_has_its_own_tolerance(model: str) -> None:
    report = verify(EngineConfig.from_flat(model=model, dtype="bfloat16"))
    assert report.first is None, report.format()
    assert max(difference.relative for difference in report.compared) > 1e-3


def test_without_transformers(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["verify", model]) == 1
    assert capsys.readouterr().err == (
        "error: verify needs transformers; install it with: pip install 'quire[verify]'\n"
    )


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({"load_format": "dummy"}, "a b", "load_format is 'dummy'"),
        ({}, "", "--text is '', which gives no tokens"),
        ({}, "a b c d " * 5000, "--text has 20000 tokens but the model takes [0-9]+; shorten the text"),
    ],
)
def test_nothing_to_compare(model: str, settings: dict[str, Any], text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(EngineConfig.from_flat(model=model, **settings), text)


def test_a_model_that_transformers_cannot_load(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in Path(model).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}))
    assert main(["verify", str(tmp_path)]) == 1
    assert "error: transformers cannot load" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_transformers_takes_for_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads Mixtral's GGUF files as Llama's, and makes up the weights that these lack."""
    write_expert_gguf("mixtral", tmp_path / "model.gguf")
    assert main(["verify", str(tmp_path / "model.gguf")]) == 1
    printed = capsys.readouterr()
    assert "transformers does not find 9 tensors of its LlamaForCausalLM" in printed.err
    assert "DIFFERENT" not in printed.out


def test_what_transformers_fails_with_is_told(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("issues during automatic conversion")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    assert main(["verify", model]) == 1
    assert "nothing to compare with: issues during automatic conversion; try" in capsys.readouterr().err


def test_nan_is_a_difference_and_the_worst_one() -> None:
    ops = [Difference("a", 0.0), Difference("model.layers.7.mlp.up_proj", float("nan")), Difference("c", 9.0)]
    report = Report(5, ops, 1e-4, 0)
    assert report.first is ops[1]
    assert "worst: layer 7, mlp.up_proj (off by nan)" in report.format()
    assert "still equal: a (off by 0.0e+00)" in report.format()


class Loaded(Exception):
    """Instead of a model."""


def test_nothing_is_rounded_unless_asked_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds nothing either: a processor with fast integers is not a difference to be found."""
    loaded: list[EngineConfig] = []

    def load(config: EngineConfig) -> None:
        loaded.append(config)
        raise Loaded

    monkeypatch.setattr(direct, "DirectModel", load)
    for given in ({}, {"activations": "int16", "kv_cache_dtype": "float16"}):
        with pytest.raises(Loaded):
            verify(EngineConfig.from_flat(model=model, **given))
    kept = [(config.model.activations, config.cache.kv_cache_dtype) for config in loaded]
    assert kept == [("float32", "float32"), ("int16", "float16")]


@pytest.mark.nightly  # transformers takes 20 seconds to decode the file
def test_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "EQUAL"
