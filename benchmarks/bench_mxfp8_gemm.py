"""mxfp8_gemm beside bf16 cuBLAS."""

OP = "mxfp8_gemm"


def test_mxfp8_gemm(case, comparison):
    comparison(case)
