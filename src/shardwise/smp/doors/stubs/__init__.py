"""Thin stand-ins for packages that scripts import; the import hook leads there where the real ones are missing."""
