"""The train step, and the run around it: optimizer, loop, run directory, and what guards them.

`run.train` is the whole of `minitext train`, from configuration to checkpoint. Start reading there.
May import inference, observability, models, data, compiler, sharding, kernels, checkpoint, distributed and config.
"""

from minitext import exports

__getattr__, __dir__ = exports(__name__, init_state="step", make_train_step="step", train="run")
