"""The demonstration: a small policy that learns on the idle seats of a live fleet."""
