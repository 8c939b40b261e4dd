"""What tests of strategies share. Imports no torch until it is used."""
