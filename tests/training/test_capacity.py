"""The bound on a step's memory: below what the compiler needs, and near enough to be of use."""

import re

import pytest

from minitext import hardware
from minitext.errors import DoesNotFit
from minitext.perf.memory import predict_and_compile
from minitext.sharding.mesh import make_mesh
from minitext.training.capacity import check_memory


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["mesh.data=8", "train.global_batch=64"], marks=pytest.mark.audit),
        ["mesh.fsdp=8", "optim.kind=lion", "model.remat=full", "train.loss_chunks=4"],
        pytest.param(
            ["mesh.fsdp=4", "mesh.tensor=2", "train.microbatches=2", "model.dtype=bfloat16"],
            marks=pytest.mark.audit,
        ),
        pytest.param(
            ["mesh.stage=2", "mesh.data=4", "model.tie_embeddings=true", "optim.kind=sgd"],
            marks=pytest.mark.audit,
        ),
    ],
)
def test_the_bound_is_below_what_the_compiler_needs_and_above_a_twentieth(
    tiny, monkeypatch, settings
):
    cfg = tiny(*settings)
    needed = predict_and_compile(cfg)["compiled"]["total"]
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: needed)
    check_memory(cfg, make_mesh(cfg.mesh))
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: needed // 20)
    with pytest.raises(DoesNotFit, match=r"needs at least .* on each of 8 device\(s\)"):
        check_memory(cfg, make_mesh(cfg.mesh))


def test_the_line_names_what_is_too_large(tiny):
    mesh = make_mesh()
    asked = {
        "train.global_batch=80000000 rows of data.seq_len=32": ["train.global_batch=80000000"],
        "a model of [0-9,.]+B parameters": ["model.embed=400000"],
        "train.sample_tokens=100,000,000,000": ["train.sample_tokens=100000000000"],
    }
    for named, settings in asked.items():
        with pytest.raises(DoesNotFit) as caught:
            check_memory(tiny(*settings), mesh)
        assert re.match(named, str(caught.value)) and caught.value.exit_code == 3


def test_an_unknown_memory_refuses_nothing(tiny, monkeypatch):
    monkeypatch.setattr(hardware, "memory_bytes", lambda device: None)
    check_memory(tiny("train.global_batch=80000000"), make_mesh())
