"""Moving bytes between two workers. A link knows nothing of pages, requests or vLLM."""
