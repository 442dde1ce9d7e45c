"""Benchmarks: ratios and differences within one run, medians, interleaved, on one thread. Never part of a test."""
