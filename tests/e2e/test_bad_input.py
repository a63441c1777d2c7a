"""Whatever a user gets wrong is one typed error that names the value and the fix; nothing hangs, nothing is left."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.loader import fetch
from quire.types import errors
from quire.types.errors import BatchError, QuireError, RequestError
from quire.types.sampling import MAX_LOGIT_BIAS, MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MIN_TEMPERATURE
from tests.e2e.tiny import VOCAB, make_model
from tests.e2e.tiny_tokenizer import write_tokenizer
from tests.loader.gguf_tiny import write_tiny_gguf

SETTINGS: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory": 1 << 22}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"), "llama")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SETTINGS) as llm:
        yield llm


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model to be damaged."""
    return shutil.copytree(model, tmp_path / "broken")


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def drop_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")


def misshape(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], object], type[QuireError], str]] = {
    "architecture": (
        lambda folder: edit_config(folder, architectures=["NoSuchForCausalLM"]),
        errors.UnknownArchitectureError,
        "unknown architecture 'NoSuchForCausalLM'; known: .*LlamaForCausalLM",
    ),
    "no architecture": (
        lambda folder: edit_config(folder, architectures=[]),
        errors.ModelError,
        'no "architectures"; it must name one',
    ),
    "no size": (
        lambda folder: edit_config(folder, hidden_size=None),
        errors.ModelError,
        "no 'hidden_size'",
    ),
    "truncated": (
        lambda folder: cut(folder / "model.safetensors", 100_000),
        errors.CheckpointError,
        r"model.safetensors is truncated .* the file has 100000; download it again",
    ),
    "truncated header": (
        lambda folder: cut(folder / "model.safetensors", 100),
        errors.CheckpointError,
        "model.safetensors is truncated .*download it again",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        errors.CheckpointError,
        "neither model.safetensors nor .*; download the model again",
    ),
    "missing tensor": (drop_tensor, errors.WeightMismatchError, "missing .*model.layers.2.mlp.up_proj.weight"),
    "misshapen tensor": (misshape, errors.WeightMismatchError, r"model.norm.weight \(expected \[64\], found \[3\]\)"),
    "config": (
        lambda folder: cut(folder / "config.json", 30),
        errors.ModelError,
        "config.json.*download",
    ),
    "tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        errors.TokenizerError,
        "tokenizer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model(broken: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, kind, message = DAMAGES[damage]
    spoil(broken)
    with pytest.raises(kind, match=f"(?s){message}"):
        LLM(str(broken), **SETTINGS)
    assert main(["run", "--model", str(broken), "Hello"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("keep", [10, 0.5, 0.999])
def test_a_truncated_gguf(tmp_path: Path, keep: float, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf("llama", path)
    size = path.stat().st_size
    cut(path, int(keep) if keep >= 1 else int(size * keep))
    with pytest.raises(errors.CheckpointError, match=r"model.gguf .*download it again"):
        LLM(str(path), **SETTINGS)
    assert main(["fit", str(path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"model": "/no/such/model"}, errors.ModelNotFoundError, "no model '/no/such/model'.*check the spelling"),
        ({"model": "smollm3"}, errors.ModelNotFoundError, r"no model 'smollm3'.* alias \(minilm, smollm2\)"),
        ({"max_len": 3}, errors.ConfigError, "unknown setting 'max_len'; known: "),
        ({"max_model_len": 4096}, errors.MemoryPlanError, "trained for 512 tokens; set --max-model-len 512"),
        ({"kv_cache_memory": 1000}, errors.MemoryPlanError, "kv_cache_memory is 1000B.*--kv-cache-memory 1MiB"),
        ({"kv_cache_memory": 1 << 50}, errors.MemoryPlanError, "available .*; set --kv-cache-memory "),
        ({"dtype": "int3"}, errors.ConfigError, "dtype is 'int3' but must be one of"),
        ({"chat_template": "/no/such.jinja"}, errors.ConfigError, "chat_template names the file '/no/such.jinja'"),
        ({"tokenizer": "/no/such"}, errors.ModelNotFoundError, "no model '/no/such'"),
    ],
)
def test_wrong_settings(model: Path, settings: dict[str, Any], kind: type[QuireError], message: str) -> None:
    with pytest.raises(kind, match=message):
        LLM(**{"model": str(model), **settings})


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ("", "prompt", "the prompt is empty; give at least one"),
        ([], "prompt", "the prompt is empty"),
        ([3, VOCAB], "prompt_token_ids", f"prompt_token_ids holds {VOCAB} .* from 0 to {VOCAB - 1}"),
        ([-1], "prompt_token_ids", "prompt_token_ids holds -1"),
        ("a" * 64, "prompt", "maximum context length is 64 tokens, .* but the prompt has 64; shorten the prompt"),
        ({"prompt": 3}, "prompt", "prompt is 3 but must be text"),
        ({"text": "a"}, "prompt", "unknown prompt key 'text'; known: "),
    ],
)
def test_a_bad_prompt(llm: LLM, prompt: Any, field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as info:
        llm.generate([prompt], GREEDY)
    assert info.value.field == field


def test_a_tokenizer_with_more_tokens_than_the_model(broken: Path) -> None:
    write_tokenizer(broken, extra_tokens=150)
    with LLM(str(broken), **SETTINGS) as llm:
        with pytest.raises(RequestError, match=r"holds 247 but token ids of this model go from 0 to 198"):
            llm.generate("a<149>", GREEDY)
        assert llm.generate("ab", GREEDY)[0].finished


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": [VOCAB]},
        {"allowed_token_ids": [VOCAB + 5]},
        {"logit_bias": {VOCAB: 1.0}},
        {"logprobs": VOCAB + 1},
        {"prompt_logprobs": VOCAB + 1},
    ],
)
def test_sampling_values_that_the_model_does_not_have(llm: LLM, params: dict[str, Any]) -> None:
    (field,) = params
    with pytest.raises(RequestError, match=f"^{field} ") as info:
        llm.generate("Hello", SamplingParams(**params))
    assert info.value.field == field


LIMITS: list[dict[str, Any]] = [
    {"temperature": MAX_TEMPERATURE},
    {"temperature": 1.001 * MIN_TEMPERATURE, "logit_bias": {5: MAX_LOGIT_BIAS, 6: -MAX_LOGIT_BIAS}},
    {"repetition_penalty": MAX_REPETITION_PENALTY, "logit_bias": {5: MAX_LOGIT_BIAS}, "temperature": 1e-4},
    {"repetition_penalty": 1 / MAX_REPETITION_PENALTY, "logit_bias": {5: -MAX_LOGIT_BIAS}, "temperature": 1e-4},
    {"top_p": 5e-324},
    {"top_p": 1e-38, "top_k": 3},
    {"min_p": 5e-324},
    {"min_p": 1.0, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"seed": (1 << 64) - 1},
    {"seed": -(1 << 63)},
]


def test_every_limit_of_the_sampling_values_can_be_computed(llm: LLM) -> None:
    """Alone and together: what is allowed never overflows."""
    params = [SamplingParams(**{"seed": 1, "max_tokens": 4, "ignore_eos": True} | values) for values in LIMITS]
    together = [output.outputs[0].token_ids for output in llm.generate(["Hello"] * len(params), params)]
    assert [len(token_ids) for token_ids in together] == [4] * len(params)
    assert [llm.generate("Hello", one)[0].outputs[0].token_ids for one in params] == together


def test_contradictory_sampling_values_fail_the_request_alone(llm: LLM) -> None:
    impossible = SamplingParams(allowed_token_ids=[2], min_tokens=2, max_tokens=4)  # 2 is the end of the text
    with pytest.raises(BatchError, match=r"1 of 3 requests failed.*request 1: .*no token may be chosen") as info:
        llm.generate(["a", "b", "c"], [GREEDY, impossible, GREEDY])
    assert isinstance(info.value.errors[1], RequestError)
    assert info.value.errors[1].field == "allowed_token_ids"
    assert [output is not None for output in info.value.outputs] == [True, False, True]


def test_a_bad_request_in_a_batch_fails_alone(llm: LLM) -> None:
    alone = llm.generate("good", GREEDY)[0].outputs[0].token_ids
    with pytest.raises(BatchError, match="3 of 5 requests failed") as info:
        llm.generate(["good", "", [VOCAB], "x" * 100, "good"], GREEDY)
    assert sorted(info.value.errors) == [1, 2, 3]
    assert all(isinstance(error, RequestError) for error in info.value.errors.values())
    assert [info.value.outputs[index].outputs[0].token_ids for index in (0, 4)] == [alone, alone]
    assert llm.generate("good", GREEDY)[0].outputs[0].token_ids == alone


def test_nan_weights_fail_their_requests_and_not_the_engine(broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][3 + ord("z") - 32] = torch.nan
    save_file(weights, broken / "model.safetensors")
    with LLM(str(broken), **SETTINGS) as llm:
        for _ in range(2):
            with pytest.raises(BatchError, match=r"1 of 2 .* NaN or infinite .* dtype are unsuitable") as info:
                llm.generate(["fizz", "good"], GREEDY)
            assert info.value.outputs[1].finished


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0 but must be between 0 and 1e+06"),
        (["--min-tokens", "5", "--max-tokens", "4"], "min_tokens is 5 but must be at most max_tokens (4)"),
        (["--model", "/no/such"], "no model '/no/such'"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0 but must be at least 1"),
        ([], "the prompt is empty"),
    ],
)
def test_the_command_line_says_it_in_one_line(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--raw", "--model", str(model), "--kv-cache-memory", "4MiB"]
    assert main(["run", "" if not arguments else "Hello", *settings, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize("when", ["before", "while downloading"])
def test_no_disk_space_for_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    if when == "before":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    else:

        def full(*args: Any) -> Path:
            (args[1] / "half.whl").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(fetch, "_download", full)
    with pytest.raises(errors.DiskSpaceError, match=r"not enough disk space .*QUIRE_CACHE"):
        LLM()
    assert main(["run", "Hello"]) == 1
    assert capsys.readouterr().err.startswith("error: not enough disk space")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_without_a_tokenizer_prompts_are_token_ids(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama")  # which has no tokenizer that could be read
    with LLM(str(folder), skip_tokenizer_init=True, **{**SETTINGS, "kv_cache_memory": "4MiB"}) as llm:
        (output,) = llm.generate([1, 5, 9], SamplingParams(temperature=0.0, max_tokens=4, logprobs=1), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
        assert output.outputs[0].text == ""
        for prompt in ("Hello", {"prompt": "Hello"}):
            with pytest.raises(RequestError, match="a text prompt needs a tokenizer; give prompt_token_ids instead"):
                llm.generate(prompt, GREEDY)
        with pytest.raises(RequestError, match="a chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "Hello"}])
        with pytest.raises(RequestError, match=r"stop .* needs a tokenizer"):
            llm.generate([1], SamplingParams(stop=["x"]))
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.get_tokenizer()
