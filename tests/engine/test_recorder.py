"""What the console is shown of an engine: phases, reasons, steps, events, blocks and misses, as they are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.recorder import Recorder
from quire.engine.step_log import NO_LOG
from quire.kv.layout import LayerKV
from quire.types.console import ConsoleQuery, EngineView
from quire.types.messages import Command
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.engine.test_core import make_core


def request(name: str, prompt: Sequence[int] = (1, 2, 3, 4, 5), max_tokens: int = 8) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(request_id=name, token_ids=list(prompt), params=params, max_tokens=max_tokens)


def look(core: EngineCore, **query: int) -> EngineView:
    reply = obey(core, Command(0, "console", msgspec.to_builtins(ConsoleQuery(**query))))
    assert reply.error is None
    return msgspec.convert(msgspec.to_builtins(reply.value), EngineView)


def test_phases_and_reasons() -> None:
    core, _ = make_core()
    for index in range(10):
        core.add_request(request(f"r{index}", prompt=list(range(index, index + 12)), max_tokens=20))
    views = {one.id: one for one in look(core).requests}
    assert {one.phase for one in views.values()} == {"queued"}
    assert views["r3"].why == "3 ahead of it in the queue"
    core.step()
    views = {one.id: one for one in look(core).requests}
    assert {views["r0"].phase, views["r1"].phase} <= {"decode", "prefill"}
    for _ in range(6):
        core.step()
    view = look(core)
    assert [one.phase for one in view.requests] == ["decode"] * 8 + ["queued"] * 2
    assert {one.why for one in view.requests[8:]} == {"all 8 rows are taken (--max-num-seqs)"}
    assert all(one.num_blocks and one.row >= 0 for one in view.requests[:8])


def test_blocks_that_are_short_are_the_reason() -> None:
    core, _ = make_core()
    for index in range(6):
        core.add_request(request(f"r{index}", prompt=[index] * 40, max_tokens=24))
    look(core)
    phases, reasons, kinds = set(), set(), set()
    number = -1
    while core.scheduler.has_unfinished:
        core.step()
        view = look(core, after_event=number)
        number = view.events[-1].number if view.events else number
        phases |= {one.phase for one in view.requests}
        reasons |= {one.why for one in view.requests if one.why}
        kinds |= {event.kind for event in view.events}
        pool = view.pools[0]
        used = sum(state in "23" for state in pool.states)
        assert used == pool.num_blocks - pool.num_free, "the map disagrees with the pool"
        core.check_integrity()
    assert "preempted" in phases
    assert any("KV blocks" in reason for reason in reasons)
    assert {"started", "resumed", "preempted", "chunk"} <= kinds


def test_the_map_names_the_owner_and_the_tree_the_shared_prefix() -> None:
    core, _ = make_core()
    look(core)
    shared = list(range(16))
    core.add_request(request("a", prompt=[*shared, 40, 41, 42, 43, 44], max_tokens=8))
    core.step()
    core.add_request(request("b", prompt=[*shared, 30, 31, 32, 33, 34], max_tokens=8))
    core.step()
    core.step()
    view = [look(core) for _ in range(6)][-1]  # the tree is made at every sixth look
    rows = {one.row: one.id for one in view.requests}
    pool = view.pools[0]
    owners = {rows[owner] for owner, state in zip(pool.owners, pool.states, strict=True) if state == "2"}
    assert owners == {"a", "b"}
    assert pool.states.count("3") == 4
    nodes = look(core).prefixes
    root = next(node for node in nodes if node.parent == -1)
    assert (root.num_blocks, root.num_used) == (4, 4)
    assert sum(node.parent == root.id for node in nodes) == 2


def test_a_miss_for_want_of_a_state_is_told_as_that() -> None:
    """Of a hybrid model: the blocks of attention are there, and no state is where the two prompts part."""
    core, _ = make_core(layers=[LayerKV("full", None, 4), LayerKV("state", bytes_per_row=9)])
    look(core)
    core.add_request(request("first", prompt=list(range(20)), max_tokens=2))
    run(core)
    core.add_request(request("fork", prompt=[*range(8), *range(30, 42)], max_tokens=2))
    run(core)
    assert look(core).misses == {
        "first prompt that begins like this": 16,
        "cached, but without a state of recurrent layers to go on from": 8,
        "differs from every cached prompt": 8,
    }


def test_why_prompts_were_not_cached() -> None:
    core, _ = make_core()
    look(core)
    core.add_request(request("short", prompt=[1, 2], max_tokens=2))
    core.add_request(request("new", prompt=list(range(20)), max_tokens=2))
    run(core)
    core.add_request(request("fork", prompt=[*range(8), *range(30, 42)], max_tokens=2))
    run(core)
    misses = look(core).misses
    assert "recurrent" not in "".join(misses)
    assert misses["prompt shorter than one block"] == 2
    assert misses["first prompt that begins like this"] == 16
    assert misses["differs from every cached prompt"] == 8
    for index in range(30):
        core.add_request(request(f"fill{index}", prompt=[index + 10, 49] * 20, max_tokens=2))
    run(core)
    core.add_request(request("again", prompt=list(range(20)), max_tokens=2))
    run(core)
    assert look(core).misses["evicted to make room"] == 16


def run(core: EngineCore) -> None:
    while core.scheduler.has_unfinished:
        core.step()


def test_steps_are_told_once_and_only_while_somebody_looks() -> None:
    core, _ = make_core()
    assert core.watch is NO_LOG
    core.add_request(request("a", max_tokens=6))
    core.step()
    look(core)
    core.step()
    core.step()
    steps = look(core).steps
    assert [step.num_tokens for step in steps] == [1, 1]
    core.step()
    assert [step.id for step in look(core, after_step=steps[-1].id).steps] == [steps[-1].id + 1]
    assert isinstance(core.watch, Recorder)
    assert obey(core, Command(1, "console", {"stop": True})).error is None
    assert core.watch is NO_LOG
    assert core.scheduler.kv.listeners == []


def test_looking_is_no_work_and_wakes_nobody_who_prepares() -> None:
    """Commands alone tell no statistics, which listeners would take for work."""
    core, _ = make_core()
    loop = EngineLoop(core)
    replies: list[object] = []
    loop.on_reply = replies.append
    loop.submit(Command(0, "console", {}))
    assert loop.wait()
    outputs = loop.run_once()
    assert (len(replies), outputs.outputs, outputs.stats) == (1, [], None)
    loop.submit(request("a", max_tokens=1))
    assert loop.wait()
    assert loop.run_once().stats is not None
