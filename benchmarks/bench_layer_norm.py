"""The op layer_norm beside its peers and a copy of as many bytes."""

OP = "layer_norm"


def test_layer_norm(case, comparison):
    comparison(case)
