"""Batches over engine processes that die: the same results as with one that lives."""

from __future__ import annotations

import os
import random
import re
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine import stalls
from quire.engine.zmq_client import ZmqClient
from quire.frontend.restarting import MAX_RESTARTS, RestartingClient
from quire.types.control import EngineState, LiveLimits, WeightsUpdate
from quire.types.errors import BatchError, EngineDeadError, EngineError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutputs, RequestOutput
from quire.types.structured import StructuredOutputsParams
from tests.engine.fake_engine import COMMAND, STALL
from tests.engine.processes import request
from tests.frontend.fake_client import text_model
from tests.frontend.mortal import KillNow, MortalClient, never
from tests.frontend.test_resumed_streams import ANSWER, random_params


class Engine(MortalClient):
    """Dies before a step, or after it with its outputs unread."""

    def wait_ready(self) -> EngineInfo:
        return self.info

    def call(self, verb: str, argument: object = None, **_: Any) -> Any:
        self._check_alive()
        return super().call(verb, argument)

    def get_outputs(self) -> EngineOutputs:
        if self._kills(self):
            self.kill()
        self._check_alive()
        outputs = super().get_outputs()
        if self._kills(self):
            self._said = outputs.outputs
            self.kill()
            self._check_alive()
        return outputs


def llm_of(kills: KillNow) -> tuple[LLM, list[Engine]]:
    engines: list[Engine] = []

    def launch(weights: str | None) -> Engine:
        engines.append(Engine(ANSWER, kills=kills))
        return engines[-1]

    return LLM.from_client(RestartingClient(launch), text_model()), engines


def facts(outputs: list[RequestOutput]) -> Any:
    return [
        ([(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs], output.prompt_logprobs)
        for output in outputs
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_kills_at_random_moments_change_no_batch(seed: int) -> None:
    chance = random.Random(seed)
    prompts = [f"prompt {index}" for index in range(chance.randint(1, 12))]
    params = [random_params(chance) for _ in prompts]

    def kills(engine: MortalClient) -> bool:
        return engine.num_steps >= 2 and chance.random() < 0.1

    whole, killed = llm_of(never), llm_of(kills)
    expected = whole[0].generate(prompts, params, use_tqdm=False)
    assert facts(killed[0].generate(prompts, params, use_tqdm=False)) == facts(expected)
    assert not killed[0]._client.has_unfinished()
    assert all(engine.is_shut_down for engine in killed[1][:-1])


def test_the_next_engine_knows_the_vocabulary() -> None:
    llm, engines = llm_of(lambda engine: engine.num_steps == 3)
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="[a-z]+"))
    llm.generate("a", params, use_tqdm=False)
    assert len(engines) > 2
    assert all(engine.vocabulary is not None for engine in engines)


def test_only_the_request_that_kills_fails() -> None:
    def kills(engine: MortalClient) -> bool:
        return any(bytes(request.token_ids[:4]) == b"kill" for request in engine.running)

    llm, _ = llm_of(kills)
    with pytest.raises(BatchError, match="died twice while it ran this request") as caught:
        llm.generate(["a", "b", "kill", "c"], SamplingParams(max_tokens=5), use_tqdm=False)
    assert [result is None for result in caught.value.outputs] == [False, False, True, False]


def test_engines_that_give_nothing_are_given_up() -> None:
    engines: list[Engine] = []

    class Stillborn(Engine):
        def wait_ready(self) -> EngineInfo:
            if len(engines) > 1:
                raise EngineDeadError("no memory")
            return self.info

    def launch(weights: str | None) -> Engine:
        engines.append(Stillborn(ANSWER, kills=lambda engine: True))
        return engines[-1]

    llm = LLM.from_client(RestartingClient(launch), text_model())
    with pytest.raises(EngineDeadError, match="no memory"):
        llm.generate(["a", "b"], use_tqdm=False)
    assert len(engines) == 1 + MAX_RESTARTS


def test_an_engine_that_stalls_is_replaced_and_says_where_it_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that stalls it is found, as one that kills it is; a start that hangs ends, too."""
    monkeypatch.setattr(stalls, "STACKS_GRACE", 0.1)
    monkeypatch.setattr(stalls, "_LEAST_PATIENCE", 2.0)
    lines: list[str] = []

    def launch(words: str = "long") -> ZmqClient:
        config = EngineConfig.from_flat(model=words)
        return ZmqClient(config, command=COMMAND, take_line=lines.append, stall_timeout=0.3)

    client = RestartingClient(lambda weights: launch())
    client.add_request(request("stalls", [STALL]))
    (output,) = client.get_outputs().outputs
    client.shutdown()
    assert re.search("died twice while it ran this request.*stalled: no step has finished", output.error or "")
    assert any("fake_engine.py" in line and "execute" in line for line in lines)
    starting = launch("hang-at-start")
    with pytest.raises(EngineDeadError, match="stalled: it has said nothing"):
        starting.wait_ready()
    starting.shutdown()


class Held(Engine):
    """Remembers what it was told; weights that are called bad do not fit."""

    def __init__(self, weights: str | None) -> None:
        super().__init__(ANSWER)
        self.weights, self.told = weights, dict[str, object]()
        self.error: str | None = None

    def call(self, verb: str, argument: object = None, **_: Any) -> Any:
        self._check_alive()
        self.told[verb] = argument
        if verb == "set_limits" and argument == LiveLimits(0):
            raise EngineError("there must be one")
        if verb in ("sleep", "wake", "update_weights"):
            self.error = "they do not fit" if argument == WeightsUpdate("bad") else None
        limits = argument if isinstance(argument, LiveLimits) else LiveLimits()
        return EngineState(
            0, False, None, self.error, "", limits.max_num_seqs or 8, limits.max_num_batched_tokens or 9
        )


def test_the_next_engine_is_as_the_last_was_made() -> None:
    engines: list[Held] = []

    def launch(weights: str | None) -> Held:
        engines.append(Held(weights))
        return engines[-1]

    llm = LLM.from_client(RestartingClient(launch), text_model())
    llm.set_limits(max_num_seqs=4)
    with pytest.raises(EngineError):
        llm.set_limits(max_num_seqs=0)
    llm.set_log_level("debug")
    llm.update_weights("good")
    with pytest.raises(EngineError, match="do not fit"):
        llm.update_weights("bad")
    llm.sleep(2)
    engines[0].kill()
    assert llm.state().max_num_seqs == 8
    assert engines[1].weights == "good"
    assert engines[1].told == {"set_limits": LiveLimits(4, 9), "set_log_level": "debug", "sleep": 2, "state": None}
    llm.wake_up()
    engines[1].kill()
    llm.pause()
    assert "sleep" not in engines[2].told
    with pytest.raises(EngineError, match="resume"):
        llm.generate("a")
    with pytest.raises(EngineError, match="without engine_process"):
        llm.collective_rpc(print)
    llm.resume()
    assert engines[2].told["pause"] is False


def test_a_batch_outlives_its_engine_process() -> None:
    prompts = ["The capital of France is", "One, two, three,", "Once upon a time"]
    params = [
        SamplingParams(max_tokens=16, temperature=0.0, logprobs=1, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.9, seed=4, n=2, ignore_eos=True),
        SamplingParams(max_tokens=16, structured_outputs=StructuredOutputsParams(regex="[a-z ]{60,}"), seed=1),
    ]
    with LLM(engine_process=True) as llm:
        expected = facts(llm.generate(prompts, params, use_tqdm=False))
        client = llm._client
        assert isinstance(client, RestartingClient)
        engine = client._client
        assert isinstance(engine, ZmqClient)
        streams = [llm.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for stream in streams:
            next(stream)
        os.kill(engine.pid, signal.SIGKILL)
        assert facts(llm.generate(prompts, params, use_tqdm=False)) == expected
        assert all(list(stream)[-1].finished for stream in streams)
        assert isinstance(client._client, ZmqClient)
        assert client._client.pid != engine.pid
