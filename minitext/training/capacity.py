"""Whether a machine could hold a training at all, by arithmetic, before any memory is taken.

Each figure is a bound from below: what remains after perfect sharding over all devices, perfect reuse of memory and the
strongest rematerialisation. So what is refused here can't run, and what is not refused may still fail in the compiler;
`minitext memory` and `minitext compile` predict exactly.

Chapters: 14.
"""

from jax.sharding import Mesh

from minitext import hardware
from minitext.config.config import Config
from minitext.errors import DoesNotFit
from minitext.inference.generate import PROMPT_BUCKET, check_length
from minitext.models.flops import count_adapters, count_params
from minitext.terminal import show_bytes

TOKEN_BYTES = 20  # token, target, position, segment id and loss mask


def check_memory(cfg: Config, mesh: Mesh, *, training: bool = True) -> None:
    """Refuses a model, batch or sample that the devices of a mesh can't hold.

    Args:
      cfg: the configuration.
      mesh: of devices that are here.
      training: whether gradients and optimizer state are needed, not only a loss.

    Raises:
      DoesNotFit: naming the setting to change.
    """
    limit = hardware.memory_bytes(mesh.local_devices[0])
    if limit is None:
        return
    model, train, tokens = cfg.model, cfg.train, cfg.train.global_batch * cfg.data.seq_len
    # Parameters; in training also the optimizer's moments, unless they're in the host's memory.
    copies = 1 if cfg.optim.offload or not training else 3 if cfg.optim.kind == "adamw" else 2
    trained, adapters = count_params(model), count_adapters(model)
    frozen = 0
    if adapters:  # the others have no moments, and half a byte each if they are stored in four bits
        trained, frozen = adapters, trained - adapters
    state = int(4 * trained * copies + frozen * (0.5 if model.is_stored else 4))
    # The input of every layer is kept for its backward pass; a pipeline keeps only some microbatches'.
    parts = train.microbatches if training else 1
    kept = model.layers * model.embed * (2 if model.dtype == "bfloat16" else 4) * training
    logits = 4 * model.vocab // train.loss_chunks if train.loss_impl == "xla" else 0
    step = 0 if mesh.shape["stage"] > 1 else tokens // parts * (kept + logits)
    batch = tokens * TOKEN_BYTES + step
    if (state + batch) / mesh.size > limit:
        what, fix = (
            (
                f"train.global_batch={train.global_batch} rows of data.seq_len={cfg.data.seq_len}",
                "lower them, or raise train.microbatches" if training else "lower them",
            )
            if state / mesh.size <= limit
            else (
                f"a model of {count_params(model) / 1e9:,.1f}B parameters",
                "choose a smaller one",
            )
        )
        raise DoesNotFit(
            f"{what}: needs at least {show_bytes((state + batch) / mesh.size)} on each of {mesh.size} device(s), which "
            f"have {show_bytes(limit)}: {fix}, or use more devices"
        )
    if training and train.sample_tokens:
        check_length(model, 1, PROMPT_BUCKET, train.sample_tokens, "train.sample_tokens")
