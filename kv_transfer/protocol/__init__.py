"""The transfer protocol without I/O: messages, and the life of a transfer on each side as a table."""
