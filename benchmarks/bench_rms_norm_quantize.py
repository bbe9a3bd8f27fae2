"""The op rms_norm_quantize beside its peers and a copy of as many bytes."""

OP = "rms_norm_quantize"


def test_rms_norm_quantize(case, comparison):
    comparison(case)
