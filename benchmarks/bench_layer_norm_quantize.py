"""The op layer_norm_quantize beside its peers and a copy of as many bytes."""

OP = "layer_norm_quantize"


def test_layer_norm_quantize(case, comparison):
    comparison(case)
