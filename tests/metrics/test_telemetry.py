from __future__ import annotations

import logging

import pytest

from quire.metrics.stats import TokenEvent
from quire.metrics.telemetry import make_telemetry
from quire.types.errors import ConfigError
from tests.metrics.scrape import scrape


async def test_metrics_and_the_log_hear_the_same_events() -> None:
    telemetry = make_telemetry("m")
    telemetry.observer.on_tokens(TokenEvent(5))
    assert scrape(telemetry.prometheus).get("generation_tokens_total") == 5
    telemetry.observer.close()


def test_without_a_log_line_no_event_loop_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")
    telemetry = make_telemetry("m", log_interval=0)
    telemetry.observer.on_tokens(TokenEvent(5))
    assert scrape(telemetry.prometheus).get("generation_tokens_total") == 5
    assert caplog.messages == []


def test_a_wrong_endpoint_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        make_telemetry("m", otlp_traces_endpoint="nowhere")
