"""``python -m hvdtrain drill``: prove on a cluster that failures cost seconds and lose nothing."""
