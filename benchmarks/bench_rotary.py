"""The op rotary beside its peers and a copy of as many bytes."""

OP = "rotary"


def test_rotary(case, comparison):
    comparison(case)
