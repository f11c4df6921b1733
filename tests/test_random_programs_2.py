"""The second hundred random programs."""

from tests.program_cases import program_test

test_the_devices_agree = program_test(100, 100)
