"""Is this checkpoint computed here as transformers computes it? Two models from the same files, number against number.

Both run in float32 on the CPU with plain attention, on the same random tokens. Compared are the residual stream after
each layer, which names the first layer that differs, the logits, and the tokens that each model finds most likely one
after another, from its own cache.

Chapters: 23.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from minitext import files
from minitext.checkpoint.weights import open_weights
from minitext.config.model import ModelConfig
from minitext.errors import UserError
from minitext.inference.generate import Sampling, generate
from minitext.models import convert, families
from minitext.models.hf_keys import stacked
from minitext.models.transformer import Block, Transformer

# Float32 sums in another order: relative to the largest number.
TOLERANCE = 1e-4
CONFIG_LIMIT = 16 << 20  # bytes of a config.json; the largest known have some thousand


class Parity(NamedTuple):
    """What the comparison found; differences are the largest, in parts of the largest number.

    Attributes:
      family: model_type of config.json.
      parameters: of the model.
      tokens: in the text.
      logits: difference of the logits.
      argmax: share of the text's places at which both find the same token most likely.
      layers: difference after each layer.
      differs: the first layer beyond `TOLERANCE`, or None.
      greedy: how many tokens both continue the text with equally.
      continued: of so many.
      unread: a line about tensors that the text doesn't need, such as those for images; empty if there are none.
    """

    family: str
    parameters: int
    tokens: int
    logits: float
    argmax: float
    layers: list[float]
    differs: int | None
    greedy: int
    continued: int
    unread: str

    def to_json(self) -> dict[str, Any]:
        """Returns the fields, and whether everything is equal but for rounding."""
        return self._asdict() | {"holds": self.holds}

    @property
    def holds(self) -> bool:
        """Whether everything is equal but for rounding."""
        return self.differs is None and self.logits <= TOLERANCE and self.greedy == self.continued


def compare(folder: str, *, length: int = 32, continued: int = 16, seed: int = 0) -> Parity:
    """Compares the two models of a Hugging Face folder.

    Args:
      folder: with config.json and safetensors.
      length: tokens of the text.
      continued: tokens that follow it.
      seed: of the text.

    Raises:
      UserError: if torch or transformers is missing, or the folder can't be read.
    """
    torch, transformers = _libraries()
    config = read_config(folder)
    name = families.family_of(config)
    cfg = families.model_of(families.config(config))
    model = read_model(folder, cfg, name)  # first: what it refuses, it refuses in one line
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True,
        trust_remote_code=False, use_safetensors=True,
    ).eval()  # fmt: skip
    theirs.generation_config.eos_token_id = None
    drawn = np.random.default_rng(seed).integers(0, cfg.vocab, (1, length))
    with torch.no_grad():
        out = theirs(torch.as_tensor(drawn), use_cache=False, output_hidden_states=True)
        whole = theirs.generate(
            torch.as_tensor(drawn),
            max_new_tokens=continued,
            min_new_tokens=continued,
            do_sample=False,
        )
    want = out.logits.numpy()
    logits = np.asarray(nnx.jit(lambda model, tokens_BT: model(tokens_BT))(model, drawn))
    # The last of theirs is normalised already.
    streams = [state[0].numpy() for state in out.hidden_states[1:]]
    layers = [_apart(a, b) for a, b in zip(residual_streams(model, drawn), streams, strict=True)]
    params, greedy = nnx.state(model), Sampling(temperature=0)
    ours = generate(cfg, params, drawn[0].tolist(), max_tokens=continued, sampling=greedy)
    with open_weights(folder) as weights:
        unread = families.table(cfg, name, weights.tensors).left_unread(weights)
    equal = np.cumprod([a == b for a, b in zip(ours, whole[0, length:].tolist(), strict=True)])
    return Parity(
        family=name,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        tokens=length,
        logits=_apart(logits, want),
        argmax=float(np.mean(logits.argmax(-1) == want.argmax(-1))),
        layers=layers,
        differs=first_apart(layers),
        greedy=int(equal.sum()),
        continued=continued,
        unread=unread,
    )


def _libraries() -> tuple[Any, Any]:
    """Returns torch and transformers."""
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(
            f"minitext parity compares with transformers, and {error.name} is not installed: pip install "
            "'minitext[parity]'"
        ) from None
    return torch, transformers


def read_config(folder: str) -> dict[str, Any]:
    """Returns a folder's config.json.

    Raises:
      UserError: if it can't be read.
    """
    path = Path(files.local_path(folder)) / "config.json"
    if not path.is_file():
        raise UserError(
            f"{files.shorten(folder)} has no config.json: name a folder in Hugging Face's format"
        )
    values = files.read_json(path, CONFIG_LIMIT)
    if not isinstance(values, dict):
        raise UserError(f"{path} has no keys with values: copy it again")
    return values


def read_model(folder: str, cfg: ModelConfig, name: str) -> Transformer:
    """Returns the model of a folder of safetensors, on the first device.

    Args:
      folder: the files.
      cfg: the model's configuration.
      name: its family.

    Raises:
      UserError: if the files don't hold this model.
    """
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), abstract)
    with open_weights(folder) as weights:
        table = families.table(cfg, name, weights.tensors)
        return nnx.merge(graphdef, convert.load(weights, table, params))


def residual_streams(model: Transformer, tokens_BT: np.ndarray) -> list[np.ndarray]:
    """Returns the residual stream [T, D] after each layer, the last one normalised, for one row of tokens."""
    positions_BT = jnp.arange(tokens_BT.shape[1])[None]
    x_XD, found = model.embed_tokens(jnp.asarray(tokens_BT)), []
    layers = {}
    for place in stacked(model.cfg):
        module: Any = model
        for part in place.path.split("."):
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        graphdef = nnx.graphdef(
            nnx.eval_shape(lambda c=place.cfg: Block(c, rules=model.rules, rngs=nnx.Rngs(0)))
        )
        run = jax.jit(lambda params, x, g=graphdef: nnx.merge(g, params)(x, positions_BT, None)[0])
        stack = nnx.state(module)
        for index, number in enumerate(place.layers):
            layers[number] = run, jax.tree.map(lambda leaf, i=index: leaf[i], stack)
    for number in range(len(layers)):
        run, params = layers[number]
        x_XD = run(params, x_XD)
        found.append(np.asarray(x_XD))
    return [*found[:-1], np.asarray(model.norm(x_XD))]


def _apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Returns the largest difference, in parts of the largest number."""
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def first_apart(layers: Sequence[float]) -> int | None:
    """Returns the first layer whose difference isn't within `TOLERANCE`, as NaN is not, or None."""
    return next((i for i, apart in enumerate(layers) if not apart <= TOLERANCE), None)


def print_parity(found: Parity) -> None:
    """Prints the comparison."""
    print(f"{found.family}, {found.parameters:,} parameters, {found.tokens} tokens, float32")
    if found.unread:
        print(found.unread)
    for number, apart in enumerate(found.layers):
        print(f"layer {number:<4} {apart:.1e}{'  <- differs' if number == found.differs else ''}")
    print(
        f"logits     {found.logits:.1e}, the same most likely token at {found.argmax:.0%} of positions"
    )
    print(f"greedy     {found.greedy} of {found.continued} tokens equal")
    print("equal but for rounding" if found.holds else f"not equal (beyond {TOLERANCE:.0e})")
