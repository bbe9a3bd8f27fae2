"""A step of linear attention with decay beside a copy of the state."""

OP = "linear_attention_decode"


def test_linear_attention_decode(case, comparison):
    comparison(case)
