"""Benchmarks that treat the service as a black box: HTTP, its commands, and files it writes for clients."""
