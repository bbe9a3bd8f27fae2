"""A step of Based beside a copy of the state and the compiled reference."""

OP = "based_decode"


def test_based_decode(case, comparison):
    comparison(case)
