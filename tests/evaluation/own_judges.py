"""What a user may pass as "own_judges:..." to an attack: judges and mistakes."""

from torch import Tensor


def always(images: Tensor) -> list[bool]:
    """Every picture shows it."""
    return [True] * len(images)


def never(images: Tensor) -> list[bool]:
    """No picture does."""
    return [False] * len(images)


def fickle(images: Tensor) -> Tensor:
    """About a third of all pictures, by a digit far behind the point: looks random, and is the same each time."""
    return (images.double().mean((1, 2, 3)) * 1e5).long() % 3 == 0


def one_answer(images: Tensor) -> list[bool]:
    """A mistake: one answer for all."""
    return [True]


not_callable = 3
