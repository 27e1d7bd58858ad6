"""The fixtures of test_ddp_train.py, for all tests of this folder."""

from test_ddp_train import (  # noqa: F401
    as_it_was,
    data,
    end_what_is_left,
    environment,
    out,
    same,
    saved,
    tiny,
    untouched,
)
