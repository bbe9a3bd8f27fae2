"""A step of SSD beside a copy of the state, and mamba_ssm where it is installed."""

OP = "ssd_decode"


def test_ssd_decode(case, comparison):
    comparison(case)
