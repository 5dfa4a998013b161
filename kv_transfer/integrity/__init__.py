"""Which page belongs to whom, and proof that only those pages are used."""
