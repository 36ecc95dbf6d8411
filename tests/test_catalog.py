"""The catalog: every name imports, and a wrong name is answered with the nearest one."""

import pytest

from cgru import catalog
from cgru.method import Method


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in catalog.TABLES.items() for name in table])
def test_every_row_imports(kind: str, name: str) -> None:
    found = catalog.resolve(kind, name)
    assert isinstance(found, Method) if kind == "method" else callable(found)


def test_own_target_is_imported() -> None:
    assert catalog.resolve("benchmark", "math:gcd")(12, 18) == 6


def test_unknown_name_says_what_is_allowed_and_the_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        catalog.resolve("benchmark", "Canvass")
    message = str(caught.value)
    assert "'Canvass'" in message
    assert "allowed: canvas" in message
    assert "Did you mean 'canvas'?" in message
    assert "\n" not in message


@pytest.mark.parametrize("target", ["no_such_module:x", "math:no_such_name"])
def test_own_target_that_does_not_exist(target: str) -> None:
    with pytest.raises(ValueError, match=target):
        catalog.resolve("benchmark", target)


def test_nothing_close_gives_no_guess() -> None:
    assert catalog.nearest("zzzz", ["canvas"]) is None
    assert "Did you mean" not in catalog.unknown("model", "zzzz", ["canvas"], "Do this.")
