"""For pytest: the tests of this folder share the fixtures of harness.py."""

from harness import data, end_what_is_left, environment, out, tiny  # noqa: F401
