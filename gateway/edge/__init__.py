"""What stands at a client's connection, whichever program took it: deadlines, bounds and error bodies."""
