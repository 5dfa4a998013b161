"""Faults on purpose. Off unless configured, and refused in production."""
