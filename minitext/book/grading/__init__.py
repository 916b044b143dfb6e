"""Graded exercises: the format authors write, the checks in a notebook, and `minitext grade`."""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, Exercise="registry", learner_number="registry", check="runner"
)
