"""Prefill and decode replicas: one vLLM engine each, behind a Ray Serve deployment."""
