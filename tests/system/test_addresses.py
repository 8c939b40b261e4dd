"""What this machine's interfaces are called."""

import sys

import pytest

from plait.system.addresses import interface_of


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which interface has an address")
def test_the_interface_that_has_an_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None, "an address for examples, which no machine has"
