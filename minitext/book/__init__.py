"""What the chapters and exercises need and training does not: notebook setup, source listings, pictures, grading.

`setup`, `show`, `check` and `glue` are what a chapter's cells call; `minitext grade` runs from `book.grading`.
May import every room but `cli`.

Chapters: none.
"""

from minitext import exports

__getattr__, __dir__ = exports(
    __name__,
    {
        "setup": "notebook",
        "show": "notebook",
        "check": "notebook",
        "glue": "notebook",
    },
)
