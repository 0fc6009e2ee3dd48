"""The driver of an elastic job: who belongs to it, and when its next world begins."""
