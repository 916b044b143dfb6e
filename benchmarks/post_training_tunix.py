"""The same post-training by ours and by Tunix's trainers: curves, and seconds of a step, on the sums of `grpo_arithmetic.py`.

    python benchmarks/post_training_tunix.py

It needs `minitext[tunix]` in an environment of its own (see `make test-tunix`). One model of 3 layers of 96 learns from

- sft: a teacher who errs, the same batches and AdamW on both sides (Tunix: `PeftTrainer` with our loss of a packed batch);
- dpo: the right answer chosen and the teacher's wrong one rejected, the same pairs (ours: a pair in one row; Tunix: two rows);
- grpo: rewards for right answers, the same prompts a step and the same settings. The engine of minitext draws on both sides,
  with seeds of each side's own, so the curves agree in course, not in every number.

sft and dpo take a step by turns in one process, warm; grpo's sides run one after the other in processes of their own, and their
seconds include compiling. Accuracies are those of all held-out sums, drawn and likeliest.
"""

import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
from common import kept_case, parser, ratio, spread, write_record
from grpo_arithmetic import BASE, ERRORS, GRPO, MODEL, TAUGHT, TEMPLATE, measure, train

SEED, SFT_STEPS, DPO_STEPS, GRPO_STEPS, PAIRS = 0, 60, 60, 80, 64
SFT = [
    "optim.kind=adamw",
    "optim.learning_rate=1e-3",
    "optim.weight_decay=0",
    f"train.steps={SFT_STEPS}",
]
DPO = [
    "objective.kind=preference", "data.source=preferences", "data.seq_len=20", f"train.global_batch={PAIRS}",
    "optim.kind=adamw", "optim.learning_rate=2e-4", "optim.weight_decay=0", "optim.warmup_steps=5", "optim.clip_norm=1",
    f"train.steps={DPO_STEPS}", "objective.beta=0.5",
]  # fmt: skip
SHORTER = [f"train.{key}={GRPO_STEPS}" for key in ("steps", "save_every", "eval_every")]


def config(words):
    import minitext as mt

    return mt.load_config("laptop", [*MODEL, f"train.seed={SEED}", f"data.seed={SEED}", *words])


class Ours:
    """Our train step."""

    def __init__(self, cfg, objective, params=None):
        import dataclasses

        import jax

        from minitext.sharding.mesh import make_mesh
        from minitext.training.step import init_state, make_train_step

        self.mesh = make_mesh(devices=jax.devices()[:1])
        self.state = init_state(cfg, self.mesh)
        if params is not None:
            from jax.sharding import NamedSharding, PartitionSpec

            put = lambda x: jax.device_put(np.asarray(x), NamedSharding(self.mesh, PartitionSpec()))  # noqa: E731
            params = jax.tree.map(put, params)
            copy = jax.tree.map(put, params)
            self.state = dataclasses.replace(self.state, params=params, reference=copy)
        self.run = make_train_step(cfg, self.mesh, objective)

    def step(self, batch):
        import jax

        with jax.set_mesh(self.mesh):
            self.state, metrics = self.run(self.state, batch)
        return float(metrics["loss"])


class Tunix:
    """A trainer of Tunix's, which is given one step at a time."""

    def __init__(self, trainer):
        self.trainer, self.losses = trainer, []
        self.trainer.is_managed_externally = True  # it then goes on where the last call ended
        self.trainer._write_metrics = lambda metrics: None
        self.trainer._post_process_train_step = lambda aux: None
        buffer = self.trainer._buffer_metrics

        def hear(metrics, loss, step, additional_metrics=None):
            self.losses.append(loss)
            return buffer(metrics, loss, step, additional_metrics)

        self.trainer._buffer_metrics = hear

    def step(self, batch):
        self.trainer.train([batch])
        return float(self.losses[-1])


def alternate(ours, tunix, batches):
    """Curves of both, and seconds of each step, by turns."""
    losses, seconds = {"ours": [], "tunix": []}, {"ours": [], "tunix": []}
    for number, (mine, theirs) in enumerate(batches):
        sides = [("ours", ours, mine), ("tunix", tunix, theirs)]
        for name, side, batch in sides[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            losses[name].append(side.step(batch))
            seconds[name].append(time.perf_counter() - start)
    warm = {name: values[5:] for name, values in seconds.items()}
    a, b = (np.array(losses[name]) for name in ("ours", "tunix"))
    return {
        "losses": {name: values[::5] + values[-1:] for name, values in losses.items()},
        "largest_difference": float(np.abs(a - b).max()), "first_difference": float(abs(a[0] - b[0])),
        "seconds": {name: spread(values) for name, values in warm.items()},
        "tunix_over_ours": ratio(warm["tunix"], warm["ours"]), "steps": len(a),
    }  # fmt: skip


def text_batches(cfg, count):
    """Rows of taught sums, packed, with the answers' digits as targets."""
    from minitext.data.arithmetic import make_sums, taught

    rng = taught(make_sums("train", seed=SEED), count=TAUGHT, errors=ERRORS, seed=SEED)
    B, T = cfg.train.global_batch, cfg.data.seq_len
    for _ in range(count):
        batch = {
            name: np.zeros((B, T), np.int32)
            for name in ("tokens", "targets", "positions", "segment_ids")
        }
        batch["loss_mask"] = np.zeros((B, T), np.float32)
        for row in range(B):
            start = segment = 0
            while start + 12 < T:
                record, segment = next(rng), segment + 1
                ids = [*(record["prompt"] + record["completion"]).encode(), 256]
                part = slice(start, start + len(ids) - 1)
                batch["tokens"][row, part], batch["targets"][row, part] = ids[:-1], ids[1:]
                batch["positions"][row, part], batch["segment_ids"][row, part] = (
                    range(len(ids) - 1),
                    segment,
                )
                batch["loss_mask"][row, start + len(record["prompt"]) - 1 : part.stop] = 1
                start = part.stop
        yield batch


def sft():
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    from minitext.models.transformer import Transformer
    from minitext.post_training.tunix import as_tunix, packed_loss
    from minitext.training.objective import language_modelling
    from minitext.training.optim import make_optimizer

    from flax import nnx  # isort: skip

    cfg = config([*BASE, *SFT, "data.source=grammar"])  # the batches below, not those of the source
    actor = as_tunix(Transformer(cfg.model, rngs=nnx.Rngs(SEED)))
    settings = TrainingConfig(eval_every_n_steps=10**6)
    trainer = PeftTrainer(actor, make_optimizer(cfg.optim, cfg.train.steps), settings).with_loss_fn(
        packed_loss
    )
    batches = ((batch, batch) for batch in text_batches(cfg, SFT_STEPS))
    return alternate(Ours(cfg, language_modelling(cfg)), Tunix(trainer), batches)


def pairs(cfg):
    """The same pairs as our rows and as Tunix's."""
    from tunix.sft.dpo.dpo_trainer import TrainingInput

    from minitext.data.arithmetic import make_sums, taught

    records = taught(make_sums("train", seed=SEED), count=TAUGHT, errors=0.6, seed=SEED + 1)
    wrong = (record for record in records if record["completion"] != record["answer"])
    B, T = cfg.train.global_batch, cfg.data.seq_len
    for _ in range(DPO_STEPS):
        mine = {
            name: np.zeros((B, T), np.int32)
            for name in ("tokens", "targets", "positions", "segment_ids")
        }
        mine["loss_mask"] = np.zeros((B, T), np.float32)
        sides = {
            name: np.full((B, size), 255, np.int32)
            for name, size in (("prompt", 6), ("chosen", 4), ("rejected", 4))
        }
        for row in range(B):
            record, start = next(wrong), 0
            prompt = list(record["prompt"].encode())
            sides["prompt"][row, 6 - len(prompt) :] = prompt
            for segment, (name, key) in enumerate(
                (("chosen", "answer"), ("rejected", "completion")), start=1
            ):
                answer = [*record[key].encode(), 256]
                sides[name][row, : len(answer)] = answer
                ids, part = [*prompt, *answer], slice(start, start + len(prompt) + len(answer) - 1)
                mine["tokens"][row, part], mine["targets"][row, part] = ids[:-1], ids[1:]
                mine["positions"][row, part], mine["segment_ids"][row, part] = (
                    range(len(ids) - 1),
                    segment,
                )
                mine["loss_mask"][row, part.stop - len(answer) : part.stop] = 1
                start = part.stop
        both = [x for name in sides for x in (sides[name], (sides[name] != 255).astype(np.int32))]
        yield mine, TrainingInput(*both)


def dpo(base):
    from flax import nnx
    from tunix.sft.dpo.dpo_trainer import DPOTrainer, DPOTrainingConfig

    from minitext.post_training.preference import preferences
    from minitext.post_training.tunix import as_tunix, read_run
    from minitext.training.optim import make_optimizer

    cfg = config([*DPO, "data.path=none.jsonl"])
    (policy, _), (reference, _) = read_run(base), read_run(base)
    settings = DPOTrainingConfig(eval_every_n_steps=10**6, beta=0.5)
    optimizer = make_optimizer(cfg.optim, cfg.train.steps)
    params = nnx.state(reference, nnx.Param)
    trainer = DPOTrainer(as_tunix(policy), as_tunix(reference), optimizer, settings)
    return alternate(Ours(cfg, preferences(cfg), params), Tunix(trainer), pairs(cfg))


def grpo(side, folder, base):
    """One side's run: its curve of rewards, seconds, and accuracies after."""
    from minitext.data.arithmetic import make_sums, write_records
    from minitext.observability.metrics import read_metrics

    path = folder / "sums.jsonl"
    write_records(path, make_sums("train"))
    words = [*GRPO, *SHORTER, f"data.path={path}", f"train.seed={SEED}", f"data.seed={SEED}"]
    words += [f"data.chat_template={folder / 'plain.jinja'}", f"checkpoint.load_parameters={base}"]
    start, directory = time.perf_counter(), folder / side
    if side == "ours":
        directory = train(folder, side, words)
        curve = [line["reward"] for line in read_metrics(directory) if "reward" in line]
    else:
        curve = grpo_with_tunix(config(words), base, directory)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "reward": curve, **measure(directory, make_sums("validation"))}


def grpo_with_tunix(cfg, base, directory):
    import jax
    from jax.sharding import AxisType, Mesh
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from minitext.data.arithmetic import make_sums
    from minitext.post_training.tunix import as_tunix, place_model, read_run, write_run
    from minitext.post_training.tunix_rollout import EngineRollout
    from minitext.sharding.mesh import AXES
    from minitext.training.optim import make_optimizer

    (policy, tokenizer), (reference, _) = read_run(base), read_run(base)
    one = np.array(jax.devices()[:1]).reshape((1,) * len(AXES))
    mesh = Mesh(one, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    Role, rl, rewards = rl_cluster.Role, cfg.objective, []

    def exact(prompts, completions, answer, **_):
        found = [float(said == right) for said, right in zip(completions, answer, strict=True)]
        rewards.append(float(np.mean(found)))
        return found

    roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)
    cluster = rl_cluster.RLCluster(
        actor=place_model(as_tunix(policy), mesh), reference=place_model(as_tunix(reference), mesh), tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh), rollout_engine=EngineRollout,
            training_config=rl_cluster.RLTrainingConfig(
                eval_every_n_steps=10**6, max_steps=cfg.train.steps, mini_batch_size=rl.prompts,
                actor_optimizer=make_optimizer(cfg.optim, cfg.train.steps),
            ),
            rollout_config=RolloutConfig(max_tokens_to_generate=rl.max_tokens, max_prompt_length=6, temperature=1.0),
        ),
    )  # fmt: skip
    settings = GRPOConfig(
        num_generations=rl.group, beta=rl.kl, kl_loss_mode="low_var_kl", loss_agg_mode="token-mean"
    )
    records = make_sums("train", seed=SEED)
    data = []
    for step in range(cfg.train.steps):
        some = [records[(step * rl.prompts + i) % len(records)] for i in range(rl.prompts)]
        data.append(
            {
                f"{key}{'s' * (key == 'prompt')}": np.array([r[key] for r in some])
                for key in ("prompt", "answer")
            }
        )
    GRPOLearner(cluster, settings, exact).train(data)
    write_run(cluster.actor_trainer.model, base, directory, cfg.train.steps)
    return rewards


def one(case):
    """In a process of its own: one of the four parts."""
    from minitext.data.arithmetic import make_sums, taught, write_records
    from minitext.distributed import devices

    logging.disable(logging.WARNING)
    devices.start()
    folder = Path(case["folder"])
    base = folder / "base"
    (folder / "plain.jinja").write_text(TEMPLATE)
    if case["what"] == "base":
        path = folder / "taught.jsonl"
        records = taught(make_sums("train", seed=SEED), count=TAUGHT, errors=ERRORS, seed=SEED)
        write_records(path, [{key: r[key] for key in ("prompt", "completion")} for r in records])
        words = [
            f"train.seed={SEED}",
            f"data.seed={SEED}",
            f"data.chat_template={folder / 'plain.jinja'}",
        ]
        return measure(
            train(folder, base.name, [*BASE, *words, f"data.path={path}"]), make_sums("validation")
        )
    if case["what"] == "sft":
        return sft()
    return dpo(base) if case["what"] == "dpo" else grpo(case["what"], folder, base)


def main():
    cli = parser(__doc__)
    cli.add_argument(
        "--folder", help="where runs are kept, to go on with; by default they are deleted"
    )
    args = cli.parse_args()
    if args.case:
        print(json.dumps(one(args.case)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(exist_ok=True)
        for what in ("base", "sft", "dpo", "ours", "tunix"):
            case = {"folder": str(folder), "what": what}
            found[what] = kept_case(__file__, folder / f"{what}.json", case)
            shown = {k: v for k, v in found[what].items() if k not in ("losses", "reward")}
            print(what, shown, flush=True)
    record = {
        "settings": {"model": MODEL, "sft": [*BASE, *SFT], "dpo": DPO, "grpo": [*GRPO, *SHORTER], "errors": ERRORS},
        "base": found["base"], "sft": found["sft"], "dpo": found["dpo"],
        "grpo": {"ours": found["ours"], "tunix": found["tunix"]},
    }  # fmt: skip
    write_record(args.output, "post_training_tunix", "", record)


if __name__ == "__main__":
    main()
