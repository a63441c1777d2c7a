"""ReplicaClient: several engine processes behind the face of one. A router says which of them a request goes to.

A replica that dies is launched again; its open requests go on in the others with the tokens that they have. Suspects
of having killed replicas are tried in one that no other request goes to. When no replica is left, the whole is dead.
Their number may change at any time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from quire.config.engine import EngineConfig
from quire.config.env import links_environment, visible_devices
from quire.engine.child import EngineChild, TakeLine, print_line
from quire.engine.client import AsyncClient
from quire.engine.control import REPLY_LIMIT
from quire.engine.journal import Entry, Trials, without_known_logprobs
from quire.engine.resuming import refused_output
from quire.engine.router import Router, Ticket
from quire.engine.warming import Told, warm_up
from quire.engine.zmq_client import OnPhase, PhaseTime, ZmqClient, ignore_phases
from quire.kv.hashing import HashChain
from quire.kv.stream import block_names, read_names
from quire.parallel.replica_links import make_replica_links
from quire.types.console import joined
from quire.types.errors import EngineDeadError, EngineError, EngineStartError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats
from quire.types.request import EngineRequest
from quire.utils.log import get_logger

logger = get_logger(__name__)

_BACKOFF, _MOST_BACKOFF = 0.5, 30.0  # seconds before a replica is launched again, doubled with each death in a row


LaunchReplica = Callable[[int, int], ZmqClient]
"""Launches a replica: its index, and the number of replicas."""


SINCE_START = (  # fields of EngineStats
    *("num_preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "num_drafts", "num_draft_tokens"),
    *("num_accepted_tokens", "accepted_per_position", "prefix_without_state"),
)


def sum_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """Field by field; of columns, place by place."""
    others = ("accepted_per_position", "expert_load")  # the second is of a step alone
    numbers = [name for name in EngineStats.__struct_fields__ if name not in others]
    columns = zip_longest(*(part.accepted_per_position for part in parts), fillvalue=0)
    return EngineStats(
        **{name: sum(getattr(part, name) for part in parts) for name in numbers},
        accepted_per_position=tuple(map(sum, columns)),
    )


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    entry: Entry
    ticket: Ticket = field(default_factory=Ticket)

    @property
    def replica(self) -> int:
        """-1: none has it."""
        return self.ticket.replica


class ReplicaClient(AsyncClient):
    """Everything is called on one event loop; `wait_ready_async` comes first."""

    def __init__(self, num_replicas: int, launch: LaunchReplica, links: Sequence[int] = ()) -> None:
        """`links`: descriptors of replicas that share experts, which live and die together."""
        self._launch, self._links = launch, links
        self._clients: list[ZmqClient | None] = [None] * num_replicas
        self._past = EngineStats()  # of dead replicas, what counts since start
        self._deaths = [0] * num_replicas  # in a row, without a token between them
        self._num_wanted = num_replicas
        self._readers: dict[int, asyncio.Future[None]] = {}
        self._resizing: asyncio.Future[None] | None = None
        self._router = Router(num_replicas, 1)
        self._weights = ""  # digest of those that replicas have cached prefixes of
        self._open: dict[str, _Open] = {}
        self._trials = Trials()
        self._trial_replica = -1  # where suspects run and nobody else is sent; -1: none
        self._relaunching: set[int] = set()
        self._outputs: asyncio.Queue[EngineOutputs] = asyncio.Queue()
        self._tasks: set[asyncio.Future[None]] = set()
        self._told = Told()
        self._dead: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.start_phases: list[PhaseTime] = []

    @property
    def parts(self) -> list[ZmqClient]:
        """The replicas that live, each of which is judged alone: one that is ended is replaced."""
        return [client for client in self._clients if client is not None]

    @property
    def pid(self) -> int:
        """Of the first replica that lives."""
        return next((client.pid for client in self.parts), 0)

    @property
    def stats(self) -> EngineStats:
        """Sums over the replicas, in what counts since start over the dead ones too; without a step."""
        known = (client.stats for client in self.parts)
        return msgspec.structs.replace(sum_stats([self._past, *known]), step_tokens=0, step_time=0.0)

    async def wait_ready_async(self) -> EngineInfo:
        """One after the other: each plans with the memory that those before it have left."""
        for index in range(len(self._clients)):
            client = self._clients[index] = self._launch(index, self._num_wanted)
            info = await client.wait_ready_async()
            if index == 0:
                self.info, self.start_phases = info, client.start_phases
                self._router = Router(len(self._clients), info.block_size, releases_blocks=info.releases_blocks)
            await client.call_async("watch_cache")
            logger.info("replica %d is ready in engine process %d", index, client.pid)
            self._readers[index] = self._spawn(self._read(index, client))
        return self.info

    async def wait_dead(self) -> EngineError:
        return await asyncio.shield(self._dead)

    def add_request(self, request: EngineRequest) -> None:
        if self._dead.done():
            raise EngineDeadError(str(self._dead.result()))
        self._open[request.request_id] = opened = _Open(Entry(request))
        self._submit(opened)

    def abort(self, request_ids: list[str]) -> None:
        by_replica: dict[int, list[str]] = {}
        for name in request_ids:
            if name in self._open:
                by_replica.setdefault(self._open[name].replica, []).append(name)
        for index, names in by_replica.items():
            client = self._clients[index] if index >= 0 else None
            if client is not None:
                client.abort(names)
                continue
            self._hand_out([EngineOutput(name, [], finish_reason="abort") for name in names])
        self._go_on_trying()

    async def get_outputs_async(self) -> EngineOutputs:
        if not self._outputs.empty():
            return self._outputs.get_nowait()
        waiting = asyncio.ensure_future(self._outputs.get())
        try:
            both: list[asyncio.Future[Any]] = [waiting, self._dead]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not waiting.done():
                waiting.cancel()
        if waiting.done() and not waiting.cancelled():
            return waiting.result()
        raise EngineDeadError(str(self._dead.result()))

    def take_received(self) -> list[EngineOutput]:
        found: list[EngineOutput] = []
        while not self._outputs.empty():
            found += self._outputs.get_nowait().outputs
        return found

    async def call_async(self, verb: str, argument: object = None, *, limit: float | None = REPLY_LIMIT) -> Any:
        """Call every replica, and return their reply. One that dies first gets the verb again after its restart."""
        self._told.note(verb, argument)
        calls = [client.call_async(verb, argument, limit=limit) for client in self.parts]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        given = [reply for reply in replies if not isinstance(reply, EngineDeadError)]
        if not given:
            raise EngineDeadError("no replica lives")
        for reply in given:
            if isinstance(reply, BaseException):
                raise reply
        return one_reply(verb, given)

    def has_unfinished(self) -> bool:
        return bool(self._open) or not self._outputs.empty()

    def seconds_without_news(self) -> float:
        """Of the replica that was heard last: they start one after the other."""
        return min((client.seconds_without_news() for client in self.parts), default=0.0)

    def dump_stacks(self) -> None:
        for client in self.parts:
            client.dump_stacks()

    async def stop_async(self) -> None:
        self._end()
        await asyncio.gather(*(client.stop_async() for client in self.parts))

    def shutdown(self) -> None:
        self._end()
        for client in self.parts:
            client.shutdown()

    async def resize(self, count: int, limit: float) -> None:
        """Have `count` replicas. New ones get requests once they are warm; EngineError if one does not come up.

        Those that go, the last ones, finish what they have within `limit` seconds; what they have then goes on in
        the others.
        """
        self._check_at_rest()
        if not any(self._clients[:count]):
            raise EngineError(
                f"none of the first {count} replicas runs; restore one with `quire ctl restore-replica`"
            )
        grows = count > len(self._clients)
        self._resizing = asyncio.ensure_future(self._grow(count) if grows else self._shrink(count, limit))
        await asyncio.shield(self._resizing)

    async def drain(self, index: int, limit: float) -> None:
        """End a replica when it has finished what it has, within `limit` seconds; the rest goes on elsewhere.

        `restore` brings it back. EngineError if it is not there, or if no other one lives.
        """
        self._check_at_rest()
        client = self._clients[index] if 0 <= index < len(self._clients) else None
        if client is None or len(self.parts) < 2:
            why = "it does not run" if client is None else "no other one takes its requests"
            raise EngineError(f"replica {index} cannot be drained: {why}")
        self._resizing = asyncio.ensure_future(self._drain(index, client, time.monotonic() + limit))
        await asyncio.shield(self._resizing)

    async def restore(self, index: int) -> None:
        """Launch a replica that was drained; EngineError if it runs or does not come up."""
        self._check_at_rest()
        if not 0 <= index < len(self._clients) or self._clients[index] is not None or not self._readers[index].done():
            raise EngineError(f"replica {index} is not drained; `quire ctl replicas` changes their number")
        self._resizing = asyncio.ensure_future(self._restore(index))
        await asyncio.shield(self._resizing)

    def _check_at_rest(self) -> None:
        if self._links:
            raise EngineError("replicas that share experts come and go together; start the server with another -dp")
        if self._resizing is not None and not self._resizing.done():
            raise EngineError("the number of replicas is being changed already; wait until that has ended")

    async def _drain(self, index: int, client: ZmqClient, end: float) -> None:
        self._router.close(index, is_lost=False)
        while any(opened.replica == index for opened in self._open.values()) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._readers[index].cancel()
        await client.stop_async()
        logger.info("replica %d is drained; %d requests go on in others", index, len(self._lose(index, client)))
        self._submit_waiting()

    async def _restore(self, index: int) -> None:
        self._serve_with(index, await self._bring_up(index))

    async def _grow(self, count: int) -> None:
        for index in range(len(self._clients), count):
            self._num_wanted = index + 1
            self._clients.append(None)
            self._deaths.append(0)
            self._router.add()
            try:
                self._serve_with(index, await self._bring_up(index))
            except (EngineError, OSError) as error:
                self._drop_last()
                raise EngineError(f"replica {index} does not come up, and {index} go on: {error}") from error

    async def _shrink(self, count: int, limit: float) -> None:
        self._num_wanted, end = count, time.monotonic() + limit
        for index in range(count, len(self._clients)):
            self._router.close(index, is_lost=False)
        while any(opened.replica >= count for opened in self._open.values()) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        while len(self._clients) > count:
            index, client = len(self._clients) - 1, self._clients[-1]
            self._readers.pop(index).cancel()
            if client is not None:
                await client.stop_async()
                moved = self._lose(index, client)
                logger.info("replica %d has left; %d requests go on in others", index, len(moved))
            self._drop_last()
            self._submit_waiting()
            self._go_on_trying()

    def _drop_last(self) -> None:
        self._router.drop()
        self._clients.pop()
        self._deaths.pop()
        self._num_wanted = len(self._clients)

    def _end(self) -> None:
        self._die(EngineDeadError("the engine was shut down"))
        links, self._links = self._links, ()
        for descriptor in links:
            os.close(descriptor)
        for task in (*self._tasks, *([] if self._resizing is None else [self._resizing])):
            task.cancel()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Future[None]) -> None:
        """After a bug here the whole is dead, and does not pretend to serve."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("looking after a replica failed", exc_info=error)
            self._die(EngineDeadError(f"looking after a replica failed: {error!r}"))

    def _submit(self, opened: _Open) -> None:
        """Send a request to a replica; it waits while there is none for it."""
        entry = opened.entry
        request = entry.resumed()
        if entry.is_suspect:
            if self._trial_replica < 0 or entry not in self._trials.running:
                return
            opened.ticket = Ticket(self._trial_replica)
        elif self._router.is_open:
            opened.ticket = self._router.choose(self._names(request), len(request.token_ids), request.session)
        else:
            return
        entry.has_progressed = False
        client = self._clients[opened.replica]
        assert client is not None, "an open replica has a client"
        try:
            client.add_request(request)
        except EngineDeadError:
            logger.debug("replica %d is dead, which will be heard of", opened.replica)

    def _names(self, request: EngineRequest) -> list[int]:
        chain = HashChain(request, self.info.block_size, self._weights)
        chain.extend(request.token_ids, len(request.token_ids))
        return block_names(chain.hashes)

    def _submit_waiting(self) -> None:
        for opened in list(self._open.values()):
            if opened.replica < 0:
                self._submit(opened)

    async def _read(self, index: int, client: ZmqClient) -> None:
        """Pass on what a replica says until it dies; then bring it back."""
        while True:
            try:
                batch = await client.get_outputs_async()
            except EngineError as error:
                await self._replace(index, client, error)
                return
            self._take(index, batch)

    def _take(self, index: int, batch: EngineOutputs) -> None:
        if (changes := batch.cached) is not None:
            self._weights = self._weights if changes.weights is None else changes.weights
            stored, evicted = read_names(changes.stored), read_names(changes.evicted)
            self._router.update(index, stored, evicted, is_all=changes.weights is not None)
        step, known = batch.stats, [output for output in batch.outputs if self._is_of(index, output)]
        for position, output in enumerate(known):
            known[position] = self._note(index, output)
        if self._trial_replica >= 0:
            self._go_on_trying()
        stats = None
        if step is not None:
            of_step = {name: getattr(step, name) for name in ("step_tokens", "step_time", "expert_load")}
            stats = msgspec.structs.replace(self.stats, **of_step)
        if known or stats is not None:
            self._outputs.put_nowait(EngineOutputs(known, stats))

    def _is_of(self, index: int, output: EngineOutput) -> bool:
        """Whether a replica speaks of a request that it still has."""
        opened = self._open.get(output.request_id)
        return opened is not None and opened.replica == index

    def _note(self, index: int, output: EngineOutput) -> EngineOutput:
        opened = self._open[output.request_id]
        entry = opened.entry
        if output.token_ids:
            entry.token_ids.extend(output.token_ids)
            self._deaths[index] = 0
            if not entry.has_progressed:
                entry.has_progressed = True
                self._router.computed(opened.ticket)
                self._trials.acquit(entry)
        if output.prompt_logprobs:
            output = without_known_logprobs(entry, output)
        if output.finish_reason is not None or output.error is not None:
            self._router.finish(opened.ticket)
            self._close(output.request_id)
        return output

    def _close(self, name: str) -> None:
        self._trials.acquit(self._open.pop(name).entry)

    def _hand_out(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self._close(output.request_id)
        if outputs:
            self._outputs.put_nowait(EngineOutputs(outputs))

    async def _replace(self, index: int, client: ZmqClient, error: EngineError) -> None:
        """A replica died: its requests go on elsewhere, and another process takes its place."""
        await client.stop_async()  # one that was ended because it stood still may not be gone yet
        moved = self._lose(index, client)
        self._deaths[index] += 1
        logger.error("replica %d died: %s; %d requests go on in others", index, error, len(moved))
        refused = self._trials.end_life([opened.entry for opened in moved])
        self._hand_out([refused_output(entry, str(error)) for entry in refused])
        if not self.parts or self._links:
            what = "the last replica died" if not self.parts else f"replica {index} died, which held experts of all"
            self._die(EngineDeadError(f"{what}: {error}"))
            return
        self._submit_waiting()
        if index < self._num_wanted:
            self._relaunching.add(index)
            await self._relaunch(index)
            self._relaunching.discard(index)
        self._go_on_trying()

    def _go_on_trying(self) -> None:
        """Let suspects run in a replica that nobody else is sent to: one that comes back, or else the emptiest."""
        if not self._trials.running:
            if self._trial_replica >= 0:
                self._router.open(self._trial_replica)
                self._trial_replica = -1
                self._submit_waiting()
            return
        if self._trial_replica < 0:
            living = [index for index, client in enumerate(self._clients) if client is not None]
            if self._relaunching or not living:
                return
            self._trial_replica = min(living, key=lambda index: self._router.loads[index])
            self._router.close(self._trial_replica, is_lost=False)
        self._submit_waiting()

    def _lose(self, index: int, client: ZmqClient) -> list[_Open]:
        """Forget a replica that is gone; the requests that it had, which none has now."""
        self._take(index, EngineOutputs(client.take_received()))
        since_start = {name: getattr(client.stats, name) for name in SINCE_START}
        self._past = sum_stats([self._past, EngineStats(**since_start)])
        client.shutdown()
        self._clients[index] = None
        if index == self._trial_replica:
            self._trial_replica = -1
        self._router.close(index, is_lost=True)
        moved = [opened for opened in self._open.values() if opened.replica == index]
        for opened in moved:
            opened.ticket, opened.entry.num_to_skip = Ticket(), opened.entry.num_prompt_logprobs
        return moved

    async def _relaunch(self, index: int) -> None:
        while not self._dead.done():
            await asyncio.sleep(min(_MOST_BACKOFF, _BACKOFF * 2 ** (self._deaths[index] - 1)))
            try:
                client = await self._bring_up(index)
            except EngineStartError as error:
                logger.error("replica %d is given up: %s", index, error)
                return
            except (EngineError, OSError) as error:
                logger.error("replica %d died as it started: %s", index, error)
                self._deaths[index] += 1
                continue
            self._serve_with(index, client)
            return

    async def _bring_up(self, index: int) -> ZmqClient:
        """Launch a replica and make it what the others are."""
        client = self._launch(index, self._num_wanted)
        try:
            await client.wait_ready_async()
            await warm_up(client, self._told, next(iter(self.parts), None))
            await client.call_async("watch_cache")
        except BaseException:
            client.shutdown()
            raise
        return client

    def _serve_with(self, index: int, client: ZmqClient) -> None:
        self._clients[index] = client
        if self._trials.running and self._trial_replica < 0:
            self._trial_replica = index
        else:
            self._router.open(index)
        self._readers[index] = self._spawn(self._read(index, client))
        self._submit_waiting()
        logger.info("replica %d serves now, in engine process %d", index, client.pid)

    def _die(self, error: EngineError) -> None:
        if not self._dead.done():
            self._dead.set_result(error)


def launch_replicas(
    config: EngineConfig, take_line: TakeLine = print_line, on_phase: OnPhase = ignore_phases
) -> ReplicaClient:
    """As many engine processes as the settings say, each with its own GPUs or its share of the cores."""
    ranks, visible, size = config.parallel.num_ranks, visible_devices(), config.parallel.data_parallel_size
    links = make_replica_links(size) if config.parallel.shares_experts else []

    def launch(index: int, count: int) -> ZmqClient:
        own = config.of_replica(index, max(1, len(os.sched_getaffinity(0)) // (count * ranks)))
        wanted = range(index * ranks, (index + 1) * ranks)
        devices = ",".join(visible[at] if at < len(visible) else str(at) for at in wanted)
        environment = {"CUDA_VISIBLE_DEVICES": devices, **links_environment(index, links)}
        child = EngineChild(take_line=take_line, environment=environment, pass_fds=links)
        return ZmqClient(own, child=child, on_phase=on_phase)

    return ReplicaClient(size, launch, links)


def one_reply(verb: str, replies: list[Any]) -> Any:
    """What replicas answer together: who has not ended a change or failed, to the console all, else the first."""
    if verb == "state":
        return next((state for state in replies if state.changing or state.error), replies[0])
    if verb == "read_adapter":
        return min(replies, key=lambda state: (state.error is None, not state.is_away, state.is_read))
    return joined(replies) if verb == "console" else replies[0]
