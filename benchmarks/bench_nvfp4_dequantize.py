"""nvfp4_dequantize beside a copy and plain PyTorch."""

OP = "nvfp4_dequantize"


def test_nvfp4_dequantize(case, comparison):
    comparison(case)
