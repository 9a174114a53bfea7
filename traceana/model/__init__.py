"""Aligned tables become meaning: windows, forwards, device states, and the chains that explain idle time."""
