"""The vLLM connector: scheduler side, worker side, and the courier thread between peers.

`facade.py` is what vLLM loads; it only forwards. Start reading at `metadata.py`.
"""
