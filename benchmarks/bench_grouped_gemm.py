"""Grouped products beside PyTorch's."""

OP = "grouped_gemm"


def test_grouped_gemm(case, comparison):
    comparison(case)
