"""The workers' side of an elastic job while it trains: one state for all, and another number of workers."""
