"""mxfp8_prepare beside a copy and plain PyTorch."""

OP = "mxfp8_prepare"


def test_mxfp8_prepare(case, comparison):
    comparison(case)
