"""``python -m hvdtrain drill``: prove on a cluster that failures do no harm."""
