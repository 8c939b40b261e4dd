"""What tests of strategies and models share: the conformance suites and their parts, of the package plait-testing."""

from plait.exporting import exporting

__getattr__ = exporting(__name__, __file__)
