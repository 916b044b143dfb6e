"""What the servers say of themselves at /metrics, for Prometheus. Where vLLM measures the same, the names are vLLM's.

Chapters: 24.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from minitext.inference.requests import Usage

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms of one server.

    Args:
      usage: what the engine is doing.

    Attributes:
      answers: by address and status.
      texts: by why they ended.
      first_token: seconds from a request's arrival to each text's first token.
      between_tokens: seconds from token to token of a text.
      whole: seconds from a request's arrival to each text's end.
    """

    def __init__(self, usage: Callable[[], Usage]):
        self._usage, self._registry = usage, CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        made: dict[str, Any] = {"registry": self._registry, "namespace": "minitext"}
        self.answers = Counter(
            "http_requests", "Answers by address and status.", ["path", "status"], **made
        )
        self.texts = Counter(
            "request_success", "Texts by why they ended.", ["finished_reason"], **made
        )
        timed: dict[str, Any] = {**made, "buckets": SECONDS}
        self.first_token = Histogram(
            "time_to_first_token_seconds", "Arrival to first token.", **timed
        )
        self.between_tokens = Histogram("inter_token_latency_seconds", "Token to token.", **timed)
        self.whole = Histogram("e2e_request_latency_seconds", "Arrival to the text's end.", **timed)

    def collect(self) -> Iterator[Any]:
        """Yields what the engine counts."""
        now = self._usage()
        gauges = {
            "num_requests_running": ("Texts that are being continued.", now.running),
            "num_requests_waiting": ("Texts that wait to be admitted.", now.waiting),
            "kv_cache_usage_perc": ("Pages in use, 1 for all.", now.pages_used / max(now.pages, 1)),
            "kv_cache_kept_perc": (
                "Pages kept for prompts that begin alike.",
                now.pages_kept / max(now.pages, 1),
            ),
            "kv_cache_tokens": ("Tokens that the pages have room for.", now.cache_tokens),
            "kv_cache_bytes": ("Memory that the cache takes, used or not.", now.cache_bytes),
        }
        counts = {
            "prompt_tokens": ("Tokens of prompts.", now.prompt_tokens),
            "generation_tokens": ("Tokens of answers.", now.generated_tokens),
            "prefix_cache_queries": (
                "Tokens of prompts looked for in the cache.",
                now.prompt_tokens,
            ),
            "prefix_cache_hits": ("Tokens of prompts found in the cache.", now.reused_tokens),
            "engine_steps": ("Programs run.", now.steps),
            "num_preemptions": ("Texts that lost their pages.", now.preemptions),
        }
        for name, (help_, value) in gauges.items():
            yield GaugeMetricFamily(f"minitext_{name}", help_, value)
        for name, (help_, value) in counts.items():
            yield CounterMetricFamily(f"minitext_{name}", help_, value)

    def text(self) -> tuple[bytes, int, dict[str, str]]:
        """Returns the answer to /metrics: text, status and headers."""
        return _written(self._registry)


def _written(registry: CollectorRegistry) -> tuple[bytes, int, dict[str, str]]:
    return generate_latest(registry), 200, {"Content-Type": CONTENT_TYPE_LATEST}


class ModelMetrics:
    """Counters and histograms of a server of artefacts. The label `model` is the name in the request's address.

    Args:
      running: the functions that are loaded: name, version, requests that wait, and shapes compiled for.

    Attributes:
      answers: by address and status.
      requests: inference requests, by status.
      whole: seconds from a request's arrival to its answer.
      waited: seconds that a request waited for others, and for those before it.
      together: requests in each call of the program.
      rows: rows in each call of the program, including those that were filled up.
    """

    def __init__(self, running: Callable[[], Iterable[tuple[str, str, int, int]]]):
        self._running, self._registry = running, CollectorRegistry()
        self._registry.register(self)  # pyright: ignore[reportArgumentType]
        made: dict[str, Any] = {"registry": self._registry, "namespace": "minitext"}
        by = ["model", "version"]
        self.answers = Counter(
            "http_requests", "Answers by address and status.", ["path", "status"], **made
        )
        self.requests = Counter(
            "inference_requests", "Inference requests by status.", [*by, "status"], **made
        )
        self.whole = Histogram(
            "inference_seconds", "Arrival to answer.", by, **made, buckets=SECONDS
        )
        self.waited = Histogram(
            "inference_queue_seconds", "Arrival to the call.", by, **made, buckets=SECONDS
        )
        sizes: dict[str, Any] = {**made, "buckets": [1 << i for i in range(11)]}
        self.together = Histogram(
            "inference_requests_per_call", "Requests computed together.", by, **sizes
        )
        self.rows = Histogram(
            "inference_rows_per_call",
            "Rows computed together, including those that were filled up.",
            by,
            **sizes,
        )

    def collect(self) -> Iterator[Any]:
        """Yields what is loaded now."""
        waiting = GaugeMetricFamily(
            "minitext_inference_waiting",
            "Requests that wait for a call.",
            labels=["model", "version"],
        )
        shapes = GaugeMetricFamily(
            "minitext_inference_shapes",
            "Shapes that a program is compiled for.",
            labels=["model", "version"],
        )
        for name, version, calls, compiled in self._running():
            waiting.add_metric([name, version], calls)
            shapes.add_metric([name, version], compiled)
        yield waiting
        yield shapes

    def text(self) -> tuple[bytes, int, dict[str, str]]:
        """Returns the answer to /metrics: text, status and headers."""
        return _written(self._registry)
