"""Benchmarks that treat the service as a black box."""
