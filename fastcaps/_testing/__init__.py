"""Shared by tests, benchmark and tools of a checkout: the rule for errors of results, and tables in pages."""
