"""What chapters and exercises need but training doesn't: notebook setup, source listings, pictures, grading.

`setup`, `show`, `check` and `glue` are what a chapter's cells call; `minitext grade` runs from `book.grading`.
May import every room but `cli`.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__, setup="notebook", show="notebook", glue="notebook", check="grading.runner"
)
