"""Attention beside cuDNN and FlashAttention."""

OP = "attention"


def test_attention(case, comparison):
    comparison(case)
