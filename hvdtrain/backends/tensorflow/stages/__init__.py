"""A model of Keras that is split among workers."""
