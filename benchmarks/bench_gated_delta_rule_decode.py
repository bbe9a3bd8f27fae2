"""A step of the gated delta rule beside a copy of the states and a compiled formula."""

OP = "gated_delta_rule_decode"


def test_gated_delta_rule_decode(case, comparison):
    comparison(case)
