"""Layouts, operations and their costs as read from optimised HLO; refusals; the search for the largest size."""

import pytest

from torch_tpu.planner import compiling, hlo_text, largest_that_fits, measure
from torch_tpu.planner.machine import machine
from torch_tpu.planner.tiled_layout import shapes
from torch_tpu.runtime.generations import GIB

HLO = """HloModule fused, is_scheduled=true, entry_computation_layout={(bf16[64,100]{1,0:T(8,128)(2,1)}, bf16[100,256]{1,0:T(8,128)(2,1)}, f32[1024,1024]{1,0:T(8,128)})->(bf16[64,256]{1,0:T(8,128)(2,1)}, f32[1024,1024]{1,0:T(8,128)})}

%product (p0: bf16[64,100], p1: bf16[100,256]) -> bf16[64,256] {
  %p0 = bf16[64,100]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[100,256]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution = bf16[64,256]{1,0:T(8,128)(2,1)} convolution(%p0, %p1), dim_labels=bf_io->bf, metadata={op_name="a.py:3/mm"}
}

%body (p: f32[1024,1024]) -> f32[1024,1024] {
  %p = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  ROOT %negate = f32[1024,1024]{1,0:T(8,128)} negate(%p), metadata={op_name="a.py:4/neg"}
}

ENTRY %main (a: bf16[64,100], b: bf16[100,256], c: f32[1024,1024]) -> (bf16[64,256], f32[1024,1024]) {
  %a = bf16[64,100]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[100,256]{1,0:T(8,128)(2,1)} parameter(1)
  %c = f32[1024,1024]{1,0:T(8,128)} parameter(2)
  %copy-start = (bf16[100,256]{1,0:T(8,128)(2,1)S(1)}, bf16[100,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%b)
  %copy-done = bf16[100,256]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion = bf16[64,256]{1,0:T(8,128)(2,1)} fusion(%a, %copy-done), kind=kOutput, calls=%product, metadata={op_name="a.py:3/mm"}, backend_config={"window_config":{"estimated_cycles":"1503000"}}
  %while = f32[1024,1024]{1,0:T(8,128)} while(%c), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %tuple = (bf16[64,256]{1,0:T(8,128)(2,1)}, f32[1024,1024]{1,0:T(8,128)}) tuple(%fusion, %while)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "logical", "laid_out"),
    [
        ("bf16[64,100]{1,0:T(8,128)(2,1)}", 64 * 100 * 2, 64 * 128 * 2),
        ("f32[3,5,130]{2,1,0:T(8,128)}", 3 * 5 * 130 * 4, 3 * 8 * 256 * 4),
        ("f32[3,5,130]{0,1,2:T(4,128)}", 3 * 5 * 130 * 4, 130 * 8 * 128 * 4),
        ("f32[]{:T(128)}", 4, 512),
        ("s32[1000]{0:T(1024)}", 4000, 4096),
        ("pred[8]", 8, 8),
        ("u4[16]", 8, 8),
    ],
)
def test_padding_follows_from_the_layout(text, logical, laid_out):
    (shape,) = shapes(text)
    assert (shape.logical_bytes, shape.bytes) == (logical, laid_out)


def test_operations_have_time_bytes_and_lines():
    device = machine("v5e:2x2")
    read = hlo_text.read(HLO, device)
    copy, product, negate = read.operations
    assert [s.sizes for s in read.parameters] == [(64, 100), (100, 256), (1024, 1024)]
    assert [s.sizes for s in read.results] == [(64, 256), (1024, 1024)]
    # b comes in by a copy beside other work: 104 × 256 values; the product reads a and writes its result.
    assert copy.hidden
    assert copy.bytes == 104 * 256 * 2
    assert product.place == "a.py:3/mm"
    assert product.seconds == pytest.approx(1503000 / 1.503e9, rel=1e-3)
    assert product.bytes == 64 * 128 * 2 + 64 * 256 * 2
    assert (product.float32, product.kind) == (False, "matrix product")
    # A loop of ten: 4 MiB in and out each time, at the bandwidth.
    assert negate.bytes == 10 * 2 * 4 * 2**20
    assert negate.seconds == pytest.approx(negate.bytes / 800e9)


def test_the_clock_is_the_peak_over_the_operations_of_a_cycle():
    clocks = {name: round(machine(name).clock / 1e9, 2) for name in ("v5e", "v5p", "v6e", "tpu7x")}
    assert clocks == {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}


def test_an_error_for_want_of_memory_tells_how_much():
    said = compiling.refusal(
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 24.01G of "
        "15.75G hbm. Exceeded hbm capacity by 8.26G."
    )
    assert (said.needs, said.limit) == (int(24.01 * GIB), int(15.75 * GIB))
    said = compiling.refusal(
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (3.09T) exceeds available HBM (15.75G). HLO module: fused.\nSee the documentation."
    )
    assert (said.needs, said.limit) == (int(3.09 * 2**40), int(15.75 * GIB))
    assert compiling.refusal("INTERNAL: no\nmore").message == "INTERNAL: no"
    assert compiling.refusal("INTERNAL: no").needs == 0


@pytest.mark.parametrize(
    "name", ["bfloat16:bf16", "float32:f32", "int64:s64", "uint8:u8", "bool:pred", "complex64:c64"]
)
def test_dtypes_have_names_in_hlo(name):
    numpy, _, hlo = name.partition(":")
    assert measure.hlo_dtype(numpy) == hlo


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("/a/b.py:3/mm", ("/a/b.py:3", "mm")),
        ("/a/b.py:6/an unknown place/aten.mm.default", ("/a/b.py:6", "aten.mm.default")),
        ("/a/b.py:6//c/d.py:20/aten.mm.default", ("/c/d.py:20", "aten.mm.default")),
        ("an unknown place/mm", ("", "mm")),
        ("sum", ("", "sum")),
    ],
)
def test_names_of_operations_tell_line_and_operator(name, place):
    assert measure.split_place(name) == place


@pytest.mark.parametrize(("needs", "most", "found"), [(100, 512, 89), (5000, 512, None), (1, 16, 16), (1000, 512, 1)])
def test_the_largest_batch_is_found_with_few_plans(needs, most, found):
    tried = []

    def probe(number):
        tried.append(number)
        used = needs + 10 * number
        return used <= 995 + (15 if needs == 1000 else 0), used, 995 + (15 if needs == 1000 else 0)

    assert largest_that_fits.largest(largest_that_fits.Range("batch", 1, most), probe) == found
    assert len(tried) <= 5


def test_every_eighth_batch_and_a_curve():
    def probe(number):
        return number**1.5 <= 3000, int(number**1.5), 3000

    assert largest_that_fits.largest(largest_that_fits.parse("batch=8:512:8"), probe) == 208


@pytest.mark.parametrize("text", ["batch", "batch=1", "batch=5:1", "batch=0:4", "1=1:2", "batch=1:8:0"])
def test_a_bad_range_is_refused(text):
    with pytest.raises(ValueError, match=r"batch=1:512|empty range"):
        largest_that_fits.parse(text)


def test_the_number_must_go_somewhere():
    assert largest_that_fits.substitute(["--batch", "{batch}"], "batch", 7) == ["--batch", "7"]
    with pytest.raises(ValueError, match=r"\{batch\}"):
        largest_that_fits.substitute(["--batch", "8"], "batch", 7)
