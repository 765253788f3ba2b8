"""What context adds to a chunk, kept in few directions: deficits, their factors, and patches made of them."""
