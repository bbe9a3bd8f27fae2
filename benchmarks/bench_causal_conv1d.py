"""Causal convolutions beside PyTorch's, causal-conv1d where it is installed, and a copy."""

OP = "causal_conv1d"


def test_causal_conv1d(case, comparison):
    comparison(case)
