"""Programs that measure this project or write its documentation: no part of the package, and no tests."""
