"""A step of causal convolutions beside causal-conv1d where it is installed, and a copy."""

OP = "causal_conv1d_update"


def test_causal_conv1d_update(case, comparison):
    comparison(case)
