"""What the tests of several ops share."""
