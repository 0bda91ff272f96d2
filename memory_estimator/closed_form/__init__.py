"""The first engine of the estimator: what each kind of layer does in a training step, as rules.

Engines differ in what they fuse, in what they keep for a gradient beside the maps, and in what they write in place;
each such rule names the engine, "itex" being TensorFlow with Intel's extension and "stock" TensorFlow without. All of
it was read off the allocator's log, operation by operation.
"""
