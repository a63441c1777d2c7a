"""Ranks that join an engine by address: the tokens of one process, an end in seconds, and causes that are named."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.engine import EngineConfig
from quire.config.env import child_environment
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.types.errors import ConfigError, EngineDeadError, EngineStartError
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.utils.version import VERSION, build_version
from quire.worker.door import Context, Door, knock
from quire.worker.hosts import HostsExecutor
from quire.worker.joining import CONTROL, ORDERS, REPORTS
from quire.worker.rank_messages import Beat, Execute, Join, Leave, Placement, Present, ToRank, decode_order
from tests.corpus.requests import corpus_jobs
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY
from tests.gpu.helpers import run_jobs
from tests.worker.steps_ahead import check_steps_ahead
from tests.worker.test_multiproc import LIMIT, LORA, SETTINGS, assert_alike, assert_serves, is_alive, wait_until

ROOT = Path(__file__).parents[2]
SECRET = "what these hosts share"


def executor_of(core: EngineCore) -> HostsExecutor:
    assert isinstance(core.executor, HostsExecutor)
    return core.executor


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port: int = server.getsockname()[1]
        return port


def worker_command(address: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "quire", "worker", "--join", address, *flags]


def start_worker(address: str, *flags: str, secret: str = SECRET, **options: Any) -> subprocess.Popen[str]:
    environment = child_environment(PYTHONPATH=str(ROOT), QUIRE_HOSTS_SECRET=secret, QUIRE_LOG_LEVEL="warning")
    return subprocess.Popen(worker_command(address, *flags), env=environment, text=True, **options)


@contextmanager
def running_worker(address: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    process = start_worker(address, *flags)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts") / "base"
    return make_model(folder, "llama", max_position_embeddings=1024, num_attention_heads=8, head_dim=8)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where two workers wait for engines, one after the other."""
    found = f"127.0.0.1:{free_port()}"
    with running_worker(found, "--ranks", "2"):
        yield found


@pytest.fixture(scope="module")
def settings(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text(f"{SECRET}\n")
    return {"executor": "hosts", "hosts_address": address, "hosts_secret_file": str(file), **SETTINGS, **LORA}


@pytest.fixture(scope="module")
def two_hosts(model: Path, settings: dict[str, Any]) -> Iterator[EngineCore]:
    core = make_engine(model, tensor_parallel_size=2, sequence_parallel_threshold=19, **settings)
    core.constraints.set_vocabulary(VOCABULARY)
    yield core
    pids = [member.join.pid for member in executor_of(core).members]
    core.shutdown()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_two_hosts_give_the_tokens_of_one_process(two_hosts: EngineCore, model: Path) -> None:
    """With grammars, whose masks follow their steps, log-probabilities and prefix hits."""
    one = make_engine(model, **SETTINGS, **LORA)
    one.constraints.set_vocabulary(VOCABULARY)
    expected = run_jobs(one, corpus_jobs(), seed=1)
    one.shutdown()
    assert_alike(run_jobs(two_hosts, corpus_jobs(), seed=1), expected)


def fail(core: EngineCore, rank: int) -> None:
    """Have a rank raise before its next step."""
    executor = executor_of(core)
    executor._door.send(executor.members[rank].token + ORDERS, Execute(StepPlan(10_000_001, [999], [5])))


def test_a_step_that_fails_on_one_host_is_contained(two_hosts: EngineCore) -> None:
    """The other does not wait for it, and they connect anew."""
    executor = executor_of(two_hosts)
    for rank in (0, 1):
        driver = Driver(two_hosts)
        driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        driver.step()
        fail(two_hosts, rank)
        answer = driver.finish()["a"]
        assert (len(answer.token_ids), answer.error) == (40, None)
        assert_serves(two_hosts)
    assert executor._round == 2


def test_a_worker_too_many_waits(two_hosts: EngineCore, address: str) -> None:
    third = FakeRank(address, "third")
    third.start()
    wait_until(lambda: b"third" in executor_of(two_hosts)._waiting)
    assert_serves(two_hosts)
    third.leave()


def test_a_host_that_is_lost_fails_the_engine_and_another_engine_gets_it_back(
    two_hosts: EngineCore, model: Path, settings: dict[str, Any]
) -> None:
    """The last test of the engine, which it ends. The other one is of stages, with steps ahead between hosts."""
    lose(two_hosts, 1, signal.SIGKILL, r"rank 1 on .* \(process \d+\) was killed by SIGKILL: by hand")
    two_hosts.shutdown()
    again = make_engine(model, pipeline_parallel_size=2, **settings)
    try:
        assert_serves(again)
        one = make_engine(model, **SETTINGS, **LORA)
        check_steps_ahead(again, one, partial(fail, again), num_stages=2)
        one.shutdown()
        lose(again, 0, signal.SIGSTOP, r"rank 0 on .* has not been heard of for 3 s")
    finally:
        for member in executor_of(again).members:
            with suppress(ProcessLookupError):
                os.kill(member.join.pid, signal.SIGCONT)
        again.shutdown()


def lose(core: EngineCore, rank: int, how: signal.Signals, cause: str) -> None:
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
    driver.step()
    os.kill(executor_of(core).members[rank].join.pid, how)
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match=cause):
        driver.finish()
    assert time.monotonic() - begin < LIMIT


@pytest.mark.parametrize("has_engine", [False, True])
def test_a_worker_with_another_address_or_secret_says_so(has_engine: bool) -> None:
    with closing(Door("127.0.0.1:0", b"another secret of an engine")) as door:
        address = door.address if has_engine else f"127.0.0.1:{free_port()}"
        process = start_worker(address, "--timeout", "0.2" if not has_engine else "20", stderr=subprocess.PIPE)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    cause = "does not accept the secret" if has_engine else f"no engine has listened at {address} for 0.2 s"
    assert cause in said.splitlines()[-1]


class FakeRank(threading.Thread):
    """Joins as a rank does, and says what it is told to."""

    def __init__(self, address: str, name: str, *, version: str | None = None, digest: str = "same") -> None:
        super().__init__(daemon=True)
        self._address, self._token, self._digest = address, name.encode(), digest
        self._version = version or build_version()
        self.heard: list[ToRank] = []
        self._leaves = threading.Event()

    def leave(self) -> None:
        self._leaves.set()
        self.join()

    def run(self) -> None:
        context: Context = zmq.Context()
        names = (ORDERS, REPORTS, CONTROL)
        sockets = [knock(context, self._address, SECRET.encode(), self._token + name) for name in names]
        orders, reports, control = sockets
        orders.send(msgspec.msgpack.encode(Join(self._version, f"host-{self._token.decode()}", 1, "127.0.0.1:1")))
        poller = zmq.Poller()
        poller.register(orders, zmq.POLLIN)
        poller.register(control, zmq.POLLIN)
        while not self._leaves.is_set() and not any(isinstance(message, Leave) for message in self.heard):
            control.send(msgspec.msgpack.encode(Beat()))
            for found, _ in poller.poll(200):
                self.heard.append(decode_order(found.recv()))
                if isinstance(self.heard[-1], Placement):
                    reports.send(msgspec.msgpack.encode(Present(self._digest)))
        for found in sockets:
            found.close(linger=0)
        context.term()


def config_of(model: Path, address: str, **changes: Any) -> EngineConfig:
    settings = {"tensor_parallel_size": 2, "executor": "hosts", "hosts_address": address, **SETTINGS, **changes}
    return EngineConfig.from_flat(model=str(model), **settings)


def refused(ranks: list[FakeRank]) -> list[Leave]:
    for rank in ranks:
        rank.join(10)
    return [message for rank in ranks for message in rank.heard if isinstance(message, Leave)]


def test_other_weights_on_a_host_are_refused_by_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_HOSTS_SECRET", SECRET)
    address = f"127.0.0.1:{free_port()}"
    ranks = [FakeRank(address, "a"), FakeRank(address, "b", digest="other")]
    for rank in ranks:
        rank.start()
    with pytest.raises(
        ConfigError, match=r"has other weights of .*/base than .*: digests \w+ and \w+; copy the same"
    ):
        build_engine(config_of(model, address))
    assert [leave.is_refused for leave in refused(ranks)] == [True, True]


def test_another_version_is_refused_and_missing_workers_are_counted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_HOSTS_SECRET", SECRET)
    address = f"127.0.0.1:{free_port()}"
    other = f"{VERSION}+000000000000"  # the same version of another commit
    ranks = [FakeRank(address, "a"), FakeRank(address, "b", version=other)]
    for rank in ranks:
        rank.start()
    with pytest.raises(EngineStartError, match=f"1 of 2 workers have joined at {address} in 2 s; start the others"):
        build_engine(config_of(model, address, join_timeout=2.0))
    old = refused(ranks)[-1]
    assert old.reason == f"the engine runs Quire {build_version()} but this worker {other}; install the same version"
    assert old.is_refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"executor": "hosts"}, "set both: --executor hosts --hosts-address HOST:PORT"),
        ({"hosts_address": "127.0.0.1:5900"}, "executor is 'auto'"),
        ({"executor": "hosts", "hosts_address": "h:0", "data_parallel_size": 2}, "give one of 1 to 65534"),
        ({"executor": "hosts", "hosts_address": "h:65535", "data_parallel_size": 2}, "give one of 1 to 65534"),
        ({"executor": "hosts", "hosts_address": "h:1", "join_timeout": 0.0}, "join_timeout is 0.0"),
    ],
)
def test_settings_of_hosts_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="smollm2", **settings)


def can_make_namespaces() -> bool:
    command = ["unshare", "-rn", "ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"]
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.nightly
@pytest.mark.skipif(not can_make_namespaces(), reason="this kernel does not let us make network namespaces")
def test_two_network_namespaces(model: Path, tmp_path: Path) -> None:
    """The engine and a worker in one, the other worker behind a link of its own; nothing is reached by loopback."""
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    engine = f"""
        from quire import LLM, SamplingParams
        llm = LLM({str(model)!r}, tensor_parallel_size=2, executor="hosts", hosts_address="10.99.0.1:5900",
                  hosts_secret_file={str(secret)!r}, max_model_len=256, skip_tokenizer_init=True)
        out = llm.generate([{{"prompt_token_ids": [5, 6, 7]}}], SamplingParams(temperature=0, max_tokens=8))
        print(out[0].outputs[0].token_ids, flush=True)
    """
    (tmp_path / "engine.py").write_text(textwrap.dedent(engine))
    worker = f"{sys.executable} -m quire worker --join 10.99.0.1:5900 --secret-file {secret} --once"
    script = f"""
        set -e
        ip link set lo up
        unshare -n sleep 600 & other=$!
        until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
        ip link add name one type veth peer name two
        ip link set two netns $other
        ip addr add 10.99.0.1/24 dev one
        ip link set one up
        nsenter -n -t $other ip addr add 10.99.0.2/24 dev two
        nsenter -n -t $other ip link set two up
        {worker} & first=$!
        nsenter -n -t $other {worker} & second=$!
        {sys.executable} {tmp_path}/engine.py
        wait $first $second
        kill $other
    """
    environment = child_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(
        ["unshare", "-rn", "bash", "-c", textwrap.dedent(script)],
        capture_output=True, text=True, env=environment, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    one = make_engine(model, **SETTINGS)
    driver = Driver(one)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=8))
    assert str(driver.finish()["a"].token_ids) in done.stdout
    one.shutdown()
