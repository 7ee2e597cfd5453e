"""What a method, its network, its clients' sites and their training are."""
