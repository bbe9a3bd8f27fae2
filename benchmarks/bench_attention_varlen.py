"""Attention of packed sequences beside PyTorch's varlen_attn."""

OP = "attention_varlen"


def test_attention_varlen(case, comparison):
    comparison(case)
