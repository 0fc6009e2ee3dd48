"""How PyTorch's gradients and parameters become one."""
