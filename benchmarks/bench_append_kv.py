"""New keys and values into caches beside a copy of as many bytes."""

OP = "append_kv"


def test_append_kv(case, comparison):
    comparison(case)
