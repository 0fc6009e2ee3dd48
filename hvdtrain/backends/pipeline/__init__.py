"""Split models: what both frameworks share of stages, consecutive blocks of a model on one worker each."""
