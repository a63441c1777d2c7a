"""The executor whose ranks join by address, from any host. See quire.worker.door and quire.worker.remote_rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.config.hosts import read_secret
from quire.platform.registry import get_platform
from quire.types.errors import ConfigError, EngineDeadError, EngineStartError
from quire.utils.log import get_logger
from quire.utils.phases import ReportPhase
from quire.utils.version import build_version
from quire.worker import rank_messages as messages
from quire.worker.door import Door
from quire.worker.joining import CONTROL, ORDERS, Lost
from quire.worker.ranks import STILL_AFTER, TICK, Heart, RanksExecutor

logger = get_logger(__name__)

_BEAT_EVERY = 1.0  # seconds


@dataclass
class Member:
    """A rank that has joined."""

    token: bytes
    join: messages.Join
    heart: Heart = field(default_factory=Heart)
    beats: int = 0
    digest: str | None = None

    def __str__(self) -> str:
        return f"on {self.join.host} (process {self.join.pid})"


class HostsExecutor(RanksExecutor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        super().__init__(config, report)
        parallel = config.parallel
        assert parallel.hosts_address is not None, "checked with the settings"
        self._open_door(parallel.hosts_address, read_secret(parallel.hosts_secret_file))
        self._run(config)

    def _open_door(self, address: str, secret: bytes) -> None:
        self._door = Door(address, secret)
        self.members: list[Member] = []  # in the order of ranks, once all have joined
        self._waiting: set[bytes] = set()  # workers that are one too many
        self._is_placed = False
        self._round, self._is_ended, self._last_beat = 0, False, 0.0

    def _run(self, config: EngineConfig) -> None:
        try:
            self._gather(config.parallel.join_timeout)
            self._place(config)
        except BaseException as error:
            self._leave(str(error), is_refused=isinstance(error, ConfigError))
            self._door.close(linger=1.0)
            raise
        self._start()

    def _gather(self, limit: float) -> None:
        """Wait until as many workers have joined as there are ranks."""
        address, begin, looked = self._door.address, time.monotonic(), 0.0
        logger.info("%d workers may join with `quire worker --join %s`", self.num_ranks, address)
        while len(self.members) < self.num_ranks:
            self._report("workers", len(self.members) / self.num_ranks)
            self._pump(TICK)
            if time.monotonic() - looked >= TICK:
                looked = time.monotonic()
                self.members = [member for member in self.members if not member.heart.look(member.beats)]
            if time.monotonic() - begin > limit:
                raise EngineStartError(
                    f"{len(self.members)} of {self.num_ranks} workers have joined at {address} in {limit:g} s; start"
                    f" the others with `quire worker --join {address}`, or set --join-timeout"
                )
        hosts = list(dict.fromkeys(member.join.host for member in self.members))
        self.members.sort(key=lambda member: hosts.index(member.join.host))  # neighbours share a host
        self._is_placed = True

    def _place(self, config: EngineConfig) -> None:
        """Give each its rank, see that all have the same weights, and have them connect."""
        meeting = self._meeting(config)
        for rank, member in enumerate(self.members):
            logger.info("rank %d runs %s", rank, member)
            self._door.send(member.token + ORDERS, messages.Placement(config, rank, meeting))
        self._wait_until(lambda: all(member.digest is not None for member in self.members))
        first = self.members[0]
        for rank, member in enumerate(self.members):
            if member.digest != first.digest:
                raise ConfigError(
                    f"rank {rank} {member} has other weights of {config.model.model} than rank 0 {first}: digests"
                    f" {member.digest} and {first.digest}; copy the same files to all hosts"
                )
        self._connect()

    def _meeting(self, config: EngineConfig) -> str:
        """A store where ranks on GPUs find each other."""
        if get_platform(config.device.device).uses_host_memory:
            return ""
        from quire.parallel.nccl import open_store

        if len({member.join.host for member in self.members}) > 1:
            logger.warning(
                "GPUs on several hosts exchange through NCCL, which encrypts nothing: use a private network"
            )
        self._store, meeting = open_store(self._door.address.rpartition(":")[0])
        return meeting

    def _connect(self) -> None:
        order = messages.Connect([member.join.address for member in self.members], self._round)
        for member in self.members:
            self._door.send(member.token + ORDERS, order)

    def _post(self, header: bytes, payload: NDArray[np.uint8]) -> None:
        parts = [header] if len(payload) == 0 else [header, payload.tobytes()]
        with self._pumping:
            for member in self.members:
                self._door.send_parts(member.token + ORDERS, *parts)

    def _receive(self, limit: float) -> Iterator[tuple[int, messages.FromRank]]:
        now = time.monotonic()
        if now - self._last_beat > _BEAT_EVERY:
            self._last_beat = now
            for member in self.members:
                self._door.send(member.token + CONTROL, messages.Beat())
        for identity, data in self._door.receive(limit):
            token = identity.partition(b"/")[0]
            rank = next((rank for rank, member in enumerate(self.members) if member.token == token), None)
            try:
                message = messages.decode_report(data)
            except msgspec.MsgspecError as error:
                self._door.send(
                    token + ORDERS, messages.Leave(f"the engine, Quire {build_version()}, cannot read: {error}")
                )
                continue
            if isinstance(message, messages.Join):
                self._take_join(token, message)
            elif rank is None:
                if isinstance(message, messages.Beat):
                    answer = messages.Leave("it is not of this engine") if message.is_placed else messages.Beat()
                    self._door.send(token + CONTROL, answer)
            elif isinstance(message, messages.Beat):
                self.members[rank].beats += 1
            elif isinstance(message, messages.Present):
                self.members[rank].digest = message.digest
            elif not isinstance(message, Lost):
                yield rank, message
            elif self._is_placed:
                raise EngineDeadError(f"rank {rank} {self.members[rank]} {message.reason}")
            else:
                del self.members[rank]

    def _take_join(self, token: bytes, join: messages.Join) -> None:
        if any(member.token == token for member in self.members):
            return
        if join.version != (mine := build_version()):
            reason = f"the engine runs Quire {mine} but this worker {join.version}; install the same version"
            logger.warning("a worker on %s was refused: %s", join.host, reason)
            self._door.send(token + ORDERS, messages.Leave(reason, is_refused=True))
        elif not self._is_placed and len(self.members) < self.num_ranks:
            self._waiting.discard(token)
            self.members.append(Member(token, join))
        elif token not in self._waiting:
            self._waiting.add(token)
            logger.info("a worker on %s waits: this engine has its %d ranks", join.host, self.num_ranks)

    def _look(self) -> None:
        for rank, member in enumerate(self.members):
            if member.heart.look(member.beats):
                silent = f"rank {rank} {member} has not been heard of for {STILL_AFTER * TICK:g} s"
                self._fail(EngineDeadError(f"{silent}; the engine cannot go on without it"))
                return

    def _on_failed_step(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            for member in self.members:
                self._door.send(member.token + CONTROL, messages.Ended(self._round))

    def _start_over(self) -> None:
        with self._pumping:
            if self.failure is None:
                self._round, self._is_ended = self._round + 1, False
                self._connect()

    def _end_ranks(self, reason: str) -> None:
        with self._pumping:
            self._leave(reason)

    def _leave(self, reason: str, *, is_refused: bool = False) -> None:
        for token in [*(member.token for member in self.members), *self._waiting]:
            self._door.send(token + CONTROL, messages.Leave(reason, is_refused))

    def _close(self) -> None:
        with self._pumping:
            if self.failure is None:
                self._leave("the engine ended")
            self._door.close(linger=1.0)
