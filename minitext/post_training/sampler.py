"""Answers to prompts, drawn by the engine of `minitext.inference.engine` in this process, on the trainer's own devices.

Weights go from the trainer to the engine without a trip through the host. An array is used where it is if the engine's
devices have their parts of it already; otherwise devices send each other theirs. The engine lets go of all arrays after
the answers, before the next step donates them.

So nothing is copied of a model that computes in float32, as its parameters are, on devices that divide it as training
does. One that computes in bfloat16 has its matrices in that type, in half the bytes, while it answers: casting them for
each token would read twice as much. Weights stored in fewer bits are laid out for products of one token and kept, since
only the adapters beside them change.

With several processes each has an engine on devices of its own, and answers its share of the prompts.

Chapters: 26.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from minitext.checkpoint import stacks
from minitext.config.config import Config
from minitext.errors import UserError
from minitext.inference.engine import ROWS, Engine, EngineOptions
from minitext.inference.requests import Event, Request
from minitext.post_training.policy_objective import rollout_config
from minitext.sharding.mesh import AXES

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
      cfg: the run's configuration; `objective` says how answers are drawn, and `objective.engine_devices` on how many.
      mesh: the trainer's; the engine has the first of its devices, or of this process's.
      stops: ids that end an answer.

    Raises:
      UserError: if there are too few devices, or they can't divide the model.
    """

    def __init__(self, cfg: Config, mesh: Mesh, stops: frozenset[int]):
        self.cfg, self.stops, self.engine = cfg, stops, None
        rl, model = rollout_config(cfg), cfg.model
        devices = engine_devices(mesh, rl.engine_devices)
        self.mesh = None
        if len(devices) > 1:
            sizes = [len(devices) if axis == "tensor" else 1 for axis in AXES]
            types = (AxisType.Explicit,) * len(AXES)
            self.mesh = Mesh(np.reshape(devices, sizes), AXES, axis_types=types)
        longest = cfg.data.seq_len + 1
        page = max(1, min(32, 1 << (-(-longest // PAGES) - 1).bit_length()))
        rows = min(-(-rl.prompts // jax.process_count()) * rl.group, ROWS[-1])
        self.options = EngineOptions(
            page_tokens=page,
            cache_tokens=rows * -(-longest // page) * page,
            max_sequences=rows,
            max_length=longest,
            max_waiting=1 << 30,
            chunk=max(256, page),
            reuse_prefixes=False,  # a prompt comes once with these parameters
            row_sizes=tuple(sorted({-(-rows // 16), -(-rows // 4), rows})),
            borrow=model.dtype == "float32" and not model.is_stored,
        )
        # Then nothing else that answers need changes.
        self.keeps = bool(model.lora.rank) and not self.options.borrow

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
        if not self.keeps:
            engine.release()
        return [[_answer(each) for each in heard] for heard in events]

    def _loaded(self, params: Any) -> Engine:
        params = stacks.as_one_stack(params)
        if self.engine is None:
            self.engine = Engine(self.cfg.model, params, self.options, mesh=self.mesh)
        elif self.keeps:
            self.engine.load(nnx.filter_state(params, nnx.LoRAParam))
        else:
            self.engine.load(params)
        return self.engine


def engine_devices(mesh: Mesh, count: int) -> list[Any]:
    """Returns the devices of this process's engine: the first `count`, in the mesh's order, that are all its own.

    Every process has as many, and each part begins at a multiple of `count`, as `move` needs.

    Raises:
      UserError: if there are too few devices.
    """
    devices = mesh.devices.ravel().tolist()
    if count > len(devices):
        raise UserError(
            f"objective.engine_devices={count}: there are {len(devices)}: choose {len(devices)} or less"
        )
    found: dict[int, list[Any]] = {}
    for start in range(0, len(devices) - count + 1, count):
        part = devices[start : start + count]
        if len(processes := {device.process_index for device in part}) == 1:
            found.setdefault(processes.pop(), part)
    if found.keys() != {device.process_index for device in devices} or (
        len(found) > 1 and len(devices) % count
    ):
        raise UserError(
            f"objective.engine_devices={count}: each process has an engine, and {len(devices)} devices of "
            f"{jax.process_count()} processes can't be divided like that: choose 1, or a divisor of each process's "
            "devices"
        )
    return found[jax.process_index()]


def _answer(events: Sequence[Event]) -> Answer:
    *drawn, last = events
    assert last.finish in ("stop", "length"), last
    tokens = tuple(event.token for event in drawn if event.token is not None)
    logp = np.asarray([event.logprob for event in drawn], np.float32)
    return Answer(tokens, logp, last.finish == "stop")
