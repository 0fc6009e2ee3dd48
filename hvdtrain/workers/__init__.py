"""What the processes of a job share: agreement, messages, seeds, and what each does at the moment."""
