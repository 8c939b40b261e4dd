"""What helps to write a strategy."""
