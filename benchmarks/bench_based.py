"""Based beside PyTorch's causal attention and the compiled reference."""

OP = "based"


def test_based(case, comparison):
    comparison(case)
