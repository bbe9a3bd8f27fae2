"""fp8 GEMM beside cuBLAS."""

OP = "fp8_gemm"


def test_fp8_gemm(case, comparison):
    comparison(case)
