"""The formats by name: what --tool-call-parser and --reasoning-parser may say. One line per format."""

from __future__ import annotations

from quire.parsers.format import ChannelFormat, ReasoningFormat, ToolFormat
from quire.utils.registry import Registry

TOOL_FORMATS: Registry[ToolFormat | ChannelFormat] = Registry(
    "tool call parser",
    "quire.parsers.formats",
    {
        "hermes": "hermes:HERMES",
        "qwen3_coder": "qwen:QWEN3_CODER",
        "llama3_json": "llama:LLAMA3_JSON",
        "llama4_pythonic": "llama:LLAMA4_PYTHONIC",
        "pythonic": "llama:PYTHONIC",
        "mistral": "mistral:MISTRAL",
        "mistral_old": "mistral:MISTRAL_OLD",
        "deepseek_v3": "deepseek:DEEPSEEK_V3",
        "deepseek_v31": "deepseek:DEEPSEEK_V31",
        "deepseek_v32": "deepseek:DEEPSEEK_V32",
        "deepseek_v4": "deepseek:DEEPSEEK_V4",
        "glm45": "glm:GLM45",
        "kimi_k2": "kimi:KIMI_K2",
        "granite": "granite:GRANITE",
        "phi4_mini": "phi:PHI4_MINI",
        "minimax_m1": "minimax:MINIMAX_M1",
        "minimax_m2": "minimax:MINIMAX_M2",
        "step3p5": "step:STEP3P5",
        "harmony": "harmony:HARMONY",
    },
)

REASONING_FORMATS: Registry[ReasoningFormat | ChannelFormat] = Registry(
    "reasoning parser",
    "quire.parsers.formats",
    {
        "qwen3": "qwen:QWEN3_THINKING",
        "deepseek_r1": "deepseek:DEEPSEEK_R1",
        "glm45": "glm:GLM45_THINKING",
        "granite": "granite:GRANITE_THINKING",
        "magistral": "mistral:MAGISTRAL",
        "minimax_m2": "minimax:MINIMAX_M2_THINKING",
        "step3p5": "step:STEP3P5_THINKING",
        "harmony": "harmony:HARMONY",
    },
)
