"""The base of everything: the schema of options, files, tables and units. Imports nothing of the
project."""
