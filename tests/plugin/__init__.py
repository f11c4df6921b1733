"""What differs on a PJRT plug-in: collected with `--platform xcpu` alone."""
