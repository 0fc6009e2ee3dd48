"""What tests share: running jobs, pools of workers, files and tasks to try things on."""
