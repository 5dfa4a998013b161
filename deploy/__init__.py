"""Configuration, the composition root and the `phasegate` command."""
