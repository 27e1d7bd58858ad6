"""For pytest: the tests of this folder use the harness of test_ddp_train.py, too."""

from test_ddp_train import end_what_is_left, environment  # noqa: F401
