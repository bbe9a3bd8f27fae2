"""Linear attention with decay beside fla, where it is installed, and causal attention."""

OP = "linear_attention"


def test_linear_attention(case, comparison):
    comparison(case)
