"""Answers to prompts, drawn by the engine of `minitext.inference.engine` in this process, on the trainer's own devices.

Weights go from the trainer to the engine without a trip through the host: where both keep an array on the same devices
in the same way nothing moves, elsewhere devices send each other their parts.

Chapters: 26.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from minitext.checkpoint import stacks
from minitext.config.config import Config
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.engine import ROWS, Engine, EngineOptions
from minitext.inference.requests import Event, Request
from minitext.post_training.policy_objective import rollout_config
from minitext.sharding.mesh import make_mesh

PAGES = 4  # of the longest text; an engine's tables have no fewer


class Answer(NamedTuple):
    """What a model answered.

    Attributes:
      tokens: ids, the one that ended it included.
      logp: [tokens] float32 log-probability of each, as the engine computed it, at temperature 1.
      ended: whether it ended by itself, not at the most tokens it might have.
    """

    tokens: tuple[int, ...]
    logp: np.ndarray
    ended: bool


class Sampler:
    """An engine for a run's answers, which is given the parameters of the time.

    Args:
      cfg: the run's configuration; `objective` says how answers are drawn, and `objective.engine_devices` where.
      stops: ids that end an answer.

    Raises:
      UserError: if there are too few devices, or they can't divide the model.
    """

    def __init__(self, cfg: Config, stops: frozenset[int]):
        self.cfg, self.stops, self.engine = cfg, stops, None
        rl, devices = rollout_config(cfg), jax.devices()
        count = rl.engine_devices
        if count > len(devices):
            raise UserError(
                f"objective.engine_devices={count}: there are {len(devices)}: choose {len(devices)} or less"
            )
        one = MeshConfig(tensor=count, data=1)
        self.mesh = make_mesh(one, devices=devices[:count]) if count > 1 else None
        longest = cfg.data.seq_len + 1
        page = max(1, min(32, 1 << (-(-longest // PAGES) - 1).bit_length()))
        rows = min(rl.answers, ROWS[-1])
        self.options = EngineOptions(
            page_tokens=page,
            cache_tokens=rows * -(-longest // page) * page,
            max_sequences=rows,
            max_length=longest,
            max_waiting=1 << 30,
            chunk=max(256, page),
            reuse_prefixes=False,  # a prompt comes once with these parameters
            row_sizes=tuple(sorted({-(-rows // 16), -(-rows // 4), rows})),
        )

    def answer(
        self,
        params: Any,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        n: int = 1,
    ) -> list[list[Answer]]:
        """Returns n answers to each prompt.

        Args:
          params: of the model, on the trainer's mesh.
          prompts: ids of each.
          seeds: of each prompt's draws.
          temperatures: of each prompt's answers; 0 takes the most likely token.
          n: answers to each.
        """
        engine = self._loaded(params)
        requests = [
            Request(
                prompt, rollout_config(self.cfg).max_tokens, n=n, temperature=temperature, seed=seed,
                stop_ids=self.stops, keep_stop=True, logprobs=0,
            )
            for prompt, seed, temperature in zip(prompts, seeds, temperatures, strict=True)
        ]  # fmt: skip
        events: list[list[list[Event]]] = [[[] for _ in range(n)] for _ in requests]
        for request, heard in zip(requests, events, strict=True):
            engine.submit(request, lambda event, heard=heard: heard[event.sample].append(event))
        while engine.step():
            pass
        return [[_answer(each) for each in heard] for heard in events]

    def _loaded(self, params: Any) -> Engine:
        params = stacks.as_one_stack(params)
        if self.engine is None:
            self.engine = Engine(self.cfg.model, params, self.options, mesh=self.mesh)
        elif self.cfg.model.lora.rank:  # nothing else that answers need has changed
            self.engine.load(nnx.filter_state(params, nnx.LoRAParam))
        else:
            self.engine.load(params)
        return self.engine


def _answer(events: Sequence[Event]) -> Answer:
    *drawn, last = events
    assert last.finish in ("stop", "length"), last
    tokens = tuple(event.token for event in drawn if event.token is not None)
    logp = np.asarray([event.logprob for event in drawn], np.float32)
    return Answer(tokens, logp, last.finish == "stop")
