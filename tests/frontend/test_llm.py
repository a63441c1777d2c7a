from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from quire.frontend.llm import LLM
from quire.types.errors import BatchError, EngineDeadError, GenerationError, RequestError
from quire.types.outputs import EngineOutputs, RequestOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.frontend.fake_client import EOS, TOKENIZER, FakeClient, text_model


def make(answer: Any = None, **client: Any) -> tuple[LLM, FakeClient]:
    fake = FakeClient(answer, **client) if answer is not None else FakeClient(**client)
    return LLM.from_client(fake, text_model()), fake


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def assert_idle(llm: LLM, fake: FakeClient) -> None:
    assert not llm._mailboxes
    assert len(llm._outputs) == 0
    assert not llm._outputs._aborting
    assert not fake.has_unfinished()


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "there"], ["Hi", "there"]),
        (list(b"Hi"), ["Hi"]),
        ([list(b"Hi"), list(b"yo")], ["Hi", "yo"]),
        ({"prompt": "Hi"}, ["Hi"]),
        ([{"prompt": "Hi"}, {"prompt_token_ids": list(b"yo")}, "x"], ["Hi", "yo", "x"]),
        ([], []),
    ],
)
def test_generate_takes_one_prompt_or_many_and_keeps_their_order(prompts: Any, expected: list[str]) -> None:
    llm, fake = make()
    outputs = llm.generate(prompts)
    assert texts(outputs) == expected
    assert all(output.finished for output in outputs)
    assert_idle(llm, fake)


def test_results_come_in_order_though_long_ones_finish_last() -> None:
    llm, _ = make()
    prompts = ["a" * 40, "b", "c" * 20]
    assert texts(llm.generate(prompts)) == prompts


def test_each_prompt_may_have_its_own_params() -> None:
    llm, _ = make()
    outputs = llm.generate(["abc", "abc"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert texts(outputs) == ["a", "ab"]
    with pytest.raises(RequestError, match="3 entries for 2") as refused:
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    assert refused.value.field == "sampling_params"


def test_priorities_reach_the_engine() -> None:
    llm, fake = make()
    llm.generate(["a", "b"], priority=[2, 1])
    llm.generate("c", priority=5)
    llm.generate("d")
    assert [request.priority for request in fake.added] == [2, 1, 5, 0]


def test_n_completions() -> None:
    def answer(request: EngineRequest) -> list[int]:
        return list(request.request_id.encode())

    llm, _ = make(answer)
    (output,) = llm.generate("x", SamplingParams(n=3, max_tokens=9))
    assert [(c.index, c.text) for c in output.outputs] == [(0, "0_0"), (1, "1_0"), (2, "2_0")]


def test_a_stop_string_ends_the_request_in_the_engine_too() -> None:
    llm, fake = make("one. two. three.")
    (output,) = llm.generate("x", SamplingParams(stop=".", max_tokens=50))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one", ".")
    assert fake.aborted == ["0"]
    assert_idle(llm, fake)


def test_a_bad_request_in_a_batch_fails_alone() -> None:
    llm, fake = make()
    with pytest.raises(BatchError) as failed:
        llm.generate(["good", "", "fine", [10_000]])
    error = failed.value
    assert isinstance(error, RequestError)
    assert [None if o is None else o.outputs[0].text for o in error.outputs] == ["good", None, "fine", None]
    assert sorted(error.errors) == [1, 3]
    assert "2 of 4" in str(error)
    assert "empty" in str(error)
    assert error.field == "prompt"
    assert_idle(llm, fake)


def test_a_single_bad_request_raises_its_own_error() -> None:
    llm, _ = make()
    with pytest.raises(RequestError, match="empty") as failed:
        llm.generate([""])
    assert not isinstance(failed.value, BatchError)


def test_a_request_that_fails_in_the_engine_fails_alone() -> None:
    llm, fake = make(errors={"1": "boom"})
    with pytest.raises(BatchError) as failed:
        llm.generate(["a", "b", "c"])
    assert [None if o is None else o.outputs[0].text for o in failed.value.outputs] == ["a", None, "c"]
    assert isinstance(failed.value.errors[1], GenerationError)
    assert_idle(llm, fake)
    llm, fake = make(errors={"0": "boom"})
    with pytest.raises(GenerationError, match="boom"):
        llm.generate("a")
    assert texts(llm.generate("b")) == ["b"]


def test_chat_renders_the_template() -> None:
    llm, fake = make()
    hello = [{"role": "user", "content": "Hello"}]
    (output,) = llm.chat(hello)
    assert output.prompt == "[user]Hello\n[assistant]"
    assert fake.added[0].token_ids == list(b"[user]Hello\n[assistant]")
    assert texts(llm.chat([hello, [{"role": "user", "content": "Bye"}]])) == [
        "[user]Hello\n[assistant]",
        "[user]Bye\n[assistant]",
    ]
    (output,) = llm.chat(hello, add_generation_prompt=False)
    assert output.prompt == "[user]Hello\n"
    (output,) = llm.chat(hello, chat_template="{{ greeting }}", chat_template_kwargs={"greeting": "yo"})
    assert output.prompt == "yo"


def test_chat_answers_until_the_model_ends() -> None:
    llm, _ = make("x" * 200)
    (output,) = llm.chat([{"role": "user", "content": "Hello"}])
    assert len(output.outputs[0].text) == 200
    assert llm.get_default_sampling_params().max_tokens == 64
    (output,) = llm.generate("Hello")
    assert len(output.outputs[0].text) == 64


def test_a_bad_conversation_in_a_batch_fails_alone() -> None:
    llm, _ = make()
    with pytest.raises(BatchError) as failed:
        llm.chat([[{"role": "user", "content": "a"}], [{"content": "no role"}], "text"])  # type: ignore[list-item]
    assert sorted(failed.value.errors) == [1, 2]
    assert failed.value.outputs[0] is not None


def test_a_seed_of_the_llm_makes_requests_without_one_reproducible() -> None:
    def seeds(seed: int | None) -> list[int]:
        fake = FakeClient("x")
        llm = LLM.from_client(fake, text_model(), seed)
        llm.generate(["a", "b"], [SamplingParams(n=2), SamplingParams(seed=5)])
        llm.generate("c")
        return [request.seed for request in fake.added]

    assert seeds(1) == seeds(1)
    assert seeds(1)[2] == 5
    assert len({*seeds(1), *seeds(2), *seeds(None), *seeds(None)}) == 13


@pytest.mark.parametrize("messages", ["Hello", 5, None])
def test_what_is_no_conversation_is_named_whole(messages: Any) -> None:
    llm, _ = make()
    with pytest.raises(RequestError, match=f"^messages is {messages!r} but must be a list of messages"):
        llm.chat(messages)


@pytest.mark.parametrize("wrong", [{"messages": 1}, {"tools": []}, {3: 4}, 5])
def test_template_variables_that_cannot_be(wrong: Any) -> None:
    llm, _ = make()
    with pytest.raises(RequestError, match=r"^chat_template_kwargs ") as refused:
        llm.chat([{"role": "user", "content": "Hello"}], chat_template_kwargs=wrong)
    assert refused.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"sampling_params": 5}, "sampling_params"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
        ({"priority": 1.5}, "priority"),
        ({"priority": ["high"]}, "priority"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(arguments: dict[str, Any], field: str) -> None:
    llm, fake = make()
    with pytest.raises(RequestError, match=f"^{field} is .* but must be") as refused:
        llm.generate(["Hello"], **arguments)
    assert refused.value.field == field
    assert_idle(llm, fake)


def test_stream_gives_deltas() -> None:
    llm, fake = make()
    outputs = list(llm.stream("Hello"))
    assert texts(outputs) == ["H", "e", "l", "l", "o", ""]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert "".join(texts(list(llm.stream([{"role": "user", "content": "x"}])))) == "[user]x\n[assistant]"
    assert_idle(llm, fake)


def test_a_stream_refuses_a_bad_prompt_at_once() -> None:
    llm, fake = make()
    with pytest.raises(RequestError, match="empty"):
        llm.stream("")
    llm.stream("never read")
    assert fake.added == []


def test_closing_a_stream_aborts_it() -> None:
    llm, fake = make("x" * 60)
    stream = llm.stream("Hello")
    next(stream)
    stream.close()
    assert fake.aborted == ["0"]
    assert_idle(llm, fake)


def test_streams_and_batches_may_overlap() -> None:
    llm, fake = make()
    first, second = llm.stream("first one"), llm.stream("second")
    heard = [next(first).outputs[0].text, next(second).outputs[0].text]
    assert texts(llm.generate(["batch of", "some length"])) == ["batch of", "some length"]
    assert heard[0] + "".join(texts(list(first))) == "first one"
    assert heard[1] + "".join(texts(list(second))) == "second"
    assert_idle(llm, fake)


class BusyClient(FakeClient):
    """Starts a thread in its first step, and gives it the time in which it would begin a step of its own."""

    def __init__(self, other: Callable[[], None]) -> None:
        super().__init__()
        self.thread = threading.Thread(target=other)
        self.steps: list[threading.Thread] = []
        self.overlapped = False
        self._in_step = False

    def get_outputs(self) -> EngineOutputs:
        self.overlapped |= self._in_step
        self._in_step = True
        self.steps.append(threading.current_thread())
        if len(self.steps) == 1:
            self.thread.start()
            self.thread.join(0.2)
        outputs = super().get_outputs()
        self._in_step = False
        return outputs


@pytest.mark.parametrize("first", ["batch", "stream"])
@pytest.mark.parametrize("second", ["batch", "stream"])
def test_threads_take_turns(first: str, second: str) -> None:
    def ask(kind: str, text: str) -> str:
        if kind == "batch":
            return "".join(texts(llm.generate(text)))
        return "".join(output.outputs[0].text for output in llm.stream(text))

    answers: list[str] = []
    fake = BusyClient(lambda: answers.append(ask(second, "there")))
    llm = LLM.from_client(fake, text_model())
    assert ask(first, "Hello") == "Hello"
    fake.thread.join(10)
    assert answers == ["there"]
    assert not fake.overlapped
    assert_idle(llm, fake)


class InterruptedClient(FakeClient):
    """Ctrl-C arrives in the middle of a step."""

    def get_outputs(self) -> EngineOutputs:
        if self.num_steps == 2:
            signal.raise_signal(signal.SIGINT)
        return super().get_outputs()


def test_ctrl_c_aborts_between_steps_and_is_raised() -> None:
    fake = InterruptedClient("x" * 60)
    llm = LLM.from_client(fake, text_model())
    stream = llm.stream("s")
    assert next(stream).outputs[0].text == "x"
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=50))
    assert sorted(fake.aborted) == ["1", "2"]
    assert fake.num_steps >= 3  # the interrupted step was finished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert "".join(texts(list(stream))) == "x" * 59  # nothing of other requests was lost
    assert_idle(llm, fake)


def test_engine_death_ends_everything() -> None:
    llm, _ = make("x" * 60, dies_at_step=3)
    stream = llm.stream("s")
    next(stream)
    with pytest.raises(EngineDeadError, match="told to"):
        llm.generate(["a", "b"])
    with pytest.raises(EngineDeadError, match="told to"):
        list(stream)
    assert not llm._mailboxes


def test_an_engine_that_forgets_a_request_does_not_hang_it() -> None:
    class ForgetfulClient(FakeClient):
        def add_request(self, request: EngineRequest) -> None:
            pass

    llm = LLM.from_client(ForgetfulClient(), text_model())
    with pytest.raises(EngineDeadError, match="stopped working"):
        llm.generate("a")


def test_shutdown_ends_open_streams() -> None:
    fake = FakeClient("x" * 60)
    with LLM.from_client(fake, text_model()) as llm:
        stream = llm.stream("s")
        next(stream)
    assert fake.is_shut_down
    with pytest.raises(EngineDeadError, match="shut down"):
        next(stream)


def test_a_dead_engine_is_not_asked_again() -> None:
    llm, fake = make("x" * 60, dies_at_step=3)
    stream = llm.stream("s")
    next(stream)
    with pytest.raises(EngineDeadError):
        llm.generate("a")
    steps = fake.num_steps
    stream.close()
    assert fake.num_steps == steps


def test_small_services() -> None:
    llm, fake = make()
    assert llm.get_tokenizer() is TOKENIZER
    llm.reset_prefix_cache()
    assert fake.num_resets == 1


def test_the_end_token_is_given_to_the_engine() -> None:
    llm, fake = make()
    (output,) = llm.generate("Hi")
    assert output.outputs[0].token_ids == [*b"Hi", EOS]
    assert output.outputs[0].finish_reason == "stop"
    assert fake.added[0].eos_token_ids == (EOS,)


def test_nothing_keeps_a_request_after_its_end() -> None:
    gc.disable()
    try:
        llm, _ = make(errors={"3": "boom"})
        refs: list[weakref.ref[Any]] = []
        add = llm._outputs.add

        def spy(request: Any) -> None:
            add(request)
            refs.append(weakref.ref(llm._outputs._requests[request.request_id]))

        llm._outputs.add = spy  # type: ignore[method-assign]
        llm.generate(["a", "b"], SamplingParams(n=2, logprobs=1, prompt_logprobs=1))
        list(llm.stream("c"))
        with pytest.raises(GenerationError):
            llm.generate("d")
        for index, _ in enumerate(llm.stream("long enough")):
            if index == 3:
                break
        assert len(refs) == 5
        assert [ref() for ref in refs] == [None] * 5
    finally:
        gc.enable()


def test_the_frontend_imports_no_torch() -> None:
    code = (
        "import sys, quire.frontend.llm, quire.frontend.async_engine;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
