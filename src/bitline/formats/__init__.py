"""Format readers: one file per checkpoint family, the only code that knows its tensor names and packings."""
