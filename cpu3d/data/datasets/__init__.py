"""Data sets as they are found on disk: their layouts, and what names in them tell."""
