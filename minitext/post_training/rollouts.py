"""Batches that the model writes itself: prompts, answers drawn with the parameters of the time, and what they earned.

One rollout is `objective.prompts` x `objective.group` answers. It gives the batches of several steps where
`objective.iterations` or `train.global_batch` say so. Everything in it follows from the run's seed, the rollout's
number and the parameters, so a run that resumes draws what it would have drawn. Between the batches of one rollout, its
position includes those that are left, because the parameters that drew them are gone.

Several processes divide the prompts; then each has all answers and rewards, and the rows that they make.

Chapters: 26.
"""

import base64
import io
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from minitext.checkpoint import leaves
from minitext.config.config import Config
from minitext.config.objective import GRPOConfig, PPOConfig
from minitext.data.batches import Batches
from minitext.data.placement import Batch, Placement
from minitext.data.tokenizer import Tokenizer
from minitext.errors import UserError
from minitext.post_training.advantages import (
    generalized_advantages,
    group_advantages,
    no_signal,
    whiten,
)
from minitext.post_training.exchange import exchange, share_of
from minitext.post_training.policy_loss import overlong_penalty, token_weights
from minitext.post_training.policy_objective import (
    make_scorer,
    rollout_config,
    token_share,
    updates,
)
from minitext.post_training.prompts import Prompts
from minitext.post_training.reward_workers import Rewarded, RewardWorkers
from minitext.post_training.sampler import Answer, Sampler

Arrays = dict[str, np.ndarray]


class Drawn(NamedTuple):
    """The answers to some prompts and what they earned.

    Attributes:
      prompts: [P] which prompts.
      answers: [P] groups of answers.
      texts: of all P x group answers.
      rewarded: by the functions.
      rewards: [P x group] what is learned from: the weighted sum, and the penalty for length.
    """

    prompts: list[int]
    answers: list[list[Answer]]
    texts: list[str]
    rewarded: Rewarded
    rewards: np.ndarray


class Rollouts(Batches):
    """Batches of the model's own answers, with the interface of `Batches`.

    A batch is a dict of [B, T] arrays: those of language modelling, a row being a prompt and an answer, with
    `loss_mask` 1 where the target is the answer's; and those of `policy_objective.arrays`.

    Args:
      cfg: the run's configuration.
      mesh: the trainer's.
      prompts: to answer.
      tokenizer: the model's.
      sampler: draws.
      workers: reward.

    Attributes:
      about: numbers about the batch last taken, for the step's line.
      last: the answers last drawn, for samples.
    """

    def __init__(
        self,
        cfg: Config,
        mesh: jax.sharding.Mesh,
        prompts: Prompts,
        tokenizer: Tokenizer,
        sampler: Sampler,
        workers: RewardWorkers,
    ) -> None:
        self.cfg, self.prompts, self.tokenizer = cfg, prompts, tokenizer
        self.sampler, self.workers = sampler, workers
        self.tokens_per_batch = cfg.train.global_batch * cfg.data.seq_len
        self.floor = self.count = None
        self.place = Placement(mesh, cfg.train.global_batch, cfg.data.seq_len)
        self.score = make_scorer(cfg)
        self.score_reference = make_scorer(cfg, reference=True)
        self.rollout = self.next_prompt = self.update = 0
        self.rows: Arrays = {}
        self.about: dict[str, float] = {}
        self.last: Drawn | None = None

    def take(self, state: Any) -> Batch:
        """Returns the next batch, drawn with the state's parameters if a rollout begins with it."""
        if self.update == 0:
            self._roll_out(state)
        B, rl = self.cfg.train.global_batch, rollout_config(self.cfg)
        iteration, part = divmod(self.update, rl.answers // B)
        order = self._rng(2, iteration).permutation(rl.answers)
        rows = np.sort(order[part * B : (part + 1) * B])
        batch = {name: x[rows] for name, x in self.rows.items()}
        batch["token_share"] = token_share(rl, batch).astype(np.float32)
        self.update = (self.update + 1) % updates(self.cfg)
        if self.update == 0:
            self.rollout += 1
        return self._placed(batch)

    def _placed(self, batch: Arrays) -> Batch:
        """Returns a batch, of which every process has all rows, on the mesh."""
        return self.place({name: x[self.place.rows] for name, x in batch.items()})

    def __next__(self) -> Batch:
        raise TypeError("the model writes these batches: use take(state)")

    def left(self) -> None:
        """Returns None: they never end."""

    def close(self) -> None:
        """Ends the processes that reward."""
        self.workers.close()

    # Position.

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the next batch, with what is left of a rollout that isn't done."""
        state = {
            "prompts": self.prompts.digest, "rollout": self.rollout, "next_prompt": self.next_prompt,
            "update": self.update,
        }  # fmt: skip
        if self.update:
            file = io.BytesIO()
            np.savez(file, **self.rows)  # pyright: ignore[reportArgumentType]
            state["rows"] = base64.b64encode(file.getvalue()).decode()
            state["about"] = self.about
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a position from `get_state`.

        Raises:
          UserError: if it's a position in other prompts.
        """
        if state.get("prompts") != self.prompts.digest:
            raise UserError(
                "the saved position is in other prompts: data.path, data.seed or data.validation_fraction has changed: "
                "undo the change, or start a new run"
            )
        self.rollout, self.next_prompt = state["rollout"], state["next_prompt"]
        self.update = state["update"]
        if self.update:
            file = io.BytesIO(base64.b64decode(state["rows"]))
            self.rows = dict(np.load(file, allow_pickle=False))
            self.about = state["about"]

    def _rng(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self.cfg.train.seed, self.rollout, *numbers])

    def measure(self, state: Any, count: int) -> dict[str, float]:
        """Answers each of the first prompts twice: once drawn as in training, once always with the most likely token.

        Args:
          state: with the parameters.
          count: how many prompts, or as many as there are.

        Returns:
          The mean `reward` and the share `correct` of the drawn answers, and `reward_greedy` and `correct_greedy`.
        """
        rl, numbers = rollout_config(self.cfg), list(range(min(count, len(self.prompts))))
        temperatures = [rl.temperature] * len(numbers) + [0.0] * len(numbers)
        drawn = self._answers(state.model_params, numbers * 2, 1, 0, temperatures)
        found = {}
        for kind, part in (("", slice(len(numbers))), ("_greedy", slice(len(numbers), None))):
            found[f"reward{kind}"] = float(drawn.rewards[part].mean())
            found[f"correct{kind}"] = float((drawn.rewarded.values[part, 0] >= 1).mean())
        return found

    # One rollout.

    def _roll_out(self, state: Any) -> None:
        """Draws answers and makes the rows of the next batches of them."""
        began = time.perf_counter()
        rl = rollout_config(self.cfg)
        rounds = rl.dynamic_rounds if isinstance(rl, GRPOConfig) else None
        drawn = self._draw(state.model_params, rl.prompts, 0)
        same_share = float(no_signal(drawn.rewards, rl.group).mean())
        kept = np.arange(rl.prompts)
        if rounds is not None:
            drawn, kept = self._with_signal(state.model_params, drawn, rounds)
        drew = time.perf_counter()
        rows = self._rows(drawn, kept)
        self.about = {"no_signal": same_share, **self._about(drawn)}
        self._judge(state, drawn, rows)
        self.rows = {name: x for name, x in rows.items() if name != "engine_logp"}
        self.last = drawn
        self.about |= {
            "rollout_seconds": drew - began, "scoring_seconds": time.perf_counter() - drew,
        }  # fmt: skip

    def _draw(self, params: Any, count: int, first: int) -> Drawn:
        """Answers the next prompts; `first` numbers them within the rollout."""
        rl = rollout_config(self.cfg)
        places = range(self.next_prompt, self.next_prompt + count)
        self.next_prompt += count
        numbers = [self.prompts.at(place) for place in places]
        return self._answers(params, numbers, rl.group, first, [rl.temperature] * count)

    def _answers(
        self, params: Any, numbers: list[int], n: int, first: int, temperatures: Sequence[float]
    ) -> Drawn:
        """Draws n answers to each of some prompts and rewards them."""
        rl = rollout_config(self.cfg)
        seeds = [int(self._rng(1, first + i).integers(2**62)) for i in range(len(numbers))]
        ours = share_of(len(numbers))
        tokens = [self.prompts.tokens[i] for i in numbers[ours]]
        answers = self.sampler.answer(params, tokens, seeds[ours], temperatures[ours], n)
        records = [self.prompts.records[i] for i in numbers[ours] for _ in range(n)]
        rewarded = self.workers.compute(records, self._texts(answers))
        answers, rewarded = exchange(answers, rewarded, n)
        self.workers.check(rewarded)
        flat = [answer for group in answers for answer in group]
        lengths = np.asarray([len(answer.tokens) for answer in flat])
        rewards = rewarded.values @ np.asarray([part.weight for part in rl.rewards])
        rewards = rewards + overlong_penalty(lengths, rl.max_tokens, rl.overlong)
        return Drawn(numbers, answers, self._texts(answers), rewarded, rewards)

    def _texts(self, answers: Sequence[Sequence[Answer]]) -> list[str]:
        """Returns what all answers say, without the tokens that end them."""
        flat = [answer for group in answers for answer in group]
        said = [answer.tokens[: -1 if answer.ended else None] for answer in flat]
        return [self.tokenizer.decode(tokens) for tokens in said]

    def _with_signal(self, params: Any, drawn: Drawn, rounds: int) -> tuple[Drawn, np.ndarray]:
        """Replaces groups that were rewarded alike, and returns which groups count in the end."""
        group = rollout_config(self.cfg).group
        parts, kept = [drawn], [np.flatnonzero(~no_signal(drawn.rewards, group))]
        wanted, seen = len(drawn.prompts), len(drawn.prompts)
        for _ in range(rounds):
            missing = wanted - sum(map(len, kept))
            if not missing:
                break
            more = self._draw(params, missing, seen)
            parts.append(more)
            kept.append(seen + np.flatnonzero(~no_signal(more.rewards, group)))
            seen += missing
        found = np.concatenate(kept)
        # Groups that don't count fill the rows up.
        others = np.setdiff1d(np.arange(seen), found)[: wanted - len(found)]
        whole = _joined(parts)
        return _chosen(whole, np.concatenate([found, others]), group), np.arange(len(found))

    def _rows(self, drawn: Drawn, kept: np.ndarray) -> Arrays:
        """Returns the arrays of language modelling for each answer, and what the engine said of its tokens."""
        rl, T = rollout_config(self.cfg), self.cfg.data.seq_len
        N = len(drawn.texts)
        ids, engine = np.zeros((N, T + 1), np.int32), np.zeros((N, T), np.float32)
        mask, segments = np.zeros((N, T), np.float32), np.zeros((N, T), np.int32)
        for row in range(N):
            group, sample = divmod(row, rl.group)
            prompt = self.prompts.tokens[drawn.prompts[group]]
            answer = drawn.answers[group][sample]
            start, end = len(prompt), len(prompt) + len(answer.tokens)
            ids[row, :end] = (*prompt, *answer.tokens)
            engine[row, start - 1 : end - 1] = answer.logp
            segments[row, : end - 1] = 1
            mask[row, start - 1 : end - 1] = group in kept
        positions = np.where(segments, np.arange(T, dtype=np.int32), 0)
        inputs, targets = (np.where(segments, x, 0) for x in (ids[:, :-1], ids[:, 1:]))
        return {
            "tokens": inputs, "targets": targets, "positions": positions, "segment_ids": segments,
            "loss_mask": mask, "engine_logp": engine,
            "token_weight": token_weights(mask, rl.weighting, rl.max_tokens),
        }  # fmt: skip

    def _judge(self, state: Any, drawn: Drawn, rows: Arrays) -> None:
        """Adds what the trainer says of the answers, and the advantages, to the rows."""
        rl = rollout_config(self.cfg)
        found = self._scored(self.score, state.model_params, rows)
        mask = rows["loss_mask"]
        apart = np.abs(found["logp"] - rows["engine_logp"])[mask != 0]
        if apart.size:
            self.about |= {
                "logp_mismatch": float(apart.mean()), "logp_mismatch_max": float(apart.max()),
            }  # fmt: skip
        by_trainer = rl.old_logp == "trainer"
        rows["old_logp"] = found["scaled_logp"] if by_trainer else rows["engine_logp"]
        if rl.kl:
            reference = state.frozen if state.reference is None else state.reference
            rows["ref_logp"] = self._scored(self.score_reference, reference, rows)["scaled_logp"]
        if isinstance(rl, PPOConfig):
            self._judge_by_values(rl, drawn, rows, found["values"])
            return
        assert isinstance(rl, GRPOConfig)
        advantages = group_advantages(drawn.rewards, rl.group, divide=rl.divide_by_std)
        rows["advantages"] = (mask * advantages[:, None]).astype(np.float32)

    def _judge_by_values(
        self, rl: PPOConfig, drawn: Drawn, rows: Arrays, values: np.ndarray
    ) -> None:
        """Adds PPO's advantages, old values and returns."""
        mask = rows["loss_mask"]
        rewards = np.zeros(mask.shape)
        if rl.kl:  # Ouyang et al. 2022: every token pays for leaving the reference
            rewards -= rl.kl * mask * (rows["old_logp"] - rows["ref_logp"])
        last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1] != 0, axis=1)
        rewards[np.arange(len(mask)), last] += drawn.rewards
        advantages, returns = generalized_advantages(
            rewards, values, mask, discount=rl.discount, decay=rl.decay
        )
        real = mask != 0
        spread = float(returns[real].var())
        error = float(np.square(returns - values)[real].mean())
        self.about |= {"value_error": error, "return_variance": spread}
        rows["advantages"] = whiten(advantages, mask) if rl.whiten else advantages
        rows["returns"], rows["old_values"] = returns, (values * mask).astype(np.float32)

    def _scored(self, score: Callable[..., Any], params: Any, rows: Arrays) -> Arrays:
        """Returns what a model says of all rows, a batch at a time."""
        B, names = self.cfg.train.global_batch, ("tokens", "targets", "positions", "segment_ids")
        parts = []
        for start in range(0, len(rows["tokens"]), B):
            batch = self._placed({name: rows[name][start : start + B] for name in names})
            parts.append(leaves.gather(score(params, batch)))
        real = rows["loss_mask"] != 0
        found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return {name: np.where(real, x, 0).astype(np.float32) for name, x in found.items()}

    def _about(self, drawn: Drawn) -> dict[str, float]:
        """Returns numbers about answers and rewards."""
        rl = rollout_config(self.cfg)
        flat = [answer for group in drawn.answers for answer in group]
        values = drawn.rewarded.values
        about = {
            "reward": float(drawn.rewards.mean()),
            "reward_std": float(drawn.rewards.std()),
            "correct": float((values[:, 0] >= 1).mean()),
            "answer_tokens": float(np.mean([len(answer.tokens) for answer in flat])),
            "cut_off": float(np.mean([not answer.ended for answer in flat])),
            "reward_failures": float(drawn.rewarded.failed.sum()),
        }
        if len(rl.rewards) > 1:
            names = [part.name.rpartition(":")[2] for part in rl.rewards]
            about |= {f"reward_{n}": float(x) for n, x in zip(names, values.mean(0), strict=True)}
        return about


def _joined(parts: Sequence[Drawn]) -> Drawn:
    """Returns the answers of several draws as one."""
    rewarded = Rewarded(
        np.concatenate([part.rewarded.values for part in parts]),
        np.concatenate([part.rewarded.failed for part in parts]),
        next((part.rewarded.why for part in parts if part.rewarded.why), ""),
    )
    return Drawn(
        [i for part in parts for i in part.prompts],
        [group for part in parts for group in part.answers],
        [text for part in parts for text in part.texts],
        rewarded,
        np.concatenate([part.rewards for part in parts]),
    )


def _chosen(drawn: Drawn, groups: np.ndarray, size: int) -> Drawn:
    """Returns some groups of answers."""
    rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
    rewarded = Rewarded(
        drawn.rewarded.values[rows], drawn.rewarded.failed[rows], drawn.rewarded.why
    )
    return Drawn(
        [drawn.prompts[i] for i in groups],
        [drawn.answers[i] for i in groups],
        [drawn.texts[i] for i in rows],
        rewarded,
        drawn.rewards[rows],
    )
