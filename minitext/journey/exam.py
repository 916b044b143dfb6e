"""How often a model answers correctly: when its answers are sampled, and when each token is its likeliest (greedy).

Both are needed. Reinforcement learning makes right answers likelier, which sampling shows; greedy answers show whether
the model knows more sums than before.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitext.data.chat import Renderer, read_chat
from minitext.data.tokenizer import Tokenizer
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.requests import Event, Request
from minitext.post_training.rewards import exact
from minitext.training.run_dir import PUBLISHED, load_run

DRAWS = 4  # of each question
MOST = 8  # tokens of an answer
ROWS = 256  # texts at once


class Examinee:
    """A run's model, ready to be asked.

    Args:
      directory: of the run, with a chat template.
    """

    def __init__(self, directory: Path):
        cfg, params, self.tokenizer, _ = load_run(directory)
        self.chat = read_chat(directory / PUBLISHED, self.tokenizer)
        options = EngineOptions(
            page_tokens=8, cache_tokens=ROWS * 48, max_sequences=ROWS, max_length=48, max_waiting=1 << 20,
            row_sizes=(ROWS,),
        )  # fmt: skip
        self._engine = Engine(cfg.model, params, options)

    def answers(self, prompts: Sequence[str], *, greedy: bool, draws: int = 1) -> list[list[str]]:
        """Returns the texts of `draws` answers to each prompt, the same each time."""
        said: dict[tuple[int, int], list[int]] = {}
        for number, ids in enumerate(_rendered(self.chat, self.tokenizer, prompts)):

            def hear(event: Event, number: int = number) -> None:
                if event.token is not None:
                    said.setdefault((number, event.sample), []).append(event.token)

            request = Request(
                ids, MOST, n=draws, seed=number, temperature=0.0 if greedy else 1.0, stop_ids=self.chat.stops
            )  # fmt: skip
            self._engine.submit(request, hear)
        while self._engine.step():
            pass
        decode = self.tokenizer.decode
        return [[decode(said.get((n, i), [])) for i in range(draws)] for n in range(len(prompts))]

    def grade(self, records: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Returns the share of right answers to records' prompts, `sampled` and `greedy`."""
        sampled = self.share_right(records, greedy=False)
        return {"sampled": sampled, "greedy": self.share_right(records, greedy=True)}

    def share_right(self, records: Sequence[dict[str, Any]], *, greedy: bool) -> float:
        """Returns the share of right answers to records' prompts: one greedy answer to each, or `DRAWS` sampled."""
        prompts = [record["prompt"] for record in records]
        answers = self.answers(prompts, greedy=greedy, draws=1 if greedy else DRAWS)
        right = [exact(r, text) for r, said in zip(records, answers, strict=True) for text in said]
        return sum(right) / len(right)


def _rendered(chat: Any, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    with contextlib.closing(Renderer()) as renderer:
        texts = [chat.render([{"role": "user", "content": prompt}], renderer) for prompt in prompts]
    return [tuple(tokenizer.encode_chat(text)) for text in texts]
