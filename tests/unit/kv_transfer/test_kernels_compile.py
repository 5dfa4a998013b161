"""The kernels become code for GPUs, also where there is none: what Triton interprets it need not compile."""

from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kv_transfer.api.page import WireFormat
from kv_transfer.codec.narrow_triton import _TARGETS, _narrow_page
from kv_transfer.integrity.verify_triton import _check_row

POINTERS = {
    "cache": "*i16",
    "page_ids": "*i64",
    "wire": "*u8",
    "flaws": "*i32",
    "k_scale": "fp32",
    "v_scale": "fp32",
    "slot_mapping": "*i64",
    "slots": "*i64",
    **dict.fromkeys(
        ("table", "seq_lens", "query_start_loc", "computed", "starts", "pages", "findings"), "*i32"
    ),
    "own": "*u8",
    "poison": "*u8",
}
"""Types of arguments by their names; all others are int32."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning"),
    pytest.mark.parametrize("capability", [80, 90]),
]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, capability: int, types: dict[str, str], **constants: Any) -> dict[str, Any]:
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
    code: dict[str, Any] = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
    return code


@pytest.mark.parametrize("scaled", [True, False])
def test_the_conversion_compiles_and_divides_as_exactly_as_torch(capability: int, scaled: bool) -> None:
    target = _TARGETS[WireFormat.FP8_E4M3]
    code = compiled(
        _narrow_page,
        capability,
        POINTERS | {"slots": "i32"},
        WIDE=16,
        SCALED=scaled,
        BY_SLOT=True,
        BIAS=target.bias,
        MANTISSA=target.mantissa,
        LARGEST=target.largest,
        SIGN=target.sign,
        NAN=target.nan,
        BLOCK=2048,
    )

    assert code["cubin"]
    assert ("div.rn.f32" in code["ptx"]) == scaled
    assert "div.full" not in code["ptx"]
    assert "div.approx" not in code["ptx"]


def test_the_check_of_pages_compiles(capability: int) -> None:
    assert compiled(_check_row, capability, POINTERS, CONTAIN=True, BLOCK=1024)["cubin"]
