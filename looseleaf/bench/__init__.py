"""One question a file: a table for people, then one line of JSON."""
