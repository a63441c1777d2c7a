"""quire fit prints the ledger for the settings it was given."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine.spare import SPARE_MEMORY
from quire.planning.engine_plan import plan_memory
from quire.types.ledger import LedgerLine
from quire.utils.units import format_bytes
from tests.models.zoo import INDEX, LATENT_KEYS, ROUTED_EXPERTS

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 100, "max_position_embeddings": 256, **SIZES}


def test_prints_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path
    (model / "config.json").write_text(json.dumps(CONFIG))
    asked: list[EngineConfig] = []

    def plan_memory(config: EngineConfig, others: list[LedgerLine], stage: int, platform: None) -> SimpleNamespace:
        asked.append(config)
        return SimpleNamespace(format=lambda: "weights  1 GiB\ntotal    1 GiB", num_kv_blocks=1)

    planning = ModuleType("quire.planning.engine_plan")
    monkeypatch.setattr(planning, "plan_memory", plan_memory, raising=False)
    monkeypatch.setitem(sys.modules, "quire.planning.engine_plan", planning)
    assert main(["fit", str(model), "--max-model-len", "128"]) == 0
    assert asked == [EngineConfig.from_flat(model=str(model), max_model_len=128)]
    assert capsys.readouterr().out == "weights  1 GiB\ntotal    1 GiB\n"


def test_a_config_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIG
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["fit", str(tmp_path), "--kv-cache-dtype", "float32", "--kv-cache-memory"]
    assert main([*command, "1MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["KV", "blocks", "1MiB", "64", "blocks,", "1024", "tokens"]
    assert lines[-1] == "max_model_len = 256 (what the model was trained for)"
    assert " parameters of 32." in lines[0]
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    assert main([*command, "1MiB"]) == 0
    assert " parameters of 16." in capsys.readouterr().out.splitlines()[0]
    assert main([*command, "10KiB"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: kv_cache_memory is 10KiB but one request of 128 tokens needs ")
    assert line.endswith("; set --kv-cache-memory 1MiB")


def test_the_spare_process_of_a_server_is_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the rest is what `quire serve` plans, which leaves as much to others."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    command = ["fit", str(tmp_path), "--reserved-memory", "1MiB"]
    assert main(command) == 0
    with_spare = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in with_spare if line.startswith(("reserved", "spare"))] == [
        ["reserved", "1MiB", "left"],
        ["spare", "engine", "300MiB"],
    ]
    assert main([*command, "--no-spare-engine"]) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if line.startswith("spare")]
    served = plan_memory(EngineConfig.from_flat(model=str(tmp_path), reserved_memory=1 << 20).reserving(SPARE_MEMORY))
    shown = next(line.split() for line in with_spare if line.startswith("KV blocks"))
    assert shown[3] == str(served.num_kv_blocks)
    (total,) = (line.split()[1] for line in with_spare if line.startswith("total"))
    assert total == format_bytes(served.total)


def test_the_parts_say_what_they_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["fit", str(tmp_path), "--attention-backend", "torch_ref"]) == 0
    names = [line[:12].strip() for line in capsys.readouterr().out.splitlines()][:-3]
    assert names == [
        "weights",
        "KV blocks",
        "rows",
        "block tables",
        "masks",
        "sampling",
        "activations",
        "attention",
        "spare engine",
    ]


def test_a_standby_is_in_the_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "smollm2", "--standby", "--no-spare-engine"]) == 0
    lines = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "a second process of `quire serve`, loaded and idle" in lines["standby engine"]


def test_what_a_latent_cache_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {**SIZES, **LATENT_KEYS, **INDEX, **ROUTED_EXPERTS, "vocab_size": 100, "max_position_embeddings": 256}
    latent = "latent cache: 44 numbers of a token in a layer"
    heads = "; keys and values of 4 heads would be 192, 4.4 times as many"
    for architecture, expected in {
        "DeepseekV3ForCausalLM": latent + heads,
        "DeepseekV32ForCausalLM": f"{latent}, and 16 of an index key{heads}",
    }.items():
        (tmp_path / "config.json").write_text(json.dumps({**keys, "architectures": [architecture]}))
        assert main(["fit", str(tmp_path)]) == 0
        assert expected in capsys.readouterr().out.splitlines()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["fit", str(tmp_path)]) == 0
    assert "latent" not in capsys.readouterr().out


FEW_LAYERS = {  # a large model that is planned in a moment
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(FEW_LAYERS))
    return str(folder)


def test_cards_that_are_not_here(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", llama, "--machine", "h200", "-tp", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("weights ")
    assert lines[0].endswith(" M parameters of 16.0 bits, shared by 8 ranks")
    assert any("available (of one H200)" in line for line in lines)
    assert main(["fit", llama, "--machine", "4xh200", "-tp", "8"]) == 1
    assert "with 4 cards, but -tp, -pp and -dp need 8" in capsys.readouterr().err
    assert main(["fit", llama, "--machine", "h200", "--device", "cpu"]) == 1
    assert "leave one of the two out" in capsys.readouterr().err
    for size in ("1", "8"):
        assert main(["fit", llama, "--machine", "h200", "-tp", size, "--tp-exact"]) == 1
        assert "equal bits are promised of the CPU's kernels alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "sizes"),
    [
        ("8xh200", "-tp 1 -pp 1 -dp 8"),  # one card holds it, and a request of full length
        ("8xrtx4090", "-tp 2 -pp 1 -dp 4"),
        ("rtx4090", "-tp 2 -pp 1 -dp 1"),  # how many are needed
    ],
)
def test_a_topology_is_chosen_and_explained(
    machine: str, sizes: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", llama, "--machine", machine, "--parallel", "auto"]) == 0
    first, why, *ledger = capsys.readouterr().out.splitlines()
    assert first.startswith(f"topology: {sizes} on ")
    assert "a request of 131072 tokens" in why
    assert ("-tp 1 -pp 1: " in why) == ("rtx4090" in machine)
    assert ledger[-1].startswith("max_model_len = 131072 ")


def test_a_model_that_no_machine_of_this_size_holds(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", llama, "--machine", "1xl4", "--parallel", "auto", "--gpu-memory-utilization", "0.5"]) == 1
    assert "no topology of up to 1 cards holds the model: not enough memory" in capsys.readouterr().err
