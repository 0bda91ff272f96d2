"""One training step as data: its operations, the memory they take, TensorFlow's allocator, and
their seconds."""
