"""Methods on Flower: its simulation and its deployments. Nothing else imports flwr."""
