"""The first hundred random programs do the same on the CPU and on the device."""

from tests.program_cases import program_test

test_the_devices_agree = program_test(0, 100)
