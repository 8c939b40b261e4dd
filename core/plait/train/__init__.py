"""The training loop: steps, loss, optimizer, and the numbers of a step."""
