"""Format readers: one per checkpoint family, the only code that knows its tensor names and packings."""
