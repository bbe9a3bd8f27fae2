"""Schedules of attention over caches beside a copy of the lengths."""

OP = "attention_schedule"


def test_attention_schedule(case, comparison):
    comparison(case)
