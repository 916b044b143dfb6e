"""Attention over a split sequence: each switch against a dense float64 reference, by value and by gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minitext.config.config import load_config
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.kernels.attention.mask import Mask
from minitext.sharding.check import check_mesh
from minitext.sharding.context_parallel import context_attention, zigzag
from minitext.sharding.mesh import abstract_mesh, make_mesh
from minitext.sharding.rules import RULES
from tests.conftest import audit_but
from tests.kernels import dense

RULES_ALL = RULES["all"]
T = 48
# With eight devices a piece of zigzag has three tokens, with two twelve: limits cut pieces, and hide others.
SWITCHES = {
    **dense.SWITCHES,
    "a window of less than a piece": {"window": 2},
    "short chunks": {"chunk": 5},
}
MESHES = {
    "8": {"data": 1, "context": 8},
    "2 x 2 x 2": {"fsdp": 2, "data": 1, "tensor": 2, "context": 2},
}


def inputs(V=8):
    rng = np.random.default_rng(0)
    q, k = 3 * rng.normal(size=(4, T, 4, 8)), rng.normal(size=(4, T, 2, 8))
    v, probe = rng.normal(size=(4, T, 2, V)), rng.normal(size=(4, T, 4, V))
    segments = np.cumsum(rng.random((4, T)) < 0.05, axis=1)
    return *(jnp.asarray(x, jnp.float32) for x in (q, k, v, probe)), jnp.asarray(segments)


def split(q, k, v, probe, segments, sinks, method, **options):
    """Output and gradients of q, k, v and the sinks on the current mesh, in the sequence's order."""

    def place(x, *names):
        return RULES_ALL.shard(x, *names, *(None,) * (x.ndim - len(names)))

    def order(x, *names, back=False):
        return x if method == "allgather" else zigzag(x, *names, rules=RULES_ALL, back=back)

    def loss(q, k, v, segments, sinks):
        heads = ("batch", "seq", "heads", None), ("batch", "seq", "kv_heads", None)
        q, k, v = (
            order(x, *names) for x, names in zip((q, k, v), (heads[0], *heads[1:] * 2), strict=True)
        )
        segments = segments if segments is None else order(segments, "batch", "seq")
        out = context_attention(
            q, k, v, segments, rules=RULES_ALL, method=method, sinks_N=sinks, **options
        )
        out = order(out, *heads[0], back=True)
        return jnp.sum(place(probe, *heads[0]) * out), out

    q = place(q, "batch", "seq", "heads")
    k, v = (place(x, "batch", "seq", "kv_heads") for x in (k, v))
    segments = segments if segments is None else place(segments, "batch", "seq")
    places = (0, 1, 2) if sinks is None else (0, 1, 2, 4)
    run = jax.jit(jax.value_and_grad(loss, places, has_aux=True))
    (_, out), grads = run(q, k, v, segments, sinks)
    return out, *grads


def compare(mesh, method, switches, packed, **shape):
    q, k, v, probe, segments = inputs(**shape)
    limits = {name: switches.get(name) for name in ("window", "chunk")}
    softcap, sinks = (
        switches.get("softcap"),
        jnp.linspace(-2.0, 2.0, 4) if "sinks" in switches else None,
    )
    with jax.set_mesh(make_mesh(MeshConfig(**MESHES[mesh]))):
        options = {"mask": Mask(**limits), "softcap": softcap}
        got = split(q, k, v, probe, segments if packed else None, sinks, method, **options)
    seen = dense.seen(T, segments if packed else None, **limits)
    want = dense.value_and_gradients(q, k, v, probe, seen, softcap, sinks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1.0, np.abs(b).max()))


QUICK = [("2 x 2 x 2", "ring", "all"), ("2 x 2 x 2", "allgather", "all"),
         ("8", "ring", "a window of less than a piece"), ("8", "ring", "short chunks")]  # fmt: skip
EACH = [(mesh, how, name) for mesh in MESHES for how in ("ring", "allgather") for name in SWITCHES]


@pytest.mark.parametrize("case", audit_but(QUICK, EACH))
def test_switches_are_their_definition_in_value_and_gradient(case):
    mesh, method, name = case
    compare(mesh, method, SWITCHES[name], packed=True)


@pytest.mark.parametrize("method", audit_but(["ring"], ["ring", "allgather"]))
def test_values_of_another_width_and_whole_rows(method):
    compare("2 x 2 x 2", method, SWITCHES["all"], packed=False, V=6)


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_what_it_cannot_take_is_refused(method):
    q, k, v, *_ = inputs()
    with jax.set_mesh(make_mesh(MeshConfig(context=2, data=4))):
        run = lambda **o: context_attention(q, k, v, None, rules=RULES_ALL, method=method, **o)  # noqa: E731
        for mask, word in (
            (Mask(causal=False), "causal=False"),
            (Mask(blocks=((True,),)), "blocks of 128"),
            (Mask(window=0), "window=0"),
        ):
            with pytest.raises(UserError, match=f"context attention.*{word}"):
                run(mask=mask)
        with pytest.raises(UserError, match="softcap=0"):
            run(softcap=0.0)


def test_blocks_that_a_window_hides_are_not_computed_with():
    """Keys and values of a device that no query of a piece sees hold NaN, and nothing comes of it."""
    q, k, v, probe, _ = inputs()
    far = jnp.arange(T) < 3  # the first piece, of eight devices' sixteen
    k, v = (jnp.where(far[:, None, None], jnp.nan, x) for x in (k, v))
    with jax.set_mesh(make_mesh(MeshConfig(**MESHES["8"]))):
        out, dq, *_ = split(q, k, v, probe, None, None, "ring", mask=Mask(window=3))
    # Devices 0 and 1 compute with that piece: they hold pieces 0, 1, 14 and 15.
    out, dq = np.asarray(out), np.asarray(dq)
    assert np.all(np.isfinite(out[:, 6:42])) and np.all(np.isfinite(dq[:, 6:42]))
    assert np.all(np.isnan(out[:, :3]))


@pytest.mark.parametrize(
    "layers",
    [
        ["model.period=[{}, {attention: {context: allgather}}]"],
        ["model.attention.context=allgather", "model.period=[{}, {attention: {context: ring}}]"],
        ["model.attention.kind=deltanet", "model.period=[{attention: {kind: gqa}}]"],
    ],
)
def test_layers_that_want_other_orders_of_tokens_are_refused(layers):
    cfg = load_config("laptop", [*layers, "mesh.data=4", "mesh.context=2"])
    with pytest.raises(UserError, match="one model.attention.context for all layers") as error:
        check_mesh(cfg, abstract_mesh(cfg.mesh))
    assert "\n" not in str(error.value)
    whole = cfg.replace({"mesh.context": 1, "mesh.data": 8})
    check_mesh(whole, abstract_mesh(whole.mesh))
