"""Figures: written where asked, and a mistake in drawing one isn't blamed on the file."""

import pytest

from minitext.errors import UserError
from minitext.observability.goodput import Event, account
from minitext.perf.figures import plot_goodput, save_figure

NOTHING = account([Event("init", 0.0, 1e-4)])


def test_a_run_of_less_than_a_millisecond_is_drawn(tmp_path):
    save_figure(str(tmp_path / "a.png"), lambda: plot_goodput(NOTHING))
    assert (tmp_path / "a.png").stat().st_size
    with pytest.raises(UserError, match=r"cannot draw into .*a\.doc"):
        save_figure(str(tmp_path / "a.doc"), lambda: plot_goodput(NOTHING))


def test_a_mistake_in_a_figure_is_no_error_of_the_user(tmp_path):
    with pytest.raises(ValueError, match="a mistake"):
        save_figure(str(tmp_path / "a.png"), lambda: (_ for _ in ()).throw(ValueError("a mistake")))
