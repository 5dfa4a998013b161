"""What vLLM's attention kernels on CPU make of the numbers in an FP8 page."""

import pytest
import torch

HEADS, SIZE, PAGE = 3, 64, 128
FORMAT = "fp8_e4m3"
LEAST_NORMAL = 2.0**-6


def read_back(isa: str, numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """With one token, attention's answer is its value: [SIZE] numbers written, and read."""
    from vllm import _custom_ops as ops

    value = (numbers * scale).to(torch.bfloat16).expand(1, HEADS, SIZE).contiguous()
    cache = torch.zeros(2, HEADS, 2 * PAGE, SIZE, dtype=torch.uint8)
    halves = cache.chunk(2, dim=2)
    scales = {"k_scale": scale, "v_scale": scale, "kv_cache_dtype": FORMAT}
    ops.cpu_attn_reshape_and_cache(
        torch.zeros_like(value), value, *halves, torch.tensor([PAGE]), isa, **scales
    )
    query = torch.zeros(1, 3 * HEADS, SIZE, dtype=torch.bfloat16)
    answer, lengths, starts = torch.zeros_like(query), torch.tensor([1]).int(), torch.tensor([0, 1]).int()
    plan = ops.cpu_attn_get_scheduler_metadata(
        1,
        3 * HEADS,
        HEADS,
        SIZE,
        lengths,
        torch.bfloat16,
        starts,
        True,
        -1,
        isa,
        False,
        kv_cache_dtype=FORMAT,
    )
    ops.cpu_attention_with_kv_cache(
        query,
        *halves,
        answer,
        starts,
        lengths,
        1.0,
        True,
        None,
        -1,
        torch.tensor([[1]]).int(),
        0.0,
        plan,
        None,
        **scales,
    )
    return answer[0, 0].float() / scale


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_the_kernel_for_amx_reads_numbers_below_the_least_normal_one_as_nothing(scale: float) -> None:
    """Why the default profile has measured scales: few of the numbers that they make are so small."""
    assert torch.cpu._init_amx()
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = torch.cat([codes, -codes, torch.zeros(2)]).view(-1, SIZE)

    for row in numbers:
        assert torch.equal(read_back("vec", row, scale), row)
        assert torch.equal(read_back("amx", row, scale), torch.where(row.abs() < LEAST_NORMAL, 0.0, row))
