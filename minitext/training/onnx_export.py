"""A run's forward pass as an ONNX file, which onnxruntime and many others run: tokens in, logits out.

The function is traced by JAX alone and given to jax2onnx as the primitives that this leaves. jax2onnx would otherwise
replace functions of `jax.numpy` while it traces, and some of them don't know dimensions without a size. Parameters
become the graph's initializers under their own names, and are never all copied into it by the converter.

Chapters: 27.
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from minitext import files
from minitext.checkpoint import leaves
from minitext.config.model import DeltaNetConfig, ModelConfig
from minitext.errors import UserError
from minitext.hardware import any_platform
from minitext.terminal import of_slow_work
from minitext.training import model_card
from minitext.training.interchange import load_float_run
from minitext.training.run_dir import PUBLISHED, carry

MODEL, WEIGHTS = "model.onnx", "model.onnx.data"
SINGLE_FILE_BYTES = 1 << 30  # protocol buffers hold at most 2 GB
OPSET = 21  # of February 2024
TOLERANCE = 1e-4  # what rounding explains, relative to the largest logit
CHECKED = 13  # tokens of the text on which the file is compared with the run
# The converter's for an operation it doesn't know, and JAX's for a program that asks for the value of a dimension.
INCONVERTIBLE = NotImplementedError, TypeError, ValueError
EXTRA = "pip install 'minitext[onnx]'"


def export_onnx(
    directory: Path | str,
    target: Path | str,
    licence: str = model_card.UNKNOWN,
    single_file_bytes: int = SINGLE_FILE_BYTES,
) -> int:
    """Writes a run's newest parameters and its forward pass as ONNX, whole or not at all; adapters are merged.

    The folder has `model.onnx`, which maps `tokens` [batch, length] int32 to `logits` [batch, length, V] float32 for
    any batch and length, and the tokenizer's files. It is compared with the run in onnxruntime before it's done.

    Args:
      directory: the run.
      target: the folder to make.
      licence: for the model card, README.md.
      single_file_bytes: parameters larger than this together go into a second file, `model.onnx.data`.

    Returns:
      The step that was exported.

    Raises:
      UserError: if a package is missing, the model can't be converted, the file's logits differ, or the target exists
        or can't be written.
    """
    target = Path(files.local_path(target))
    if target.exists():
        raise UserError(f"{target} exists: name a folder that does not")
    onnx, onnxruntime, to_onnx = _packages()
    cfg, params, tokenizer, step = load_float_run(directory)
    came = Path(directory) / PUBLISHED
    with of_slow_work(4, "converting") as advance:
        forward, named = forward_of(cfg.model, params)
        text_BT = np.random.default_rng(0).integers(0, cfg.model.vocab, (1, CHECKED), np.int32)
        want_BTV = np.asarray(forward(named, text_BT))  # first: the converter may leave JAX changed
        advance(1)
        graph = convert(forward, named, to_onnx)
        advance(2)
        size = _add_weights(onnx, graph, named)
        graph.producer_name, graph.producer_version = "minitext", ""
        try:
            with files.new_folder(target) as new:
                _save(onnx, graph, new, external=size > single_file_bytes)
                advance(3)
                carry(came, new)
                if not (new / "tokenizer.json").exists():
                    files.write(new / "tokenizer.json", json.dumps(tokenizer.published()))
                card = model_card.card(
                    directory, cfg, step, form="onnx", size=size, dtype="float32", licence=licence
                )
                files.write(new / model_card.CARD, card)
                session = open_session(onnxruntime, new / MODEL)
                _compare(session.run(None, {"tokens": text_BT})[0], want_BTV, directory)
                advance(4)
        except OSError as error:
            fix = "name a folder where one can be made"
            raise UserError(
                f"cannot write {target}: {files.explain(error, fix) or error}"
            ) from error
    return step


def forward_of(cfg: ModelConfig, params: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a model's jitted forward pass in float32, layers apart, and its parameters by name.

    The function takes the parameters and tokens [B, T], and returns logits [B, T, V].

    Raises:
      UserError: if the model has layers that no ONNX operator computes.
    """
    import jax
    from flax import nnx

    from minitext.inference.cpu_decode import unstack_layers
    from minitext.inference.engine import dropless
    from minitext.models.transformer import Transformer

    layers = [layer for stack in cfg.stacks.values() for layer in stack.layers]
    if any(isinstance(layer.attention, DeltaNetConfig) for layer in layers):
        raise UserError(
            "ONNX has no operator for the recurrence of gated DeltaNet layers: export with --format hf"
        )
    cfg = dropless(cfg).model_copy(update={"dtype": "float32"})
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0))))
    graphdef, apart = nnx.split(unstack_layers(nnx.merge(graphdef, params)))
    named, treedef = leaves.named(apart), jax.tree.structure(apart)

    @jax.jit
    def forward(named: dict[str, Any], tokens_BT: Any) -> Any:
        with jax.sharding.use_abstract_mesh(any_platform()):
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, list(named.values())))(tokens_BT)

    return forward, named


def convert(forward: Callable[..., Any], named: dict[str, Any], to_onnx: Callable) -> Any:
    """Returns the ONNX graph of `forward_of`'s function, whose inputs are `tokens` and the parameters.

    Raises:
      UserError: if an operation has no counterpart, or needs to know the number of texts or tokens.
    """
    import jax
    from jax.extend.core import jaxpr_as_fun

    batch, length = jax.export.symbolic_shape("batch, length")
    tokens = jax.ShapeDtypeStruct((batch, length), np.int32)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in named.items()}
    try:
        traced = jax.make_jaxpr(forward)(shapes, tokens)
        function = jaxpr_as_fun(traced)
        with _quiet():
            return to_onnx(
                lambda *args: function(*args)[0], [*shapes.values(), tokens], model_name="minitext", opset=OPSET,
                input_names=[*named, "tokens"], output_names=["logits"],
            )  # fmt: skip
    except (*INCONVERTIBLE, jax.errors.InconclusiveDimensionOperation) as error:
        said = files.shorten(str(error).strip().partition("\n")[0])
        raise UserError(
            f"the model cannot be converted to ONNX ({said}): export with --format hf or stablehlo"
        ) from error


def open_session(onnxruntime: Any, path: Path) -> Any:
    """Returns an onnxruntime session on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _packages() -> tuple[Any, Any, Any]:
    try:
        import onnx
        import onnxruntime
        from jax2onnx import to_onnx
    except ImportError as error:
        raise UserError(f"--format onnx needs {error.name}: {EXTRA}") from None
    return onnx, onnxruntime, to_onnx


def _add_weights(onnx: Any, graph: Any, named: dict[str, Any]) -> int:
    """Turns the graph's inputs but `tokens` into initializers, and returns their bytes."""
    kept = [one for one in graph.graph.input if one.name == "tokens"]
    del graph.graph.input[:]
    graph.graph.input.extend(kept)
    for name, array in named.items():
        graph.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return sum(array.nbytes for array in named.values())


def _save(onnx: Any, graph: Any, folder: Path, *, external: bool) -> None:
    if external:
        onnx.save_model(
            graph, folder / MODEL, save_as_external_data=True, location=WEIGHTS, size_threshold=1024
        )
    else:
        onnx.save_model(graph, folder / MODEL)


def _compare(got_BTV: np.ndarray, want_BTV: np.ndarray, directory: Path | str) -> None:
    apart = float(np.abs(got_BTV - want_BTV).max() / np.abs(want_BTV).max())
    if not apart <= TOLERANCE:
        raise UserError(
            f"onnxruntime's logits for {directory} differ by {apart:.1e} of the largest, and rounding explains "
            f"{TOLERANCE:.0e}: nothing is written; export with --format hf or stablehlo"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the converter's remarks, one for each operation, on shapes that it doesn't know."""
    names = ("onnx_ir", "jax2onnx")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
