"""Tokenizers rebuilt from GGUF metadata against tokenizer.json, SentencePiece and llama.cpp."""

from __future__ import annotations

import functools
import io
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
import xllamacpp
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from quire.frontend.tokenizer import Tokenizer, load_tokenizer, save_tokenizer, tokenizer_from_gguf
from quire.loader.gguf_file import read_metadata
from quire.loader.hub import resolve_model
from quire.types.errors import TokenizerError
from tests.frontend.text_helpers import (
    BYTE,
    BYTE_LEVEL_KINDS,
    CONTROL,
    NORMAL,
    TEXTS,
    USER_DEFINED,
    byte_level,
    byte_level_metadata,
    llama_tokenizer,
    sentencepiece_metadata,
    sentencepiece_model,
)

SAVED_TEXTS = ("", " Hello  world\n", "It's 12345 <tool> <s>caf\u00e9</s>\u2603")


@functools.cache
def rebuilt(kind: str) -> Tokenizer:
    return tokenizer_from_gguf(byte_level_metadata(byte_level(kind), kind))


@functools.cache
def rebuilt_llama(add_space_prefix: bool) -> Tokenizer:
    return tokenizer_from_gguf(sentencepiece_metadata(sentencepiece_model(add_space_prefix), add_space_prefix))


@pytest.mark.parametrize("kind", BYTE_LEVEL_KINDS)
@given(text=TEXTS, add_special_tokens=st.booleans(), data=st.data())
@settings(max_examples=60)
def test_byte_level_equals_tokenizer_json(
    kind: str, text: str, add_special_tokens: bool, data: st.DataObject
) -> None:
    original, ours = byte_level(kind), rebuilt(kind)
    ids = original.encode(text, add_special_tokens=add_special_tokens).ids
    assert ours.encode(text, add_special_tokens) == ids
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 2), max_size=12)) + ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_space_prefix", [True, False])
@given(text=TEXTS, add_special_tokens=st.booleans())
@settings(max_examples=100)
def test_sentencepiece_equals_tokenizer_json(add_space_prefix: bool, text: str, add_special_tokens: bool) -> None:
    original, ours = llama_tokenizer(add_space_prefix), rebuilt_llama(add_space_prefix)
    ids = original.encode(text, add_special_tokens=add_special_tokens).ids
    assert ours.encode(text, add_special_tokens) == ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == original.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("add_space_prefix", [True, False])
@given(text=TEXTS.filter(lambda text: "<" not in text and "\0" not in text))
@settings(max_examples=100)
def test_sentencepiece_equals_sentencepiece(add_space_prefix: bool, text: str) -> None:
    model, ours = sentencepiece_model(add_space_prefix), rebuilt_llama(add_space_prefix)
    assert ours.encode(text, add_special_tokens=False) == model.encode(text)
    assert ours.decode(model.encode(text)) == model.decode(model.encode(text))


SPACED_TEXTS = st.text("ab  \n.", max_size=30)


@functools.cache
def with_extra_whitespace_removed() -> Tokenizer:
    metadata = sentencepiece_metadata(sentencepiece_model(remove_extra_whitespaces=True), added=False)
    return tokenizer_from_gguf(metadata | {"tokenizer.ggml.remove_extra_whitespaces": True})


@given(text=SPACED_TEXTS)
@settings(max_examples=100)
def test_extra_whitespace_is_removed_where_the_file_says_so(text: str) -> None:
    model = sentencepiece_model(remove_extra_whitespaces=True)
    assert with_extra_whitespace_removed().encode(text, add_special_tokens=False) == model.encode(text)


GEMMA_SYMBOLS = ("\u2581\u2581", "\u2581\u2581\u2581", "\n", "\n\n", "<b>")


@functools.cache
def with_user_defined_symbols() -> Tokenizer:
    metadata = sentencepiece_metadata(sentencepiece_model(False, False, GEMMA_SYMBOLS), False, added=False)
    for index, token in enumerate(metadata["tokenizer.ggml.tokens"]):
        if token in GEMMA_SYMBOLS:  # converters write these tokens as the text they stand for
            metadata["tokenizer.ggml.tokens"][index] = token.replace("\u2581", " ")
            metadata["tokenizer.ggml.token_type"][index] = USER_DEFINED
    return tokenizer_from_gguf(metadata)


@given(text=st.lists(st.sampled_from(["a", "b", " ", "  ", "\n", "<b>", "the"]), max_size=20).map("".join))
@settings(max_examples=100)
def test_user_defined_symbols_come_before_merging(text: str) -> None:
    model = sentencepiece_model(False, False, GEMMA_SYMBOLS)
    ids = model.encode(text)
    assert with_user_defined_symbols().encode(text, add_special_tokens=False) == ids
    assert with_user_defined_symbols().decode(ids) == text


def test_wordpiece_equals_tokenizer_json() -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "fox", "##es", "run", "##ning", ",", "e", "##e"]
    original = tokenizers.Tokenizer(
        models.WordPiece({token: index for index, token in enumerate(vocabulary)}, unk_token="[UNK]")
    )
    original.normalizer = normalizers.BertNormalizer(lowercase=True)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    original.decoder = decoders.WordPiece(cleanup=False)
    original.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    spelled = [
        token if token.startswith("[") else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token in vocabulary
    ]
    ours = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": spelled,
            "tokenizer.ggml.token_type": [CONTROL] * 4 + [NORMAL] * 8,
            "tokenizer.ggml.cls_token_id": 2,
            "tokenizer.ggml.seperator_token_id": 3,
            "tokenizer.ggml.unknown_token_id": 1,
        }
    )
    for text in ("The foxes, running", "É fox", "", "zzz the"):
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode([token_id for token_id in ids if token_id > 3])


def test_gemma4_uses_listed_merges_and_sentencepiece_spelling() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "b", "\n", "\n\n", "ab", "\u2581ab", "<turn|>"]
    types = [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * 7 + [CONTROL]
    ours = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": ["\n \n", "a b", "\u2581 ab"],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
        }
    )
    ids = ours.encode("ab ab\n\n\u00e9<turn|>")
    spelled = [ours.convert_id_to_token(token_id) for token_id in ids]
    assert spelled == ["<bos>", "ab", "\u2581ab", "\n\n", "<0xC3>", "<0xA9>", "<turn|>"]
    assert ours.decode(ids) == "ab ab\n\n\u00e9"
    assert ours.eos_token_ids == (1, len(tokens) - 1)


def test_token_types_templates_and_ends() -> None:
    metadata = byte_level_metadata(byte_level("smollm"), "smollm")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|eot_id|>", ""]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], CONTROL, NORMAL]
    metadata["tokenizer.ggml.add_bos_token"] = True
    metadata["tokenizer.ggml.add_eos_token"] = True
    metadata["tokenizer.chat_template"] = "plain"
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    ours = tokenizer_from_gguf(metadata)
    end, begin = ours.eos_token_id, ours.bos_token_id
    assert ours.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert ours.eos_token_ids == (end, size)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "<|end|>"}
    assert ours.is_special(size)
    assert not ours.is_special(metadata["tokenizer.ggml.tokens"].index("<tool>"))
    assert ours.encode("") == [begin, end]
    assert ours.convert_id_to_token(size + 1) == f"[EMPTY_{size + 1}]"


@pytest.mark.parametrize("kind", [*BYTE_LEVEL_KINDS, "sentencepiece"])
@pytest.mark.parametrize("templates", [{}, {"": "plain"}, {"": "plain", ".tool_use": "tools"}])
def test_a_saved_tokenizer_is_the_same(kind: str, templates: dict[str, str], tmp_path: Path) -> None:
    if kind == "sentencepiece":
        metadata = sentencepiece_metadata(sentencepiece_model(True), True)
    else:
        metadata = byte_level_metadata(byte_level(kind), kind)
    metadata |= {f"tokenizer.chat_template{name}": text for name, text in templates.items()}
    ours = tokenizer_from_gguf(metadata)
    save_tokenizer(ours, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ours.eos_token_ids}))
    again = load_tokenizer(tmp_path)
    for name in ("special_tokens", "eos_token_ids", "chat_templates"):
        assert getattr(again, name) == getattr(ours, name)
    for text in SAVED_TEXTS:
        assert again.encode(text) == ours.encode(text)
    every = range(ours.backend.get_vocab_size())
    assert [again.token_bytes(token) for token in every] == [ours.token_bytes(token) for token in every]
    assert [again.is_special(token) for token in every] == [ours.is_special(token) for token in every]


def test_harmony_does_not_end_with_a_message() -> None:
    metadata = byte_level_metadata(byte_level("gpt-4o"), "gpt-4o")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<|return|>", "<|call|>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], CONTROL, CONTROL]
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.eos_token_id"] = size - 2
    assert tokenizer_from_gguf(metadata).eos_token_ids == (size - 2, size - 1)


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id"])
@pytest.mark.parametrize("value", [4_000_000_000, -2, "</s>", 1.5])
def test_a_token_that_the_file_lacks_is_named(key: str, value: Any) -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(TokenizerError, match=rf"ggml\.{key} is {value!r} but the file's tokens go from 0 to"):
        tokenizer_from_gguf(metadata)


def test_a_token_may_be_absent_and_padding_is_not_looked_at() -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2")
    before = tokenizer_from_gguf(metadata)
    more = {"tokenizer.ggml.eot_token_id": 2**32 - 1, "tokenizer.ggml.padding_token_id": 4_000_000_000}
    assert tokenizer_from_gguf(metadata | more).eos_token_ids == before.eos_token_ids


def test_phi3_control_tokens_swallow_space() -> None:
    metadata = sentencepiece_metadata(sentencepiece_model()) | {"general.architecture": "phi3"}
    ours = tokenizer_from_gguf(metadata)
    assert ours.encode("<|end|>\n \nThe") == ours.encode("<|end|>The")
    assert ours.encode("<s>\nThe") != ours.encode("<s>The")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "'martian'.*known:.*llama-bpe.*qwen2"),
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'; known: gpt2, llama"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "1 entries for"),
        ({"tokenizer.ggml.merges": ["abc"]}, "'abc', not a pair"),
        ({"tokenizer.ggml.merges": ["nothere either"]}, "do not fit"),
        ({"tokenizer.ggml.model": "llama"}, "no tokenizer.ggml.scores"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "'a' twice"),
    ],
)
def test_bad_metadata_is_named(change: dict[str, Any], message: str) -> None:
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2") | change
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(metadata)


DIVERSE_TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing ",
    "The capital of France is Paris.\n\nWhat about 12345 or 3.14159?",
    "<|im_start|>user\nWhat's up?<|im_end|>\n<|im_start|>assistant\n",
    "don't I'LL we've she'd They're IT'S",
    "tabs\tand\r\nnewlines\n\n\n   and    spaces   ",
    "Grüße, Καλημέρα, Привет, 你好\uff0c世界。 こんにちは 안녕하세요 สวัสดี مرحبا नमस्ते",
    "emoji 😀👍🏽👩‍👩‍👧 flags 🇨🇭 zero\u200bwidth e\u0301 \u00a0nbsp \u3000ideographic",
    "def f(x):\n    return {k: v**2 for k, v in x.items() if k != '_'}  # comment\n",
    "½ ² Ⅷ ٣٤٥ १२३ ①",
    "<file_sep><reponame>a/b<gh_stars>10 <|endoftext|>",
    "\x00\x01\x7f control \ufffd\ufeff",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
]


@pytest.fixture(scope="module")
def smollm2_path() -> Path:
    return Path(resolve_model("smollm2").path)


def test_the_default_model_tokenizes_as_llama_cpp_does(smollm2_path: Path) -> None:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(smollm2_path)
    parameters.n_ctx = 64
    parameters.warmup = False
    parameters.cpuparams.n_threads = 1
    parameters.verbosity = -1
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    server = xllamacpp.Server(parameters)

    def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            server.listening_address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    ours = load_tokenizer(smollm2_path)
    for text in DIVERSE_TEXTS:
        theirs = post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        assert ours.encode(text) == theirs, repr(text)
        assert ours.decode(theirs, skip_special_tokens=False) == text
        assert post("/detokenize", {"tokens": theirs})["content"] == text


def test_the_default_model_starts_fast(smollm2_path: Path) -> None:
    metadata = read_metadata(smollm2_path)
    seconds = []
    for _ in range(3):
        start = time.process_time()
        ours = tokenizer_from_gguf(metadata)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.3
    assert ours.vocab_size == 49152
    assert ours.eos_token_id == 2
    assert "<|im_start|>" in ours.chat_templates["default"]


def test_user_defined_tokens_are_found_in_text_and_shown() -> None:
    ours = rebuilt("gpt-2")
    [token_id] = ours.encode("<tool>")
    metadata = byte_level_metadata(byte_level("gpt-2"), "gpt-2")
    assert metadata["tokenizer.ggml.token_type"][token_id] == USER_DEFINED
    assert ours.decode([token_id]) == "<tool>"


WORDS = ["the cat sits on the mat", "a cat and the dogs are here", "numbers 12 345 6789", "ça va bien, merci"]
ODD = ["  the   cats ", "\uff34\uff28\uff25 \ufb01ne cat", "unknown: \u2603\u2603 snow", "the\ncat\tsits", ""]


def test_unigram_tokenizers_cut_as_sentencepiece_does(tmp_path: Path) -> None:
    """With its normalization, which a file has as a table."""
    model = io.BytesIO()
    options = {"model_type": "unigram", "vocab_size": 60, "hard_vocab_limit": False, "character_coverage": 1.0}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(WORDS * 20), model_writer=model, minloglevel=2, **options
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    assert proto.normalizer_spec.precompiled_charsmap
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "nomic-bert-moe")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_precompiled_charsmap(proto.normalizer_spec.precompiled_charsmap)
    writer.add_add_bos_token(True)
    for index, name in enumerate(("unk", "bos", "eos")):
        getattr(writer, f"add_{name}_token_id")(index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = tokenizer_from_gguf(read_metadata(tmp_path / "tokens.gguf"))
    original = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in (*WORDS, *ODD):
        assert found.encode(text) == [1, *original.encode(text), 2], text
    assert found.decode(original.encode(WORDS[0])) == WORDS[0]
