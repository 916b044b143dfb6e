"""Any function of arrays over HTTP: the same numbers as the function gives alone, whatever else the server is asked."""

import concurrent.futures
import contextlib
import gc
import http.client
import json
import shutil
import socket
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitext.errors import UserError
from minitext.inference import artefact, model_store
from minitext.inference.artefact_server import Served, Server
from minitext.inference.batching import Batcher, BatchSizes, Program
from minitext.inference.http_server import bind
from minitext.inference.open_inference import DATATYPES, Spec, read_request
from minitext.inference.protocol import Refused

D, F = 4, 3


def mlp(weights, inputs):
    return {"y": jnp.tanh(inputs["x"] @ weights["w"]) + weights["b"]}


def weights_of(seed=0):
    rng = np.random.default_rng(seed)
    return {"w": rng.normal(size=(D, F)).astype("f4"), "b": rng.normal(size=F).astype("f4")}


def save_mlp(folder, seed=0, **options):
    function = artefact.Function(mlp, {"x": (f"b, {D}", "float32")}, batch="b")
    named = {"name": "mlp", "version": "1"} | options
    artefact.save(folder, {"run": function}, weights_of(seed), **named)


def mixed(weights, inputs):
    """Several inputs of several types, rows not in the first dimension, and a scalar that rows share."""
    x_TB, flags_B = inputs["x"], inputs["flags"]
    return {
        "sum": jnp.where(flags_B, x_TB.sum(0), -1) * inputs["scale"],
        "times": (x_TB * weights["two"].astype(x_TB.dtype)).astype(jnp.bfloat16),
        "length": jnp.int32(x_TB.shape[0]),
    }


MIXED = artefact.Function(
    mixed, {"x": ("t, b", "int32"), "flags": ("b", "bool"), "scale": ("", "int32")}, batch="b"
)
"""Rows that look at each other: joining requests would change them."""
CENTRED = artefact.Function(
    lambda weights, inputs: {"y": inputs["x"] - inputs["x"].mean(0)}, {"x": (f"b, {D}", "float32")}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository: two versions of an MLP, and an artefact of two functions."""
    home = tmp_path_factory.mktemp("models")
    save_mlp(home / "mlp" / "one", 0)
    save_mlp(home / "mlp" / "ten", 1, version="10")
    save_mlp(home / "mlp" / "nine", 2, version="9")
    functions = {"mixed": MIXED, "centred": CENTRED}
    artefact.save(home / "odd", functions, {"two": np.int32(2)}, name="odd", platforms=["cpu"])
    return home


class Running:
    """A server in a thread of its own."""

    def __init__(self, *places, rows=8, wait=0.02, drain_seconds=5.0, **options):
        self.served = Served(places, BatchSizes(rows, wait), drain_seconds=drain_seconds, **options)
        self.served.store.load_all()
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.socket.listen(2048)
        self.server = Server(self.served, drain_seconds)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )
        self.thread.start()

    def ask(self, path, body=None, method=None, **headers):
        """Returns status, headers and what was answered, read as JSON if it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = {"Content-Type": "application/json"} | headers
            connection.request(method or ("GET" if data is None else "POST"), path, data, given)
            answer = connection.getresponse()
            text = answer.read()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status, answer.headers, json.loads(text) if is_json else text
        finally:
            connection.close()

    def untyped(self, path, body, headers):
        """Returns the status of a request whose body has no declared type."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            return connection.getresponse().status
        finally:
            connection.close()

    def infer(self, name, version=None, **inputs):
        """Returns the outputs as arrays."""
        path = f"/v2/models/{name}" + (f"/versions/{version}" if version else "") + "/infer"
        status, _, said = self.ask(path, {"inputs": [tensor(n, x) for n, x in inputs.items()]})
        assert status == 200, said
        return {one["name"]: array(one) for one in said["outputs"]}

    def value(self, metric):
        lines = self.ask("/metrics")[2].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric))

    def close(self):
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()


TYPES = {datatype: np.dtype(getattr(jnp, name, name)) for name, datatype in DATATYPES.items() if name != "bool"} | {
    "BOOL": np.dtype(bool)
}  # fmt: skip


def tensor(name, x):
    x = np.asarray(x)
    return {"name": name, "shape": list(x.shape), "datatype": DATATYPES[x.dtype.name], "data": x.tolist()
            if x.ndim else [x.item()]}  # fmt: skip


def array(said):
    return np.asarray(said["data"], TYPES[said["datatype"]]).reshape(said["shape"])


@pytest.fixture(scope="module")
def server(folder):
    running = Running(folder)
    yield running
    running.close()


def alone(x, seed=1):
    weights = weights_of(seed)
    return np.tanh(x @ weights["w"]) + weights["b"]


# --- the protocol


def test_the_addresses_of_the_protocol(server):
    assert server.ask("/v2/health/live")[::2] == (200, {"live": True})
    assert server.ask("/v2/health/ready")[::2] == (200, {"ready": True})
    about = server.ask("/v2")[2]
    assert about["name"] == "minitext" and "binary_tensor_data" in about["extensions"]
    tensors = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, D]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, F]}],
    }
    for path in ("/v2/models/mlp", "/v2/models/mlp/versions/9"):
        said = server.ask(path)[2]
        assert said.pop("platform") == "jax_stablehlo"
        assert said == {"name": "mlp", "versions": ["1", "9", "10"], **tensors}
        assert server.ask(f"{path}/ready")[::2] == (200, {"name": "mlp", "ready": True})
    assert server.ask("/v2/models/odd.mixed")[2]["inputs"][1] == {
        "name": "scale", "datatype": "INT32", "shape": [],
    }  # fmt: skip
    for path in ("none", "mlp.none", "odd.none", "mlp/versions/8"):
        assert server.ask(f"/v2/models/{path}/ready")[0] == 503
    assert server.ask("/v2/models/odd/ready")[0] == 200
    assert server.ask("/v2/models/odd.mixed/ready")[0] == 200
    status, _, said = server.ask("/v2/models/odd")
    assert status == 404 and said["error"].endswith("ask for odd.mixed or odd.centred")


def test_a_request_is_answered_by_the_latest_version_or_the_one_it_names(server):
    x = np.arange(2 * D, dtype="f4").reshape(2, D) / 8
    for version, seed in ((None, 1), ("10", 1), ("9", 2), ("1", 0)):
        got = server.infer("mlp", version, x=x)["y"]
        np.testing.assert_allclose(got, alone(x, seed), rtol=1e-6)
    body = {"id": "a1", "inputs": [tensor("x", x)], "outputs": [{"name": "y"}]}
    said = server.ask("/v2/models/mlp/infer", body)[2]
    assert (said["id"], said["model_name"], said["model_version"]) == ("a1", "mlp", "10")
    flat = {**tensor("x", x), "data": x.ravel().tolist()}
    assert server.ask("/v2/models/mlp/infer", {"inputs": [flat]})[2]["outputs"] == said["outputs"]


def test_types_scalars_and_rows_in_any_dimension(server):
    x_TB, flags = np.arange(-6, 6, dtype="i4").reshape(4, 3), np.array([True, False, True])
    got = server.infer("odd.mixed", x=x_TB, flags=flags, scale=np.int32(3))
    np.testing.assert_array_equal(got["sum"], np.where(flags, x_TB.sum(0), -1) * 3)
    np.testing.assert_array_equal(got["times"], (2 * x_TB).astype(jnp.bfloat16))
    assert got["times"].dtype == jnp.bfloat16 and got["length"].shape == () and got["length"] == 4


def test_bytes_instead_of_numbers_in_json(server):
    """The extension that Triton's client uses unless it's told otherwise."""
    x = np.random.default_rng(0).normal(size=(3, D)).astype("f4")
    one = {
        "name": "x",
        "shape": [3, D],
        "datatype": "FP32",
        "parameters": {"binary_data_size": x.nbytes},
    }
    head = json.dumps(
        {"inputs": [one], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    )
    path, length = "/v2/models/mlp/infer", {"Inference-Header-Content-Length": str(len(head))}
    kinds = ({"Content-Type": "application/octet-stream"}, {"Content-Type": "application/json"})
    for kind in kinds:
        status, headers, said = server.ask(path, head.encode() + x.tobytes(), **length, **kind)
        assert status == 200 and headers["Content-Type"] == "application/octet-stream"
        size = int(headers["Inference-Header-Content-Length"])
        (output,) = json.loads(said[:size])["outputs"]
        assert output["parameters"] == {"binary_data_size": 3 * F * 4} and "data" not in output
        got = np.frombuffer(said[size:], "<f4").reshape(3, F)
        np.testing.assert_allclose(got, alone(x), rtol=1e-6)
    flags = np.array([1, 0, 2], np.uint8)
    inputs = [
        {"name": "x", "shape": [1, 3], "datatype": "INT32", "data": [1, 2, 3]},
        {"name": "flags", "shape": [3], "datatype": "BOOL", "parameters": {"binary_data_size": 3}},
        {"name": "scale", "shape": [], "datatype": "INT32", "data": [1]},
    ]
    head = json.dumps({"inputs": inputs})
    length = {"Inference-Header-Content-Length": str(len(head))}
    status, _, said = server.ask(
        "/v2/models/odd.mixed/infer", head.encode() + flags.tobytes(), **length
    )
    assert status == 400 and "a byte of it is 2" in said["error"]


# --- joined requests


def crowd(server, xs, name="mlp"):
    with concurrent.futures.ThreadPoolExecutor(len(xs)) as threads:
        return [*threads.map(lambda x: server.infer(name, x=x)["y"], xs)]


def test_requests_are_computed_together_and_answered_as_if_alone(server):
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=(rng.integers(1, 4), D)).astype("f4") for _ in range(24)]
    before = server.value('minitext_inference_requests_per_call_count{model="mlp",version="10"}')
    for x, got in zip(xs, crowd(server, xs), strict=True):
        assert got.shape == (len(x), F)
        np.testing.assert_allclose(got, alone(x), rtol=2e-6, atol=1e-6)
    calls = (
        server.value('minitext_inference_requests_per_call_count{model="mlp",version="10"}')
        - before
    )
    assert calls < len(xs), "no requests were joined"


def test_rows_that_look_at_each_other_are_not_joined(server):
    """An artefact that doesn't say that its rows are independent is called as it was asked."""
    xs = [np.full((2, D), i, "f4") + np.array([[0], [1]], "f4") for i in range(8)]
    for got in crowd(server, xs, "odd.centred"):
        np.testing.assert_array_equal(got, np.array([[-0.5], [0.5]]) * np.ones(D))


def program(run, inputs, outputs, batch="b"):
    said = {"inputs": inputs, "outputs": outputs, "batch": batch}
    return Program(run, said)


def described(**shapes):
    return {name: {"shape": shape, "dtype": "float32"} for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "inputs, outputs, axes",
    [
        ({"x": ["b", 4]}, {"y": [3, "b"]}, {"x": 0, "y": 1}),
        ({"x": ["b", "t"], "n": []}, {"y": ["t"]}, {"x": 0, "n": None, "y": None}),
        ({"x": ["2*b", 4]}, {"y": ["b"]}, {}),
        ({"x": ["b", "b"]}, {"y": ["b"]}, {}),
        ({"x": ["b"]}, {"y": ["b + 1"]}, {}),
        ({"x": ["t"]}, {"y": ["t"]}, {}),
        ({"x": ["bb"]}, {"y": ["bb"]}, {}),
    ],
)
def test_only_plain_rows_are_joined(inputs, outputs, axes):
    assert program(None, described(**inputs), described(**outputs)).axes == axes


def test_what_calls_must_have_in_common(server):
    """Lengths differ, or what rows share: then calls are apart, and each is right."""
    xs = [np.arange(t * 2, dtype="i4").reshape(t, 2) for t in (1, 2, 3)] * 2
    scales = [1, 1, 1, 5, 5, 5]

    def one(x, scale):
        flags = np.ones(2, bool)
        return server.infer("odd.mixed", x=x, flags=flags, scale=np.int32(scale))["sum"]

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for x, scale, got in zip(xs, scales, threads.map(one, xs, scales), strict=True):
            np.testing.assert_array_equal(got, x.sum(0) * scale)


class Answers:
    """What a batcher tells."""

    def __init__(self):
        self.found, self.done = {}, threading.Semaphore(0)

    def of(self, key):
        def told(found):
            self.found[key] = found
            self.done.release()

        return told

    def wait(self, count):
        for _ in range(count):
            assert self.done.acquire(timeout=30)
        return self.found


def test_a_call_that_fails_fails_alone():
    """Whatever makes a program fail, its neighbours in the batch are computed again without it."""
    seen = []

    def fails(inputs):
        seen.append(len(inputs["x"]))
        if (inputs["x"] == 13).any():
            raise RuntimeError("thirteen")
        return {"y": inputs["x"] * 2}

    whole = program(None, described(x=["b"]), described(y=["b"]))
    whole._compile = lambda inputs: fails
    batcher, answers = Batcher(whole, BatchSizes(8, 0.2)), Answers()
    for i in (11, 12, 13, 14):
        batcher.submit({"x": np.array([i], "f4")}, answers.of(i))
    found = answers.wait(4)
    assert isinstance(found.pop(13), RuntimeError)
    assert {i: y["y"].tolist() for i, y in found.items()} == {i: [2.0 * i] for i in (11, 12, 14)}
    assert seen[0] == 4 and len(seen) == 5
    batcher.close()


def test_nobody_waits_longer_than_they_must():
    """A full batch begins at once, a lone call after the wait, and a cancelled one is not computed."""
    computed = []

    def run(inputs):
        computed.append(inputs["x"].tolist())
        return {"y": inputs["x"]}

    whole = program(None, described(x=["b"]), described(y=["b"]))
    whole._compile = lambda inputs: run
    batcher, answers = Batcher(whole, BatchSizes(4, 0.3)), Answers()
    began = time.perf_counter()
    for i in range(4):
        batcher.submit({"x": np.array([i], "f4")}, answers.of(i))
    answers.wait(4)
    assert time.perf_counter() - began < 0.25 and computed == [[0, 1, 2, 3]]
    began = time.perf_counter()
    lone = batcher.submit({"x": np.array([7], "f4")}, answers.of(7))
    assert lone.rows == 1
    answers.wait(1)
    assert time.perf_counter() - began >= 0.29
    gone = batcher.submit({"x": np.array([8], "f4")}, answers.of(8))
    gone.cancelled = True
    batcher.submit({"x": np.array([9, 10, 11], "f4")}, answers.of(9))
    answers.wait(1)
    assert (
        computed[-1] == [9, 10, 11, 11] and 8 not in answers.found
    )  # filled up to 4 by the last row
    with pytest.raises(Refused, match="5 rows, and at most 4"):
        batcher.submit({"x": np.zeros(5, "f4")}, answers.of(5))
    batcher.close(5)
    with pytest.raises(Refused, match="unloaded"):
        batcher.submit({"x": np.zeros(1, "f4")}, answers.of(6))


# --- models that come and go


def test_models_come_and_go_while_requests_run(folder, tmp_path):
    """No request fails while versions are loaded, reloaded and unloaded, and each answer is some version's."""
    home = tmp_path / "models"
    shutil.copytree(folder / "mlp" / "one", home / "mlp" / "a")
    running = Running(home, wait=0.001)
    x, stop, wrong = np.ones((1, D), "f4"), threading.Event(), []
    right = [alone(x, seed) for seed in (0, 1)]

    def keep_asking():
        while not stop.is_set():
            got = running.infer("mlp", x=x)["y"]
            if not any(np.allclose(got, want, rtol=1e-6) for want in right):
                wrong.append(got)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(keep_asking) for _ in range(4)]
        path = "/v2/repository/models/mlp"
        index = running.ask("/v2/repository/index", {})[2]
        assert [(one["version"], one["state"]) for one in index] == [("1", "READY")]
        shutil.copytree(folder / "mlp" / "ten", home / "mlp" / "b")
        index = running.ask("/v2/repository/index", b"", "POST")[2]
        assert [(one["version"], one["state"]) for one in index] == [
            ("1", "READY"),
            ("10", "UNAVAILABLE"),
        ]
        for _ in range(3):
            assert running.ask(f"{path}/load", b"", "POST")[0] == 200
            np.testing.assert_allclose(running.infer("mlp", x=x)["y"], right[1], rtol=1e-6)
            parameters = {"parameters": {"version": "10"}}
            assert running.ask(f"{path}/unload", parameters)[0] == 200
            np.testing.assert_allclose(running.infer("mlp", x=x)["y"], right[0], rtol=1e-6)
        # The same version with other weights.
        shutil.rmtree(home / "mlp")
        save_mlp(home / "mlp" / "new", 1, version="1")
        assert running.ask(f"{path}/load", b"", "POST")[0] == 200
        np.testing.assert_allclose(running.infer("mlp", "1", x=x)["y"], right[1], rtol=1e-6)
        stop.set()
        assert [each.result() for each in asking] == [None] * 4 and not wrong
    assert running.ask(f"{path}/unload", b"", "POST")[0] == 200
    assert running.ask("/v2/models/mlp/infer", {"inputs": [tensor("x", x)]})[0] == 404
    assert running.ask(f"{path}/unload", b"", "POST")[0] == 404
    assert running.ask("/v2/repository/index", {"ready": True})[2] == []
    running.close()


def test_an_unloaded_model_is_out_of_memory(tmp_path):
    """Weights and compiled programs, of which each takes the weights as arguments: there is one copy of them."""
    gc.freeze()  # what other tests left is not searched each time
    shape = (37, 41)
    function = artefact.Function(
        lambda w, inputs: {"y": inputs["x"] @ w}, {"x": ("b, 37", "float32")}, batch="b"
    )
    artefact.save(tmp_path / "a", {"run": function}, np.ones(shape, "f4"), name="a")

    def alive():
        gc.collect()
        return sum(x.shape == shape for x in jax.live_arrays())

    def batch_threads():
        return sum(thread.name == "batch" for thread in threading.enumerate())

    before = batch_threads()
    running = Running(tmp_path / "a")
    assert running.infer("a", x=np.ones((2, 37), "f4"))["y"].tolist() == [[37.0] * 41] * 2
    model = weakref.ref(running.served.store.loaded()[0])
    assert alive() == 1 and batch_threads() == before + 1
    assert running.ask("/v2/repository/models/a/unload", b"", "POST")[0] == 200
    assert alive() == 0 and model() is None and batch_threads() == before
    assert running.ask("/v2/repository/models/a/load", b"", "POST")[0] == 200
    assert alive() == 1
    running.close()
    assert alive() == 0
    gc.unfreeze()


def test_a_damaged_artefact_is_refused_and_the_others_go_on(folder, tmp_path):
    home = tmp_path / "models"
    shutil.copytree(folder / "mlp" / "one", home / "good")
    running = Running(home)
    shutil.copytree(folder / "mlp" / "ten", home / "bad")
    weights = home / "bad" / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    status, _, said = running.ask("/v2/repository/models/mlp/load", b"", "POST")
    assert (
        status == 400
        and "weights.safetensors was changed" in said["error"]
        and "\n" not in said["error"]
    )
    index = {one["version"]: one for one in running.ask("/v2/repository/index", {})[2]}
    assert index["1"]["state"] == "READY" and "was changed" in index["10"]["reason"]
    assert running.infer("mlp", x=np.zeros((1, D), "f4"))["y"].shape == (1, F)
    running.close()
    with pytest.raises(UserError, match="was changed"):
        Running(home)


def test_folders_that_cannot_be_served(folder, tmp_path):
    def refuse(*places):
        with pytest.raises(UserError) as refused:
            model_store.Store(places).load_all()
        assert len(str(refused.value).splitlines()) == 1
        return str(refused.value)

    assert "is not an artefact and holds none" in refuse(tmp_path)
    assert "cannot be read" in refuse(tmp_path / "none")
    shutil.copytree(folder / "mlp" / "one", tmp_path / "twin")
    assert "are both mlp version 1" in refuse(folder, tmp_path / "twin")
    outside = {
        "name": "../a",
        "version": "1",
        "sha256": "",
        "weights": {"file": "weights.safetensors"},
    }
    for text in ("", "[]", "{", '{"name": "a"}', json.dumps(outside), "[" * 100_000):
        (tmp_path / "twin" / "manifest.json").write_text(text)
        assert "manifest" in refuse(tmp_path / "twin")


def test_memory_is_looked_at_before_it_is_taken(folder, monkeypatch):
    monkeypatch.setattr(model_store.hardware, "memory_bytes", lambda device: 100)
    store = model_store.Store([folder / "mlp"])
    with pytest.raises(UserError, match="has weights of .* unload one first"):
        store.load_all()


def test_a_call_that_needs_too_much_memory_is_refused_before_it_runs(tmp_path):
    """A hundred bytes of request may ask for gigabytes, where shapes grow inside."""

    def grows(w, inputs):
        x_T = inputs["x"]
        y_TT = jnp.cos(x_T[:, None] * x_T * w)
        return {"y": y_TT / y_TT.sum(0)}

    function = artefact.Function(grows, {"x": ("t", "float32")})
    artefact.save(tmp_path / "a", {"run": function}, np.float32(1), name="a")
    running = Running(tmp_path / "a")
    batcher = running.served.store.loaded()[0].batchers["run"]
    batcher.program._most_bytes = 1 << 20
    assert running.infer("a", x=np.ones(10, "f4"))["y"].shape == (10, 10)
    status, _, said = running.ask(
        "/v2/models/a/infer", {"inputs": [tensor("x", np.ones(2000, "f4"))]}
    )
    assert status == 413 and "of memory, and a call may have" in said["error"]
    running.close()


def test_constraints_of_a_program_are_its_own(tmp_path):
    function = artefact.Function(
        lambda w, inputs: {"y": jnp.reshape(inputs["x"], (-1, 2)) * w}, {"x": ("2*n", "float32")}
    )
    artefact.save(tmp_path / "a", {"run": function}, np.float32(3), name="a")
    running = Running(tmp_path / "a")
    assert running.infer("a", x=np.arange(4, dtype="f4"))["y"].tolist() == [[0, 3], [6, 9]]
    status, _, said = running.ask("/v2/models/a/infer", {"inputs": [tensor("x", np.ones(3, "f4"))]})
    assert status == 400
    assert said["error"].startswith(
        "the function doesn't take these shapes: Division had remainder"
    )
    running.close()


def test_rows_are_filled_up_only_as_far_as_a_constraint_allows(tmp_path):
    function = artefact.Function(
        lambda w, inputs: {"y": inputs["x"] * w}, {"x": ("b", "float32")}, ["b <= 6"], batch="b"
    )
    artefact.save(tmp_path / "a", {"run": function}, np.float32(2), name="a")
    running = Running(tmp_path / "a")
    assert running.infer("a", x=np.ones(5, "f4"))["y"].shape == (5,)
    status, _, said = running.ask("/v2/models/a/infer", {"inputs": [tensor("x", np.ones(7, "f4"))]})
    assert status == 400
    assert said["error"].startswith("the function doesn't take these shapes: b <= 6")
    running.close()


# --- those who mean no good


@pytest.mark.parametrize("shape", [[2**62, 0], [0, 2**63 - 1]])
@pytest.mark.parametrize("data", [{"data": []}, {"parameters": {"binary_data_size": 0}}])
def test_empty_arrays_of_shapes_that_no_array_has_are_refused(shape, data):
    inputs = {"x": Spec("x", ("2*b", "2*c"), np.dtype("f4"))}
    one = {"name": "x", "shape": shape, "datatype": "FP32", **data}
    body = json.dumps({"inputs": [one]}).encode()
    with pytest.raises(Refused, match="too large for an array"):
        read_request(body, str(len(body)), inputs, {})


X = {"name": "x", "shape": [1, D], "datatype": "FP32", "data": [0.0] * D}
BARE = {"name": "x", "shape": [1, D], "datatype": "FP32"}
HOSTILE = [
    (b"", 400), (b"{", 400), (b"[]", 400), (b"null", 400), (b"\xff\xfe", 400), (b"[" * 100_000, 400),
    (b'{"inputs": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400), ({}, 400), ({"inputs": None}, 400),
    ({"inputs": {}}, 400), ({"inputs": []}, 400), ({"inputs": [None]}, 400), ({"inputs": [X, X]}, 400),
    ({"inputs": [{**X, "name": "z" * 10_000}]}, 400), ({"inputs": [{**X, "name": None}]}, 400),
    ({"inputs": [{**X, "shape": [4]}]}, 400), ({"inputs": [{**X, "shape": [0, 4]}]}, 400),
    ({"inputs": [{**X, "shape": [-1, 4]}]}, 400), ({"inputs": [{**X, "shape": [1, 5]}]}, 400),
    ({"inputs": [{**X, "shape": [10**30, 4]}]}, 400), ({"inputs": [{**X, "shape": [2**62, 4]}]}, 400),
    ({"inputs": [{**X, "shape": [1.0, 4]}]}, 400), ({"inputs": [{**X, "shape": [True, 4]}]}, 400),
    ({"inputs": [{**X, "shape": "14"}]}, 400), ({"inputs": [{**X, "shape": [1] * 1000}]}, 400),
    ({"inputs": [{**X, "shape": [1 << 20, 4]}]}, 400), ({"inputs": [{**X, "datatype": "FP64"}]}, 400),
    ({"inputs": [{**X, "datatype": "BYTES"}]}, 400), ({"inputs": [{**X, "datatype": 7}]}, 400),
    ({"inputs": [{**X, "data": None}]}, 400), ({"inputs": [{**X, "data": "0000"}]}, 400),
    ({"inputs": [{**X, "data": [0, 0, 0]}]}, 400), ({"inputs": [{**X, "data": [0] * 5}]}, 400),
    ({"inputs": [{**X, "data": [[0, 0], [0, 0]]}]}, 400), ({"inputs": [{**X, "data": [[[0, 0, 0, 0]]]}]}, 400),
    ({"inputs": [{**X, "data": [[0, 0, 0, [0]]]}]}, 400), ({"inputs": [{**X, "data": ["0", 0, 0, 0]}]}, 400),
    ({"inputs": [{**X, "data": [True, 0, 0, 0]}]}, 400), ({"inputs": [{**X, "data": [None] * 4}]}, 400),
    ({"inputs": [{**X, "data": [1e300, 0, 0, 0]}]}, 400), ({"inputs": [{**X, "data": [10**400, 0, 0, 0]}]}, 400),
    ({"inputs": [{**X, "data": [{}] * 4}]}, 400), ({"inputs": [X], "outputs": [{"name": "x"}]}, 400),
    ({"inputs": [X], "outputs": [{"name": "y"}] * 2}, 400), ({"inputs": [X], "outputs": [{}]}, 400),
    ({"inputs": [X], "outputs": [{"name": "y", "parameters": {"classification": 2}}]}, 400),
    ({"inputs": [X], "outputs": [{"name": "y", "parameters": {"binary_data": 1}}]}, 400),
    ({"inputs": [X], "parameters": {"binary_data_output": "yes"}}, 400), ({"inputs": [X], "parameters": []}, 400),
    ({"inputs": [X], "id": 7}, 400), ({"inputs": [X], "id": "i" * 100_000}, 400),
    ({"inputs": [{**X, "parameters": {"binary_data_size": 16}}]}, 400),
    ({"inputs": [{**BARE, "parameters": {"binary_data_size": 16}}]}, 400),
    ({"inputs": [{**BARE, "parameters": {"binary_data_size": -1}}]}, 400),
    ({"inputs": [{**BARE, "parameters": {"shared_memory_region": "r"}}]}, 400),
    ({"inputs": [{**X, "shape": [9, D], "data": [0.0] * 9 * D}]}, 413), (b" " * 300_000, 413),
]  # fmt: skip


@pytest.fixture(scope="module")
def narrow(folder):
    running = Running(folder / "mlp", most_body=200_000, api_key="secret", most_waiting=4)
    yield running
    running.close()


KEY = {"Authorization": "Bearer secret"}


def test_hostile_requests_are_refused_in_one_line(narrow):
    for body, status in HOSTILE:
        got, _, said = narrow.ask("/v2/models/mlp/infer", body, **KEY)
        assert got == status, (body if len(str(body)) < 300 else str(body)[:300], said)
        assert (
            list(said) == ["error"] and "\n" not in said["error"] and 10 < len(said["error"]) < 400
        )
    good = {"inputs": [X]}
    path = "/v2/models/mlp/infer"
    for where, status in (
        ("/v2/models/none/infer", 404), ("/v2/models/mlp/versions/2/infer", 404), ("/v2/models/../infer", 404),
        ("/v2/models/mlp%00/infer", 404), (f"/v2/models/{'a' * 5000}/infer", 404), ("/v2/models//infer", 404),
        ("/v2/models/..%2f..%2fetc/infer", 404), ("/v2/repository/models/none/load", 404),
        ("/v2/repository/models/..%2f..%2fetc/load", 404), ("/v2/repository/models/mlp/unload/x", 404),
        ("/v2/health/live", 405), ("/v2/models/mlp.run/infer", 200),
    ):  # fmt: skip
        got, _, said = narrow.ask(where, good, "POST", **KEY)
        assert got == status and (status == 200 or "\n" not in said["error"]), (where, got, said)
    kinds = {"Content-Type": "text/plain"}, {"Content-Type": "application/octet-stream"}
    assert [narrow.ask(path, good, **KEY, **kind)[0] for kind in kinds] == [415, 400]
    assert narrow.untyped(path, good, KEY) == 200  # as Triton's client asks
    assert (
        narrow.untyped(path, good, KEY | {"Origin": "http://elsewhere"}) == 415
    )  # another site's page
    for length in ("-1", "1e3", "99999999999", "x", "9" * 30, "3"):
        header = {"Inference-Header-Content-Length": length}
        assert narrow.ask(path, good, **KEY, **header)[0] == 400, length
    for body in (b"{", b"[]", {"parameters": {"version": 1}}, {"parameters": 3}):
        assert narrow.ask("/v2/repository/models/mlp/load", body, **KEY)[0] == 400
    assert narrow.ask(path, good, **KEY)[0] == 200
    failed = 'minitext_http_requests_total{path="/v2/models/{name}/infer",status="5'
    assert narrow.value(failed) == 0


def test_the_key_is_wanted_but_for_health_and_metrics(narrow):
    for path in ("/v2", "/v2/models/mlp", "/v2/models/mlp/ready"):
        assert narrow.ask(path)[0] == 401
        assert narrow.ask(path, Authorization="Bearer wrong")[0] == 401
        assert narrow.ask(path, **KEY)[0] == 200
    for path in (
        "/v2/models/mlp/infer",
        "/v2/repository/index",
        "/v2/repository/models/mlp/unload",
    ):
        assert narrow.ask(path, {"inputs": [X]})[0] == 401
    assert narrow.ask("/v2/health/ready")[0] == 200 and narrow.ask("/metrics")[0] == 200


def test_too_many_requests_are_told_to_come_again(narrow):
    """Those who are slow to send their requests take places too."""
    head = (
        b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer secret\r\nContent-Length: 100\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", narrow.port)))
            slow.sendall(head)
        _until(lambda: narrow.served.under_way == 4)
        status, headers, said = narrow.ask("/v2/models/mlp/infer", {"inputs": [X]}, **KEY)
        assert status == 429 and headers["Retry-After"] and "too many" in said["error"]
        assert narrow.ask("/v2/health/live")[0] == 200
    _until(lambda: narrow.served.under_way == 0)
    assert narrow.ask("/v2/models/mlp/infer", {"inputs": [X]}, **KEY)[0] == 200
    narrow.served.bytes_held = 8 * narrow.served.most_body
    try:
        status, _, said = narrow.ask("/v2/models/mlp/infer", {"inputs": [X]}, **KEY)
        assert status == 429 and "large requests" in said["error"]
    finally:
        narrow.served.bytes_held = 0


def _until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@settings(max_examples=25, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(
        st.sampled_from(["name", "shape", "datatype", "data", "parameters", "inputs", "outputs", "id", "x"]),
        inner, max_size=5,
    ), max_leaves=20,
))  # fmt: skip
def test_no_json_makes_the_server_fail(narrow, value):
    for body in (value, {"inputs": value}, {"inputs": [value]}, {"inputs": [{**X, "data": value}]}):
        status, _, said = narrow.ask("/v2/models/mlp/infer", json.dumps(body).encode(), **KEY)
        assert status == 200 or (400 <= status < 500 and "\n" not in said["error"]), (body, said)


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 8), seed=st.integers(0, 1000), nested=st.booleans())
def test_any_rows_are_what_they_are_alone(server, rows, seed, nested):
    x = np.random.default_rng(seed).normal(size=(rows, D)).astype("f4")
    given = tensor("x", x) if nested else {**tensor("x", x), "data": x.ravel().tolist()}
    said = server.ask("/v2/models/mlp/infer", {"inputs": [given]})[2]
    np.testing.assert_allclose(array(said["outputs"][0]), alone(x), rtol=2e-6, atol=1e-6)


def test_infinite_numbers_go_through(server):
    x = np.array([[np.inf, 1, -np.inf, 0], [np.nan, 0, 0, 0]], "f4")
    body = json.dumps({"inputs": [tensor("x", x)]}).encode()
    assert b"Infinity" in body and b"NaN" in body
    got = array(server.ask("/v2/models/odd.centred/infer", body)[2]["outputs"][0])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, (x - x.mean(0)).astype("f4"))


# --- the end


def test_what_runs_is_answered_before_the_end(folder):
    running = Running(folder / "mlp", wait=0.5)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(running.infer, "mlp", x=np.zeros((1, D), "f4")) for _ in range(3)]
        _until(lambda: running.served.under_way == 3)
        running.server.should_exit = True
        for each in asking:
            assert each.result()["y"].shape == (1, F)
    running.close()
    assert running.served.store.loaded() == []


def test_a_client_that_hangs_up_is_not_computed_for(folder):
    running = Running(folder / "mlp", wait=0.5)
    body = json.dumps({"inputs": [X]}).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(
            f"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        _until(lambda: running.served.under_way == 1)
        _until(
            lambda: any(
                b.waiting for m in running.served.store.loaded() for b in m.batchers.values()
            )
        )
    _until(lambda: running.served.under_way == 0)
    assert running.value("minitext_inference_requests_per_call_count") == 0
    assert running.value('minitext_inference_requests_total{model="mlp",status="499"') == 1
    running.close()


def test_metrics_are_by_model_and_version(server):
    server.infer("mlp", "9", x=np.zeros((1, D), "f4"))
    text = server.ask("/metrics")[2].decode()
    labels = '{model="mlp",version="9"}'
    for name in (
        "inference_seconds_count",
        "inference_queue_seconds_count",
        "inference_rows_per_call_count",
    ):
        assert f"minitext_{name}{labels}" in text
    assert f"minitext_inference_shapes{labels}" in text
    assert 'minitext_inference_waiting{model="odd.mixed",version="1"}' in text
    server.ask("/v2/models/secret-name/infer", {"inputs": [X]})
    assert "secret-name" not in server.ask("/metrics")[2].decode()
