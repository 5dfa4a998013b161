from load.manifest import hardware

CPUINFO = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu avx2 {more}\n"


def test_a_processor_without_avx512_is_said_to_have_none() -> None:
    found = hardware(CPUINFO.format(more="sse"), 2)

    assert (found["cpu"], found["cores"], found["avx2"], found["avx512"]) == ("A Processor", 2, True, False)


def test_a_processor_with_avx512_is_said_to_have_it() -> None:
    found = hardware(CPUINFO.format(more="avx512f avx512_bf16"), 2)

    assert (found["avx512"], found["avx512_bf16"]) == (True, True)
