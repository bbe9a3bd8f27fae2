"""Quantisation to fp8 beside a copy."""

OP = "fp8_quantize"


def test_fp8_quantize(case, comparison):
    comparison(case)
