"""A decoding step of LoLCATS beside a copy of as many bytes."""

OP = "lolcats_decode"


def test_lolcats_decode(case, comparison):
    comparison(case)
