"""One training step on paper: its operations, the memory they take, TensorFlow's allocator, and
their seconds."""
