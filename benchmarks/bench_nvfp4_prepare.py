"""NVFP4 weights into the layout of their product."""

OP = "nvfp4_prepare"


def test_nvfp4_prepare(case, comparison):
    comparison(case)
