"""Trains a small language model on your Python's standard library."""

from itertools import islice

import jax

import minitext as mt

cfg = mt.load_config("laptop", ["train.steps=40", "model.layers=2"])
mesh = mt.make_mesh(cfg.mesh)
batches = mt.make_batches(
    cfg.data, mesh, vocab=cfg.model.vocab, global_batch=cfg.train.global_batch
)
state = mt.init_state(cfg, mesh)
train_step = mt.make_train_step(cfg, mesh)

with jax.set_mesh(mesh):
    for batch in islice(batches, cfg.train.steps):
        state, metrics = train_step(state, batch)
        if state.step == 1 or state.step % 10 == 0:
            print(f"step {state.step:2d}   loss {metrics['loss']:.2f}")
