"""Forward, loss and backward of a training step as one flat graph."""
