"""The op rms_norm beside its peers and a copy of as many bytes."""

OP = "rms_norm"


def test_rms_norm(case, comparison):
    comparison(case)
