"""Fills in what the user left unset, and says why. Knows numbers, not devices: the caller passes the defaults."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config.engine import EngineConfig, check_budget
from quire.config.groups import SpeculativeConfig
from quire.config.speculative import PROPOSING

_FEW_DRAFTS, _MOST_DRAFTS = 32, 384


@dataclass(frozen=True)
class DeviceDefaults:
    """What a platform suggests."""

    device: str
    dtype: str
    dtype_reason: str
    quantization: str
    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int
    attention_backend: str
    quantization_reason: str = ""  # "": it is the device's default
    activations: str = "auto"  # what `quantization` rounds rows to
    activations_reason: str = ""  # "": they are the fastest
    typed_quantization: str = "none"  # instead of `quantization` where the user names a type
    deterministic_backend: str = ""  # attention whose results never depend on the batch; "": the usual one is such
    step_time_target: float = 0.14  # seconds


# What a mode makes of the default budget of a step, number of requests at once, and time of a step.
_MODES = {"balanced": (1.0, 1, 1.0), "interactivity": (0.25, 1, 0.35), "throughput": (2.0, 2, 0.0)}


@dataclass(frozen=True)
class ResolvedConfig:
    """Every decision that depends on neither the model's size nor the free memory."""

    dtype: str
    quantization: str
    activations: str
    moe_backend: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_drafts: int  # of all requests in a step
    jumps_forward: bool  # what grammars force is drafted
    long_prefill_token_threshold: int
    step_time_target: float  # seconds; 0: no bound
    steps_in_flight: int
    attention_backend: str
    reasons: dict[str, str]

    def explain(self) -> list[str]:
        return [f"{name} = {getattr(self, name)} ({reason})" for name, reason in self.reasons.items()]

    def with_rows(self, rows: int, speculative: SpeculativeConfig | None) -> ResolvedConfig:
        """Settings for fewer requests at once: those that have room for the states of recurrent layers."""
        reasons = {**self.reasons, "max_num_seqs": "states of more requests do not fit; --kv-cache-memory changes it"}
        drafts = _max_drafts(speculative, rows, self.max_num_batched_tokens)
        return replace(self, max_num_seqs=rows, max_num_drafts=drafts, reasons=reasons)


def resolve(config: EngineConfig, defaults: DeviceDefaults) -> ResolvedConfig:
    reasons: dict[str, str] = {}

    def pick(name: str, given: float | str | None, default: float | str, reason: str) -> float | str:
        unset = given is None or given == "auto"
        reasons[name] = reason if unset else "set by the user"
        return default if unset or given is None else given

    on_device = f"default on {defaults.device}"
    sched = config.scheduler
    budget_factor, seqs_factor, time_factor = _MODES[sched.performance_mode]
    for_mode = on_device if sched.performance_mode == "balanced" else f"{on_device}, for {sched.performance_mode}"
    dtype = str(pick("dtype", config.model.dtype, defaults.dtype, defaults.dtype_reason))
    automatic = defaults.quantization if config.model.dtype == "auto" else defaults.typed_quantization
    why = (defaults.quantization_reason or on_device) if automatic == defaults.quantization else "dtype is set"
    method = str(pick("quantization", config.model.quantization, automatic, why))
    activations = str(
        pick(
            "activations",
            config.model.activations,
            defaults.activations if method == defaults.quantization else "auto",
            (defaults.activations_reason or "what the processor multiplies fastest")
            if method == defaults.quantization
            else "as quantization needs",
        )
    )
    moe_backend = str(pick("moe_backend", config.model.moe_backend, "auto", "as weights are kept"))
    budget = int(
        pick(
            "max_num_batched_tokens",
            sched.max_num_batched_tokens,
            max(1, int(defaults.max_num_batched_tokens * budget_factor)),
            for_mode,
        )
    )
    num_seqs = int(
        pick(
            "max_num_seqs",
            sched.max_num_seqs,
            min(defaults.max_num_seqs * seqs_factor, budget),
            f"{for_mode}, within the budget",
        )
    )
    check_budget(num_seqs, budget)
    threshold = int(
        pick(
            "long_prefill_token_threshold",
            sched.long_prefill_token_threshold,
            max(1, budget // 2),
            "half of max_num_batched_tokens",
        )
    )
    target = float(
        pick("step_time_target", sched.step_time_target, defaults.step_time_target * time_factor, for_mode)
    )
    speculative = config.speculation.speculative_config
    most_drafts = _max_drafts(speculative, num_seqs, budget)
    reasons["max_num_drafts"] = "room for predictions" if speculative is None else "as asked"
    # Unasked only where a step with drafts has the bits of one without: where no backend is the deterministic one.
    jumps = not defaults.deterministic_backend if speculative is None else speculative.method != "none"
    reasons["jumps_forward"] = on_device if speculative is None else "as asked"
    waits = speculative is not None and speculative.method in PROPOSING
    stages = config.parallel.pipeline_parallel_size
    depth, why = (1, "drafts come with results") if waits else (defaults.steps_in_flight, on_device)
    if stages > 1:
        depth, why = stages + 1, "a step for each stage, and one that waits"
    in_flight = int(pick("steps_in_flight", sched.steps_in_flight, depth, why))
    fixed = config.device.deterministic and defaults.deterministic_backend
    backend = str(
        pick(
            "attention_backend",
            config.device.attention_backend,
            defaults.deterministic_backend if fixed else defaults.attention_backend,
            f"deterministic on {defaults.device}" if fixed else on_device,
        )
    )
    return ResolvedConfig(
        dtype=dtype,
        quantization=method,
        activations=activations,
        moe_backend=moe_backend,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_num_drafts=most_drafts,
        jumps_forward=jumps,
        long_prefill_token_threshold=min(threshold, budget),
        step_time_target=target,
        steps_in_flight=in_flight,
        attention_backend=backend,
        reasons=reasons,
    )


def _max_drafts(config: SpeculativeConfig | None, num_seqs: int, budget: int) -> int:
    """Each place that is sampled takes memory of the vocabulary's size; at large batches drafts do not pay anyway."""
    if config is None:  # requests may bring predictions
        most = _FEW_DRAFTS
    elif config.method == "none":
        most = 0
    else:
        most = min(num_seqs * (config.num_speculative_tokens or _FEW_DRAFTS), _MOST_DRAFTS)
    return max(0, min(most, budget - 1))
