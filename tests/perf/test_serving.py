"""What serving should cost: by hand, in proportion, and as the TPU's compiler compiles it."""

import importlib.util
import json

import pytest

import minitext as mt
from minitext import hardware
from minitext.cli import main
from minitext.compiler.targets import parse_target, topology_mesh
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.inference.engine import RULES_OF_ENGINE, make_programs
from minitext.models.flops import count_params
from minitext.perf import serving
from minitext.perf.serving import predict_serving, print_serving

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
ASKED = {"texts": 16, "context": 1024, "prompt": 512}


def predict(preset, target, *settings, **asked):
    return predict_serving(mt.load_config(preset, list(settings)), target, **(ASKED | asked))


def test_a_step_of_llama_by_hand():
    found, chip = predict("llama3-8b", "v5e:2x4"), CHIPS["v5e"]
    cfg = mt.load_config("llama3-8b").model
    table, cache = 2 * cfg.vocab * cfg.embed, 16 * 1024 * 2 * 2 * cfg.layers * cfg.K * cfg.H
    # Norms are whole on every device, and float32.
    norms = (2 * cfg.layers + 1) * cfg.embed
    weights = 2 * (count_params(cfg) - norms) / 8 + 4 * norms
    assert found.weight_bytes == weights and found.tensor == 8 and found.replicas == 1
    assert found.decode.bytes == weights - table / 8 + cache / 8
    assert found.decode.memory == found.decode.bytes / chip.hbm_bandwidth
    products = count_params(cfg) - table / 2 - norms  # the embedding is no product
    scores = 4 * cfg.heads * cfg.H * 1024 * cfg.layers
    assert found.decode.flops == 16 * (2 * products + scores) / 8
    assert found.decode.sent == (2 * cfg.layers + 1) * 2 * 7 / 8 * 16 * cfg.embed * 2
    assert found.prefill.flops == 512 * (2 * (products - table / 2) + scores / 4) / 8
    assert found.prefill.bytes == weights - 2 * table / 8  # neither table
    assert found.decode.limit == "memory" and found.fits
    step = found.decode.memory + found.decode.network
    assert found.tokens_per_second == pytest.approx(16 / step / 8)


def test_more_texts_share_the_weights():
    one, many = (predict("llama3-8b", "v5e:2x4", texts=texts) for texts in (1, 64))
    assert many.tokens_per_second > 15 * one.tokens_per_second
    assert many.decode.bytes - one.decode.bytes == 63 * one.text_bytes
    # Where caches are most of what is read, more texts help less.
    long, longer = (predict("llama3-8b", "v5e:2x4", texts=n, context=65536) for n in (8, 16))
    assert longer.tokens_per_second < 1.2 * long.tokens_per_second


def test_experts_are_read_once_a_text_takes_them():
    cfg = mt.load_config("qwen3-30b-a3b").model
    few, many = (predict("qwen3-30b-a3b", "v6e:2x2", texts=n, context=64) for n in (1, 256))
    expert = 3 * cfg.embed * cfg.mlp * 2 / 4
    untouched = (few.weight_bytes - few.decode.bytes + few.text_bytes) / cfg.layers
    embedding = cfg.vocab * cfg.embed * 2 / 4 / cfg.layers
    assert untouched == pytest.approx((128 - 8) * expert + embedding)
    read = many.decode.bytes - 256 * many.text_bytes
    assert read == pytest.approx(many.weight_bytes - embedding * cfg.layers, rel=1e-3)


@pytest.mark.parametrize(("dtype", "bits", "block"), [("int8", 8, None), ("int4", 4, 32)])
def test_stored_weights_are_read_in_their_own_bits(dtype, bits, block):
    rule = f"{{module: blocks/.*, dtype: {dtype}{f', block: {block}' if block else ''}}}"
    wide, narrow = (
        predict("llama3-8b", "v5e:2x4", *words) for words in ((), (f"model.storage=[{rule}]",))
    )
    cfg = mt.load_config("llama3-8b").model
    tables, norms = 2 * cfg.vocab * cfg.embed, (2 * cfg.layers + 1) * cfg.embed
    layers = count_params(cfg) - tables - norms
    # By channel each output has a scale in float32, and devices that share the inputs of one have all of them. A block
    # has one of two bytes.
    outputs = (cfg.heads * cfg.H + 2 * cfg.K * cfg.H + 2 * cfg.mlp) / 8 + 2 * cfg.embed
    scales = 2 * layers / block / 8 if block else 4 * cfg.layers * outputs
    assert narrow.weight_bytes == layers * bits / 8 / 8 + 2 * tables / 8 + 4 * norms + scales
    assert narrow.decode.bytes - narrow.weight_bytes == wide.decode.bytes - wide.weight_bytes
    assert narrow.tokens_per_second > 1.2 * wide.tokens_per_second
    assert narrow.fitting > wide.fitting


def test_experts_and_tables_that_are_stored_are_left_unread_in_their_own_bits():
    words = ["model.storage=[{dtype: int8}]"]
    found = predict("qwen3-30b-a3b", "v6e:2x2", *words, texts=1, context=64)
    cfg = mt.load_config("qwen3-30b-a3b").model
    expert = (3 * cfg.embed * cfg.mlp + 4 * 2 * cfg.mlp) / 4 + 4 * cfg.embed
    table = cfg.vocab * (cfg.embed + 4) / 4
    unread = found.weight_bytes - (found.decode.bytes - found.text_bytes)
    assert unread == pytest.approx(cfg.layers * (128 - 8) * expert + table)


@pytest.mark.audit
def test_windows_and_states_are_read_as_they_are_kept():
    settings = ["model.layers=6"]
    short, long = (
        predict("gemma3-4b", "v6e:1x1", *settings, texts=1, context=n) for n in (1024, 4096)
    )
    cfg = mt.load_config("gemma3-4b", settings).model
    token, whole = 2 * 2 * cfg.K * cfg.H, cfg.layers // 6  # every sixth layer sees all
    assert long.text_bytes == 4096 * token * cfg.layers
    assert long.decode.bytes - short.decode.bytes == 3072 * token * whole
    settings = ["mesh.data=2", "mesh.tensor=2", "model.layers=4"]
    short, long = (
        predict("qwen3-next", "v5p:2x2x1", *settings, texts=1, context=n) for n in (64, 128)
    )
    cfg = mt.load_config("qwen3-next", settings).model
    assert long.text_bytes - short.text_bytes == 64 * 2 * 2 * cfg.K * cfg.H * cfg.layers // 4 // 2


@pytest.mark.parametrize(
    ("preset", "target", "settings", "said"),
    [
        ("llama3-8b", "v5e:2x4", ["mesh.tensor=3"], "mesh.tensor=3"),
        ("laptop", "v5e:2x4", ["mesh.tensor=16"], "mesh.data=1 and mesh.tensor=16 make 16 devices"),
        ("llama3-8b", "v5e:2x4", ["mesh.fsdp=2"], "mesh.fsdp=2: an engine has mesh.tensor"),
        ("llama3-8b", "v5e:2x2 slices=2", [], "only 4 devices .*: set mesh.data=2 mesh.tensor=4"),
        ("llama3-8b", "h100:2x8", [], "only 8 devices .*: set mesh.data=2 mesh.tensor=8"),
        ("qwen3-30b-a3b", "v5e:2x4", [], "model.kv_heads=4 is not divisible by mesh.tensor=8"),
        ("llama3-8b", "v5x:2", [], "unknown chip"),
    ],
)
def test_what_cannot_be_is_said(preset, target, settings, said):
    with pytest.raises(UserError, match=said) as refusal:
        predict(preset, target, *settings)
    _, advised, advice = str(refusal.value).partition(": set ")
    if advised:
        assert predict(preset, target, *advice.split()).replicas == 2


SMALL = [
    "model.layers=2", "model.embed=512", "model.heads=8", "model.kv_heads=4", "model.head_dim=128", "model.mlp=1024",
    "model.vocab=1024", "model.dtype=bfloat16",
]  # fmt: skip


def test_a_chunk_is_read_up_to_the_last_token():
    settings = [*SMALL, "model.attention.chunk=1024"]
    full, new, more = (
        predict("laptop", "v5e:1x1", *settings, texts=1, context=n).decode
        for n in (1024, 1025, 2048)
    )
    assert full.bytes == more.bytes > new.bytes and full.flops == more.flops
    assert full.flops - new.flops == 1023 * 4 * 8 * 128 * 2  # both products of 8 heads in 2 layers


def test_a_narrow_cache_has_a_byte_for_a_number_and_four_for_a_scale():
    wide, narrow = (
        predict("llama3-8b", "v5e:2x4", texts=1, cache_dtype=dtype) for dtype in ("auto", "fp8")
    )
    cfg = mt.load_config("llama3-8b").model
    assert wide.text_bytes == 1024 * cfg.layers * 2 * cfg.K * 2 * cfg.H / 8
    assert narrow.text_bytes == 1024 * cfg.layers * 2 * cfg.K * (cfg.H + 4) / 8
    saved = wide.text_bytes - narrow.text_bytes
    assert wide.decode.bytes - narrow.decode.bytes == saved
    assert narrow.fitting == pytest.approx(
        wide.fitting * wide.text_bytes / narrow.text_bytes, abs=2
    )


@needs_libtpu
@pytest.mark.parametrize(
    ("settings", "cache_dtype"),
    [
        ((), "auto"),
        pytest.param((), "int8", marks=pytest.mark.audit),
        pytest.param(("model.ffn.kind=moe",), "auto", marks=pytest.mark.audit),
    ],
    ids=str,
)
def test_the_engines_programs_compile_for_a_tpu(settings, cache_dtype):
    found = predict(
        "laptop", "v5e:2x2", *SMALL, *settings, compile=True, prompt=256, cache_dtype=cache_dtype
    )
    for name, report in found.reports.items():
        cache = sum(size for path, size in report.arguments.items() if path.startswith("cache."))
        assert report.alias_bytes == cache  # written in place ...
        assert report.temp_bytes < cache / 4  # ... and never copied, not even a layer's
        assert report.fits and name in ("decode", "prefill")
    assert found.reports["decode"].arguments["arrays"] == found.weight_bytes
    pages, token = (16 * 17 + 1) * 64, 128 * 2
    if cache_dtype != "auto":
        pages, token = (16 * 9 + 1) * 128, 128 + 4
    assert (
        cache == pages * token * 2 * 2 * 4 / 4
    )  # keys and values of two layers, four heads on four devices
    assert found.kernels["decode"]["paged_attention"] == 2
    assert found.reports["decode"].sent["all-reduce"] == found.decode.sent
    print_serving(found)


@needs_libtpu
@pytest.mark.audit
def test_layers_of_borrowed_stacks_are_read_where_they_are(monkeypatch):
    def borrowed(model):
        return make_programs(model, 1, RULES_OF_ENGINE, hardware.platform(), borrow=True)

    monkeypatch.setattr(serving, "_programs", borrowed)
    cfg = mt.load_config("laptop", [*SMALL, "model.layers=4", "model.dtype=float32"]).model
    mesh = topology_mesh(parse_target("v5e:1x1"), MeshConfig(data=1))
    reports, _ = serving.compile_engine(cfg, mesh, "v5e:1x1", texts=16, context=255, prompt=256)
    matrix = 4 * cfg.embed * cfg.mlp
    assert all(report.temp_bytes < 2 * matrix for report in reports.values())


@needs_libtpu
@pytest.mark.audit
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("preset", "target"),
    [
        ("llama3-8b", "v5e:2x4"), ("llama3-8b", "v6e:1x1"), ("qwen3-30b-a3b", "v5e:2x2"), ("qwen3-30b-a3b", "v6e:2x2"),
    ],
)  # fmt: skip
def test_published_models_compile(preset, target):
    found = predict(preset, target, compile=True)
    layers = mt.load_config(preset).model.layers
    assert found.fits and found.kernels["decode"]["paged_attention"] == layers


def test_the_command(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["minitext", "predict-serving", *words])
        with pytest.raises(SystemExit) as stop:
            main.main()
        return stop.value.code or 0, *capsys.readouterr()

    code, out, _ = run("llama3-8b", "target=v6e:1x1", "--json")
    found = json.loads(out)
    assert code == 0 and found["fits"] and found["decode"]["limit"] == "memory"
    assert found["prefill"]["limit"] == "compute"
    code, out, _ = run("llama3-8b", "target=v5e:1x1")
    assert code == 3 and "and 3 texts of 2,048 tokens fit" in out and "tokens/s/chip" in out
    code, out, err = run("llama3-8b")
    assert code == 2 and "target=" in err and err.count("\n") == 1


def test_bytes_are_those_of_the_type():
    half, full = (
        predict("laptop", "v5e:1x1", f"model.dtype={dtype}") for dtype in ("bfloat16", "float32")
    )
    assert full.text_bytes == 2 * half.text_bytes
