"""What a job does before its first step: config, data, dry run, checks and the plan."""
