"""nvfp4_quantize beside a copy and plain PyTorch."""

OP = "nvfp4_quantize"


def test_nvfp4_quantize(case, comparison):
    comparison(case)
