"""The conformance suites, of which `plait.testing` exports what is public, and the commands `verify` and `new`."""
