"""What a layer keeps, tables of rows, and attention over them; the only code that touches transformers' caches."""
