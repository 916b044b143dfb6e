"""How fast a model should answer on chips that aren't here, and the engine's programs compiled for them.

An answer takes two kinds of work. Prefill computes all tokens of a prompt at once: its products reuse each weight for
many tokens, so arithmetic bounds it. Decode computes one token of each text: it reads every weight, and each text's own
cache, for a few products, so memory bounds it (Pope et al. 2022; Austin et al. 2025, "How to Scale Your Model", part
7). Nothing is fitted. The rates are those of `minitext.hardware.CHIPS`, and memory and matrix units are taken to be
busy all the time, so real steps are slower.

Chapters: 24.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from minitext import hardware
from minitext.compiler.aot import compile_step, read_dump
from minitext.compiler.report import Report
from minitext.compiler.targets import Target, parse_target, topology_mesh
from minitext.config.config import Config
from minitext.config.model import DeltaNetConfig, ModelConfig, MoEConfig
from minitext.config.section import cached
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.hardware import LINK_SECONDS
from minitext.inference.engine import (
    COLUMNS,
    RULES_OF_ENGINE,
    Programs,
    check_mesh,
    dropless,
    make_programs,
)
from minitext.inference.layout import Layout
from minitext.inference.replicas import divide
from minitext.inference.sampling import Want
from minitext.models.flops import all_layers, count_attention, keys_seen
from minitext.models.moe import EXPERTS
from minitext.models.paged import page_tokens
from minitext.models.transformer import VARIANTS, Transformer, make_pages, with_paging
from minitext.perf.sizes import check_products
from minitext.sharding.mesh import abstract_mesh
from minitext.sharding.rules import tree_shardings
from minitext.terminal import print_tables, show_bytes, table

_KERNEL = re.compile(
    r"%(\w+?)(?:\.\d+)? = [^\n]* custom_call_target=\"(?:tpu_custom_call|__gpu\$xla\.gpu\.triton)\""
)


@dataclass(frozen=True)
class Work:
    """What one program needs of each device, and how long that takes.

    Attributes:
      flops: of products.
      bytes: read from memory: weights, and the caches of the texts.
      sent: bytes that the device sends to the others.
      compute: seconds that the products take at the peak.
      memory: seconds that reading takes at the memory's bandwidth.
      network: seconds that sending takes, which nothing hides: each layer waits for it twice.
    """

    flops: float
    bytes: float
    sent: float
    compute: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        """The whole program's time."""
        return max(self.compute, self.memory) + self.network

    @property
    def limit(self) -> str:
        """What takes the longest: `compute`, `memory` or `network`."""
        return max(("compute", "memory", "network"), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class Serving:
    """A prediction for an engine on a target.

    Attributes:
      target: its name.
      chips: all of them.
      replicas: copies of the model; each has its own texts.
      tensor: devices that share a copy.
      texts: texts that a replica continues at once.
      context: tokens that each of them has.
      prompt: tokens of a new text's prompt.
      weight_bytes: of parameters on a device.
      text_bytes: of one text's cache on a device.
      fitting: texts of this length that fit on a replica.
      decode: a step that computes one token of each text.
      prefill: the whole of a prompt.
      reports: what the compiler says of the programs `decode` and `prefill`, if it was asked.
      kernels: Pallas kernels that each of these calls in a step, and how often.
    """

    target: str
    chips: int
    replicas: int
    tensor: int
    texts: int
    context: int
    prompt: int
    weight_bytes: int
    text_bytes: int
    fitting: int
    decode: Work
    prefill: Work
    reports: dict[str, Report] = field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of answers for each second and chip, while no prompt is computed."""
        return self.texts * self.replicas / self.decode.seconds / self.chips

    @property
    def prompt_tokens_per_second(self) -> float:
        """Tokens of prompts for each second and chip, while no answer is."""
        return self.prompt * self.replicas / self.prefill.seconds / self.chips

    @property
    def fits(self) -> bool:
        """Whether weights and caches have room, and the compiler says so too if it was asked."""
        return self.fitting >= self.texts and all(report.fits for report in self.reports.values())

    def to_json(self) -> dict[str, Any]:
        """Returns the prediction as JSON values."""
        works = {
            name: asdict(work) | {"seconds": work.seconds, "limit": work.limit}
            for name, work in (("decode", self.decode), ("prefill", self.prefill))
        }
        plain = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("reports", "kernels", *works)
        }
        return plain | works | {
            "tokens_per_second_per_chip": self.tokens_per_second,
            "prompt_tokens_per_second_per_chip": self.prompt_tokens_per_second,
            "fits": self.fits,
            "kernels": self.kernels,
            "reports": {name: report.to_json() for name, report in self.reports.items()},
        }  # fmt: skip


def predict_serving(
    cfg: Config, target: str, *,
    texts: int, context: int, prompt: int, cache_dtype: str = "auto", compile: bool = False,
) -> Serving:  # fmt: skip
    """Predicts how fast an engine answers.

    Args:
      cfg: the model, and how many devices share a copy (`mesh.tensor`; by default all of the target).
      target: such as `v5e:2x2`; see `minitext.compiler.targets.parse_target`.
      texts: that a replica continues at once.
      context: tokens that each of them has already.
      prompt: tokens of a new text's prompt.
      cache_dtype: what pages hold (`EngineOptions`).
      compile: whether to compile the engine's two programs for the target.

    Raises:
      UserError: for a bad target, a mesh that fits neither the target nor the model, or quantized products.
    """
    check_products(cfg.model, "serving", stored=True)
    parsed = parse_target(target)
    sizes = _sizes(cfg, parsed)
    chip, ways = parsed.chip, sizes.tensor
    own, model = abstract_mesh(sizes.model_copy(update={"data": 1}), chip), dropless(cfg.model)
    check_mesh(model, own)
    with jax.sharding.use_abstract_mesh(own):
        sizes_of = _weight_bytes(model, own)
        weights = sum(sizes_of.values())
        text_bytes = sum(_text_bytes(model, own, context, cache_dtype))
        decode = _decode(model, parsed, own, sizes_of, texts, context, cache_dtype)
        prefill = _prefill(model, parsed, own, sizes_of, prompt)
    available = (chip.program_bytes or chip.hbm_bytes // chip.devices) - weights
    found = Serving(
        target=str(parsed),
        chips=parsed.devices // chip.devices,
        replicas=sizes.data,
        tensor=ways,
        texts=texts,
        context=context,
        prompt=prompt,
        weight_bytes=weights,
        text_bytes=text_bytes,
        fitting=max(0, available // text_bytes),
        decode=decode,
        prefill=prefill,
    )
    if not compile:
        return found
    mesh = divide(topology_mesh(parsed, sizes))[0]
    reports, kernels = compile_engine(
        model, mesh, str(parsed), texts=texts, context=context, prompt=prompt, cache_dtype=cache_dtype
    )  # fmt: skip
    return replace(found, reports=reports, kernels=kernels)


def compile_engine(
    model: ModelConfig, mesh: Mesh, target: str, *,
    texts: int, context: int, prompt: int, cache_dtype: str = "auto",
) -> tuple[dict[str, Report], dict[str, dict[str, int]]]:  # fmt: skip
    """Compiles the programs of an engine, as it runs them, for devices that need not be here.

    Args:
      model: the model.
      mesh: of one replica.
      target: its name, for the reports.
      texts: rows of decode.
      context: tokens of each; as many fill the cache.
      prompt: tokens that prefill computes at once, after as many others.
      cache_dtype: what pages hold (`EngineOptions`).

    Returns:
      The reports of `decode` and `prefill`, and the kernels that each calls.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    like = partial(jax.ShapeDtypeStruct, sharding=whole)
    with jax.set_mesh(mesh):
        S = page_tokens(cache_dtype)
        width = -(-(context + 1) // S)
        programs = _programs(model)
        arrays = _arrays(model, mesh)
        cache = _abstract(_pages(model, texts * width + 1, 1 + texts, cache_dtype), mesh)
    ints = like((texts, COLUMNS + width), jnp.int32)
    floats, tokens = like((texts, 4), jnp.float32), like((texts,), jnp.int32)
    decode = jax.jit(partial(programs.decode, want=Want(random=True)), donate_argnums=1)
    earlier = -(-prompt // S)
    number = like((), jnp.int32)
    part = like((6, prompt), jnp.int32), like((1, earlier), jnp.int32), number, number
    runs = {
        "decode": (decode, (arrays, cache, tokens, ints, floats, None)),
        "prefill": (programs.prefill, (arrays, cache, *part)),
    }
    reports, kernels = {}, {}
    for name, (fn, args) in runs.items():

        def keep(_lowered: Any, _compiled: Any, folder: str, name: str = name) -> None:
            kernels[name] = dict(Counter(_KERNEL.findall(read_dump(folder)[1])))

        reports[name] = compile_step(fn, args, mesh, target=target, keep=keep)
    return reports, kernels


def print_serving(found: Serving) -> None:
    """Prints a prediction on stdout."""

    def row(name: str, work: Work) -> tuple[str, ...]:
        times = (work.seconds, work.compute, work.memory, work.network)
        return (name, *(f"{seconds * 1e3:,.2f}" for seconds in times), work.limit)

    decode, prefill = found.decode, found.prefill
    rows = [
        row(f"a token of each of {found.texts} texts (decode)", decode),
        row(f"a prompt of {found.prompt:,} tokens (prefill)", prefill),
    ]
    copies = f"{found.replicas} x " if found.replicas > 1 else ""
    per_device = f"of each device {show_bytes(found.weight_bytes)} are weights"
    parts: list[Any] = [
        f"{found.target}: {copies}{found.tensor} device(s) that share the model; {per_device}, and "
        f"{found.fitting:,} texts of {found.context:,} tokens fit ({show_bytes(found.text_bytes)} each)",
        table(("ms", "all", "compute", "memory", "network", "bound by"), rows, right=(1, 2, 3, 4)),
        f"{found.tokens_per_second:,.0f} tokens/s/chip of answers, {found.prompt_tokens_per_second:,.0f} of prompts, "
        "with memory and matrix units always busy",
    ]
    compiled = [
        (
            f"{name} {'fits' if report.fits else 'does not fit'}",
            *map(show_bytes, (report.argument_bytes, report.temp_bytes, sum(report.sent.values()))),
            ", ".join(f"{n} {kernel}" for kernel, n in found.kernels.get(name, {}).items()),
            f"{report.compile_seconds:.1f} s",
        )
        for name, report in found.reports.items()
    ]
    if compiled:
        heads = ("compiled", "arguments", "temporaries", "sent", "kernels", "in")
        parts.append(table(heads, compiled, right=(1, 2, 3, 5)))
    print_tables(*parts)


def _sizes(cfg: Config, target: Target) -> MeshConfig:
    """The target's devices as replicas (`data`) of devices that share a copy (`tensor`)."""
    mesh, devices = cfg.mesh, target.devices
    for axis, size in mesh.sizes().items():
        if size > 1 and axis not in ("data", "tensor"):
            raise UserError(f"mesh.{axis}={size}: an engine has mesh.tensor and mesh.data alone")
    data = max(mesh.data, 1)
    tensor = mesh.tensor if mesh.tensor > 1 else max(devices // data, 1)
    data = mesh.data if mesh.data > 0 else max(devices // tensor, 1)
    if data * tensor != devices:
        raise UserError(
            f"mesh.data={data} and mesh.tensor={tensor} make {data * tensor} devices, and {target} has {devices}: "
            "choose sizes whose product is that number"
        )
    joined = target.shape[-1] if target.chip.platform == "gpu" else devices // target.slices
    if tensor > joined:
        raise UserError(
            f"mesh.tensor={tensor}: only {joined} devices of {target} are joined by ICI or NVLink, and how fast a copy "
            f"across them is can't be predicted: set mesh.data={devices // joined} mesh.tensor={joined}"
        )
    return MeshConfig(data=data, tensor=tensor)


def _abstract(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The same shapes, on the devices of a mesh."""

    def there(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))

    return jax.tree.map(there, tree)


def _programs(model: ModelConfig) -> Programs:
    return make_programs(model, 1, RULES_OF_ENGINE, hardware.platform())


def _arrays(model: ModelConfig, mesh: Mesh | AbstractMesh) -> list[jax.ShapeDtypeStruct]:
    """The parameters as the engine's programs take them."""
    rules = RULES_OF_ENGINE
    params = jax.eval_shape(lambda: nnx.state(Transformer(model, rules=rules, rngs=nnx.Rngs(0))))
    shardings = tree_shardings(params, mesh, rules)
    placed = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings
    )
    return _abstract(jax.eval_shape(_programs(model).lay_out, placed), mesh)


@cached
def _weight_bytes(model: ModelConfig, mesh: Mesh | AbstractMesh) -> dict[tuple[Any, ...], int]:
    """The bytes on a device of each parameter as the programs take it, by its path; stored numbers are parts of it."""
    layout = Layout(model, 1, RULES_OF_ENGINE, 0)
    placed = jax.tree.unflatten(layout.treedef, _arrays(model, mesh))
    flat = jax.tree_util.tree_flatten_with_path(placed)[0]
    return {tuple(getattr(key, "key", None) for key in path): _device_bytes(x) for path, x in flat}


def _pages(model: ModelConfig, pages: int, slots: int, cache_dtype: str) -> Any:
    sizes = pages, page_tokens(cache_dtype), slots, RULES_OF_ENGINE, cache_dtype
    return jax.eval_shape(lambda: with_paging(make_pages(model, *sizes), None))


def _device_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _text_bytes(
    model: ModelConfig, mesh: Mesh | AbstractMesh, context: int, cache_dtype: str
) -> Iterator[int]:
    """What a text of so many tokens takes on a device in each layer: whole pages, and recurrent states."""
    for repeats, layer in all_layers(model):
        yield repeats * _layer_bytes(layer, mesh, context, cache_dtype)


def _layer_bytes(
    layer: ModelConfig, mesh: Mesh | AbstractMesh, tokens: int, cache_dtype: str
) -> int:
    S = page_tokens(cache_dtype)
    sizes = max(-(-tokens // S), 1), S, 1, RULES_OF_ENGINE, cache_dtype
    make = VARIANTS[type(layer.attention)].make_pages
    cache = jax.eval_shape(lambda: make(layer, *sizes)[:-1])
    return sum(map(_device_bytes, jax.tree.leaves(_abstract(cache, mesh))))


def _seen(layer: ModelConfig, context: int) -> int:
    """Keys that the last token of a text sees."""
    window = getattr(layer.attention, "window", None) or context
    chunk = getattr(layer.attention, "chunk", None)
    return min(window, (context - 1) % chunk + 1 if chunk else context)


def _decode(
    model: ModelConfig,
    target: Target,
    mesh: Mesh | AbstractMesh,
    weights: dict[tuple[Any, ...], int],
    texts: int,
    context: int,
    cache_dtype: str,
) -> Work:
    """One token of each text: every weight is read but the embedding's other rows and the experts that nobody takes."""
    flops, read = 2.0 * model.vocab * model.embed, 0.0
    for repeats, layer in all_layers(model):
        keys = _seen(layer, context)
        flops += repeats * (_layer_flops(layer) + count_attention(layer).per_key * keys)
        recurrent = isinstance(layer.attention, DeltaNetConfig)  # its state is read and written
        size = _layer_bytes(layer, mesh, keys, cache_dtype)
        read += repeats * size * (2 if recurrent else 1)
    read = texts * read + _read(model, weights, texts, logits=True)
    return _work(model, target, mesh, texts * flops, texts, read)


def _prefill(
    model: ModelConfig,
    target: Target,
    mesh: Mesh | AbstractMesh,
    weights: dict[tuple[Any, ...], int],
    prompt: int,
) -> Work:
    """A prompt: the layers' weights once for all tokens; no logits, because its last token is the first of decode."""
    flops = 0.0
    for repeats, layer in all_layers(model):
        keys = keys_seen(layer, prompt)
        flops += repeats * (_layer_flops(layer) + count_attention(layer).per_key * keys)
    read = _read(model, weights, prompt, logits=False)
    return _work(model, target, mesh, prompt * flops, prompt, read)


def _layer_flops(layer: ModelConfig) -> float:
    attention = count_attention(layer)
    active = VARIANTS[type(layer.ffn)].count(layer, active=True)
    return 2.0 * (attention.weights + active) + attention.per_token


def _read(
    model: ModelConfig, weights: dict[tuple[Any, ...], int], tokens: int, *, logits: bool
) -> float:
    """Bytes of weights that a device reads for so many tokens.

    A token takes k of E experts. If it is as likely to take any of them, (1 - k/E)^tokens of them stay untouched. Of
    the embedding, unless it is also the output layer, only the tokens' own rows are read; of the output layer nothing
    without `logits`.
    """
    whole = ("embed" if model.tie_embeddings else "unembed",) if logits else ()
    tables = {"embed", "unembed"}.difference(whole)
    read = float(sum(size for path, size in weights.items() if path[0] not in tables))
    for path, size in weights.items():
        layer = _routed(model, path)
        if layer is not None:
            read -= (1 - layer.experts_per_token / layer.experts) ** tokens * size
    return read


def _routed(model: ModelConfig, path: tuple[Any, ...]) -> MoEConfig | None:
    """Returns the mixture of experts whose experts share the array at a path, or None."""
    where = path.index("ffn") if "ffn" in path else -1
    if where < 0 or path[where + 1] not in EXPERTS:
        return None
    layers = model.stacks[path[0]].layers
    ffn = layers[path[2] if len(layers) > 1 else 0].ffn
    return ffn if isinstance(ffn, MoEConfig) else None


def _work(
    model: ModelConfig,
    target: Target,
    mesh: Mesh | AbstractMesh,
    flops: float,
    tokens: int,
    read: float,
) -> Work:
    """A program's times. In each layer, and for the embedding, all devices add up [tokens, D], in a ring."""
    chip, ways = target.chip, mesh.shape["tensor"]
    layers = sum(repeats for repeats, _ in all_layers(model))
    sums = 2 * layers + 1 if ways > 1 else 0
    sent = sums * 2 * (ways - 1) / ways * tokens * model.embed * jnp.dtype(model.dtype).itemsize
    # A ring of a torus uses a link in both directions; a switch gives a GPU all of its links.
    rate = (
        2 * (chip.link_rate or chip.link_bandwidth)
        if chip.platform == "tpu"
        else chip.link_bandwidth * chip.links
    )
    hops = ways if chip.platform == "tpu" else 2
    peak = chip.peak(model.dtype) / chip.devices
    bandwidth = chip.hbm_bandwidth / chip.devices
    return Work(
        flops=flops / ways,
        bytes=read,
        sent=sent,
        compute=flops / ways / peak,
        memory=read / bandwidth,
        network=sent / rate + sums * hops * LINK_SECONDS,
    )
