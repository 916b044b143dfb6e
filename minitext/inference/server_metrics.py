"""What the server says of itself at /metrics, for Prometheus. Where vLLM measures the same, the names are vLLM's.

Chapters: 24.
"""

from collections.abc import Callable, Iterator
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
        return generate_latest(self._registry), 200, {"Content-Type": CONTENT_TYPE_LATEST}
