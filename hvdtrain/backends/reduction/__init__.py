"""What both frameworks share of how gradients and parameters become one."""
