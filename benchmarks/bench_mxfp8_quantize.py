"""mxfp8_quantize beside a copy and plain PyTorch."""

OP = "mxfp8_quantize"


def test_mxfp8_quantize(case, comparison):
    comparison(case)
