"""What the tests, the benchmark and the tools of a checkout share: the rule for results, and tables in pages."""
