"""The loop every engine shares, and what a run leaves in its folder."""
