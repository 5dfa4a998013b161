"""Paged KV-cache transfer between the prefill and the decode phase."""
