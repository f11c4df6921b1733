"""Marks of tests that a platform can't run, for several files."""

import pytest

lapack = pytest.mark.jaxlib_cpu("programs of a plug-in can't call jaxlib's LAPACK")
