"""A model of PyTorch that is split among workers."""
