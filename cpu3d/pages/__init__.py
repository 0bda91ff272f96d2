"""The look of all pages, the viewer of slices."""
