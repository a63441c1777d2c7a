"""Tokenizers from Hugging Face folders, against transformers on the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from transformers import PreTrainedTokenizerFast

from quire.frontend.tokenizer import LONG_TEXT, Tokenizer, load_tokenizer
from quire.types.errors import RequestError, TokenizerError
from tests.frontend.text_helpers import TEXTS, byte_level, llama_tokenizer


def write_folder(folder: Path, kind: str = "llama-bpe", **config: Any) -> Path:
    backend = llama_tokenizer() if kind == "llama" else byte_level(kind)
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "post-processor": ("llama-bpe", {}),
    "no post-processor": ("gpt-2", {}),
    "flags beside the file": ("gpt-2", {"add_bos_token": True, "add_eos_token": True}),
    "no bos": ("llama-bpe", {"add_bos_token": False}),
    "eos only": ("qwen2", {"add_eos_token": True}),
    "token objects": ("qwen2", {"eos_token": {"content": "<|end|>", "__type": "AddedToken"}, "pad_token": "<s>"}),
    "sentencepiece": ("llama", {"add_bos_token": True, "eos_token": "</s>", "unk_token": "<unk>"}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_means_what_transformers_makes_of_it(name: str, tmp_path: Path) -> None:
    kind, config = CONFIGS[name]
    folder = write_folder(tmp_path, kind, **config)
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)

    @given(TEXTS)
    @settings(max_examples=40, suppress_health_check=[HealthCheck.nested_given])
    def check(text: str) -> None:
        for add_special_tokens in (True, False):
            ids = theirs.encode(text, add_special_tokens=add_special_tokens)
            assert ours.encode(text, add_special_tokens) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)

    check()
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.special_tokens == {
        name: token for name, token in theirs.special_tokens_map.items() if isinstance(token, str)
    }
    hidden = [index for index in range(len(theirs)) if theirs.decode([index], skip_special_tokens=True) == ""]
    assert [index for index in hidden if theirs.decode([index])] == list(filter(ours.is_special, range(len(theirs))))


def test_end_tokens_are_gathered_from_all_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    own = load_tokenizer(folder).eos_token_id
    assert own is not None
    write_json(folder / "generation_config.json", {"eos_token_id": [5, own]})
    write_json(folder / "config.json", {"eos_token_id": 7, "text_config": {"eos_token_id": [8]}})
    assert load_tokenizer(folder).eos_token_ids == (own, 5, 7, 8)


def test_tokens_known_to_the_config_alone_are_added(tmp_path: Path) -> None:
    size = byte_level("gpt-2").get_vocab_size()
    added = {str(size): {"content": "<new>", "special": True}, str(size + 1): {"content": "<also>", "lstrip": True}}
    ours = load_tokenizer(write_folder(tmp_path, "gpt-2", added_tokens_decoder=added))
    assert ours.encode("<new>x <also>", add_special_tokens=False) == [
        size,
        *ours.encode("x", add_special_tokens=False),
        size + 1,
    ]
    assert ours.is_special(size)
    assert not ours.is_special(size + 1)
    write_folder(tmp_path, "gpt-2", added_tokens_decoder={"99999": {"content": "<far>"}})
    with pytest.raises(TokenizerError, match="'<far>' the id 99999"):
        load_tokenizer(tmp_path)


def test_a_special_token_named_in_the_config_is_special(tmp_path: Path) -> None:
    ours = load_tokenizer(write_folder(tmp_path, "gpt-2", additional_special_tokens=["<tool>"], pad_token="<pad>"))
    tool, pad = ours.encode("<tool><pad>", add_special_tokens=False)
    assert ours.is_special(tool)
    assert ours.is_special(pad)
    assert ours.decode([tool, pad]) == ""


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "gpt-2")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    write_json(folder / "tokenizer.json", content)
    assert len(load_tokenizer(folder).encode("zqzqzq")) == 6


def test_chat_templates_are_found_in_their_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    assert load_tokenizer(folder).chat_templates == {}
    write_json(folder / "chat_template.json", {"chat_template": "legacy"})
    assert load_tokenizer(folder).chat_templates == {"default": "legacy"}
    write_folder(folder, chat_template="config")
    assert load_tokenizer(folder).chat_templates == {"default": "config"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write_folder(folder, chat_template=named)
    assert load_tokenizer(folder).chat_templates == {"default": "d", "tool_use": "t"}
    (folder / "chat_template.jinja").write_text("file é", encoding="utf-8")
    assert load_tokenizer(folder).chat_templates == {"default": "file é"}
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert load_tokenizer(folder).chat_templates == {"default": "file é", "rag": "rag"}


def test_tokens_and_their_text() -> None:
    ours = Tokenizer(byte_level("gpt-2"))
    [space] = ours.encode(" ", add_special_tokens=False)
    assert ours.convert_id_to_token(space) == "Ġ"
    assert ours.token_text(space) == " "
    euro = ours.encode("€", add_special_tokens=False)
    assert b"".join(map(ours.token_bytes, euro)) == "€".encode()
    for token_id in (-1, 10**9, 2**40):
        assert ours.convert_id_to_token(token_id) is None
        assert ours.token_text(token_id) == ""
        assert ours.decode([token_id]) == ""


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match=r"surrogate.*position 1"):
        Tokenizer(byte_level("gpt-2")).encode("a\ud800")


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_a_long_text_has_the_tokens_of_its_lines(add_special_tokens: bool) -> None:
    tokenizer = Tokenizer(byte_level("llama-bpe"))
    line = "the quick brown fox é😀\n"
    count = LONG_TEXT // len(line) + 1
    ids = tokenizer.encode(line * count, add_special_tokens)
    first = tokenizer.encode(line, add_special_tokens)
    plain = tokenizer.encode(line, False)
    assert ids == first[: len(first) - len(plain)] + plain * count
    with pytest.raises(RequestError, match=r"surrogate.*position 20001"):
        tokenizer.encode("a" * (LONG_TEXT + 1) + "\ud800")


def test_others_run_while_a_long_text_is_encoded() -> None:
    """An event loop that gives it to a thread must not stand still."""
    tokenizer = Tokenizer(byte_level("gpt-2"))
    text = "the quick brown fox " * 50_000
    turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, text)
        while not encoding.done():
            turns += 1
            wait([encoding], timeout=0.001)
    assert turns > 10


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="does not exist"):
        load_tokenizer(tmp_path / "nothing")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; .*\(--tokenizer\)"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"only a SentencePiece tokenizer\.model.*save_pretrained"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"Hugging Face folder or a \.gguf file"):
        load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    for content in ("{", "[]"):
        write_folder(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", {"x": {"content": "<a>"}}),
        ("added_tokens_decoder", {"7": {"special": True}}),
        ("added_tokens_decoder", {"7": {"content": "<a>", "lstrip": "yes"}}),
        ("additional_special_tokens", 7),
        ("extra_special_tokens", "<a>"),
        ("chat_template", [{"name": "default"}]),
        ("chat_template", 7),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, "</s>"]),
        ("eos_token_id", 4_000_000_000),
        ("eos_token_id", [1, -7]),
    ],
)
def test_values_of_another_type_are_named(tmp_path: Path, key: str, value: Any) -> None:
    folder = write_folder(tmp_path, **{key: value})
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {key} is .*download the file again"):
        load_tokenizer(folder)


def test_end_tokens_of_another_type_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    write_json(folder / "config.json", {"text_config": {"eos_token_id": "</s>"}})
    with pytest.raises(TokenizerError, match=r"config\.json: eos_token_id is '</s>'"):
        load_tokenizer(folder)


@pytest.mark.parametrize("where", ["vocabulary", "config.json", "generation_config.json"])
def test_an_id_that_no_model_has_is_named(tmp_path: Path, where: str) -> None:
    folder = write_folder(tmp_path)
    if where == "vocabulary":
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"]["vocab"]["x"] = 4_000_000_000
        write_json(folder / "tokenizer.json", content)
        message = r"tokenizer\.json gives token 'x' the id 4000000000, but ids must be below 16777216"
    else:
        write_json(folder / where, {"eos_token_id": [4_000_000_000]})
        message = rf"{where}: eos_token_id is \[4000000000\]"
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder)


def test_minus_one_is_no_end_token(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    write_json(folder / "config.json", {"eos_token_id": -1})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_ids == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_nested_too_deeply_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path)
    (folder / name).write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(TokenizerError, match=rf"cannot read .*{name}: it is nested too deeply"):
        load_tokenizer(folder)


def test_the_text_side_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, quire.frontend.tokenizer, quire.frontend.chat_template, quire.frontend.detokenizer, "
        "quire.frontend.stop_strings; assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
