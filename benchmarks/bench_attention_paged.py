"""Attention over paged caches beside a copy of as many bytes."""

OP = "attention_paged"


def test_attention_paged(case, comparison):
    comparison(case)
