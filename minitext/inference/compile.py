"""The engine's two programs compiled ahead of time, for chips that aren't here.

Weights and cache are abstract, so a model of any size compiles on any machine.

Chapters: 24.
"""

import inspect
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from minitext.compiler import hlo
from minitext.compiler.aot import compile_step, read_dump
from minitext.compiler.report import Report
from minitext.compiler.targets import parse_target, topology_devices
from minitext.config.model import ModelConfig
from minitext.config.sections import MeshConfig
from minitext.inference.engine import (
    COLUMNS,
    RULES_OF_ENGINE,
    EngineOptions,
    check_mesh,
    dropless,
    make_programs,
)
from minitext.inference.sampling import Want
from minitext.models.transformer import Transformer, make_pages, with_paging
from minitext.sharding.mesh import make_mesh
from minitext.sharding.rules import tree_shardings

PAGE_TOKENS = 64


@dataclass(frozen=True)
class ServingProgram:
    """One of the engine's programs, compiled.

    Attributes:
      report: memory, collectives and times.
      kernels: how often the program calls the paged attention kernel.
      cache_copies: copies of a whole layer's keys or values in the program.
      weight_bytes: bytes of the weights on one device, as asked for.
      cache_bytes: bytes of the cache on one device, as asked for.
    """

    report: Report
    kernels: int
    cache_copies: int
    weight_bytes: int
    cache_bytes: int


def compile_serving(
    cfg: ModelConfig, target: str, options: EngineOptions, *, devices: int = 0
) -> dict[str, ServingProgram]:
    """Compiles prefill and decode as the engine calls them with its largest batch, texts and part of a prompt.

    Args:
      cfg: the model.
      target: such as `v5e:2x4`; see `minitext.compiler.targets.parse_target`.
      options: the batch, the texts' length and the prompt's part; the cache holds `max_sequences` texts of
        `max_length`.
      devices: of the target that share each text; 0: all.

    Returns:
      `decode` and `prefill`.

    Raises:
      UserError: for a bad target, or one whose devices don't divide what they split.
    """
    found = topology_devices(parse_target(target))
    found = found[: devices or len(found)]
    mesh = make_mesh(MeshConfig(tensor=len(found)), found)
    check_mesh(cfg, mesh)
    cfg, rules = dropless(cfg), RULES_OF_ENGINE
    whole = jax.NamedSharding(mesh, jax.P())
    B, S = options.max_sequences, options.page_tokens or PAGE_TOKENS
    X = -(-options.max_length // S)

    def given(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    with jax.set_mesh(mesh):
        programs = make_programs(cfg, 1, rules)
        params = nnx.eval_shape(
            lambda: nnx.state(Transformer(cfg, rules=rules, rngs=nnx.Rngs(0)), nnx.Param)
        )
        placed = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            params,
            tree_shardings(params, mesh, rules),
        )
        arrays = jax.eval_shape(programs.lay_out, placed)
        cache = jax.eval_shape(
            lambda: with_paging(make_pages(cfg, B * X + 1, S, B + 1, rules), None)
        )
    rows = given("int32", B), given("int32", B, COLUMNS + X), given("float32", B, 4)
    part = given("int32", 3, options.chunk), given("int32", 1, X), *[given("int32")] * 2
    want = Want(random=False, filters=False, logprobs=False)
    decode = jax.jit(
        partial(inspect.unwrap(programs.decode), adjustments=None, want=want), donate_argnums=1
    )
    return {
        "decode": _compile(decode, (arrays, cache, *rows), mesh, target),
        "prefill": _compile(programs.prefill, (arrays, cache, *part), mesh, target),
    }


def _compile(fn: Any, args: tuple, mesh: Any, target: str) -> ServingProgram:
    texts = [""]
    report = compile_step(
        fn, args, mesh, target=target, keep=lambda _, __, folder: texts.append(read_dump(folder)[1])
    )
    weights, cache = args[:2]
    kernels, copies = read_program(texts[-1], {_part(x).shape for x in jax.tree.leaves(cache)})
    sizes = (
        sum(_part(x).size * x.dtype.itemsize for x in jax.tree.leaves(t)) for t in (weights, cache)
    )
    return ServingProgram(report, kernels, copies, *sizes)


def _part(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns what one device holds of an array."""
    assert x.sharding is not None
    return jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)


def read_program(text: str, shapes: set[tuple[int, ...]]) -> tuple[int, int]:
    """Counts a compiled program's calls of the paged attention kernel, and its copies of arrays of these shapes.

    An asynchronous copy isn't counted: with it the compiler fetches a small array into vector memory ahead of its use.
    """
    wanted = {",".join(map(str, shape)) for shape in shapes}
    kernels = copies = 0
    for instructions in hlo.computations(text)[0].values():
        for one in instructions:
            if one.opcode == "custom-call" and "paged_attention" in one.line:
                kernels += 1
            if one.opcode in ("copy", "transpose"):
                dims = re.search(r"\[([\d,]*)\]", one.type)
                copies += dims is not None and dims[1] in wanted
    return kernels, copies
