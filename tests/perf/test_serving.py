"""Serving predicted from weights, keys and values, by hand for two models."""

import json

import pytest

import minitext as mt
from minitext.cli import main
from minitext.errors import UserError
from minitext.hardware import CHIPS
from minitext.models.flops import count_params
from minitext.perf.serving import predict_serving


def test_a_step_reads_the_weights_and_all_keys_and_values():
    cfg = mt.load_config("llama3-8b").model
    found = predict_serving(cfg, "v5e:2x4", 32, 2048)
    keys = 32 * 2048 * 32 * 2 * 8 * 128 * 2
    weights = 2 * (count_params(cfg) - cfg.vocab * cfg.embed)  # one row of the embedding a token
    chip = CHIPS["v5e"]
    assert found.decode.memory == pytest.approx((weights + keys) / 8 / chip.hbm_bandwidth, rel=1e-3)
    assert found.cache_bytes == keys / 8
    assert found.decode.bound == "memory"
    assert found.tokens_per_second == pytest.approx(32 / 8 / found.decode.seconds)
    assert found.fits and not predict_serving(cfg, "v5e:2x4", found.texts + 1, 2048).fits


def test_a_large_batch_is_bound_by_compute():
    cfg = mt.load_config("llama3-8b").model
    found = predict_serving(cfg, "v5e:1x1", 4096, 2)
    assert found.decode.bound == "compute" and found.decode.communication == 0


def test_few_tokens_meet_few_experts():
    cfg = mt.load_config("qwen3-30b-a3b").model
    one, many = (predict_serving(cfg, "h100:1x1x1", rows, 2).decode.memory for rows in (1, 10_000))
    head = cfg.vocab * cfg.embed
    bandwidth = CHIPS["h100"].hbm_bandwidth
    active = 2 * (count_params(cfg, active=True) - head)
    assert one == pytest.approx(active / bandwidth, rel=1e-2)
    keys = 10_000 * 2 * 48 * 2 * 4 * 128 * 2
    whole = 2 * (count_params(cfg) - head)
    assert many == pytest.approx((whole + keys) / bandwidth, rel=1e-2)


def test_a_window_limits_what_is_read():
    cfg = mt.load_config("llama3-8b").model
    near = mt.load_config("llama3-8b", ["model.attention.window=512"]).model
    a, b = (predict_serving(one, "v5e:2x4", 32, 2048).decode.memory for one in (cfg, near))
    keys = 32 * 32 * 2 * 8 * 128 * 2
    assert a - b == pytest.approx((2048 - 512) * keys / 8 / CHIPS["v5e"].hbm_bandwidth)


def test_other_caches_are_refused():
    with pytest.raises(UserError, match=r"attention.kind=gqa"):
        predict_serving(mt.load_config("deepseek-v3").model, "v5p:4x4x4", 1, 2048)


def test_the_command_prints_json_and_exits_with_3_where_it_does_not_fit(capsys, monkeypatch):
    for rows, code in (("32", 0), ("9999", 3)):
        words = [
            "minitext",
            "predict-serving",
            "llama3-8b",
            "target=v5e:2x4",
            "--rows",
            rows,
            "--json",
        ]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == code
        said = json.loads(capsys.readouterr().out)
        assert said["fits"] == (code == 0) and said["decode"]["bound"] == "memory"
