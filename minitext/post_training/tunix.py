"""Tunix, the stack's library for post-training, on our models: its trainers and learners train them, our engine samples.

Tunix (`minitext[tunix]`) calls a model as `model(tokens, positions, cache, attention_mask)` and wants logits and a cache.
`as_tunix` gives ours that form and leaves their parameters as they are, so any trainer of Tunix can change them, and
`write_run` makes a run of them again. Tunix's own sampler needs a cache that ours don't have: in its place
`EngineRollout` draws answers with the engine of `minitext serve`.

    model, tokenizer = read_run("runs/tiny")
    actor = as_tunix(model)                      # then, for adapters: qwix.apply_lora_to_model(actor, provider, tokens)
    PeftTrainer(actor, optax.adamw(1e-3), config).with_loss_fn(batch_loss).train(batches)   # ours, packed or not
    DPOTrainer(actor, as_tunix(reference), optimizer, config, tokenizer)
    RLCluster(actor=actor, ..., tokenizer=tokenizer, cluster_config=ClusterConfig(rollout_engine=EngineRollout, ...))
    write_run(actor, "runs/tiny", "runs/tiny-tunix", step)

The limits of Tunix 0.1.7 on our models:

- It sees logits alone, so a mixture of experts is trained without its balancing loss.
- On a mesh (`on_mesh`) it leaves the division of the work to the compiler, which our own step states for each operation.
- Padding is an id: what a model answers with it isn't learned from.
- `PPOLearner` keeps rewards as integers, so 0.5 is 0. Log-probabilities of old answers are at temperature 1.

Chapters: 26.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from tunix.rl import common
from tunix.rl.rollout import base_rollout

from minitext.config.sections import MeshConfig
from minitext.data.tokenizer import Tokenizer, load_tokenizer
from minitext.errors import UserError
from minitext.inference.engine import Engine, EngineOptions
from minitext.inference.requests import Event, Request
from minitext.models.transformer import Transformer
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import param_spec, tree_shardings
from minitext.training.loss import cross_entropy, masked_sum
from minitext.training.run_dir import TOKENIZER, load_run, read_config, write_parameters
from minitext.training.step import model_def


class TunixModel(nnx.Module):
    """A model as Tunix calls it; `model` is ours, whose parameters it has.

    Args:
      model: ours.
      alpha: that of Qwix's adapters, which Qwix doesn't keep with them; None: there are none.
    """

    def __init__(self, model: Transformer, alpha: float | None = None):
        self.model, self.alpha = model, alpha

    def __call__(
        self,
        input_tokens: jax.Array,
        positions: jax.Array | None = None,
        cache: Any = None,
        attention_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        """Returns the logits [B, T, V] of the next tokens, float32, and no cache.

        Args:
          input_tokens: [B, T].
          positions: [B, T], or None for 0 to T - 1.
          cache: None.
          attention_mask: [B, T, T] which tokens (second) see which (third). Our models express causal masks, of packed
            texts too, in which padding is seen by nobody. Other masks are refused where their numbers are known; a
            program that meets one gives logits that are not numbers.
          segment_ids: [B, T] as ours; the mask has precedence.

        Raises:
          UserError: for a cache, or a mask that our models can't express.
        """
        x_BTD, fits_B = self._hidden(input_tokens, positions, cache, attention_mask, segment_ids)
        logits_BTV = self.model.logits(x_BTD)
        return jnp.where(fits_B[:, None, None], logits_BTV, jnp.nan), None

    def _hidden(self, tokens_BT, positions_BT, cache, mask_BTT, segment_ids_BT):
        """Returns the input of the output layer, and which rows have a mask that can be expressed."""
        if cache is not None:
            raise UserError(
                "Tunix's own sampler needs another cache than minitext's models have: set rollout_engine=EngineRollout"
            )
        fits_B = jnp.ones(len(tokens_BT), bool)
        if mask_BTT is not None:
            segment_ids_BT, fits_B = segments_of(mask_BTT)
            if not isinstance(fits_B, jax.core.Tracer) and not jnp.all(fits_B):
                raise UserError(
                    f"row {int(jnp.argmin(fits_B))} of the attention mask is not causal within texts: minitext's "
                    "models know no other mask from outside"
                )
        return self.model.hidden(tokens_BT, positions_BT, segment_ids_BT)[0], fits_B


class TunixCritic(TunixModel):
    """A model that Tunix's PPO asks for values: a projection of the hidden state, zero at first, gives them."""

    def __init__(self, model: Transformer):
        super().__init__(model)
        self.head = nnx.Param(jnp.zeros(model.cfg.embed), axes=("act",))

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_tokens, positions=None, cache=None, attention_mask=None, segment_ids=None
    ) -> jax.Array:
        """Returns the values [B, T, 1] of texts up to each token, float32, for the arguments of `TunixModel`."""
        x_BTD, fits_B = self._hidden(input_tokens, positions, cache, attention_mask, segment_ids)
        values_BT = jnp.einsum("BTD,D->BT", x_BTD.astype(jnp.float32), self.head.get_value())
        return jnp.where(fits_B[:, None], values_BT, jnp.nan)[..., None]


def as_tunix(model: Transformer, alpha: float | None = None) -> TunixModel:
    """Returns a model for Tunix's trainers; for `alpha` see `TunixModel`."""
    return TunixModel(model, alpha)


def segments_of(mask_BTT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns segment ids [B, T] that mean the same as an attention mask [B, T, T], and which rows [B] have such ids."""
    mask_BTT = mask_BTT != 0
    real_BT = jnp.diagonal(mask_BTT, axis1=1, axis2=2)
    ids_BT = jnp.where(real_BT, 1 + jnp.argmax(mask_BTT, axis=2), 0)
    T = mask_BTT.shape[1]
    said_BTT = (ids_BT[:, :, None] == ids_BT[:, None]) & jnp.tril(jnp.ones((T, T), bool))
    same_BTT = (mask_BTT == said_BTT) | ~real_BT[:, :, None]  # what padding sees means nothing
    return ids_BT, jnp.all(same_BTT, axis=(1, 2))


def batch_loss(model: TunixModel, tokens, targets, positions, segment_ids, loss_mask) -> jax.Array:
    """The loss of our batches for `PeftTrainer.with_loss_fn`: nats per target, as in `minitext sft`.

    Tunix's own loss takes the next token of the row as target, and so loses the last one of each packed conversation.
    """
    logits_BTV, _ = model(tokens, positions, segment_ids=segment_ids)
    return masked_sum(cross_entropy(logits_BTV, targets), loss_mask) / jnp.sum(loss_mask)


def on_mesh(model: TunixModel, mesh: Mesh) -> TunixModel:
    """Returns the model divided over a mesh, with what Tunix divides the optimizer's state by.

    Args:
      model: on any devices.
      mesh: with our axes (`minitext.sharding.mesh.AXES`) of the type Auto, as the compiler divides the work.
    """
    graphdef, state = nnx.split(model)
    rules = model.model.rules
    placed = jax.device_put(state, tree_shardings(state, mesh, rules))

    def divided(variable: Any) -> Any:
        return variable.replace(out_sharding=tuple(param_spec(rules, variable, mesh)), mesh=mesh)

    known = jax.tree.map(divided, placed, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return nnx.merge(graphdef, known)


def read_run(run: Path | str) -> tuple[Transformer, "TunixTokenizer"]:
    """Returns a run's newest model, and its tokenizer as Tunix's libraries call it.

    Raises:
      UserError: if the directory holds no run or no usable checkpoint.
    """
    cfg, params, tokenizer, _ = load_run(run)
    return nnx.merge(model_def(cfg), params), TunixTokenizer(tokenizer, cfg.model.vocab)


def write_run(model: TunixModel, run: Path | str, target: Path | str, step: int) -> None:
    """Writes a model that Tunix has trained as a run, whole or not at all, with adapters added to their weights.

    Args:
      model: made of `run`'s.
      run: whose configuration, tokenizer and chat template the new one has.
      target: directory to make.
      step: steps that it was trained.

    Raises:
      UserError: if it has other parameters than `run`, or can't be written.
    """
    cfg, params = read_config(run), plain_params(model)
    if Path(target).exists():
        raise UserError(f"{target} exists: name a directory that does not")
    wanted = nnx.eval_shape(lambda: nnx.state(Transformer(cfg.model, rngs=nnx.Rngs(0)), nnx.Param))
    if _shapes(params) != _shapes(wanted):
        raise UserError(f"the model's parameters are not those of {run}: name the run that it was read from")
    tokenizer = load_tokenizer(Path(run) / TOKENIZER)
    write_parameters(run, Path(target), cfg, params, tokenizer, step)


def plain_params(model: TunixModel) -> Any:
    """Returns the parameters of our model as `nnx.State`, with Qwix's adapters added to their weights.

    Raises:
      UserError: for adapters without `alpha`, or of other weights than matrices.
    """
    flat = dict(nnx.to_flat_state(nnx.state(model.model, nnx.Param)))
    params = {path: x for path, x in flat.items() if not isinstance(x, nnx.LoRAParam)}
    adapters = {path for path in flat if path not in params}
    if adapters and model.alpha is None:
        raise UserError("the model has adapters of Qwix: give as_tunix their alpha")
    for path in params:
        *above, name = path
        a, b = (flat.get((*above, f"{name}_lora_{part}")) for part in "ab")
        if a is None or b is None:
            continue
        adapters -= {(*above, f"{name}_lora_{part}") for part in "ab"}
        scale = model.alpha / a.get_value().shape[-1]
        arrays = params[path].get_value(), a.get_value(), b.get_value()
        params[path] = params[path].replace(_with_adapter(*arrays, scale))
    if adapters:
        raise UserError(f"{'/'.join(map(str, min(adapters)))} is no adapter of a matrix")
    return nnx.from_flat_state(params)


@partial(jax.jit, static_argnames="scale")
def _with_adapter(w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    return w + scale * jnp.einsum("...DR,...RF->...DF", a, b).astype(w.dtype)


def _shapes(params: Any) -> dict[Any, tuple[int, ...]]:
    return {path: x.get_value().shape for path, x in nnx.to_flat_state(params)}


class TunixTokenizer:
    """A tokenizer as Tunix calls it (`tunix.generate.tokenizer_adapter`).

    Args:
      tokenizer: ours.
      vocab: the model's; ids beyond the tokenizer's are free for padding.
      pad: id of padding; None: one that stands for no text, if there is one.

    Raises:
      UserError: if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, pad: int | None = None):
        if pad is None:
            pad = vocab - 1 if vocab > tokenizer.vocab_size else tokenizer.no_text
        if pad is None:
            raise UserError("every id of this tokenizer may stand for text: name one for padding with pad=")
        self.tokenizer, self.pad = tokenizer, pad

    def encode(self, text: str, **_: Any) -> list[int]:
        """Returns the ids of a text, after what the model expects at its beginning."""
        return [int(i) for i in self.tokenizer.encode(text)]

    def decode(self, ids: Any, **_: Any) -> str:
        """Returns the text of ids, without padding and ends."""
        return self.tokenizer.decode(int(i) for i in ids if int(i) != self.pad)

    def bos_id(self) -> None:
        """Returns None: `encode` begins with it where the model expects it."""

    def eos_id(self) -> int:
        """Returns the id that ends a document."""
        return self.tokenizer.eod_id

    def pad_id(self) -> int:
        """Returns the id of padding."""
        return self.pad


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
        self.engine = Engine(rollout_actor.model.cfg, params, options, mesh=divided)

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
            raise UserError(f"a prompt has {most} tokens: set max_prompt_length={most}, now {longest}")
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
        return common.compute_per_token_logps(graphdef, state, prompt_tokens, completion_tokens, **ids)

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
