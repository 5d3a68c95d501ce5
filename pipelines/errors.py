"""What can go wrong with pipelines and models, with messages that name the cure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PipelineError(ValueError):
    """A pipeline that can't run: says which file, which key, what is wrong with it and what is allowed.

    Attributes:
        file: The file's path, or the name it was loaded under.
        key: Where in it, like ``stages.thinker.batch.max_num_seqs``; empty for the file as a whole.
    """

    def __init__(self, problem: str, *, key: str = "", file: str = "") -> None:
        super().__init__(": ".join(part for part in (file, key, problem) if part))
        self.problem = problem
        self.key = key
        self.file = file

    def within(self, file: str) -> PipelineError:
        """The same error, with the file's name."""
        return PipelineError(self.problem, key=self.key, file=file)


class ModelError(Exception):
    """A model that can't be had: names the cause and the cure."""


def choices(wrong: object, allowed: Iterable[str]) -> str:
    """ "did you mean x? Allowed: a, b, x" for a name that is none of those allowed."""
    names = list(allowed)
    word = str(wrong)
    close = difflib.get_close_matches(word, names, n=1)
    close = close or difflib.get_close_matches(word.replace("-", "_"), names, n=1)
    close = close or [name for name in names if word and name.startswith(word)]
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}Allowed: {', '.join(names) or 'none'}"
