"""What people look at: a page of runs (``report``), and a followed run (``watch``). Both only read."""
