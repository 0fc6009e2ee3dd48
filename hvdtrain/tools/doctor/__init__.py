"""The doctor: every host runs ``collect``, a transport carries the answers, and checks compare them."""
