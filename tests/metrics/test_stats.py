from __future__ import annotations

import inspect
from unittest.mock import Mock, call

from quire.metrics.stats import EngineCounters, Observer, Observers
from quire.types.outputs import EngineStats


def test_several_observers_hear_every_event_in_order() -> None:
    heard = Mock()
    both = Observers(heard.first, heard.second)
    events = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction) if not name.startswith("_")]
    assert len(events) >= 7
    for name in events:
        arguments = [object()] * (len(inspect.signature(getattr(Observer, name)).parameters) - 1)
        heard.reset_mock()
        getattr(both, name)(*arguments)
        assert heard.mock_calls == [getattr(call.first, name)(*arguments), getattr(call.second, name)(*arguments)]


def test_counts_go_on_over_a_restart() -> None:
    counters = EngineCounters()
    counters.add(EngineStats(num_preemptions=2, prefix_queries=100, prefix_hits=40))
    counters.add(EngineStats(num_preemptions=3, prefix_queries=150, prefix_hits=40))
    counters.restart()
    counters.add(
        EngineStats(num_preemptions=5, prefix_queries=200, prefix_hits=70)
    )  # more than the old one's at once
    assert (counters.num_preemptions, counters.prefix_queries, counters.prefix_hits) == (8, 350, 110)
