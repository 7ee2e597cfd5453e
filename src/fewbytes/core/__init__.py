"""Methods, their networks, client sites and local training."""
