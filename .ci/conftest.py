"""The fixtures of test_ddp_train.py, for all tests of this folder."""

from test_ddp_train import (  # noqa: F401
    as_it_was,
    data,
    environment,
    no_process_is_left,
    out,
    same,
    saved,
    tiny,
    untouched,
)
