"""Our quantized products against Qwix's, by the same rules: error of the gradients, time of a step, narrow products.

    python benchmarks/quantization_qwix.py

A model of 2 layers is trained for no step: its loss and gradients are computed by float32 products, by ours
(`model.quantization`) and by those of Qwix's `QtProvider` with the rules that `to_qwix` makes of the same ones. A layer's
error is that of its gradients as one vector, against float32's. Products are those of the traced program, a scanned
layer's once. The sides take turns, warm, in one process; the machine's processor has no fp8 products.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from common import parser, ratio, spread, write_record
from flax import nnx

SIZES = {"layers": 2, "embed": 256, "heads": 4, "kv_heads": 4, "mlp": 512, "vocab": 2048}
BATCH, SEQ_LEN, ROUNDS = 8, 128, 7
EVERY_PRODUCT = "blocks/.*|unembed"
RULES = {
    "int8 by channel": {"dtype": "int8"},
    "int8 by tensor": {"dtype": "int8", "granularity": "tensor"},
    "int8 by blocks of 128": {"dtype": "int8", "granularity": "block", "block": 128},
    "fp8 by channel": {"dtype": "fp8"},
    "fp8 by channel, gradients e5m2": {"dtype": "fp8", "gradients": "e5m2"},
}


def make_model(rules=()):
    """The same random model for every side, with our rules or none."""
    import minitext as mt
    from minitext.models.transformer import Transformer

    settings = [f"model.{key}={value}" for key, value in SIZES.items()]
    settings += ["model.dtype=float32", "model.tie_embeddings=false", "model.scan_layers=true"]
    cfg = mt.load_config("laptop", settings).model
    return Transformer(cfg.model_copy(update={"quantization": tuple(rules)}), rngs=nnx.Rngs(0))


def sides():
    """Yields (scheme, whose products, model)."""
    import qwix

    from minitext.config.quantization import QuantizationRule
    from minitext.models.qwix_rules import to_qwix

    yield "float32", "exact", make_model()
    for scheme, options in RULES.items():
        rules = [QuantizationRule(module=EVERY_PRODUCT, **options)]
        yield scheme, "ours", make_model(rules)
        model = make_model()
        provider = qwix.QtProvider(to_qwix(rules, model))
        yield scheme, "qwix", qwix.quantize_model(model, provider, tokens()[:, :-1])


def tokens():
    shape = BATCH, SEQ_LEN + 1
    return jax.random.randint(jax.random.key(1), shape, 0, SIZES["vocab"])


class Step:
    """The loss and gradients of one side's model."""

    def __init__(self, model):
        graphdef, params = nnx.split(model)

        def loss(params, rows):
            log_probs = jax.nn.log_softmax(nnx.merge(graphdef, params)(rows[:, :-1]))
            return -jnp.mean(jnp.take_along_axis(log_probs, rows[:, 1:, None], axis=-1))

        self.params, self.rows = params, tokens()
        self.function = jax.value_and_grad(loss)
        self.run = jax.jit(self.function).lower(params, self.rows).compile()

    def seconds(self):
        start = time.perf_counter()
        jax.block_until_ready(self.run(self.params, self.rows))
        return time.perf_counter() - start

    def products(self):
        """How many products the program has, and how many of two narrow factors."""
        from minitext.models.qwix_rules import traced_products

        program = jax.make_jaxpr(self.function)(self.params, self.rows)
        found = [types for _, types in traced_products(program.jaxpr)]
        narrow = [all(jnp.dtype(kind).itemsize == 1 for kind in types) for types in found]
        return {"products": len(found), "narrow": sum(narrow)}

    def gradients(self):
        """The loss, and a vector of gradients for each layer and for the output layer."""
        loss, grads = self.run(self.params, self.rows)
        flat = {"/".join(map(str, k)): v.get_value() for k, v in nnx.to_flat_state(grads)}
        stacked = [np.asarray(g) for path, g in flat.items() if path.startswith("blocks")]
        layers = [np.concatenate([np.ravel(g[i]) for g in stacked]) for i in range(SIZES["layers"])]
        return float(loss), [*layers, np.ravel(flat["unembed/w"])]


def compared(got, want):
    """The relative error and the cosine of each layer's gradients; the output layer's are the last."""
    errors, cosines = [], []
    for a, b in zip(got, want, strict=True):
        a, b = np.float64(a), np.float64(b)
        errors.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
        cosines.append(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)))
    return {"gradient_error": errors, "gradient_cosine": cosines}


def main():
    args = parser(__doc__).parse_args()
    steps = {}
    for scheme, whose, model in sides():
        print(f"compiling {scheme}, {whose}", flush=True)
        steps[scheme, whose] = Step(model)
    times = {key: [] for key in steps}
    for i in range(ROUNDS + 1):
        for key in list(steps)[:: 1 if i % 2 else -1]:
            seconds = steps[key].seconds()
            if i:  # the first round warms up
                times[key].append(seconds)
    exact = "float32", "exact"
    loss, want = steps[exact].gradients()
    rows = []
    for (scheme, whose), step in steps.items():
        its, got = step.gradients()
        row = {"scheme": scheme, "products_of": whose, **step.products(), "loss_error": its - loss}
        row |= compared(got, want) | {"step_s": spread(times[scheme, whose])}
        row["times_float32"] = ratio(times[scheme, whose], times[exact])
        rows.append(row)
        worst = max(row["gradient_error"])
        print(
            f"{scheme:32} {whose:6} {row['narrow']:3} of {row['products']} products narrow, gradients' error "
            f"{worst:.2%} in the worst layer, {statistics.median(times[scheme, whose]) * 1e3:.0f} ms a step, "
            f"{row['times_float32']:.2f} of float32's"
        )
    write_record(
        args.output,
        "quantization_qwix",
        "",
        {"model": SIZES, "tokens": BATCH * SEQ_LEN, "rows": rows},
    )


if __name__ == "__main__":
    main()
