"""The gated delta rule beside flash-linear-attention and a compiled formula."""

OP = "gated_delta_rule"


def test_gated_delta_rule(case, comparison):
    comparison(case)
