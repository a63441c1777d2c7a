"""What to measure, as plain values that are checked when they are made. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from quire.config.groups import DEFAULT_MODEL
from quire.types.errors import ConfigError

DatasetName = Literal["random", "shared-prefix", "jsonl", "sharegpt"]
Endpoint = Literal["chat", "completions"]
Arrival = Literal["poisson", "constant"]

FROM_FILES: tuple[DatasetName, ...] = ("jsonl", "sharegpt")
DEFAULT_NUM_PROMPTS = 100
GOODPUT_METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Which prompts, and how long the answers are to be."""

    dataset_name: DatasetName = "random"
    dataset_path: Path | None = None
    num_prompts: int | None = None
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    num_prefixes: int = 4
    prefix_len: int = 96
    max_total_len: int = 2048
    token_ids: bool = False
    tokenizer: str = DEFAULT_MODEL
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("--dataset-name", self.dataset_name, get_args(DatasetName))
        if self.from_file and self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} needs a file; give --dataset-path")
        if not self.from_file and self.dataset_path is not None:
            raise ConfigError(
                f"--dataset-name {self.dataset_name} reads no file; give --dataset-name jsonl or sharegpt"
            )
        for name in ("input_len", "output_len", "num_prefixes", "prefix_len", "max_total_len"):
            check_least(name, getattr(self, name), 1)
        if self.num_prompts is not None:
            check_least("num_prompts", self.num_prompts, 1)
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio is {self.range_ratio:g} but must be at least 0 and below 1")
        if self.dataset_name == "shared-prefix" and self.prefix_len >= self.shortest_input:
            raise ConfigError(
                f"--prefix-len {self.prefix_len} leaves nothing of a prompt of {self.shortest_input} tokens; "
                f"give a larger --input-len or a smaller --prefix-len"
            )

    @property
    def from_file(self) -> bool:
        return self.dataset_name in FROM_FILES

    def describe(self) -> dict[str, Any]:
        """For the report, in values that JSON knows."""
        return {**asdict(self), "dataset_path": None if self.dataset_path is None else str(self.dataset_path)}

    @property
    def shortest_input(self) -> int:
        return max(1, math.floor(self.input_len * (1 - self.range_ratio)))


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """One batch that is run several times."""

    batch_size: int
    input_len: int
    output_len: int
    repeats: int
    warmup: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "output_len", "repeats"):
            check_least(name, getattr(self, name), 1)
        check_least("warmup", self.warmup, 0)


@dataclass(frozen=True, kw_only=True)
class EmbedOptions:
    """One batch of texts that is embedded several times."""

    batch_size: int
    input_len: int
    repeats: int
    warmup: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "repeats"):
            check_least(name, getattr(self, name), 1)
        check_least("warmup", self.warmup, 0)


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which server, and how to ask it."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    ignore_eos: bool | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    request_timeout: float = 600.0
    ready_timeout: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("--endpoint", self.endpoint, get_args(Endpoint))
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url is {self.base_url!r} but must begin with http:// or https://")
        if self.request_timeout <= 0:
            raise ConfigError(f"--request-timeout is {self.request_timeout:g} but must be above 0")

    @property
    def root(self) -> str:
        """The base may or may not end with /v1; this does not."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def url(self, path: str) -> str:
        """The address of an OpenAI route."""
        return f"{self.root}/v1/{path}"


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """When requests are sent."""

    request_rate: float = math.inf
    arrival: Arrival = "poisson"
    max_concurrency: int | None = None
    ramp: float = 0.0
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_choice("--arrival", self.arrival, get_args(Arrival))
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate is {self.request_rate:g} but must be above 0, or inf")
        if self.max_concurrency is not None:
            check_least("max_concurrency", self.max_concurrency, 1)
        check_least("warmup", self.warmup, 0)
        if self.ramp < 0:
            raise ConfigError(f"--ramp is {self.ramp:g} seconds but must be at least 0")
        if self.ramp and math.isinf(self.request_rate) and self.max_concurrency is None:
            raise ConfigError("--ramp has nothing to ramp up; give --request-rate or --max-concurrency too")


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """One measurement of a server."""

    data: DataOptions = field(default_factory=DataOptions)
    target: TargetOptions = field(default_factory=TargetOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    goodput: Mapping[str, float] = field(default_factory=dict)  # metric -> milliseconds

    def ignore_eos(self) -> bool:
        """Made-up prompts need answers of a set length; real ones end where the model ends them."""
        asked = self.target.ignore_eos
        return not self.data.from_file if asked is None else asked

    def describe(self) -> dict[str, Any]:
        """For the report: everything but the key, in values that JSON knows."""
        plain = asdict(self)
        del plain["target"]["api_key"]
        plain["data"] = self.data.describe()
        plain["load"]["request_rate"] = plain_rate(self.load.request_rate)
        plain["target"]["ignore_eos"] = self.ignore_eos()
        return plain


def plain_rate(rate: float) -> float | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(rate) else rate


def parse_goodput(texts: list[str]) -> dict[str, float]:
    """Limits such as ttft:200 tpot:50, in milliseconds."""
    limits: dict[str, float] = {}
    for text in texts:
        metric, _, value = text.partition(":")
        if metric not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput {text!r}: {metric!r} is no metric; known: {', '.join(GOODPUT_METRICS)}")
        try:
            limits[metric] = float(value)
        except ValueError as error:
            raise ConfigError(f"--goodput {text!r}: {value!r} is no number of milliseconds") from error
        if not limits[metric] > 0:
            raise ConfigError(f"--goodput {text!r}: the limit must be above 0 milliseconds")
    return limits


def _check_choice(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} is {value!r} but must be one of {', '.join(known)}")


def check_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"--{name.replace('_', '-')} is {value} but must be at least {least}")
