"""Our engine as the sampler of Tunix's reinforcement learning; `minitext.post_training.tunix` has an example.

Chapters: 26.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.requests import Event, Request
from minitext.models.lora import merged_config
from minitext.post_training.tunix import TunixModel, plain_params
from minitext.sharding.mesh import make_mesh


class EngineRollout(base_rollout.BaseRollout):
    """Answers drawn by our engine: pass the class to Tunix's `ClusterConfig(rollout_engine=...)`.

    The engine has every device of the rollout's mesh, which divide heads and features. Weights go there from the
    trainer's devices, not through the host.

    Args:
      rollout_actor: the model in training.
      tokenizer: Tunix's adapter of a `TunixTokenizer`.
      mesh: the rollout's.
      rollout_config: says how long texts may be.
      sequences: texts at a time.
    """

    def __init__(
        self, rollout_actor: TunixModel, tokenizer: Any, mesh: Mesh,
        rollout_config: base_rollout.RolloutConfig, sequences: int = 64,
    ):  # fmt: skip
        self.tokenizer, self.calls = tokenizer, 0
        # What the trainer changes is copied, or Tunix takes both models for one, which it then doesn't synchronize.
        graphdef, state = nnx.split(rollout_actor)
        self.actor = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        options = EngineOptions(max_sequences=sequences, max_length=length, max_waiting=1 << 30)
        devices, params = list(mesh.devices.flat), plain_params(self.actor)
        divided = None
        if len(devices) > 1:
            divided = make_mesh(MeshConfig(data=1, tensor=len(devices)), devices)
        else:
            params = jax.device_put(params, devices[0])
        self.engine = Engine(merged_config(rollout_actor.model.cfg), params, options, mesh=divided)

    def generate(
        self, prompts: Sequence[str], rollout_config: base_rollout.RolloutConfig, **_: Any
    ) -> base_rollout.RolloutOutput:
        """Draws an answer to each prompt, each with a seed of its own.

        Args:
          prompts: texts.
          rollout_config: `seed` decides the draws of all calls; `logprobs` are those at temperature 1.

        Returns:
          The answers. Their tokens include the one that ended them.

        Raises:
          UserError: for a prompt longer than `max_prompt_length`.
        """
        c, longest = rollout_config, rollout_config.max_prompt_length
        ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        if (most := max(map(len, ids))) > longest:
            raise UserError(
                f"a prompt has {most} tokens: set max_prompt_length={most}, now {longest}"
            )
        seed = [0] if c.seed is None else np.ravel(np.asarray(c.seed)).tolist()
        self.calls += 1
        seeds = np.random.SeedSequence([*seed, self.calls]).generate_state(len(ids))
        heard: list[list[Event]] = [[] for _ in ids]
        for prompt, one, events in zip(ids, seeds.tolist(), heard, strict=True):
            request = Request(
                tuple(prompt), c.max_tokens_to_generate, temperature=c.temperature, seed=one,
                top_p=1.0 if c.top_p is None else c.top_p, top_k=max(c.top_k or 0, 0),
                stop_ids=frozenset(c.eos_tokens or [self.eos_id()]), keep_stop=True,
                logprobs=0 if c.return_logprobs else None,
            )  # fmt: skip
            self.engine.submit(request, events.append)
        while self.engine.step():
            pass
        tokens = [np.array([e.token for e in events[:-1]], np.int32) for events in heard]
        padded = np.full((len(ids), longest), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[longest - len(prompt) :] = prompt
        logprobs = [np.array([e.logprob for e in events[:-1]], np.float32) for events in heard]
        return base_rollout.RolloutOutput(
            text=[self.tokenizer.decode(x) for x in tokens], logits=[], tokens=tokens,
            left_padded_prompt_tokens=padded, logprobs=logprobs if c.return_logprobs else None,
        )  # fmt: skip

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array
    ) -> jax.Array:
        """Returns what the model that draws says of answers, [B, T] in nats at temperature 1."""
        graphdef, state = nnx.split(self.actor)
        ids = {"pad_id": self.pad_id(), "eos_id": self.eos_id()}
        return common.compute_per_token_logps(
            graphdef, state, prompt_tokens, completion_tokens, **ids
        )

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Takes the trainer's newest weights, or adapters."""
        nnx.update(self.actor, params)
        self.engine.load(plain_params(self.actor))

    def pad_id(self) -> int:
        """Returns the id of padding."""
        return self.tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the id that ends an answer."""
        return self.tokenizer.eos_id()

    def model(self) -> TunixModel:
        """Returns the model that draws, as of the last weights it took."""
        return self.actor
