"""Published weights: what is read equals what was written, and hostile files end in one line."""

import json
import os
import pickle
import resource
import struct
import time

import ml_dtypes
import numpy as np
import pytest

from minitext import files
from minitext.checkpoint import gguf, safetensors
from minitext.checkpoint.weights import INDEX, SINGLE, open_weights
from minitext.errors import UserError

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def random_tensors(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"a.weight": (7, 5), "b": (11,), "one": (), "experts": (3, 4, 6), "none": (0, 4)}
    return {n: rng.normal(size=s).astype(np.float32).astype(DTYPES[dtype]) for n, s in shapes.items()}  # fmt: skip


def write_file(path, tensors: dict[str, np.ndarray], dtype: str):
    described = {name: (array.shape, dtype) for name, array in tensors.items()}
    safetensors.write(path, described, tensors.values(), {"format": "pt"})


def write_folder(folder, tensors: dict[str, np.ndarray]):
    """One shard a tensor."""
    folder.mkdir()
    where = {}
    for i, (name, array) in enumerate(tensors.items()):
        where[name] = f"model-{i:05}.safetensors"
        write_file(folder / where[name], {name: array}, "F32")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_by_us_and_by_the_library(tmp_path, dtype):
    from safetensors.numpy import load_file

    tensors = random_tensors(dtype)
    write_file(tmp_path / SINGLE, tensors, dtype)
    theirs = load_file(tmp_path / SINGLE)
    with open_weights(tmp_path) as weights:
        assert weights.metadata == {"format": "pt"} and not weights.is_gguf
        for name, array in tensors.items():
            assert weights.names()[name] == (array.shape, dtype)
            assert weights.read(name).tobytes() == array.tobytes() == theirs[name].tobytes(), name


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_a_length_that_begins_like_a_pickle_is_a_length(tmp_path, length):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
    whole = struct.pack("<Q", length) + header.ljust(length).encode() + struct.pack("<f", 3.5)
    (tmp_path / SINGLE).write_bytes(whole)
    with open_weights(tmp_path) as weights:
        assert weights.read("a") == [3.5]


def test_a_slice_reads_its_rows_alone(tmp_path, monkeypatch):
    tensors = random_tensors("F32")
    write_file(tmp_path / SINGLE, tensors, "F32")
    read = []
    pread = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: read.append(pread(*args)) or read[-1])
    with open_weights(tmp_path) as weights:
        found = weights.read("a.weight", (slice(2, 6, 3), slice(1, 4)))
        np.testing.assert_array_equal(found, tensors["a.weight"][2:6:3, 1:4])
        assert sum(read) == 4 * 5 * 4
        assert weights.read("a.weight", (slice(3, 3),)).shape == (0, 5)


def test_folders_of_several_files_and_links_are_read(tmp_path):
    tensors = random_tensors("F32")
    write_folder(tmp_path / "real", tensors)
    (tmp_path / "link").mkdir()
    for path in (tmp_path / "real").iterdir():
        (tmp_path / "link" / path.name).symlink_to(path)
    with open_weights(tmp_path / "link") as weights:
        assert set(weights.names()) == set(tensors)
        np.testing.assert_array_equal(weights.read("experts"), tensors["experts"])


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_gguf_is_read_as_the_library_reads_it(tmp_path, dtype):
    import gguf as library

    kind = library.GGMLQuantizationType[dtype]
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    if dtype in ("Q4_K", "Q6_K"):  # the library dequantizes these only
        numbers, size = library.GGML_QUANT_SIZES[kind]
        data = np.random.default_rng(0).integers(0, 64, (6, 512 // numbers * size), np.uint8)
    else:
        data = library.quants.quantize(values, kind)
    path = tmp_path / "model.gguf"
    writer = library.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "é", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.0, -1.0])
    writer.add_bool("flag", True)
    writer.add_tensor("w", data, raw_dtype=kind)
    writer.add_tensor("v", data[0], raw_dtype=kind)
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_weights(path) as weights:
        expected = library.quants.dequantize(data, kind).reshape(6, 512)
        shapes = {"w": ((6, 512), dtype), "v": ((512,), dtype), "norm": ((5,), "F32")}
        assert weights.names() == shapes
        np.testing.assert_array_equal(weights.read("v"), expected[0])
        np.testing.assert_array_equal(weights.read("v", (slice(3, 70),)), expected[0, 3:70])
        np.testing.assert_array_equal(weights.read("w"), expected)
        np.testing.assert_array_equal(weights.read("w", (slice(2, 4), slice(3, 9))), expected[2:4, 3:9])  # fmt: skip
        np.testing.assert_array_equal(weights.read("norm"), np.arange(5))
        said = weights.metadata
        assert said["llama.block_count"] == 3 and said["flag"] is True
        assert said["tokenizer.ggml.tokens"] == ["a", "é", ""]
        assert list(said["tokenizer.ggml.scores"]) == [0.5, 1.0, -1.0]


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0"])
def test_gguf_is_written_as_the_library_reads_it(tmp_path, dtype):
    import gguf as library

    rng = np.random.default_rng(1)
    shapes = {"w": (4, 64), "odd": (4, 33), "v": (7,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    tensors = {n: (a.shape, gguf.stored_type(a.shape, dtype)) for n, a in arrays.items()}
    fields = {"llama.block_count": 2, "llama.eps": 0.5, "words": ["x", "y"], "yes": True, "t": "z"}
    gguf.write(tmp_path / "m.gguf", "llama", fields, tensors, arrays.values())
    reader = library.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert {key: reader.fields[key].contents() for key in fields} == fields
    with open_weights(tmp_path / "m.gguf") as weights:
        assert weights.names() == tensors
        for tensor in reader.tensors:
            expected = library.quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(weights.read(tensor.name), expected)
            close = {"F32": 0, "F16": 2e-3, "Q8_0": 2e-2}[dtype]
            np.testing.assert_allclose(expected, arrays[tensor.name], atol=close)


# --- hostile files


def refused(path, *words: str) -> str:
    """Opens and reads everything; the error must come soon, take little memory, and have these words in one line."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as caught, open_weights(path) as weights:
        for name in weights.names():
            weights.read(name)
    assert time.process_time() - began < 5  # whoever else has the cores
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    said = str(caught.value)
    assert "\n" not in said and len(said) < 600
    for word in words:
        assert word in said, said
    return said


def raw(header: dict | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(shape, begin, end, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TWICE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
HOSTILE = {
    "empty": (b"", "cut short"),
    "text": (b"hello", "cut short"),
    "header of 2^60 bytes": (raw({}, length=2**60), "header"),
    "header longer than the file": (raw({}, length=100), "header"),
    "shorter than its header says": (raw({"a": entry([4], 0, 16)}, b"\0" * 8), "damaged"),
    "longer than its header says": (raw({"a": entry([4], 0, 16)}, b"\0" * 20), "damaged"),
    "offsets against the shape": (raw({"a": entry([5], 0, 16)}, b"\0" * 16), "damaged"),
    "offsets backwards": (raw({"a": entry([4], 16, 0)}, b"\0" * 16), "damaged"),
    "offsets that overlap": (
        raw({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, b"\0" * 24),
        "damaged",
    ),
    "a shape that overflows": (raw({"a": entry([2**62, 2**62], 0, 16)}, b"\0" * 16), "damaged"),
    "a negative shape": (raw({"a": entry([-4], 0, 16)}, b"\0" * 16), "damaged"),
    "an unknown type": (raw({"a": entry([4], 0, 16, "F33")}, b"\0" * 16), "damaged"),
    "a type that isn't read": (raw({"a": entry([4], 0, 4, "F8_E4M3")}, b"\0" * 4), "F8_E4M3"),
    "a name twice": (raw(TWICE, b"\0" * 8), "damaged"),
    "no JSON": (raw(b"{" * 50), "damaged"),
    "a list": (raw(b"[1,2,3]"), "damaged"),
    "deep JSON": (raw(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), "damaged"),
    "a pickle": (pickle.dumps({"a": 1}), "pickle"),
    "a zipped pickle": (b"PK\x03\x04" + b"\0" * 100, "pickle"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_are_refused(tmp_path, name):
    content, word = HOSTILE[name]
    (tmp_path / SINGLE).write_bytes(content)
    refused(tmp_path, word)


def test_a_header_beyond_the_limit_is_not_read(tmp_path):
    with (tmp_path / SINGLE).open("wb") as file:
        file.write(struct.pack("<Q", 90 << 20))
        file.truncate(100 << 20)
    refused(tmp_path, "limit")


def test_every_truncation_of_a_file_is_refused(tmp_path):
    write_file(tmp_path / SINGLE, random_tensors("F32"), "F32")
    whole = (tmp_path / SINGLE).read_bytes()
    for size in range(0, len(whole), 13):
        (tmp_path / SINGLE).write_bytes(whole[:size])
        refused(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path):
    write_file(tmp_path / SINGLE, random_tensors("F32"), "F32")
    with open_weights(tmp_path) as weights:
        os.truncate(tmp_path / SINGLE, (tmp_path / SINGLE).stat().st_size - 8)
        with pytest.raises(UserError, match="ends after"):
            for name in weights.names():
                weights.read(name)


ELSEWHERE = (
    "../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", 3, "a\0.safetensors",
    "\\x.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("file", ELSEWHERE)
def test_an_index_leads_nowhere_else(tmp_path, file):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    refused(tmp_path, "not in this folder")


def test_indices_that_lie_are_refused(tmp_path):
    where = write_folder(tmp_path / "f", random_tensors("F32"))
    index = tmp_path / "f" / INDEX

    def say(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))

    say(where | {"more": where["b"]})
    refused(index.parent, "more", where["b"])
    say(where | {"b": where["one"]})
    refused(index.parent, "says that b")
    say(where | {"c": "missing.safetensors"})
    refused(index.parent, "missing.safetensors")
    say(where | {"c": "pytorch_model.bin"})
    refused(index.parent, "pickle", "pytorch_model.bin")
    say({})
    refused(index.parent, "weight_map")
    write_file(index.parent / "twice.safetensors", {"b": np.zeros(3, np.float32)}, "F32")
    say(where | {"b": "twice.safetensors"})
    index.write_text(index.read_text())
    say({n: f for n, f in where.items()} | {"c": "twice.safetensors"})
    refused(index.parent, "the tensor b is in")


def test_what_is_no_folder_of_weights_is_refused(tmp_path):
    refused(tmp_path, "has no model.safetensors")
    refused(tmp_path / "missing", "missing")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    refused(tmp_path, "pytorch_model.bin", "pickle")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "is not a file")
    os.mkfifo(tmp_path / SINGLE)
    refused(tmp_path, "is not a file")


def test_hostile_json_is_refused(tmp_path):
    path = tmp_path / "x.json"
    for text, word in {
        "[" * 200_000: "is nested too deep",
        '{"a": 1, "a": 2}': "twice",
        "{": "not JSON",
        '"\ud800': "not UTF-8",
        "1" * 100_000: "not JSON",
        "x" * 2_000_000: "too many for a file",
    }.items():
        path.write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(UserError, match=word):
            files.read_json(path, 1 << 20)
    with pytest.raises(UserError, match="missing"):
        files.read_json(tmp_path / "missing", 1 << 20)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def info(name="w", shape=(4,), kind=0, offset=0, dimensions=None) -> bytes:
    sizes = b"".join(struct.pack("<Q", s) for s in shape)
    count = len(shape) if dimensions is None else dimensions
    return string(name) + struct.pack("<I", count) + sizes + struct.pack("<IQ", kind, offset)


def gguf_file(tensors=(), keys=(), tensor_count=None, key_count=None, body=b"\0" * 64) -> bytes:
    counted = len(tensors) if tensor_count is None else tensor_count
    counts = struct.pack("<IQQ", 3, counted, len(keys) if key_count is None else key_count)
    header = b"GGUF" + counts + b"".join(keys) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + body


U32, BIG = struct.pack("<I", 4), 2**60
HOSTILE_GGUF = {
    "empty": (b"", "GGUF"),
    "only the magic": (b"GGUF", "GGUF"),
    "version 99": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
    "2^60 tensors": (gguf_file(tensor_count=BIG), "tensors"),
    "2^60 keys": (gguf_file(key_count=BIG), "keys"),
    "many tensors in a short file": (gguf_file(tensor_count=60_000), "damaged"),
    "a name of 2^60 bytes": (gguf_file(keys=[struct.pack("<Q", BIG)]), "name"),
    "a text of 2^60 bytes": (
        gguf_file(keys=[string("k") + struct.pack("<IQ", 8, BIG)]),
        "bytes",
    ),
    "a list of 2^60": (gguf_file(keys=[string("k") + struct.pack("<IIQ", 9, 0, BIG)]), "items"),
    "a list longer than the file": (
        gguf_file(keys=[string("k") + struct.pack("<IIQ", 9, 10, 1 << 21)]),
        "left",
    ),
    "lists in lists": (gguf_file(keys=[string("k") + struct.pack("<IIQ", 9, 9, 1)]), "kind 9"),
    "an unknown kind": (gguf_file(keys=[string("k") + struct.pack("<I", 77)]), "kind 77"),
    "a key twice": (gguf_file(keys=[string("k") + U32 + U32] * 2), "twice"),
    "an alignment of 0": (
        gguf_file(keys=[string("general.alignment") + U32 + struct.pack("<I", 0)]),
        "power of two",
    ),
    "an alignment of text": (
        gguf_file(keys=[string("general.alignment") + struct.pack("<I", 8) + string("x")]),
        "power of two",
    ),
    "2^31 dimensions": (gguf_file([info(dimensions=2**31)]), "dimensions"),
    "dimensions that overflow": (gguf_file([info(shape=(2**32, 2**32, 2**32))]), "fit"),
    "an offset beyond the end": (gguf_file([info(offset=BIG)]), "fit"),
    "a tensor beyond the end": (gguf_file([info(shape=(64,))]), "fit"),
    "half a block": (gguf_file([info(shape=(33,), kind=8)]), "fit"),
    "a tensor twice": (gguf_file([info(), info()]), "twice"),
    "an unknown type": (gguf_file([info(kind=999)]), "type 999"),
    "a type that isn't read": (gguf_file([info(shape=(256,), kind=10)]), "Q2_K"),
}


@pytest.mark.parametrize("name", HOSTILE_GGUF)
def test_hostile_gguf_is_refused(tmp_path, name):
    content, word = HOSTILE_GGUF[name]
    (tmp_path / "m.gguf").write_bytes(content)
    refused(tmp_path / "m.gguf", word)


def test_every_truncation_of_a_gguf_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    gguf.write(path, "llama", {"words": ["x", "y"]}, {"w": ((8,), "F32")}, [np.ones(8, np.float32)])
    whole = path.read_bytes().rstrip(b"\0")
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        refused(path)


@pytest.mark.parametrize("library", ["safetensors", "gguf"])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, library):
    import sys

    write_file(tmp_path / SINGLE, random_tensors("F32"), "F32")
    (tmp_path / "m.gguf").write_bytes(gguf_file([info()]))
    monkeypatch.setitem(sys.modules, library, None)
    path = tmp_path if library == "safetensors" else tmp_path / "m.gguf"
    refused(path, library, "minitext[convert]")
