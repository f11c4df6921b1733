"""The only package that touches jaxlib's client and libtpu: platforms, transfers, compiling, executing."""
