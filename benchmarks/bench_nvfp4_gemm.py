"""Products with NVFP4 weights beside cuBLAS in bf16."""

OP = "nvfp4_gemm"


def test_nvfp4_gemm(case, comparison):
    comparison(case)
