"""The dial: sizes follow by rule, and are the model's own."""

import itertools
import shlex

import jax
import pytest
from flax import nnx

from minitext.config.config import load_config
from minitext.errors import UserError
from minitext.journey import dial
from minitext.models.flops import count_flops
from minitext.models.transformer import Transformer


@pytest.mark.parametrize("depth", [1, 3, 5, 6])
def test_counted_parameters_are_the_models(depth):
    recipe = dial.recipe(depth)
    cfg = load_config(None, recipe.settings()).model
    model = nnx.eval_shape(lambda: Transformer(cfg, rngs=nnx.Rngs(0)))
    assert recipe.parameters == sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("depth", [3, 5, 17, 32, 128])
def test_settings_resolve_to_what_the_recipe_says(depth):
    recipe = dial.recipe(depth)
    cfg = load_config(None, recipe.settings())
    assert (cfg.model.embed, cfg.model.K, cfg.model.H) == (
        24 * depth,
        recipe.heads,
        recipe.head_dim,
    )
    assert cfg.train.global_batch * cfg.data.seq_len * cfg.train.steps == recipe.tokens
    assert recipe.flops == cfg.train.steps * count_flops(cfg.model, recipe.batch, recipe.seq_len)
    assert recipe.tokens == pytest.approx(3 * recipe.parameters, rel=0.05)


def test_more_depth_is_more_of_everything_but_rate():
    recipes = [dial.recipe(depth) for depth in range(dial.LEAST_DEPTH, dial.MOST_DEPTH + 1)]
    for less, more in itertools.pairwise(recipes):
        assert less.parameters < more.parameters and less.flops < more.flops
        assert less.batch <= more.batch and less.learning_rate >= more.learning_rate


def test_each_budget_buys_the_largest_depth_that_it_pays_for():
    for depth in (3, 4, 7, 20):
        cost = dial.pretraining_flops(depth)
        assert dial.depth_for(cost) == depth
        assert dial.depth_for(dial.pretraining_flops(depth + 1) * 0.999) == depth
    with pytest.raises(UserError, match="too small: depth 3, the least, takes"):
        dial.depth_for(1e9)


def test_a_study_is_smaller_and_of_the_same_kind():
    for depth in (3, 4, 5, 16, 32, 128):
        study = dial.study_of(depth)
        assert 2 <= len(study) <= 4 and all(each.depth < depth for each in study)
        assert {each.vocab for each in study} == {dial.recipe(depth).vocab}
        assert sum(each.flops for each in study) < dial.recipe(depth).flops


def test_recipes_survive_json():
    recipe = dial.recipe(4)
    assert dial.from_json(recipe.to_json()) == recipe


@pytest.mark.parametrize(
    ("depth", "tokens"), [(2, 3), (129, 3), (-1, 3), (5, 0), (5, -1), (5, float("nan")), (5, 1e9)]
)
def test_impossible_dials_are_refused(depth, tokens):
    with pytest.raises(UserError):
        dial.check(depth, tokens)


def test_the_command_of_a_plan_is_one_that_a_shell_takes(capsys):
    settings = ["data.source=files", "data.path=my [old] texts"]
    dial.print_plan(dial.recipe(3), dial.study_of(3), settings)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("minitext ")[2])
    cfg = load_config(words[1], words[2:])
    assert cfg.data.path == "my [old] texts" and cfg.train.steps == dial.recipe(3).steps
