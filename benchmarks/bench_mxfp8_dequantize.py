"""mxfp8_dequantize beside a copy and plain PyTorch."""

OP = "mxfp8_dequantize"


def test_mxfp8_dequantize(case, comparison):
    comparison(case)
