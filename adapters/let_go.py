"""Errors without the memory of those who met them."""

from __future__ import annotations


def let_go(error: BaseException | None) -> None:
    """Cuts an error that nobody will look at any more, and those behind it, from the frames they passed.

    A future holds its error, that its traceback, and that the frame which waits for the future. What else
    such a cycle holds, like views of other processes' tensors, would stay until Python's collector comes by,
    which it seldom does where few objects hold much.
    """
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        if isinstance(error, BaseExceptionGroup):
            for each in error.exceptions:
                let_go(each)
        error = error.__cause__ or error.__context__
