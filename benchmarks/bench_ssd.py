"""SSD beside mamba_ssm, where it is installed, and causal attention."""

OP = "ssd"


def test_ssd(case, comparison):
    comparison(case)
