"""Text: files of it read as tokens in windows, and tables of texts with labels."""
