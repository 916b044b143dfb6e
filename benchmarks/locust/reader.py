"""A reader for locust: asks a server for a text of 32 tokens and notes when each part of it comes.

    locust -f benchmarks/locust/reader.py --host http://127.0.0.1:8000

Locust's table then has two rows more: the time to the first token, and the time between tokens. Its row "answer" counts
answers; its times end with the first line, before any token.
"""

import os
import random
import time

from locust import HttpUser, task

WORDS = [
    "the",
    "ship",
    "sailed",
    "north",
    "past",
    "an",
    "old",
    "stone",
    "light",
    "into",
    "grey",
    "morning",
]
TOKENS = int(os.environ.get("READER_TOKENS", "32"))


class Reader(HttpUser):
    """Asks again as soon as an answer is complete."""

    @task
    def read(self):
        # Prompts of 8 to 64 words, which seldom begin alike.
        prompt = " ".join(random.choices(WORDS, k=random.randint(8, 64)))
        asked = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "stream": True,
            "seed": random.randrange(2**31),
        }
        began, last = time.perf_counter(), None
        with self.client.post(
            "/v1/completions", json=asked, stream=True, name="answer", catch_response=True
        ) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):  # an empty line, the end, or a refusal
                    continue
                now = time.perf_counter()
                self._note("first token" if last is None else "next tokens", now - (last or began))
                last = now

    def _note(self, name: str, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="text",
            name=name,
            response_time=1000 * seconds,
            response_length=0,
            exception=None,
        )
