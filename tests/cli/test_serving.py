"""A server's adapters are models of their own, chosen by the field `model`, as in vLLM."""

import io
import re
import shutil

import jax
import numpy as np
import openai
import pytest

from minitext.checkpoint.checkpointer import Checkpointer
from minitext.cli.serving import _adapters, _lines, _load, _mesh
from minitext.config.config import to_yaml
from minitext.config.sections import MeshConfig
from minitext.errors import UserError
from minitext.inference.engine import EngineOptions
from minitext.inference.generate import Sampling, generate
from minitext.training.run_dir import load_adapters, load_merged
from tests.inference.test_server import Running


@pytest.fixture(scope="module")
def runs(adapted, tmp_path_factory):
    """A run, two of adapters beside it that differ, and one of adapters of another form."""
    folder = tmp_path_factory.mktemp("runs")
    made = {"base": adapted / "base", "other": adapted / "tuned"}
    cfg, trained = load_adapters(made["other"], made["base"])
    cfg = cfg.replace({"model.lora.alpha": 4.0})
    for seed, name in enumerate(("one", "two")):
        made[name], rng = folder / name, np.random.default_rng(seed)
        ignored = shutil.ignore_patterns("checkpoints")
        shutil.copytree(made["other"], made[name], ignore=ignored)
        (made[name] / "config.yml").write_text(to_yaml(cfg))
        drawn = jax.tree.map(lambda x, rng=rng: rng.normal(size=x.shape).astype("f"), trained)
        with Checkpointer(made[name] / "checkpoints") as checkpointer:
            checkpointer.save(6, {"params": drawn}, {}, cfg.model_dump(mode="json"), wait=True)
    return made


@pytest.mark.audit
def test_each_adapter_is_a_model(runs, tmp_path, monkeypatch):
    given = [f"{name}={runs[name]}" for name in ("one", "two")]
    adapters = _adapters(given, runs["base"], "base")
    served, step = _load(runs["base"], "base", EngineOptions(), None, None, adapters)
    assert step == 3
    server = Running(tmp_path)
    server.engine.close()
    monkeypatch.setattr(server.served, "engine", served.engine)
    monkeypatch.setattr(server.served, "name", "base")
    monkeypatch.setattr(server.served, "tokenizer", served.tokenizer)
    served.engine.start()
    try:
        client = server.client()
        found = {m.id: m for m in client.models.list().data}
        assert list(found) == ["base", "one", "two"]
        assert found["one"].parent == found["two"].parent == "base"
        assert client.models.retrieve("two").id == "two"
        texts = []
        for name in found:
            got = client.completions.create(
                model=name, prompt="the cat", max_tokens=8, temperature=0
            )
            assert got.model == name
            cfg, params, tokenizer, _ = load_merged(runs[name])
            prompt = tokenizer.encode("the cat")
            greedy = Sampling(temperature=0.0)
            want = generate(
                cfg.model,
                params,
                prompt,
                max_tokens=8,
                stop_id=tokenizer.eod_id,
                sampling=greedy,
                seed=0,
            )
            assert got.choices[0].text == tokenizer.decode(list(want))
            texts.append(got.choices[0].text)
        assert len(set(texts)) == 3
        with pytest.raises(openai.NotFoundError, match="name base or one or two"):
            client.completions.create(model="three", prompt="the cat", max_tokens=1)
    finally:
        server.close()
        served.engine.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["one"], "write NAME=RUN"),
        (["base={one}"], "another model is called base"),
        (["one={one}", "one={two}"], "another model is called one"),
        (["plain={base}"], "has no adapters: train some"),
        (["none={base}/none"], "is not a run directory"),
        (["one={one}", "other={other}"], "adapters of one form"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_be_served_are_refused(runs, given, says):
    with pytest.raises(UserError, match=re.escape(says)) as error:
        _adapters([text.format(**runs) for text in given], runs["base"], "base")
    assert "\n" not in str(error.value)


def test_adapters_of_another_base_are_refused(runs):
    with pytest.raises(UserError, match="has adapters of its own"):
        _adapters([f"one={runs['one']}"], runs["two"], "two")


def test_devices_that_do_not_divide_the_model_are_refused_before_it_is_read(runs, tmp_path):
    (tmp_path / "config.yml").write_text((runs["base"] / "config.yml").read_text())
    with pytest.raises(UserError, match="model.heads=4 is not divisible by mesh.tensor=8"):
        _load(tmp_path, "base", EngineOptions(), _mesh(MeshConfig(data=1, tensor=8)), None, {})


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_lines_of_a_pipe_that_are_not_text_are_read_on(errors, monkeypatch):
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n\nnext\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr("sys.stdin", piped)
    assert list(_lines()) == ["caf\ufffd", "next"]
