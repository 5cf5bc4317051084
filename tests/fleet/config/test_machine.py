"""A machine is named by what torch uses of it."""

import pytest

from fleet.config.machine import describe_machine, vector_instructions

AVX2 = ["sse2", "avx2", "fma"]
AVX512 = [*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl"]


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], {}, ""),
        (["sse2"], {}, "SSE"),
        (AVX2, {}, "AVX2"),
        (AVX512, {}, "AVX-512"),
        ([*AVX512, "avx512_bf16"], {}, "AVX-512 with bfloat16"),
        ([*AVX512, "avx512_bf16"], {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2"),
        ([*AVX512, "avx512_bf16"], {"ATEN_CPU_CAPABILITY": "avx2"}, "AVX2 (oneDNN: AVX-512 with bfloat16)"),
        ([*AVX512, "avx512_bf16"], {"ONEDNN_MAX_CPU_ISA": "avx512_core"}, "AVX-512"),
        ([*AVX512, "avx512_bf16"], {"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX-512 (oneDNN: AVX2)"),
        (AVX2, {"ONEDNN_MAX_CPU_ISA": "ALL"}, "AVX2"),
    ],
)
def test_vector_instructions_are_those_that_are_used(flags, environment, expected):
    assert vector_instructions(flags, environment) == expected


def test_a_machine_has_a_processor_and_cores():
    assert " cores" in describe_machine()
