"""Where handlers run: in worker processes of this machine; what every engine shares."""
