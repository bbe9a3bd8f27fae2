"""Merging attention over parts of the keys beside a copy of as many bytes."""

OP = "merge_attention"


def test_merge_attention(case, comparison):
    comparison(case)
