"""Tensors in requests and answers, as the Open Inference Protocol writes them (KServe's V2, which Triton has too).

A tensor is a name, a shape, a type and its elements, row by row: in JSON, flat or nested, or as bytes behind the JSON
(the extension `binary_tensor_data`), which is shorter and faster. A request is compared with what the function takes
before an array is made of it.

Sources: https://github.com/kserve/open-inference-protocol, and of the extensions
https://github.com/triton-inference-server/server/tree/main/docs/protocol.

Chapters: 27.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, NamedTuple

import ml_dtypes
import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json, to_json

from minitext.files import shorten
from minitext.inference.protocol import Refused, validated

DATATYPES = {
    "bool": "BOOL", "uint8": "UINT8", "uint16": "UINT16", "uint32": "UINT32", "uint64": "UINT64", "int8": "INT8",
    "int16": "INT16", "int32": "INT32", "int64": "INT64", "float16": "FP16", "bfloat16": "BF16", "float32": "FP32",
    "float64": "FP64",
}  # fmt: skip
MOST_ID = 1000  # characters
MOST_SIZE = 2**63 - 1  # of a dimension, and of an array in bytes


class Spec(NamedTuple):
    """What a function takes or gives under a name.

    Attributes:
      name: of the tensor.
      shape: numbers, and the symbols of dimensions that a caller chooses.
      dtype: NumPy's.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: np.dtype

    @property
    def datatype(self) -> str:
        """The protocol's name of the type."""
        return DATATYPES[self.dtype.name]

    @property
    def metadata(self) -> dict[str, Any]:
        """The tensor in a model's metadata, with -1 for a size that callers choose."""
        sizes = [size if isinstance(size, int) else -1 for size in self.shape]
        return {"name": self.name, "datatype": self.datatype, "shape": sizes}

    def written(self) -> str:
        """Returns the shape as people write it: [b, 4]."""
        return f"[{', '.join(map(str, self.shape))}]"


def specs_of(described: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the tensors that a manifest describes, by name.

    Raises:
      ValueError: for a type that the protocol doesn't have.
    """
    found = {}
    for name, said in described.items():
        dtype = np.dtype(getattr(ml_dtypes, said["dtype"], said["dtype"]))
        if dtype.name not in DATATYPES:
            raise ValueError(f"{name} is {dtype.name}, which the Open Inference Protocol lacks")
        found[name] = Spec(name, tuple(said["shape"]), dtype)
    return found


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Input(_Strict):
    name: str
    shape: list[Annotated[int, Field(ge=0, le=MOST_SIZE)]] = Field(max_length=32)
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Output(_Strict):
    name: str
    parameters: dict[str, Any] = {}


class _Body(_Strict):
    id: str | None = Field(None, max_length=MOST_ID)
    parameters: dict[str, Any] = {}
    inputs: list[_Input] = Field(max_length=10_000)
    outputs: list[_Output] | None = Field(None, max_length=10_000)


class Asked(NamedTuple):
    """A request that fits a function.

    Attributes:
      id: what the client calls it, or None.
      inputs: arrays by name.
      outputs: names of what to answer, in order, and whether as bytes.
    """

    id: str | None
    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]


def read_request(
    body: bytes, json_bytes: str | None, inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]
) -> Asked:
    """Returns what is asked for.

    Args:
      body: of the request; its size is checked already.
      json_bytes: the header Inference-Header-Content-Length, of a request with bytes behind the JSON.
      inputs: what the function takes.
      outputs: what it gives.

    Raises:
      Refused: it isn't JSON, or isn't what the function takes.
    """
    head, rest = _split(body, json_bytes)
    try:
        found = from_json(head)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {shorten(str(error))}") from None
    said = validated(found, _Body)
    given = {one.name: one for one in said.inputs}
    if len(given) < len(said.inputs):
        raise Refused("an input is given twice: name each once")
    for name in given:
        if name not in inputs:
            raise Refused(f"there is no input {shorten(name)}: give {', '.join(inputs)}")
    if missing := [name for name in inputs if name not in given]:
        raise Refused(f"the input {missing[0]} is missing: give {', '.join(inputs)}")
    sizes: dict[str, int] = {}
    for one in said.inputs:
        _fit(inputs[one.name], one, sizes)
    arrays, start = {}, 0
    for one in said.inputs:
        spec, size = inputs[one.name], one.parameters.get("binary_data_size")
        if size is None:
            arrays[one.name] = _from_json(spec, one)
        else:
            arrays[one.name] = _from_bytes(spec, one, size, rest[start:])
            start += size
    if start != len(rest):
        raise Refused(
            f"{len(rest):,} bytes follow the JSON, and the inputs' binary_data_size name {start:,}: send these alone"
        )
    return Asked(said.id, {name: arrays[name] for name in inputs}, _wanted(said, outputs))


def _split(body: bytes, json_bytes: str | None) -> tuple[bytes, memoryview]:
    if json_bytes is None:
        return body, memoryview(b"")
    if not re.fullmatch(r"\d{1,18}", json_bytes) or int(json_bytes) > len(body):
        raise Refused(
            f"Inference-Header-Content-Length={shorten(json_bytes)}: give the JSON's bytes, of {len(body):,} in all"
        )
    return body[: int(json_bytes)], memoryview(body)[int(json_bytes) :]


def _fit(spec: Spec, one: _Input, sizes: dict[str, int]) -> None:
    """Compares type and shape with what the function takes; `sizes` are those of the symbols so far."""
    name = spec.name
    if one.datatype != spec.datatype:
        raise Refused(f"{name} is {shorten(one.datatype)}, and the function takes {spec.datatype}")
    if len(one.shape) != len(spec.shape):
        raise Refused(f"{name} has the shape {one.shape}, and the function takes {spec.written()}")
    # NumPy bounds empty arrays too, by their other dimensions.
    if math.prod(size or 1 for size in one.shape) * spec.dtype.itemsize > MOST_SIZE:
        raise Refused(f"{name} has the shape {one.shape}, which is too large for an array")
    for size, want in zip(one.shape, spec.shape, strict=True):
        if isinstance(want, int):
            fits = size == want
        elif want.isidentifier():
            fits = size >= 1 and sizes.setdefault(want, size) == size
        else:  # an expression such as 2*b, which the program checks when it's called
            fits = size >= 0
        if not fits:
            more = f" with {want}={sizes[str(want)]}" if sizes.get(str(want), size) != size else ""
            raise Refused(
                f"{name} has the shape {one.shape}, and the function takes {spec.written()}{more}"
            )


def _from_json(spec: Spec, one: _Input) -> np.ndarray:
    count = math.prod(one.shape)
    if not isinstance(one.data, list):
        raise Refused(
            f"{spec.name} has no data: give it as a list, or as bytes with binary_data_size"
        )
    elements = _flat(one.data, one.shape)
    if elements is None or len(elements) != count:
        raise Refused(
            f"the data of {spec.name} isn't {count:,} elements in the shape {one.shape}: give them flat, or nested so"
        )
    kinds, kind = set(map(type, elements)), spec.dtype.kind
    allowed = {"b": {bool}, "i": {int}, "u": {int}}.get(kind, {int, float})
    if not kinds <= allowed:
        wrong = next(x for x in elements if type(x) not in allowed)
        raise Refused(f"{spec.name} is {spec.datatype}, and {shorten(repr(wrong))} is in its data")
    try:
        if kind in "biu":
            array = np.asarray(elements, spec.dtype)
        else:
            wide = np.asarray(elements, np.float64)
            with np.errstate(over="ignore"):
                array = wide.astype(spec.dtype)
            if np.any(np.isinf(array.astype(np.float64)) & np.isfinite(wide)):
                raise OverflowError
    except OverflowError:
        raise Refused(
            f"a number in the data of {spec.name} is out of {spec.datatype}'s range"
        ) from None
    return array.reshape(one.shape)


def _flat(data: list[Any], shape: Sequence[int]) -> list[Any] | None:
    """Returns the elements of flat or nested data, or None if it's nested in another shape."""
    if not data or not isinstance(data[0], list):
        return data
    if len(data) != shape[0] if shape else True:
        return None
    for size in shape[1:]:
        if not all(type(part) is list and len(part) == size for part in data):
            return None
        data = list(chain.from_iterable(data))
    return data


def _from_bytes(spec: Spec, one: _Input, size: Any, rest: memoryview) -> np.ndarray:
    want = math.prod(one.shape) * spec.dtype.itemsize
    if one.data is not None:
        raise Refused(f"{spec.name} has both data and binary_data_size: give one of them")
    if type(size) is not int or size != want:
        raise Refused(
            f"{spec.name} has binary_data_size={shorten(str(size))}, and {one.shape} of {spec.datatype} are {want:,} "
            "bytes"
        )
    if size > len(rest):
        raise Refused(f"the bytes of {spec.name} are missing: {size:,} were to come")
    if spec.dtype.kind == "b":
        flags = np.frombuffer(rest[:size], np.uint8)
        if flags.size and flags.max() > 1:
            raise Refused(f"{spec.name} is BOOL, and a byte of it is {flags.max()}: send 0 or 1")
        return flags.astype(bool).reshape(one.shape)
    little = spec.dtype.newbyteorder("<") if spec.dtype.kind in "iuf" else spec.dtype
    # A copy, because the bytes needn't begin at a multiple of the element's size.
    return (
        np.frombuffer(bytes(rest[:size]), little).astype(spec.dtype, copy=False).reshape(one.shape)
    )


def _wanted(said: _Body, outputs: Mapping[str, Spec]) -> dict[str, bool]:
    every = _flag(said.parameters, "binary_data_output", False)
    if said.outputs is None:
        return dict.fromkeys(outputs, every)
    found: dict[str, bool] = {}
    for one in said.outputs:
        if one.name not in outputs:
            raise Refused(f"there is no output {shorten(one.name)}: ask for {', '.join(outputs)}")
        if one.name in found:
            raise Refused(f"the output {one.name} is asked for twice: name it once")
        if unknown := [key for key in one.parameters if key != "binary_data"]:
            raise Refused(
                f"the output {one.name} has the parameter {shorten(unknown[0])}, which is not supported"
            )
        found[one.name] = _flag(one.parameters, "binary_data", every)
    return found


def _flag(parameters: Mapping[str, Any], name: str, otherwise: bool) -> bool:
    value = parameters.get(name, otherwise)
    if not isinstance(value, bool):
        raise Refused(f"{name}={shorten(repr(value))}: give true or false")
    return value


def write_answer(
    said: dict[str, Any],
    wanted: Mapping[str, bool],
    arrays: Mapping[str, np.ndarray],
    specs: Mapping[str, Spec],
) -> tuple[list[bytes], int | None]:
    """Returns an answer's parts, and the bytes of its JSON if other bytes follow.

    Numbers of fewer bits than float64 are written exactly; NaN and the infinities as Python's JSON has them.

    Args:
      said: the answer's other fields.
      wanted: the outputs, and whether as bytes.
      arrays: by name.
      specs: what the function gives.
    """
    tensors, tails = [], []
    for name, as_bytes in wanted.items():
        array = arrays[name]
        tensor: dict[str, Any] = {
            "name": name, "datatype": specs[name].datatype, "shape": list(array.shape),
        }  # fmt: skip
        if as_bytes:
            tails.append(_bytes_of(array))
            tensor["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    head = to_json(said | {"outputs": tensors}, inf_nan_mode="constants")
    return [head, *tails], (len(head) if tails else None)


def _bytes_of(array: np.ndarray) -> bytes:
    little = array.dtype.newbyteorder("<") if array.dtype.kind in "iuf" else array.dtype
    return np.ascontiguousarray(array).astype(little, copy=False).tobytes()
