from __future__ import annotations

from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from tests.kv.recorder import KVEvent, Recorder
from tests.kv.test_manager import request, start


def test_a_listener_hears_of_every_stored_and_evicted_block() -> None:
    events = Recorder()
    kv = KVCacheManager(plan_layout([LayerKV("full", None, 1)], 4), 4)
    kv.listeners.append(events)
    first = start(kv, request(range(8)))
    kv.store(first, list(range(8)), 8)
    hashes = list(first.chain.hashes) if first.chain else []
    assert events.events == [KVEvent(0, hashes[0], True), KVEvent(0, hashes[1], True)]
    kv.free(first)
    start(kv, request(range(100, 108)))
    assert events.events[2:] == [KVEvent(0, hashes[1], False)], "the end of a prompt is evicted first"
    kv.reset_prefix_cache()
    assert events.events[3:] == [KVEvent(0, hashes[0], False)]
