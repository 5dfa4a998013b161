"""Token counts as both dialects word them."""

from typing import Any

from gateway.dispatch.generation import Generation


def wording(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
