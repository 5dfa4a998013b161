"""The HTTP surface: tenants in, token streams out."""
