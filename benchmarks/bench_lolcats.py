"""LoLCATS beside PyTorch's causal attention and the compiled reference."""

OP = "lolcats"


def test_lolcats(case, comparison):
    comparison(case)
