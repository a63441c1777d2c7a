"""Reading metrics as Prometheus would."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.prometheus import PrometheusObserver


class Scrape:
    """One scrape, by name without the prefix and by labels besides model_name."""

    def __init__(self, text: str, prefix: str = "quire:") -> None:
        self.types: dict[str, str] = {}
        self.samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.model_names: set[str] = set()
        for family in text_string_to_metric_families(text):
            if not family.name.startswith(prefix):
                continue
            self.types[family.name.removeprefix(prefix)] = family.type
            for sample in family.samples:
                labels = dict(sample.labels)
                self.model_names.add(labels.pop("model_name"))
                key = (sample.name.removeprefix(prefix), tuple(sorted(labels.items())))
                assert key not in self.samples
                self.samples[key] = sample.value

    def get(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]

    def histogram(self, name: str, **labels: str) -> tuple[float, float]:
        """(count, sum)"""
        return self.get(f"{name}_count", **labels), self.get(f"{name}_sum", **labels)


def scrape(observer: PrometheusObserver) -> Scrape:
    return Scrape(observer.expose()[0].decode())
