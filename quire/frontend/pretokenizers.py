"""How byte-level BPE vocabularies cut text before merging: one table from `tokenizer.ggml.pre` to its rules.

The patterns are facts about published tokenizers; this module knows no vocabulary and no file format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from quire.types.errors import TokenizerError


@dataclass(frozen=True)
class PreTokenizer:
    """Cuts applied one after the other, each inside the pieces of the one before, then mapped to bytes."""

    splits: tuple[str, ...] = ()
    single_digits: bool = False  # every numeric character on its own, before anything else
    gpt2_words: bool = False  # GPT-2's word pattern, after `splits`
    nfc: bool = False  # the published tokenizer normalizes to NFC first
    ignore_merges: bool = False  # a piece that is a token as a whole is not merged from its parts
    add_bos: bool = False  # when the file does not say

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.splits]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _words(numbers: str, letters: str = r"\p{L}", contraction: str = _CONTRACTION + "|") -> str:
    """The pattern family that GPT-4 began; its members differ in how they group digits."""
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}|{_PUNCTUATION}|{_SPACES}"


def _cased_words(numbers: str, contraction: str) -> str:
    """The GPT-4o family: a change from lower to upper case starts a new word."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _kimi_words() -> str:
    upper, lower = f"[{_UPPER}&&[^\\p{{Han}}]]", f"[{_LOWER}&&[^\\p{{Han}}]]"
    lead, end = r"[^\r\n\p{L}\p{N}]?", f"(?:{_CONTRACTION})?"
    return (
        rf"[\p{{Han}}]+|{lead}{upper}*{lower}+{end}|{lead}{upper}+{lower}*{end}"
        rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
    )


# Letters of bicameral scripts, as listed by DeepSeek's first tokenizer.
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943]+"
)

_DEEPSEEK3_WORDS = (
    _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)

_GPT2 = PreTokenizer(gpt2_words=True)
_DIGITS_GPT2 = PreTokenizer(single_digits=True, gpt2_words=True)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_GPT4O = PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3_WORDS))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_BLOOM = PreTokenizer((_BLOOM_WORDS,))
_LLAMA3_WITH_BOS = replace(_LLAMA3, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        (
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        )
    ),
    "gpt-2": _GPT2,
    "modern-bert": _GPT2,
    "phi-2": _GPT2,
    "gigachat": _GPT2,
    "a.x-4.0": _GPT2,
    "mellum": _GPT2,
    "jais": _GPT2,
    "exaone4": _GPT2,
    "trillion": _GPT2,
    "granite-docling": _GPT2,
    "olmo": replace(_GPT2, nfc=True),
    "mpt": replace(_GPT2, nfc=True),
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,  # Granite's code models too
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "mellum2": _DIGITS_GPT2,
    "command-r": replace(_DIGITS_GPT2, nfc=True),
    "falcon": PreTokenizer(
        (
            r"[\p{P}\$\+<=>\^~\|`]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            "[0-9][0-9][0-9]",
        )
    ),
    "llama-bpe": _LLAMA3_WITH_BOS,
    "llama3": _LLAMA3_WITH_BOS,
    "llama-v3": _LLAMA3_WITH_BOS,
    "falcon3": _LLAMA3_WITH_BOS,
    "falcon-h1": _LLAMA3_WITH_BOS,
    "pixtral": _LLAMA3_WITH_BOS,
    "midm-2.0": _LLAMA3_WITH_BOS,
    "lfm2": _LLAMA3_WITH_BOS,
    "dbrx": _LLAMA3,  # OLMo 2 too
    "smaug-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "qwen2": replace(_QWEN2, nfc=True),
    "f2llmv2": replace(_QWEN2, nfc=True),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
    ),
    "deepseek-r1-qwen": _QWEN2,
    "kormo": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "solar-open": _QWEN2,
    "grok-2": _QWEN2,
    "ufakzeka": PreTokenizer((_words(r"\p{N}", contraction=""),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _words(r"\p{N}"))),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
        )
    ),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True),
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "kanana2": _GPT4O,
    "minimax-m2": _GPT4O,
    "kimi-k2": PreTokenizer((_kimi_words(),)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            _DEEPSEEK_LETTERS,
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "llada-moe": _BAILING,
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "viking": PreTokenizer((_BLOOM_WORDS, r"\p{N}")),
}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"unknown pre-tokenizer {name!r} in tokenizer.ggml.pre; known: {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Use the model's Hugging Face folder, whose tokenizer.json says how to cut text"
        )
    return PRE_TOKENIZERS[name]
