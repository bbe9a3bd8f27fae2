"""GEMM beside cuBLAS."""

OP = "gemm"


def test_gemm(case, comparison):
    comparison(case)
