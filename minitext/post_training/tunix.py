"""Tunix, the stack's library for post-training, on our models: its trainers train them, and our engine samples.

Tunix (`minitext[tunix]`) calls a model as `model(tokens, positions, cache, attention_mask)` and wants logits and a
cache. `as_tunix` gives ours that form and leaves their parameters as they are, so any trainer of Tunix can change them,
and `write_run` makes a run of them again. Tunix's own sampler needs a cache that ours don't have: in its place
`tunix_rollout.EngineRollout` draws answers with the engine of `minitext serve`.

    model, tokenizer = read_run("runs/tiny")
    actor = as_tunix(model)                      # then, for adapters: qwix.apply_lora_to_model(actor, provider, tokens)
    PeftTrainer(actor, optax.adamw(1e-3), config).with_loss_fn(packed_loss).train(batches)   # ours, packed or not
    DPOTrainer(actor, as_tunix(reference), optimizer, config, tokenizer)
    RLCluster(actor=actor, tokenizer=tokenizer, cluster_config=ClusterConfig(rollout_engine=EngineRollout, ...))
    write_run(actor, "runs/tiny", "runs/tiny-tunix", step)

The limits of Tunix 0.1.7 on our models:

- It sees logits alone, so a mixture of experts is trained without its balancing loss.
- On a mesh (`place_model`) the compiler divides the work. Our own step states it for each operation.
- Its optimizer sees arrays without our names, so `weight_decay` also counts the stacked scales [L, D] as matrices.
- Padding is an id: what a model answers with it isn't learned from.
- `PPOLearner` keeps rewards as integers, so 0.5 is 0. Log-probabilities of old answers are at temperature 1.

Chapters: 26.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh

from minitext.data.tokenizer import Tokenizer, load_tokenizer
from minitext.errors import UserError
from minitext.models.lora import merge, merged_config
from minitext.models.transformer import Transformer
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
            if not isinstance(fits_B, Tracer) and not jnp.all(fits_B):
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
    """Returns segment ids [B, T] that mean the same as attention masks [B, T, T], and which rows [B] have such ids."""
    mask_BTT = mask_BTT != 0
    real_BT = jnp.diagonal(mask_BTT, axis1=1, axis2=2)
    ids_BT = jnp.where(real_BT, 1 + jnp.argmax(mask_BTT, axis=2), 0)
    T = mask_BTT.shape[1]
    said_BTT = (ids_BT[:, :, None] == ids_BT[:, None]) & jnp.tril(jnp.ones((T, T), bool))
    same_BTT = (mask_BTT == said_BTT) | ~real_BT[:, :, None]  # what padding sees means nothing
    return ids_BT, jnp.all(same_BTT, axis=(1, 2))


def packed_loss(model: TunixModel, tokens, targets, positions, segment_ids, loss_mask) -> jax.Array:
    """The loss of our batches for `PeftTrainer.with_loss_fn`: nats per target, as in `minitext sft`.

    Tunix's own loss takes the next token of the row as target, and so loses the last one of each packed conversation.
    """
    logits_BTV, _ = model(tokens, positions, segment_ids=segment_ids)
    return masked_sum(cross_entropy(logits_BTV, targets), loss_mask) / jnp.sum(loss_mask)


def place_model(model: TunixModel, mesh: Mesh) -> TunixModel:
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
      UserError: if it isn't `run`'s model, or can't be written.
    """
    if Path(target).exists():
        raise UserError(f"{target} exists: name a directory that does not")
    cfg = read_config(run)
    if cfg.model != model.model.cfg:
        raise UserError(f"this is not the model of {run}: name the run that it was read from")
    alone = cfg.checkpoint.model_copy(update={"load_parameters": None})
    cfg = cfg.model_copy(update={"model": merged_config(cfg.model), "checkpoint": alone})
    tokenizer = load_tokenizer(Path(run) / TOKENIZER)
    write_parameters(run, Path(target), cfg, plain_params(model), tokenizer, step)


def plain_params(model: TunixModel) -> Any:
    """Returns the parameters of our model as `nnx.State`, with adapters, Qwix's or ours, added to their weights.

    Raises:
      UserError: for Qwix's adapters without `alpha`, or of other weights than matrices as they are in our runs.
    """
    if not any(isinstance(x, nnx.LoRAParam) for _, x in nnx.to_flat_state(nnx.state(model))):
        return nnx.state(model.model, nnx.Param)
    return _merged(*nnx.split(model.model), model.alpha)


@partial(jax.jit, static_argnames="alpha")
def _merged(graphdef: Any, state: Any, alpha: float | None) -> Any:
    model = nnx.merge(graphdef, state)
    merge(model)
    for path, module in list(nnx.iter_modules(model)):
        for key in [key for key in vars(module) if key.endswith("_lora_a")]:
            name = key.removesuffix("_lora_a")
            w, a, b = (getattr(module, name + end) for end in ("", "_lora_a", "_lora_b"))
            if alpha is None:
                raise UserError("the model has adapters of Qwix: give as_tunix their alpha")
            if not isinstance(w, nnx.Param) or a.get_value().ndim != w.get_value().ndim:
                where = "/".join(map(str, (*path, name)))
                raise UserError(
                    f"{where} has an adapter of Qwix and isn't a float matrix: exempt it"
                )
            product = jnp.einsum("...DR,...RF->...DF", a.get_value(), b.get_value())
            scale = alpha / a.get_value().shape[-1]
            setattr(module, name, w.replace(w.get_value() + scale * product))
            delattr(module, name + "_lora_a")
            delattr(module, name + "_lora_b")
    return nnx.state(model, nnx.Param)


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
            raise UserError(
                "every id of this tokenizer may stand for text: name one for padding with pad="
            )
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
